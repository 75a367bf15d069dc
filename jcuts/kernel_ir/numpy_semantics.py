"""NumPy semantics of every element-wise operation of a data-flow graph, used by the reference interpreter.

XLA's answers are followed where NumPy's differ: integer division by zero gives -1 (all bits set) and a remainder by
zero the dividend, shifts by the width or more give 0 (or the sign), conversions to integers saturate and take NaN to 0.
bfloat16 and float16 are carried in float32; bfloat16 is rounded where it is stored, converted, compared or made
discrete, float16 after every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jcuts.base.errors import IRError

HALVES = ("bfloat16", "float16")
FLOATS = ("float64", "float32", *HALVES)
_DISCRETE = frozenset(
    {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "is_finite",
        "convert",
        "floor",
        "ceil",
        "round",
        "sign",
        "nextafter",
        "rem",
    }
)


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a storage type."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def carried(name: str) -> np.dtype:
    """The NumPy dtype that values of a storage type have between operations."""
    return np.dtype(np.float32) if name in HALVES else np.dtype(name)


def stored(value: Any, name: str) -> np.ndarray:
    """A carried value rounded to its type in memory."""
    return np.asarray(value).astype(numpy_dtype(name))


def apply(op: str, dtype: str, types: Sequence[str], args: Sequence[Any], attrs: Mapping[str, object]) -> np.ndarray:
    """One element operation.

    Args: dtype: of the result; types: storage types of the arguments; args: their carried values.
    Raises: IRError for an operation that has no meaning here.
    """
    result = _apply(op, dtype, types, args, attrs)
    return stored(result, dtype).astype(carried(dtype)) if dtype == "float16" and op != "widen" else result


def _apply(op: str, dtype: str, types: Sequence[str], args: Sequence[Any], attrs: Mapping[str, object]) -> np.ndarray:
    if op in _DISCRETE:
        args = [stored(a, t).astype(carried(t)) for a, t in zip(args, types, strict=True)]
    if op == "widen":
        return np.asarray(args[0]).astype(carried(dtype))
    if op == "select":
        return np.where(args[0], args[1], args[2])
    if op == "clamp":
        return np.minimum(np.maximum(args[1], args[0]), args[2])
    if op == "convert":
        return convert(args[0], types[0], dtype)
    if op == "integer_pow":
        return _power(args[0], int(str(attrs["y"])))
    if op == "round":
        return _away(args[0]) if attrs["method"] == 0 else np.rint(args[0])
    kind = carried(dtype).kind
    if kind in "iu" and op in _INTEGER:
        return _INTEGER[op](*args).astype(carried(dtype))
    function = _UNIVERSAL.get(op) or _special(op)
    if function is None:
        raise IRError(f"no meaning for element operation {op!r}")
    result = np.asarray(function(*args))
    return result if result.dtype == bool and dtype == "bool" else result.astype(carried(dtype))


def combine(how: str, dtype: str, left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
    """One step of a reduction; argmax and argmin carry (value, position)."""
    if how not in ("argmax", "argmin"):
        return (apply(how, dtype, [dtype, dtype], [left[0], right[0]], {}),)
    (a, i), (b, j) = left, right
    nan = carried(dtype).kind == "f"
    a_nan, b_nan = (np.isnan(a), np.isnan(b)) if nan else (np.zeros_like(a, bool), np.zeros_like(b, bool))
    better = ((b > a) if how == "argmax" else (b < a)) | (b_nan & ~a_nan)
    tie = (a == b) | (a_nan & b_nan)
    take = (better & ~a_nan) | (tie & (j < i))
    return np.where(take, b, a), np.where(take, j, i)


def convert(value: Any, source: str, target: str) -> np.ndarray:
    """Change of storage type, rounded to the target."""
    value = np.asarray(value)
    if target == "bool":
        return value != 0
    if carried(source).kind == "f" and carried(target).kind in "iu":
        limits = np.iinfo(np.dtype(target))
        wide = value.astype(np.float64)
        inside = np.where(np.isnan(wide) | (wide <= limits.min) | (wide >= float(limits.max)), 0, wide)
        result = inside.astype(np.dtype(target))
        result = np.where(wide >= float(limits.max), limits.max, np.where(wide <= limits.min, limits.min, result))
        return np.where(np.isnan(wide), 0, result).astype(np.dtype(target))
    return value.astype(numpy_dtype(target)).astype(carried(target))


def _power(base: Any, exponent: int) -> np.ndarray:
    base = np.asarray(base)
    result, factor, left = np.ones_like(base), base, abs(exponent)
    while left:
        if left & 1:
            result = result * factor
        factor, left = factor * factor, left >> 1
    return np.divide(1, result).astype(base.dtype) if exponent < 0 else result


def _away(x: Any) -> np.ndarray:
    """Rounding half away from zero."""
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(1, x), whole).astype(np.asarray(x).dtype)


def _sign(x: Any) -> np.ndarray:
    """-1, 1, or x itself where it is a zero or NaN."""
    return np.where((x == 0) | np.isnan(x), x, np.copysign(1, x))


def _divide(a: Any, b: Any) -> np.ndarray:
    """Integer division, truncating; by zero: all bits set."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where((b == 0) | (b == -1 if a.dtype.kind == "i" else False), 1, b).astype(a.dtype)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
        quotient = np.where(b == -1, np.negative(a), quotient)
    return np.where(b == 0, np.invert(np.zeros_like(a)), quotient).astype(a.dtype)


