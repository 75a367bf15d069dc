"""Transcendental functions on the SFU (``ex2.approx``, ``rcp.approx``, ``rsqrt.approx``, ``tanh.approx``), error
bounded.

They replace the polynomials of `codegen.vecmath` where they are faster.  `ERROR_ULP` bounds the error in units in
the last place of the stated type, for results that are normal numbers of float32; denormal ones are rounded
gradually.  Values of 16-bit types are carried in float32: their functions need an error well below half a unit of
the 16-bit type only.

Source of the SFU's own errors: PTX ISA, ``ex2.approx``, ``rcp.approx``, ``rsqrt.approx``, ``tanh.approx``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.toolchain.target import AMPERE
from jcuts.codegen.llvm import lanes as L
from jcuts.codegen.vecmath.expr import Num, horner
from jcuts.codegen.vecmath.f32 import F32

LOG2_E = 1.4426950216293335  # float32 nearest log2(e)
LOG2_E_LOW = 1.9259629911266175e-08  # what is left of log2(e)
LN2 = 0.6931471824645996
TANH_CUT = 0.55
# tanh(x) = x + x z P(z), z = x*x, on |x| < 0.6: relative error 2^-26 (least squares at Chebyshev nodes)
TANH = (-0.33333298563957214, 0.13331915438175201, -0.053783293813467026, 0.020794618874788284, -0.0058939456939697266)

# erfc(y) exp(y^2) (y + 2) in t = (y - 2)/(y + 2), 0 <= y < 10.2: relative error 2^-19.4
COARSE_ERFC = (
    1.021582841873169,
    -0.687174379825592,
    0.27947184443473816,
    -0.036245349794626236,
    -0.021476130932569504,
    0.005746350158005953,
    0.0027452216017991304,
)

HALVES = ("bfloat16", "float16")
ERROR_ULP: dict[tuple[str, str], float] = {
    ("exp", "float32"): 3.5,
    ("exp2", "float32"): 2.5,
    ("logistic", "float32"): 5.0,
    ("tanh", "float32"): 4.0,
    ("rsqrt", "float32"): 2.5,
    ("erfc", "float32"): 8.0,
    ("exp", "half"): 0.1,
    ("exp2", "half"): 0.1,
    ("logistic", "half"): 0.6,
    ("tanh", "half"): 0.6,
    ("rsqrt", "half"): 0.1,
    ("erfc", "half"): 0.1,
}


def _unit(x: Num, text: str) -> Num:
    return Num(x.builder, asm(x.builder, f"{text} $0, $1;", L.F32, [x.value]))


def _clamped(x: Num, low: float, high: float) -> Num:
    """min(max(x, low), high); a NaN stays."""
    b = x.builder
    low_, high_ = (ir.Constant(L.F32, v) for v in (low, high))
    if b.capability < AMPERE:
        value = asm(b, "min.f32 $0, $1, $2;", L.F32, [asm(b, "max.f32 $0, $1, $2;", L.F32, [x.value, low_]), high_])
        return Num(b, b.select(b.fcmp_unordered("uno", x.value, x.value), x.value, value))
    value = asm(b, "max.NaN.f32 $0, $1, $2;", L.F32, [x.value, low_])
    return Num(b, asm(b, "min.NaN.f32 $0, $1, $2;", L.F32, [value, high_]))


def _exp(x: Num) -> Num:
    """2^hi (1 + ln2 lo) with hi + lo = x log2(e): the rounding error of hi would be multiplied by up to 128."""
    x = _clamped(x, -104.0, 90.0)
    high = x * LOG2_E
    low = x.fma(LOG2_E_LOW, x.fma(LOG2_E, -high))
    return _unit(high, "ex2.approx.f32") * low.fma(LN2, 1.0)


def fast_exp_nonpositive(builder: GpuBuilder, x: L.Value) -> L.Value:
    """e^x of a float32 that is not positive, for weights that are rounded to 11 bits or fewer.

    Relative error at most (|x| + 4) 2^-24; results below 2^-126 are 0, so is that of -inf; a NaN stays.
    """
    return _unit(Num(builder, x) * LOG2_E, "ex2.approx.ftz.f32").value


def _exp_half(x: Num) -> Num:
    return _unit(x * LOG2_E, "ex2.approx.f32")


def _exp2(x: Num) -> Num:
    return _unit(x, "ex2.approx.f32")


def _reciprocal(x: Num) -> Num:
    """1/x for x >= 1, denormal results too: the unit is given x/4, and a quarter of its result is rounded gradually."""
    return _unit(x * 0.25, "rcp.approx.ftz.f32") * 0.25


def _logistic(x: Num) -> Num:
    return _reciprocal(_exp(-x) + 1.0)


def _logistic_half(x: Num) -> Num:
    """(1 + tanh(x/2)) / 2 loses small results: exp instead."""
    return _reciprocal(_exp_half(-x) + 1.0)


def _tanh(x: Num) -> Num:
    """1 - 2/(exp(2|x|) + 1), near zero an odd polynomial; the sign last, since the polynomial gives 0 for -0."""
    size = abs(x)
    far = _unit(_unit((size + size) * LOG2_E, "ex2.approx.ftz.f32") + 1.0, "rcp.approx.ftz.f32").fma(-2.0, 1.0)
    z = x * x
    near = (x * z).fma(horner(z, TANH), x)
    return far.where(size < TANH_CUT, near).copysign(x)


def _tanh_half(x: Num) -> Num:
    return _unit(x, "tanh.approx.f32")


def _rsqrt(x: Num) -> Num:
    return _unit(x, "rsqrt.approx.f32")


def _erfc(x: Num) -> Num:
    """As in `vecmath.error_function`, branch-free; with a correction of the reciprocal's approximation error."""
    (pole,), (zero,) = (F32.polynomials[name] for name in ("ERFC_POLE", "ERFC_ZERO"))
    size = abs(x)
    near = 1.0 - x.fma(F32.poly("ERF", x * x), x)
    y = _clamped(size, 0.0, zero)
    bottom = y + pole
    inverse = _unit(bottom, "rcp.approx.ftz.f32")
    low = inverse * (inverse.fma(-bottom, 1.0) - (y - (bottom - pole)) * inverse)
    g = F32.poly("ERFC", low.fma(-2.0 * pole, inverse.fma(-2.0 * pole, 1.0)))
    g = g.fma(inverse, g * low)
    square = y * y
    tail = _exp(-square)
    tail = tail.fma(-y.fma(y, -square), tail) * g
    return tail.where(x < 0.0, 2.0 - tail).where(size < 0.65, near)


