"""Float-format traits of the generic elementary functions: bit layout, ranges, multi-part constants, coefficients.

With them come frexp (`split`), ldexp (`scale`) and the error-free transforms FastTwoSum and TwoProduct (FMA).
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.codegen.llvm import lanes
from jcuts.codegen.vecmath.expr import Int, Num, horner

Table = tuple[float, ...]


@dataclass(frozen=True)
class Format:
    """One float format.

    A constant that is used beyond the format's precision is a tuple of parts: high, low (, lower), each the nearest
    float to what the parts before it leave over.

    Attributes:
        mantissa: stored mantissa bits (23 or 52); bias: of the exponent.
        shifter: 1.5 * 2^mantissa; adding it leaves the nearest integer in the low bits of the sum.
        ln2, pi_half, ...: constants in parts.
        polynomials: coefficients by name, lowest power first (fitted by ``benchmarks/vecmath/fit_polynomials.py``).
        exp_range: beyond these, e^x is 0 or infinite; one_above: tanh is 1 from here on.
        trig_fast: largest |x| whose reduction by pi/2 in three parts keeps full accuracy.
    """

    name: str
    element: lanes.Type
    mantissa: int
    bias: int
    smallest_normal: float
    ln2: tuple[float, float]
    log2_e: float
    pi_half: tuple[float, float, float]
    exp_range: tuple[float, float]
    exp2_range: tuple[float, float]
    one_above: float
    trig_fast: float
    sqrt_half_bits: int
    polynomials: dict[str, Table]

    @property
    def shifter(self) -> float:
        return 1.5 * 2.0**self.mantissa

    @property
    def shifter_bits(self) -> int:
        return ((self.bias + self.mantissa) << self.mantissa) | (1 << (self.mantissa - 1))

    @property
    def mantissa_mask(self) -> int:
        return (1 << self.mantissa) - 1

    @property
    def infinity_bits(self) -> int:
        return (2 * self.bias + 1) << self.mantissa

    @property
    def digits(self) -> int:
        """Significant bits: 24 or 53."""
        return self.mantissa + 1

    def poly(self, name: str, x: Num) -> Num:
        return horner(x, self.polynomials[name])

    def nearest_integer(self, x: Num, times: float = 1.0) -> tuple[Num, Int]:
        """The integer nearest to x * times (below 2^(mantissa-2)) as a float and as an integer.

        Never undefined, unlike LLVM's float-to-integer conversion of a NaN (the integer is then arbitrary).
        """
        shifted = x.fma(times, self.shifter)
        return shifted - self.shifter, shifted.bits() - self.shifter_bits

    def power_of_two(self, n: Int) -> Num:
        """2^n for exponents of normal numbers."""
        return ((n + self.bias) << self.mantissa).as_float()

    def scale(self, x: Num, n: Int) -> Num:
        """x * 2^n for |n| up to twice the exponent range: in two factors, so that results down to the denormals and
        up to overflow are right."""
        half = n >> 1
        return x * self.power_of_two(half) * self.power_of_two(n - half)

    def split(self, x: Num) -> tuple[Num, Num]:
        """m in [sqrt(1/2), sqrt(2)) and e with x = 2^e m, for positive finite x, denormals included.

        float32 denormals are read from their bits, hence right whether or not the processor flushes them (XLA has it
        flush them, yet its float32 logarithm of them is finite); float64 ones are zero where they are flushed.
        """
        bits = x.bits()
        if self.mantissa == 23:
            small = bits.signed("<", 1 << 23)
            bits = bits.where(small, bits.to_float(self.element).bits())  # a denormal is its bits times 2^-149
            lift = 149.0
        else:
            small = x < self.smallest_normal
            bits = bits.where(small, (x * 2.0**54).bits())
            lift = 54.0
        shifted = bits - self.sqrt_half_bits
        m = ((shifted & self.mantissa_mask) + self.sqrt_half_bits).as_float()
        e = self.small_int(shifted >> self.mantissa)
        return m, e.where(small, e - lift)

    def small_int(self, n: Int) -> Num:
        """An integer below 2^22 as a float, without a 64-bit conversion instruction (which AVX2 lacks)."""
        if self.mantissa == 23:
            return n.to_float(self.element)
        return (n + self.shifter_bits).as_float() - self.shifter

    def is_zero(self, x: Num) -> lanes.Value:
        """x == 0; a float32 denormal is not zero (see ``split``)."""
        return (x.bits() << 1).signed("==", 0) if self.mantissa == 23 else x.equals(0.0)


def two_sum(a: Num, b: Num) -> tuple[Num, Num]:
    """a + b exactly, as its rounded value and the rest, for |a| >= |b| or a = 0."""
    high = a + b
    return high, b - (high - a)


def two_product(a: Num, b: Num) -> tuple[Num, Num]:
    """a * b exactly, as its rounded value and the rest."""
    high = a * b
    return high, a.fma(b, -high)
