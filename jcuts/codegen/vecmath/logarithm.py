"""Vector logarithms and functions built on them (log, log1p, asinh, acosh, atanh, pow, cbrt), float32 and float64.

x = 2^e m, m = 1 + f in [sqrt(1/2), sqrt(2)), log x = e ln 2 + f - f^2/2 + rest(f).
"""

from __future__ import annotations

from jcuts.codegen.vecmath.exponential import exp_of_parts
from jcuts.codegen.vecmath.expr import Num, where
from jcuts.codegen.vecmath.formats import Format, two_product, two_sum


def log_sum(k: Format, f: Num, e: Num) -> Num:
    """e ln 2 + log(1 + f)."""
    half_square = f * f * 0.5
    if k.mantissa == 23:
        rest = (f * f * f) * k.poly("LOG", f)
    else:
        # s = f/(2+f):  log(1+f) = 2 s + s^3 p(s^2)  and  2 s = f - f^2/2 + s f^2/2
        s = f / (f + 2.0)
        z = s * s
        rest = s * (half_square + z * k.poly("ATANH2", z))
    tail = e.fma(k.ln2[1], rest) - half_square
    return e.fma(k.ln2[0], f + tail)


def special(k: Format, x: Num, result: Num) -> Num:
    """log's values at zero, below zero, at infinity and NaN."""
    bits = x.bits()
    result = result.where(bits.signed(">=", k.infinity_bits), x)  # infinity and NaN keep themselves
    result = result.where(bits.signed("<", 0), float("nan"))
    return result.where(k.is_zero(x), float("-inf"))


def log(k: Format, x: Num) -> Num:
    m, e = k.split(x)
    return special(k, x, log_sum(k, m - 1.0, e))


def log1p_parts(k: Format, x: Num) -> tuple[Num, Num, Num]:
    """f, e, u with 1 + x = 2^e (1 + f) and u = 1 + x rounded.

    e comes from u; f = x 2^-e + (2^-e - 1) is then exact but for one rounding, so what u lost does not matter.
    """
    u = x + 1.0
    m, e = k.split(u)
    large = x > 2.0 ** (k.digits + 2)  # 2^-e - 1 would lose nothing, but 2^-e may be a denormal
    inverse = k.power_of_two(k.nearest_integer(-e)[1])
    return where(large, m - 1.0, x.fma(inverse, inverse - 1.0)), e, u


def log1p(k: Format, x: Num) -> Num:
    """log(1 + x) with full relative accuracy near zero."""
    f, e, u = log1p_parts(k, x)
    result = special(k, u, log_sum(k, f, e))
    return result.where(abs(x) < k.smallest_normal * 2.0**24, x)


