"""Vector error functions: erf, erfc and erf_inv, float32 and float64."""

from __future__ import annotations

from jcuts.codegen.vecmath.exponential import exp_of_parts
from jcuts.codegen.vecmath.expr import Num, where
from jcuts.codegen.vecmath.formats import Format
from jcuts.codegen.vecmath.logarithm import log_sum


def erfc_of_magnitude(k: Format, y: Num) -> Num:
    """erfc(y), y >= 1/2: exp(-y^2) G(t) / (y + pole), t = (y - pole)/(y + pole); y^2 in two parts."""
    (pole,) = k.polynomials["ERFC_POLE"]
    y = y.at_most(k.polynomials["ERFC_ZERO"][0])
    bottom = y + pole
    inverse = 1.0 / bottom
    # what the sum and the quotient lost, so that neither counts in the result
    inverse_low = inverse * (inverse.fma(-bottom, 1.0) - (y - (bottom - pole)) * inverse)
    t = inverse_low.fma(-2.0 * pole, inverse.fma(-2.0 * pole, 1.0))
    g = k.poly("ERFC", t)
    g = g.fma(inverse, g * inverse_low)
    square = y * y
    low = y.fma(y, -square)
    return exp_of_parts(k, -square, -low) * g


def erfc(k: Format, x: Num) -> Num:
    """1 - erf x below 0.65; above, the tail with full relative accuracy, or 2 minus it."""
    y = abs(x)
    near = 1.0 - x.fma(k.poly("ERF", x * x), x)
    tail = erfc_of_magnitude(k, y)
    return where(y < 0.65, near, where(x < 0.0, 2.0 - tail, tail))


def erf(k: Format, x: Num) -> Num:
    """x + x p(x^2) near zero; beyond, 1 - q(|x|)^8 for float32 and 1 - erfc |x| for float64."""
    (cut,) = k.polynomials["ERF_CUT"]
    y = abs(x)
    z = y * y
    near = y.fma(k.poly("ERF", z), y)
    if k.mantissa == 23:
        root = k.poly("ERF_TAIL", y.at_most(3.95))
        fourth = root * root
        fourth = fourth * fourth
        far = fourth.fma(-fourth, 1.0)
    else:
        far = 1.0 - erfc_of_magnitude(k, y)
    return where(y < cut, near, far).copysign(x)


def erf_inv(k: Format, x: Num) -> Num:
    """x p(w), w = -log(1 - x^2); polynomials in w near zero, in sqrt(w) further out."""
    complement = x.fma(-x, 1.0)
    # near |x| = 1 the product keeps the digits that 1 - x^2 loses
    y = abs(x)
    complement = where(y > 0.5, (1.0 - y) * (y + 1.0), complement)
    m, e = k.split(complement)
    w = -log_sum(k, m - 1.0, e)
    centre, limit = k.polynomials["ERFINV_NEAR"]
    p = k.poly("ERFINV_0", w - centre)
    root = w.sqrt()
    centres = k.polynomials["ERFINV_CENTRES"]
    limits = k.polynomials["ERFINV_LIMITS"]
    p = p.where(w > limit, k.poly("ERFINV_1", root - centres[0]))
    for index, bound in enumerate(limits):
        p = p.where(w > bound, k.poly(f"ERFINV_{index + 2}", root - centres[index + 1]))
    result = x * p
    infinity = x.make(float("inf")).copysign(x)
    return result.where(y.equals(1.0), infinity).where(x.builder.not_(y <= 1.0), float("nan"))
