"""Vectorised mathematical functions as LLVM IR, with stated error bounds.

``emit`` appends the code of one ``jax.lax`` function on float lanes; ``exact.emit_exact`` that of operations with an
exact answer (integer arithmetic, comparisons, conversions, rounding).

    >>> supported("tanh", "float32")
    True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jcuts.base.errors import IRError
from jcuts.codegen.llvm import lanes
from jcuts.codegen.vecmath import error_function, exponential, logarithm, trigonometric
from jcuts.codegen.vecmath.expr import Num
from jcuts.codegen.vecmath.f32 import F32
from jcuts.codegen.vecmath.f64 import F64
from jcuts.codegen.vecmath.formats import Format


def _sqrt(k: Format, x: Num) -> Num:
    return x.sqrt()


def _rsqrt(k: Format, x: Num) -> Num:
    return 1.0 / x.sqrt()


@dataclass(frozen=True)
class Function:
    """One entry of the table.

    Attributes:
        code: from ``Num`` arguments to the ``Num`` result.
        ulp: bound of the error against the exact value, in units in the last place of the result, for results that
            are normal numbers (smaller ones may be flushed to zero); found by ``benchmarks/vecmath/accuracy.py``.
        arity: number of arguments.
        scalarised: some lanes may go through a scalar libm call.
    """

    code: Callable[..., Num]
    ulp: float
    arity: int = 1
    scalarised: bool = False


# function, arity, stated bound in ulp for float32 and float64, is a libm call possible in float64
_FUNCTIONS: dict[str, tuple[Callable[..., Num], int, float, float, bool]] = {
    "exp": (exponential.exp, 1, 1.0, 1.0, False),
    "exp2": (exponential.exp2, 1, 1.0, 1.0, False),
    "expm1": (exponential.expm1, 1, 2.0, 2.0, False),
    "logistic": (exponential.logistic, 1, 2.5, 2.5, False),
    "tanh": (exponential.tanh, 1, 2.5, 2.5, False),
    "sinh": (exponential.sinh, 1, 2.5, 2.5, False),
    "cosh": (exponential.cosh, 1, 2.0, 2.0, False),
    "log": (logarithm.log, 1, 1.0, 1.0, False),
    "log1p": (logarithm.log1p, 1, 1.5, 1.5, False),
    "asinh": (logarithm.asinh, 1, 3.5, 3.5, False),
    "acosh": (logarithm.acosh, 1, 3.5, 3.5, False),
    "atanh": (logarithm.atanh, 1, 3.0, 3.0, False),
    "pow": (logarithm.power, 2, 1.5, 1.5, False),
    "cbrt": (logarithm.cbrt, 1, 1.0, 1.0, False),
    "sqrt": (_sqrt, 1, 0.5, 0.5, False),
    "rsqrt": (_rsqrt, 1, 2.0, 2.0, False),
    "sin": (trigonometric.sin, 1, 2.0, 2.0, True),
    "cos": (trigonometric.cos, 1, 2.0, 2.0, True),
    "tan": (trigonometric.tan, 1, 3.5, 3.5, True),
    "asin": (trigonometric.asin, 1, 2.0, 2.0, False),
    "acos": (trigonometric.acos, 1, 2.0, 2.0, False),
    "atan": (trigonometric.atan, 1, 2.0, 2.0, False),
    "atan2": (trigonometric.atan2, 2, 2.0, 2.0, False),
    "erf": (error_function.erf, 1, 2.5, 2.0, False),
    "erfc": (error_function.erfc, 1, 4.0, 4.0, False),
    "erf_inv": (error_function.erf_inv, 1, 3.5, 4.0, False),
}

TABLE: dict[tuple[str, str], Function] = {
    (name, k.name): Function(partial(code, k), (ulp32, ulp64)[k is F64], arity, scalar and k is F64)
    for name, (code, arity, ulp32, ulp64, scalar) in _FUNCTIONS.items()
    for k in (F32, F64)
}

ERROR_ULP: dict[tuple[str, str], float] = {key: entry.ulp for key, entry in TABLE.items()}


def supported(name: str, dtype: str) -> bool:
    """Does ``emit`` know this function of ``jax.lax`` on this dtype?"""
    return (name, dtype) in TABLE


def emit(builder: lanes.Builder, name: str, args: Sequence[lanes.Value], dtype: str) -> lanes.Value:
    """Appends the code of ``jax.lax.<name>`` on vectors (or scalars) of lanes.

    Args:
        builder: positioned where the code goes; sin, cos and tan add basic blocks and leave it at the end of the last.
        name: a ``jax.lax`` primitive name.
        args: values ``<N x float>`` / ``<N x double>`` (any N) or scalars, all of one type.
        dtype: ``float32`` or ``float64``.

    Returns: the value, of the arguments' type; its error is at most ``ERROR_ULP[name, dtype]``.
    Raises: IRError if the function is unknown or the number of arguments is wrong.
    """
    entry = TABLE.get((name, dtype))
    if entry is None:
        raise IRError(f"no vector code for {name} on {dtype}", function=name, dtype=dtype)
    if len(args) != entry.arity:
        raise IRError(f"{name} takes {entry.arity} arguments, not {len(args)}", function=name, got=len(args))
    return entry.code(*(Num(builder, value) for value in args)).value