def asinh(k: Format, x: Num) -> Num:
    """log1p(y + y^2 / (1 + sqrt(1 + y^2))), y = |x|; log(2 y) where y^2 would overflow or drown the 1."""
    y = abs(x)
    large = y > 2.0 ** (k.digits + 2)
    z = y * y
    argument = where(large, y, y + z / ((z + 1.0).sqrt() + 1.0))
    f, e, u = log1p_parts(k, argument)
    result = special(k, u, log_sum(k, f, e.where(large, e + 1.0)))
    return result.where(y < 2.0 ** -(k.digits // 2 + 2), y).copysign(x)


def acosh(k: Format, x: Num) -> Num:
    """log1p(t + sqrt(t (t + 2))), t = x - 1; log(2 x) where t^2 would overflow."""
    large = x > 2.0 ** (k.digits + 2)
    t = x - 1.0
    argument = where(large, x, t + (t * (t + 2.0)).sqrt())
    f, e, u = log1p_parts(k, argument)
    return special(k, u, log_sum(k, f, e.where(large, e + 1.0))).where(x < 1.0, float("nan"))


def atanh(k: Format, x: Num) -> Num:
    """log1p(2 y / (1 - y)) / 2, y = |x|."""
    y = abs(x)
    result = log1p(k, (y + y) / (1.0 - y)) * 0.5
    return result.where(y < 2.0 ** -(k.digits // 2 + 2), y).copysign(x)


def log_parts(k: Format, x: Num) -> tuple[Num, Num]:
    """log x as high + low with about 12 bits beyond the format, for positive finite x.

    2 atanh(s) = 2 s + s z (2/3 + z p(z)), s = f/(2+f) and z = s^2 in two parts each.
    """
    m, e = k.split(x)
    f = m - 1.0
    bottom = f + 2.0
    bottom_low = f - (bottom - 2.0)
    s = f / bottom
    s_low = (s.fma(-bottom, f) - s * bottom_low) / bottom
    z, z_low = two_product(s, s)
    z_low = (s + s).fma(s_low, z_low)
    third_high, third_low = k.polynomials["TWO_THIRDS"]
    q, q_low = two_sum(x.make(third_high), z * k.poly("ATANH2_TAIL", z))
    q_low = q_low + third_low
    w, w_low = two_product(z, q)
    w_low = w_low + z.fma(q_low, z_low * q)
    cubic, cubic_low = two_product(s, w)
    cubic_low = cubic_low + s.fma(w_low, s_low * w)
    high, low = two_sum(s + s, cubic)
    low = low + (cubic_low + (s_low + s_low))
    # e ln2_short is exact: its low bits are zero
    ln2_short, ln2_rest = k.polynomials["LN2_SHORT"]
    whole = e * ln2_short
    total, rest = two_sum(where(e.equals(0.0), high, whole), where(e.equals(0.0), x.make(0.0), high))
    rest = rest + e.fma(ln2_rest, low)
    return two_sum(total, rest)


def power(k: Format, x: Num, y: Num) -> Num:
    """x^y = e^(y log|x|) with the product in two parts, then the cases of C's ``pow``."""
    base = abs(x)
    infinity = x.make(float("inf"))
    # Zero after scaling: a denormal is zero where the processor takes it for one, as in the comparisons beside it (the
    # gradient of a power asks whether its base is zero); a test of x alone may be compiled into one of its bits.
    zero_base = (base * 2.0**k.digits).equals(0.0)
    high, low = log_parts(k, base)
    low = low.where(zero_base, 0.0).where(base.equals(infinity), 0.0)
    high = high.where(zero_base, float("-inf")).where(base.equals(infinity), infinity).where(base.is_nan(), base)
    product = high * y
    product_low = high.fma(y, -product) + low * y
    huge = abs(product) > 2.0 ** (k.digits // 2)  # far beyond exp's range: the low part may be inf - inf
    result = exp_of_parts(k, product, product_low.where(huge, 0.0))
    b = x.builder
    # y odd: an integer whose half is none
    half = y * 0.5
    integer = y.floor().equals(y)
    if k.mantissa == 23:  # a denormal is no integer, although the floor of one that is taken for zero is
        pattern = abs(y).bits()
        integer = b.and_(integer, b.or_(pattern.signed("==", 0), pattern.signed(">", 0x7FFFFF)))
    odd = b.and_(integer, b.not_(half.floor().equals(half)))
    negative = x.bits().signed("<", 0)
    result = result.where(b.and_(negative, odd), -result)
    below_zero = b.and_(negative, b.not_(zero_base))
    invalid = b.and_(b.and_(below_zero, b.not_(integer)), abs(x) < infinity)
    result = result.where(b.and_(base.equals(1.0), abs(y).equals(infinity)), 1.0)
    result = result.where(b.or_(y.equals(0.0), x.equals(1.0)), 1.0)
    return result.where(invalid, float("nan"))


def cbrt(k: Format, x: Num) -> Num:
    """A guess from a third of the bits, one Halley step (two for float64), then a Newton step on the exact residual.

    Scaled by 2^(+-3 j) first so that cubes neither overflow nor lose bits.
    """
    step = 3 * ((k.digits + 4) // 3)
    y = abs(x)
    small, large = y < k.smallest_normal * 2.0 ** (2 * step), y > 2.0 ** (k.bias - 3)
    scaled = y.where(small, y * 2.0**step).where(large, y * 2.0**-step)
    # exponent and leading mantissa bits are a piecewise linear logarithm, here an integer below 2^22
    drop = k.mantissa - (13 if k.mantissa == 23 else 10)
    third = k.small_int(scaled.bits().logical_right(drop)) * (1.0 / 3.0)
    offset = 2.0 / 3.0 * (k.bias - 0.05) * 2.0 ** (k.mantissa - drop)
    guess = (k.nearest_integer(third + offset)[1] << drop).as_float()
    for _ in range(1 if k.mantissa == 23 else 2):
        cube = guess * guess * guess
        guess = guess * ((cube + scaled + scaled) / (cube + cube + scaled))
    square = guess * guess
    guess = guess - square.fma(guess, -scaled) / (square * 3.0)
    guess = guess.where(small, guess * 2.0 ** (-step // 3)).where(large, guess * 2.0 ** (step // 3))
    b = x.builder
    # Zero after scaling: with denormals taken for zero, a test of x alone may still be compiled into one of its bits.
    keep = b.or_(scaled.equals(0.0), b.or_(y.equals(float("inf")), x.is_nan()))
    return guess.copysign(x).where(keep, x)
