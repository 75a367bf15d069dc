"""Vector exponentials and functions built on them (exp, exp2, expm1, logistic, tanh, sinh, cosh), float32 and float64.

All start from x = n ln 2 + r, |r| <= ln(2)/2: n ln 2 is subtracted in two parts by FMA, where the first step is exact
because n * ln2[0] is a multiple of ln2[0]'s last bit and the difference is below 1.
"""

from __future__ import annotations

from jcuts.codegen.vecmath.expr import Int, Num, where
from jcuts.codegen.vecmath.formats import Format


def reduce(k: Format, x: Num) -> tuple[Num, Int]:
    """r and n with x = n ln 2 + r."""
    n, whole = k.nearest_integer(x, k.log2_e)
    r = n.fma(-k.ln2[0], x)
    return n.fma(-k.ln2[1], r), whole


def exp_of_parts(k: Format, x: Num, low: Num | None = None, shift: int = 0) -> Num:
    """2^shift * e^(x + low), |low| far below x's last place."""
    r, n = reduce(k, x.at_least(k.exp_range[0]).at_most(k.exp_range[1]))
    q = (r * r).fma(k.poly("EXP", r), r)
    if low is not None:
        q = q + low.fma(q, low)  # e^low - 1 = low at this precision
    return k.scale(q + 1.0, n + shift if shift else n)


def exp(k: Format, x: Num) -> Num:
    """e^x = 2^n (1 + r + r^2 p(r))."""
    return exp_of_parts(k, x)


def exp2(k: Format, x: Num) -> Num:
    """2^x = 2^n p(x - n)."""
    x = x.at_least(k.exp2_range[0]).at_most(k.exp2_range[1])
    n, whole = k.nearest_integer(x)
    return k.scale(k.poly("EXP2", x - n), whole)


def expm1_magnitude(k: Format, x: Num, top: float) -> Num:
    """e^x - 1 = 2^n (e^r - 1) + (2^n - 1), x already at least -60 and clamped to ``top``; loses the sign of zero.

    Halved while it is put together, so that n = 128 (1024) does not overflow early.
    """
    r, n = reduce(k, x.at_least(-60.0).at_most(top))
    q = (r * r).fma(k.poly("EXP", r), r)
    half = k.power_of_two(n - 1)
    return half.fma(q, half - 0.5) * 2.0


def keep_denormals(k: Format, result: Num, x: Num) -> Num:
    """``x`` itself below the normal numbers, as XLA has it, where denormals are otherwise taken for zero.

    And a little above: half of the smallest normal number, an intermediate of `expm1_magnitude`, would be zero.
    """
    return result.where(abs(x) < 4.0 * k.smallest_normal, x)


def expm1(k: Format, x: Num) -> Num:
    """e^x - 1 with full relative accuracy near zero."""
    return keep_denormals(k, expm1_magnitude(k, x, k.exp_range[1] - 1.0).copysign(x), x)


def logistic(k: Format, x: Num) -> Num:
    """1 / (1 + e^-x)."""
    return 1.0 / (exp(k, -x) + 1.0)


def tanh(k: Format, x: Num) -> Num:
    """With E = e^(2|x|) - 1: E / (E + 2) below 0.55, 1 - 2 / (E + 2) above; one division for both."""
    y = abs(x)
    e = expm1_magnitude(k, y + y, 2.0 * k.one_above)
    near = y < 0.55
    ratio = where(near, e, x.make(-2.0)) / (e + 2.0)
    return keep_denormals(k, where(near, ratio, ratio + 1.0).copysign(x), x)


def half_exp(k: Format, y: Num) -> Num:
    """e^y / 2 without overflow where e^y / 2 has none."""
    return exp_of_parts(k, y, shift=-1)


def cosh(k: Format, x: Num) -> Num:
    """h + 1/(4h), h = e^|x| / 2."""
    h = half_exp(k, abs(x))
    return h + 0.25 / h


def sinh(k: Format, x: Num) -> Num:
    """x + x^3 p(x^2) below 1, h - 1/(4h) above, h = e^|x| / 2."""
    y = abs(x)
    h = half_exp(k, y)
    z = y * y
    near = (y * z).fma(k.poly("SINH", z), y)
    return where(y < 1.0, near, h - 0.25 / h).copysign(x)