def _remainder(a: Any, b: Any) -> np.ndarray:
    """Integer remainder with the dividend's sign; by zero: the dividend."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where((b == 0) | (b == -1 if a.dtype.kind == "i" else False), 1, b).astype(a.dtype)
    rest = np.where(b == 0, a, np.fmod(a, safe))
    return rest.astype(a.dtype)


def _shift(how: str) -> Callable[[Any, Any], np.ndarray]:
    def shift(a: Any, b: Any) -> np.ndarray:
        a, b = np.broadcast_arrays(a, b)
        bits = a.dtype.itemsize * 8
        unsigned, signed = np.dtype(f"u{a.dtype.itemsize}"), np.dtype(f"i{a.dtype.itemsize}")
        count = b.view(unsigned) if b.flags.c_contiguous else np.ascontiguousarray(b).view(unsigned)
        over, count = count >= bits, np.minimum(count, bits - 1)
        if how == "arithmetic":
            return np.right_shift(a.astype(signed), np.where(over, bits - 1, count).astype(signed)).astype(a.dtype)
        raw = a.astype(unsigned)
        moved = np.left_shift(raw, count) if how == "left" else np.right_shift(raw, count)
        return np.where(over, 0, moved).astype(unsigned).astype(a.dtype)

    return shift


def _ones(a: Any) -> np.ndarray:
    return np.bitwise_count(np.asarray(a).view(f"u{np.asarray(a).dtype.itemsize}"))


def _leading_zeros(a: Any) -> np.ndarray:
    bits = np.asarray(a).dtype.itemsize * 8
    raw = np.ascontiguousarray(a).view(f"u{np.asarray(a).dtype.itemsize}").astype(np.uint64)
    length = sum((raw >> np.uint64(k) != 0).astype(np.int64) for k in range(bits))
    return np.asarray(bits - length)


def _tf32(x: Any) -> np.ndarray:
    """float32 to the nearest TF32 number (10 bits after the point), ties to even; values that are not finite stay."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), near.view(np.float32), x)


_INTEGER: dict[str, Callable[..., np.ndarray]] = {
    "div": _divide,
    "rem": _remainder,
    "shift_left": _shift("left"),
    "shift_right_logical": _shift("logical"),
    "shift_right_arithmetic": _shift("arithmetic"),
    "population_count": _ones,
    "clz": _leading_zeros,
    "not": np.invert,
    "sign": np.sign,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_UNIVERSAL: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rem": np.fmod,
    "neg": np.negative,
    "abs": np.abs,
    "sign": _sign,
    "max": np.maximum,
    "min": np.minimum,
    "floor": np.floor,
    "ceil": np.ceil,
    "is_finite": np.isfinite,
    "not": np.logical_not,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "square": np.square,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "pow": np.power,
    "atan2": np.arctan2,
    "nextafter": np.nextafter,
    "fma": lambda x, y, z: x * y + z,
    "tf32": _tf32,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_BINARY = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "rem",
        "max",
        "min",
        "and",
        "or",
        "xor",
        "pow",
        "atan2",
        "nextafter",
        "shift_left",
        "shift_right_logical",
        "shift_right_arithmetic",
        *_COMPARISONS,
    }
)
_TERNARY = frozenset({"select", "clamp", "fma"})
_UNARY = (
    frozenset(
        {
            *_UNIVERSAL,
            *_INTEGER,
            "erf",
            "erfc",
            "erf_inv",
            "widen",
            "convert",
            "integer_pow",
            "round",
        }
    )
    - _BINARY
    - _TERNARY
)


def arguments(op: str) -> int | None:
    """Arity of an element-wise operation; None for an unknown one."""
    return 1 if op in _UNARY else 2 if op in _BINARY else 3 if op in _TERNARY else None


def result_types(op: str, types: Sequence[str]) -> str | None:
    """Result type of an element-wise operation on these types; None where several are possible, '' where none is."""
    if op in ("convert", "widen"):
        return None
    if op in _COMPARISONS or op == "is_finite":
        return "bool" if len(set(types)) == 1 else ""
    if op == "select":
        return types[1] if types[0] == "bool" and types[1] == types[2] else ""
    return types[0] if len(set(types)) == 1 else ""


def _special(op: str) -> Callable[..., Any] | None:
    """Error functions, which NumPy lacks (scipy comes with jax)."""
    names = {"erf": "erf", "erfc": "erfc", "erf_inv": "erfinv"}
    if op not in names:
        return None
    import scipy.special

    return getattr(scipy.special, names[op])