def _coarse_erfc(x: Num) -> Num:
    """A third of the instructions: relative error at most 2^-19 + x^2 2^-23; denormal results are 0."""
    (zero,) = F32.polynomials["ERFC_ZERO"]
    b = x.builder
    y = Num(b, asm(b, "min.NaN.f32 $0, $1, $2;", L.F32, [abs(x).value, ir.Constant(L.F32, zero)]))
    inverse = _unit(y + 2.0, "rcp.approx.ftz.f32")
    tail = horner(inverse.fma(-4.0, 1.0), COARSE_ERFC) * inverse
    tail = tail * _unit(y * y * -LOG2_E, "ex2.approx.ftz.f32")
    return tail.where(x < 0.0, 2.0 - tail)


_FLOAT32: dict[str, Callable[[Num], Num]] = {
    "exp": _exp,
    "exp2": _exp2,
    "logistic": _logistic,
    "tanh": _tanh,
    "rsqrt": _rsqrt,
    "erfc": _erfc,
}
_HALF: dict[str, Callable[[Num], Num]] = {
    "exp": _exp_half,
    "exp2": _exp2,
    "logistic": _logistic_half,
    "tanh": _tanh_half,
    "rsqrt": _rsqrt,
    "erfc": _erfc,
}


def supported(op: str, dtype: str) -> bool:
    """Whether the SFU has a function for this operation on a storage type."""
    return op in (_HALF if dtype in HALVES else _FLOAT32 if dtype == "float32" else {})


_COARSE: dict[str, Callable[[Num], Num]] = {"erfc": _coarse_erfc}


def emit(builder: GpuBuilder, op: str, dtype: str, args: Sequence[L.Value], *, coarse: bool = False) -> L.Value:
    """The value, carried in float32.

    Args: coarse: the argument comes from sums of products of 11 or fewer bits: an error of 2^-18 is none.
    """
    functions = _HALF if dtype in HALVES else _FLOAT32
    found = _COARSE.get(op, functions[op]) if coarse else functions[op]
    return found(Num(builder, args[0])).value
