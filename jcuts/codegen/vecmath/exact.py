"""Vector code of operations with one exact result (integer arithmetic, comparisons, min/max, rem, rounding), as XLA on
CPU.

Floats: ``max`` and ``min`` propagate NaN and order -0 below +0; ``rem`` is C's ``fmod``.  Integers wrap; a division by
zero gives all ones (-1), its remainder the dividend; INT_MIN / -1 is INT_MIN, remainder 0; shift amounts are read as
unsigned, those of the width or more leave nothing but sign bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from jcuts.base.errors import IRError
from jcuts.codegen.llvm import lanes
from jcuts.codegen.vecmath.convert import convert, is_float, is_unsigned
from jcuts.codegen.vecmath.expr import Num
from jcuts.codegen.vecmath.trigonometric import if_any

AWAY_FROM_ZERO = 0
"""`jax.lax.RoundingMethod`: halves away from zero."""
TO_NEAREST_EVEN = 1
"""`jax.lax.RoundingMethod`: halves to the even neighbour."""

Args = Sequence[lanes.Value]


def _unary_intrinsic(name: str) -> Callable[..., lanes.Value]:
    def code(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
        return lanes.intrinsic(builder, name, args[0].type, args)

    return code


def _round(builder: lanes.Builder, args: Args, dtype: str, method: int) -> lanes.Value:
    name = {AWAY_FROM_ZERO: "round", TO_NEAREST_EVEN: "roundeven"}.get(int(method))
    if name is None:
        raise IRError(f"rounding method {method}: 0 (ties away from zero) or 1 (ties to even)", method=method)
    return lanes.intrinsic(builder, name, args[0].type, args)


def _float_sign(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    """-1 or 1; zeros keep their sign, NaN stays."""
    x = Num(builder, args[0])
    one = x.make(1.0).where(x.equals(0.0), 0.0).copysign(x)
    return one.where(x.is_nan(), x).value


def _nextafter(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    """The neighbour of x towards y: one step of the bits; y itself where they are equal.

    Zero is told by its bits: XLA's threads read denormals as zero in comparisons, but step from their bits.
    """
    x, y = (Num(builder, a) for a in args)
    bits = x.bits()
    up = builder.xor((x < y), bits.signed("<", 0))  # away from zero
    step = bits.make(-1).where(up, 1)
    smallest = (y.bits() & (1 << (lanes.bit_width(x.type) - 1))) | 1
    zero = (bits << 1).signed("==", 0)
    result = (bits + step).where(zero, smallest).as_float().where(x.equals(y), y)
    return result.where(x.is_nan(), x).where(y.is_nan(), y).value


def _float_rem(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    """x - trunc(x/y) y, exact while the quotient is an exact integer; libm's fmod per lane where one is beyond.

    The rounded quotient can only be one too large, when the remainder comes out below zero.
    """
    x, y = (Num(builder, a) for a in args)
    ax, ay = abs(x), abs(y)
    quotient = (ax / ay).trunc()
    rest = quotient.fma(-ay, ax)
    rest = rest.where(rest < 0.0, rest + ay)
    rest = rest.where(ay.equals(float("inf")), ax.where(ax.equals(float("inf")), float("nan"))).copysign(x)
    rest = rest.where(builder.or_(x.is_nan(), y.is_nan()), float("nan"))
    symbol, limit = {"float32": ("fmodf", 2.0**23), "float64": ("fmod", 2.0**52)}[dtype]
    slow = builder.and_(quotient >= limit, builder.and_(ax < float("inf"), ay > 0.0))
    return if_any(x, slow, lambda: [Num(builder, lanes.per_lane(builder, symbol, args))], [rest])[0].value


def _clamp(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    """min(max(x, low), high), arguments in the order of ``jax.lax.clamp``: low, x, high."""
    low, x, high = args
    return emit_exact(builder, "min", [emit_exact(builder, "max", [x, low], dtype), high], dtype)


def _is_finite(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    return abs(Num(builder, args[0])) < float("inf")


def _integer_order(operator: str) -> Callable[..., lanes.Value]:
    def code(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
        compare = builder.icmp_unsigned if is_unsigned(dtype) else builder.icmp_signed
        return builder.select(compare(operator, *args), *args)

    return code


def _safe_divisor(builder: lanes.Builder, args: Args, dtype: str) -> tuple[lanes.Value, lanes.Value]:
    """The divisor with 1 where the division is undefined, and the mask of zero divisors."""
    a, b = args
    zero = builder.icmp_signed("==", b, lanes.const(b.type, 0))
    undefined = zero
    if not is_unsigned(dtype):
        lowest = -(1 << (lanes.bit_width(a.type) - 1))
        overflow = builder.and_(
            builder.icmp_signed("==", a, lanes.const(a.type, lowest)),
            builder.icmp_signed("==", b, lanes.const(b.type, -1)),
        )
        undefined = builder.or_(zero, overflow)
    return builder.select(undefined, lanes.const(b.type, 1), b), zero


def _quotient(builder: lanes.Builder, a: lanes.Value, b: lanes.Value, dtype: str) -> lanes.Value:
    """a / b truncated, b safe.

    Few processors divide integer vectors, so up to 32 bits they go through a float of more digits: a quotient that is
    no integer lies at least 2^-width (relative) below the next one, so rounding never reaches it.  A constant divisor
    is left to LLVM, which multiplies.
    """
    unsigned, width = is_unsigned(dtype), lanes.bit_width(a.type)
    if isinstance(b, ir.Constant) or lanes.lane_count(a.type) == 1 or width > 32:
        return (builder.udiv if unsigned else builder.sdiv)(a, b)
    real = lanes.like(a.type, lanes.F32 if width <= 16 else lanes.F64)
    into, back = (builder.uitofp, builder.fptoui) if unsigned else (builder.sitofp, builder.fptosi)
    return back(builder.fdiv(into(a, real), into(b, real)), a.type)


def _integer_div(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    a = args[0]
    divisor, zero = _safe_divisor(builder, args, dtype)
    return builder.select(zero, lanes.const(a.type, -1), _quotient(builder, a, divisor, dtype))


def _integer_rem(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    a = args[0]
    divisor, zero = _safe_divisor(builder, args, dtype)
    rest = builder.sub(a, builder.mul(_quotient(builder, a, divisor, dtype), divisor))
    return builder.select(zero, a, rest)


def _shift(operation: str) -> Callable[..., lanes.Value]:
    def code(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
        x, amount = args
        width = lanes.bit_width(x.type)
        inside = builder.icmp_unsigned("<", amount, lanes.const(x.type, width))
        if operation == "ashr":
            return builder.ashr(x, builder.select(inside, amount, lanes.const(x.type, width - 1)))
        safe = builder.select(inside, amount, lanes.const(x.type, 0))
        shifted = builder.shl(x, safe) if operation == "shl" else builder.lshr(x, safe)
        return builder.select(inside, shifted, lanes.const(x.type, 0))

    return code


def _integer_sign(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    x = args[0]
    zero, one = lanes.const(x.type, 0), lanes.const(x.type, 1)
    positive = builder.select(builder.icmp_signed("==", x, zero), zero, one)
    if is_unsigned(dtype):
        return positive
    return builder.select(builder.icmp_signed("<", x, zero), lanes.const(x.type, -1), positive)


def _with_flag(name: str) -> Callable[..., lanes.Value]:
    """Intrinsics whose last argument says that an edge case is undefined: it is not."""

    def code(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
        return lanes.intrinsic(builder, name, args[0].type, [args[0], lanes.I1(0)])

    return code


def _integer_pow(builder: lanes.Builder, args: Args, dtype: str, y: int) -> lanes.Value:
    """x^y by squaring, in the order in which JAX lowers it; 1/x^-y for negative y, of floats only."""
    x = args[0]
    multiply = builder.fmul if is_float(dtype) else builder.mul
    one = lanes.const(x.type, 1.0 if is_float(dtype) else 1)
    if y == 0:
        return one
    if y < 0 and not is_float(dtype):
        raise IRError(f"integer_pow of {dtype} by {y}: integers have no negative powers", dtype=dtype, y=y)
    left, result = abs(y), one
    first = True
    while left > 0:
        if left & 1:
            result, first = (x if first else multiply(result, x)), False
        left >>= 1
        if left > 0:
            x = multiply(x, x)
    return builder.fdiv(one, result) if y < 0 else result


def _copysign(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
    return lanes.intrinsic(builder, "copysign", args[0].type, args)


def _builder(name: str) -> Callable[..., lanes.Value]:
    def code(builder: lanes.Builder, args: Args, dtype: str) -> lanes.Value:
        return getattr(builder, name)(*args)

    return code


FLOAT: dict[str, tuple[int, Callable[..., lanes.Value]]] = {
    "add": (2, _builder("fadd")),
    "sub": (2, _builder("fsub")),
    "mul": (2, _builder("fmul")),
    "div": (2, _builder("fdiv")),
    "neg": (1, _builder("fneg")),
    "abs": (1, _unary_intrinsic("fabs")),
    "sign": (1, _float_sign),
    "floor": (1, _unary_intrinsic("floor")),
    "ceil": (1, _unary_intrinsic("ceil")),
    "round": (1, _round),
    "nextafter": (2, _nextafter),
    "rem": (2, _float_rem),
    "is_finite": (1, _is_finite),
    "copysign": (2, _copysign),
    "max": (2, _unary_intrinsic("maximum")),
    "min": (2, _unary_intrinsic("minimum")),
    "clamp": (3, _clamp),
    "integer_pow": (1, _integer_pow),
}
INTEGER: dict[str, tuple[int, Callable[..., lanes.Value]]] = {
    "add": (2, _builder("add")),
    "sub": (2, _builder("sub")),
    "mul": (2, _builder("mul")),
    "div": (2, _integer_div),
    "rem": (2, _integer_rem),
    "neg": (1, _builder("neg")),
    "abs": (1, _with_flag("abs")),
    "sign": (1, _integer_sign),
    "max": (2, _integer_order(">")),
    "min": (2, _integer_order("<")),
    "clamp": (3, _clamp),
    "shift_left": (2, _shift("shl")),
    "shift_right_logical": (2, _shift("lshr")),
    "shift_right_arithmetic": (2, _shift("ashr")),
    "population_count": (1, _unary_intrinsic("ctpop")),
    "clz": (1, _with_flag("ctlz")),
    "integer_pow": (1, _integer_pow),
    "not": (1, _builder("not_")),
    "and": (2, _builder("and_")),
    "or": (2, _builder("or_")),
    "xor": (2, _builder("xor")),
}
BOOL: dict[str, tuple[int, Callable[..., lanes.Value]]] = {
    "max": (2, _builder("or_")),
    "min": (2, _builder("and_")),
    "not": (1, _builder("not_")),
    "and": (2, _builder("and_")),
    "or": (2, _builder("or_")),
    "xor": (2, _builder("xor")),
    "clamp": (3, _clamp),
}


def _table(dtype: str) -> dict[str, tuple[int, Callable[..., lanes.Value]]]:
    if dtype in ("float32", "float64"):
        return FLOAT
    if dtype == "bool":
        return BOOL
    return {} if is_float(dtype) else INTEGER


def exact_supported(name: str, dtype: str) -> bool:
    """Does ``emit_exact`` know this operation on this dtype?  16-bit floats only convert; arithmetic is in float32."""
    return name == "convert" or name in _table(dtype)


def emit_exact(builder: lanes.Builder, name: str, args: Args, dtype: str, **params: object) -> lanes.Value:
    """Appends the code of an exact operation on lanes.

    Args:
        builder: positioned where the code goes; ``rem`` of floats adds basic blocks and leaves it after them.
        name: a ``jax.lax`` primitive name, or ``convert`` or ``copysign``.
        args: vectors or scalars of the dtype's register type, all of one type.
        dtype: of the operands.
        params: ``target`` (dtype) of convert; ``method`` (0 or 1) of round; ``y`` (int) of integer_pow.

    Returns: the value: of the operands' type, ``i1`` lanes for is_finite, the target's for convert.
    Raises: IRError if the operation is unknown on this dtype or the number of arguments is wrong.
    """
    if name == "convert":
        return convert(builder, args[0], dtype, str(params["target"]))
    entry = _table(dtype).get(name)
    if entry is None:
        raise IRError(f"no exact code for {name} on {dtype}", function=name, dtype=dtype)
    arity, code = entry
    if len(args) != arity:
        raise IRError(f"{name} takes {arity} arguments, not {len(args)}", function=name, got=len(args))
    return code(builder, args, dtype, **params)
