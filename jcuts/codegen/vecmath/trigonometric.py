"""Vector trigonometric functions (sin, cos, tan, asin, acos, atan2) with Cody-Waite and Payne-Hanek range reduction.

Reduction: x = n pi/2 + r, |r| <= pi/4, n pi/2 subtracted in three parts by FMA while |x| <= ``trig_fast``.  Beyond, a
float32 takes the fraction of x * 2/pi from the right window of the bits of 2/pi (Payne and Hanek), in integer lanes;
a float64 goes to libm, lane by lane.  Both are behind a branch that is taken if any lane needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from jcuts.codegen.llvm import lanes
from jcuts.codegen.vecmath.exponential import keep_denormals
from jcuts.codegen.vecmath.expr import Int, Num, where
from jcuts.codegen.vecmath.formats import Format, two_product, two_sum

# The first 224 bits of 2/pi after the point, 32 at a time, below 64 zero bits for the smallest exponents
TWO_OVER_PI = (0, 0, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB)


def if_any(x: Num, mask: lanes.Value, slow: Callable[[], Sequence[Num | Int]], fast: Sequence[Num | Int]) -> list:
    """``fast``, or per lane of the mask what ``slow`` computes; the slow code runs only if some lane needs it."""
    b = x.builder
    before = b.block
    some = lanes.any_lane(b, mask)
    with b.if_then(some, likely=False):
        merged = [type(old)(b, b.select(mask, new.value, old.value)) for new, old in zip(slow(), fast, strict=True)]
        inside = b.block
    results = []
    for old, new in zip(fast, merged, strict=True):
        phi = b.phi(old.type)
        phi.add_incoming(old.value, before)
        phi.add_incoming(new.value, inside)
        results.append(type(old)(b, phi))
    return results


def reduce_fast(k: Format, x: Num) -> tuple[Num, Int]:
    """r and n with x = n pi/2 + r; the first step is exact (see ``exponential``)."""
    n, whole = k.nearest_integer(x, 2.0 / 3.141592653589793)
    r = n.fma(-k.pi_half[0], x)
    r = n.fma(-k.pi_half[1], r)
    return n.fma(-k.pi_half[2], r), whole


def reduce_large_f32(k: Format, x: Num) -> tuple[Num, Int]:
    """r and n mod 4 for any finite |x| >= 1: the fraction of |x| * 2/pi from three 32-bit words of 2/pi.

    |x| = m 2^(e-23), m of 24 bits.  Bits of 2/pi worth 4 or more after scaling are multiples of 4 turns and are left
    out: the window starts at bit e - 25 + 64 of the table, 96 bits of it leave an error below 2^-60 turns.
    """
    bits = x.bits() & 0x7FFFFFFF
    e = bits.logical_right(23) - 127
    m = (bits & 0x7FFFFF | 0x800000).resize(64, signed=False)
    start = e + (64 - 25)
    index, offset = start.logical_right(5), start & 31

    def word(ahead: int) -> Int:
        total = x.bits() & 0
        for position, value in enumerate(TWO_OVER_PI):
            if position >= ahead:
                total = total.where(index.signed("==", position - ahead), value)
        return total.resize(64, signed=False)

    words = [word(ahead) for ahead in range(4)]
    wide_offset = offset.resize(64, signed=False)
    pairs = [(first << 32) | second for first, second in pairwise(words)]
    window = [(pair << wide_offset).logical_right(32) for pair in pairs]
    # the fraction of m * window (a multiple of 2^-96) is x * 2/pi / 4, kept to 2^-64: what overflows is whole turns
    total = ((m * window[0]) << 32) + m * window[1] + (m * window[2]).logical_right(32)
    return _turns_to_angle(k, x, total)


def _turns_to_angle(k: Format, x: Num, total: Int) -> tuple[Num, Int]:
    """From quarter turns as 64-bit fixed point (62 fraction bits) to the nearest quarter and the angle left."""
    point = 62
    quarter = (total + (1 << (point - 1))).logical_right(point)
    rest = total - (quarter << point)
    # convert in two halves: 64-bit conversion is not an instruction everywhere
    top = (rest >> 32).resize(32).to_float(lanes.F64)
    bottom = (rest & 0xFFFFFFFF).resize(32)
    low = bottom.logical_right(1).to_float(lanes.F64) * 2.0
    angle = (top.fma(2.0**32, low) * (1.5707963267948966 * 2.0**-point)).to(k.element)
    negative = x.bits().signed("<", 0)
    n = quarter.resize(32)
    zero = n & 0
    return angle.where(negative, -angle), n.where(negative, zero - n)


def reduce(k: Format, x: Num) -> tuple[Num, Int]:
    """r and n for every float32 (NaN for infinities)."""
    r, n = reduce_fast(k, x)
    r, n = if_any(x, abs(x) > k.trig_fast, lambda: reduce_large_f32(k, x), [r, n])
    return r.where(abs(x).equals(float("inf")), float("nan")), n


def sine_core(k: Format, r: Num) -> Num:
    z = r * r
    return (r * z).fma(k.poly("SIN", z), r)


def cosine_core(k: Format, r: Num) -> Num:
    z = r * r
    half = z * 0.5
    top = 1.0 - half
    return top + ((1.0 - top) - half + z * z * k.poly("COS", z))


def _circular(k: Format, x: Num, quarter: int, symbol: str) -> Num:
    """sin(x + quarter * pi/2)."""

    def finish(r: Num, n: Int) -> Num:
        n = n + quarter if quarter else n
        swap = (n & 1).signed("!=", 0)
        value = where(swap, cosine_core(k, r), sine_core(k, r))
        sign = (n & 2) << (k.digits + (6 if k.mantissa == 23 else 9))
        return (value.bits() ^ sign).as_float()

    if k.mantissa == 23:
        result = finish(*reduce(k, x))
    else:
        fast = finish(*reduce_fast(k, x))
        result = _libm_beyond(k, x, fast, symbol)
    return result


def _libm_beyond(k: Format, x: Num, fast: Num, symbol: str) -> Num:
    def slow() -> list[Num]:
        return [Num(x.builder, lanes.per_lane(x.builder, symbol, [x.value]))]

    return if_any(x, abs(x) > k.trig_fast, slow, [fast])[0]


def sin(k: Format, x: Num) -> Num:
    result = _circular(k, x, 0, "sin")
    return result.where(x.equals(0.0), x)


def cos(k: Format, x: Num) -> Num:
    return _circular(k, x, 1, "cos")


def tan(k: Format, x: Num) -> Num:
    """s/c or -c/s by the parity of n."""
    r, n = reduce(k, x) if k.mantissa == 23 else reduce_fast(k, x)
    s, c = sine_core(k, r), cosine_core(k, r)
    swap = (n & 1).signed("!=", 0)
    result = where(swap, -c, s) / where(swap, s, c)
    if k.mantissa != 23:
        result = _libm_beyond(k, x, result, "tan")
    return result.where(x.equals(0.0), x)


def _arcsine_core(k: Format, s: Num, z: Num) -> Num:
    """asin(s), z = s^2 <= 1/4."""
    return (s * z).fma(k.poly("ASIN", z), s)


def asin(k: Format, x: Num) -> Num:
    """asin y below 1/2; pi/2 - 2 asin(sqrt((1 - y)/2)) above."""
    y = abs(x)
    near = y < 0.5
    z = where(near, y * y, (1.0 - y) * 0.5)
    s = where(near, y, z.sqrt())
    core = _arcsine_core(k, s, z)
    far = (k.pi_half[0] - core * 2.0) + k.pi_half[1]
    return where(near, core, far).copysign(x)


def acos(k: Format, x: Num) -> Num:
    """pi/2 - asin x near zero; 2 asin(sqrt((1 - |x|)/2)), or pi minus it, elsewhere."""
    y = abs(x)
    near = y < 0.5
    z = where(near, y * y, (1.0 - y) * 0.5)
    s = where(near, x, z.sqrt())
    core = _arcsine_core(k, s, z)
    twice = core + core
    negative = k.pi_half[0] * 2.0 - (twice - k.pi_half[1] * 2.0)
    far = where(x < 0.0, negative, twice)
    return where(near, k.pi_half[0] - (core - k.pi_half[1]), far)


def _arctangent(k: Format, low: Num, high: Num, swapped: lanes.Value, flip: lanes.Value | None = None) -> Num:
    """atan(low / high), 0 <= low <= high; pi/2 minus it where swapped; then pi minus that where flip.

    Above tan(pi/8) the quotient is taken as (low - high)/(low + high) and pi/4 is added.  The multiples of pi/4 are
    collected first and added once, in two parts.
    """
    above = low > high * 0.41421356
    t = where(above, low - high, low) / where(above, low + high, high)
    z = t * t
    rest = (t * z) * k.poly("ATAN", z)
    one, base = t.make(1.0), t.make(0.0).where(above, 0.5)
    sign = one.where(swapped, -1.0)
    base = base.where(swapped, 1.0 - base)
    if flip is not None:
        sign, base = sign.where(flip, -sign), base.where(flip, 2.0 - base)
    t, rest = t * sign, rest * sign
    multiple, multiple_low = two_product(base, base.make(k.pi_half[0]))
    total, left = two_sum(multiple, t)
    with_base = total + (left + base.fma(k.pi_half[1], rest + multiple_low))
    return where(base.equals(0.0), t + rest, with_base)


def atan(k: Format, x: Num) -> Num:
    y = abs(x)
    swapped = y > 1.0
    one = x.make(1.0)
    result = _arctangent(k, where(swapped, one, y), where(swapped, y, one), swapped).copysign(x)
    return keep_denormals(k, result, x)


def atan2(k: Format, y: Num, x: Num) -> Num:
    """The angle of (x, y): C's cases for zeros and infinities."""
    b = x.builder
    ay, ax = abs(y), abs(x)
    swapped = ay > ax
    low, high = where(swapped, ax, ay), where(swapped, ay, ax)
    # inf/inf is 1, 0/0 is 0/1; large sums must not overflow, nor small ones lose bits
    both = low.equals(float("inf"))
    low, high = low.where(both, 1.0), high.where(both, 1.0)
    high = high.where(high.equals(0.0), 1.0)
    factor = x.make(1.0).where(high > 2.0 ** (k.bias - 2), 0.25)
    factor = factor.where(high < 2.0 ** (k.digits + 3 - k.bias), 2.0**k.digits)
    low, high = low * factor, high * factor
    angle = _arctangent(k, low, high, swapped, x.bits().signed("<", 0))
    nan = b.or_(x.is_nan(), y.is_nan())
    return angle.copysign(y).where(nan, float("nan"))
