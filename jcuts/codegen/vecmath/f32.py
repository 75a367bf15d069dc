"""float32: exponentials, logarithms and what is made of them.

Coefficients are minimax fits of the weighted error named beside each, made by ``benchmarks/vecmath_fit.py``.
Integer parts of exponents come from adding 1.5 * 2^23, so that a NaN never meets a float-to-integer conversion
(which LLVM leaves undefined).
"""

from __future__ import annotations

from jcuts.codegen import lanes
from jcuts.codegen.vecmath.expr import Int, Num, horner

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375  # 355/512: n * LN2_HIGH is exact for |n| < 2^14
LN2_LOW = -2.12194440054690583e-4
SHIFTER = 12582912.0  # 1.5 * 2^23

# exp(r), |r| <= 0.347, relative error 2^-28.2
EXP = (1.0, 1.0, 0.49999994, 0.166665152, 0.0416680798, 0.00836937036, 0.00138414768)
# (log(1+f) - f + f^2/2) / f^3, f in [sqrt(1/2)-1, sqrt(2)-1], relative to log(1+f) 2^-27.2
LOG = (0.333333313, -0.250008225, 0.200012609, -0.166233301, 0.142008856, -0.131593853, 0.127668813, -0.0764291137)
# tanh(x)/x = P(x^2)/Q(x^2), |x| <= 9.02, relative error 2^-25.9
TANH_P = (1.0, 0.136814713, 0.00387025205, 2.80447366e-05, 3.06684882e-08, -1.22598251e-11)
TANH_Q = (1.0, 0.470148027, 0.0272529479, 0.000394196861, 1.28988859e-06)


def reduce_exponent(x: Num) -> tuple[Num, Int]:
    """r and integer n with x = n ln 2 + r, |r| <= ln(2)/2 (for |x| < 2^13)."""
    shifted = x.fma(LOG2_E, SHIFTER)
    n = shifted - SHIFTER
    r = n.fma(-LN2_HIGH, x)
    return n.fma(-LN2_LOW, r), (shifted.bits() << 9) >> 9  # the low 23 bits of 1.5 * 2^23 + n are n


def scale(x: Num, n: Int) -> Num:
    """x * 2^n for |n| <= 252: in two factors, so that results down to the denormals and up to overflow are right."""
    half = n >> 1
    first = ((half + 127) << 23).as_float()
    second = ((n - half + 127) << 23).as_float()
    return x * first * second


def exp(x: Num) -> Num:
    """e^x: x clamped to [-104, 89] (0 and inf beyond), x = n ln 2 + r, 2^n * p(r)."""
    r, n = reduce_exponent(x.at_least(-104.0).at_most(89.0))
    return scale(horner(r, EXP), n)


def split(x: Num, pivot: int = 0x3F3504F3) -> tuple[Num, Num]:
    """m and e with x = 2^e * m, m in [sqrt(1/2), sqrt(2)), for positive finite x (denormals included).

    Works on the bits, so that denormals are right whether or not the processor flushes them.
    """
    bits = x.bits()
    small = bits.signed("<", 0x00800000)
    # a denormal's bits, read as an integer, are its value times 2^149
    bits = bits.where(small, bits.to_float(lanes.F32).bits())
    shifted = bits - pivot
    e = (shifted >> 23).to_float(lanes.F32)
    m = ((shifted & 0x007FFFFF) + pivot).as_float()
    return m, e.where(small, e - 149.0)


def log(x: Num) -> Num:
    """log x: x = 2^e m, m = 1 + f, log = e ln2 + (f - f^2/2 + f^3 p(f))."""
    m, e = split(x)
    return log_special(x, log_sum(m - 1.0, e))


def log_sum(f: Num, e: Num, correction: Num | None = None) -> Num:
    """e ln 2 + log(1 + f) (+ a small correction), f in [sqrt(1/2)-1, sqrt(2)-1]."""
    square = f * f
    tail = (f * square) * horner(f, LOG)
    if correction is not None:
        tail = tail + correction
    tail = e.fma(LN2_LOW, tail)
    tail = square.fma(-0.5, tail)
    return e.fma(LN2_HIGH, tail + f)


def log_special(x: Num, result: Num) -> Num:
    """log's values at zero, below zero, infinity and NaN, by the bits of x (denormals are not zero)."""
    bits = x.bits()
    infinite = bits.signed(">=", 0x7F800000)  # +inf and positive NaN keep themselves
    result = result.where(infinite, x)
    negative = bits.signed("<", 0)
    result = result.where(negative, float("nan"))
    zero = (bits << 1).signed("==", 0)
    return result.where(zero, float("-inf"))


def tanh(x: Num) -> Num:
    """x P(x^2) / Q(x^2) with |x| clamped to 9.02, where tanh rounds to 1."""
    clamped = x.at_least(-9.02).at_most(9.02)
    z = clamped * clamped
    ratio = clamped * horner(z, TANH_P) / horner(z, TANH_Q)
    return ratio.at_least(-1.0).at_most(1.0)


def logistic(x: Num) -> Num:
    """1 / (1 + e^-x)."""
    return 1.0 / (exp(-x) + 1.0)
