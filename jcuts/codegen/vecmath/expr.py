"""Operator overloading on LLVM vectors: lets the formulas of this package read as formulas.

``Num`` wraps a float vector (or scalar), ``Int`` an integer one of the same shape; Python numbers become constants in
every lane.  Each operation appends one LLVM instruction, without fast-math flags: what is written is what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from jcuts.codegen.llvm import lanes


class Num:
    """Float lanes."""

    __slots__ = ("builder", "value")

    def __init__(self, builder: lanes.Builder, value: lanes.Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def type(self) -> lanes.Type:
        return self.value.type

    def make(self, other: Num | float) -> Num:
        """A constant of this shape (a ``Num`` passes through)."""
        return other if isinstance(other, Num) else Num(self.builder, lanes.const(self.type, float(other)))

    def __add__(self, other: Num | float) -> Num:
        return Num(self.builder, self.builder.fadd(self.value, self.make(other).value))

    def __radd__(self, other: float) -> Num:
        return self + other

    def __sub__(self, other: Num | float) -> Num:
        return Num(self.builder, self.builder.fsub(self.value, self.make(other).value))

    def __rsub__(self, other: float) -> Num:
        return self.make(other) - self

    def __mul__(self, other: Num | float) -> Num:
        return Num(self.builder, self.builder.fmul(self.value, self.make(other).value))

    def __rmul__(self, other: float) -> Num:
        return self * other

    def __truediv__(self, other: Num | float) -> Num:
        return Num(self.builder, self.builder.fdiv(self.value, self.make(other).value))

    def __rtruediv__(self, other: float) -> Num:
        return self.make(other) / self

    def __neg__(self) -> Num:
        return Num(self.builder, self.builder.fneg(self.value))

    def __abs__(self) -> Num:
        return self._unary("fabs")

    def fma(self, times: Num | float, plus: Num | float) -> Num:
        """self * times + plus, rounded once."""
        args = [self.value, self.make(times).value, self.make(plus).value]
        return Num(self.builder, lanes.fma(self.builder, *args))

    def _unary(self, name: str) -> Num:
        return Num(self.builder, lanes.intrinsic(self.builder, name, self.type, [self.value]))

    def sqrt(self) -> Num:
        return self._unary("sqrt")

    def floor(self) -> Num:
        return self._unary("floor")

    def ceil(self) -> Num:
        return self._unary("ceil")

    def trunc(self) -> Num:
        return self._unary("trunc")

    def nearest(self) -> Num:
        """The nearest integer, ties to even, in the default rounding mode."""
        return self._unary("rint")

    def copysign(self, sign: Num | float) -> Num:
        args = [self.value, self.make(sign).value]
        return Num(self.builder, lanes.intrinsic(self.builder, "copysign", self.type, args))

    def compare(self, operator: str, other: Num | float) -> lanes.Value:
        """Ordered comparison (false where either is NaN); ``!=`` alone is true for NaN."""
        if operator == "!=":
            return self.builder.fcmp_unordered("!=", self.value, self.make(other).value)
        return self.builder.fcmp_ordered(operator, self.value, self.make(other).value)

    def __lt__(self, other: Num | float) -> lanes.Value:
        return self.compare("<", other)

    def __le__(self, other: Num | float) -> lanes.Value:
        return self.compare("<=", other)

    def __gt__(self, other: Num | float) -> lanes.Value:
        return self.compare(">", other)

    def __ge__(self, other: Num | float) -> lanes.Value:
        return self.compare(">=", other)

    def equals(self, other: Num | float) -> lanes.Value:
        return self.compare("==", other)

    def is_nan(self) -> lanes.Value:
        return self.builder.fcmp_unordered("uno", self.value, self.value)

    def where(self, mask: lanes.Value, yes: Num | float) -> Num:
        """``mask ? yes : self``."""
        return Num(self.builder, self.builder.select(mask, self.make(yes).value, self.value))

    def at_least(self, bound: Num | float) -> Num:
        """``self < bound ? bound : self``: a NaN stays."""
        return self.where(self < bound, bound)

    def at_most(self, bound: Num | float) -> Num:
        """``self > bound ? bound : self``: a NaN stays."""
        return self.where(self > bound, bound)

    def bits(self) -> Int:
        """The bit pattern as integers of the same width."""
        return Int(self.builder, lanes.bitcast(self.builder, self.value, ir.IntType(lanes.bit_width(self.type))))

    def to(self, element: lanes.Type) -> Num:
        """Converted to another float format (round to nearest even)."""
        here, there = lanes.bit_width(self.type), lanes.bit_width(element)
        if here == there:
            return self
        cast = self.builder.fpext if there > here else self.builder.fptrunc
        return Num(self.builder, cast(self.value, lanes.like(self.type, element)))


class Int:
    """Integer lanes; shifts right are arithmetic unless ``logical`` is named."""

    __slots__ = ("builder", "value")

    def __init__(self, builder: lanes.Builder, value: lanes.Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def type(self) -> lanes.Type:
        return self.value.type

    def make(self, other: Int | int) -> Int:
        """A constant of this shape, modulo 2^width (an ``Int`` passes through)."""
        if isinstance(other, Int):
            return other
        width = lanes.bit_width(self.type)
        wrapped = (other + (1 << (width - 1))) % (1 << width) - (1 << (width - 1)) if width > 1 else other & 1
        return Int(self.builder, lanes.const(self.type, wrapped))

    def __add__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.add(self.value, self.make(other).value))

    def __sub__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.sub(self.value, self.make(other).value))

    def __mul__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.mul(self.value, self.make(other).value))

    def __and__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.and_(self.value, self.make(other).value))

    def __or__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.or_(self.value, self.make(other).value))

    def __xor__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.xor(self.value, self.make(other).value))

    def __lshift__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.shl(self.value, self.make(other).value))

    def __rshift__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.ashr(self.value, self.make(other).value))

    def logical_right(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.lshr(self.value, self.make(other).value))

    def signed(self, operator: str, other: Int | int) -> lanes.Value:
        return self.builder.icmp_signed(operator, self.value, self.make(other).value)

    def unsigned(self, operator: str, other: Int | int) -> lanes.Value:
        return self.builder.icmp_unsigned(operator, self.value, self.make(other).value)

    def where(self, mask: lanes.Value, yes: Int | int) -> Int:
        """``mask ? yes : self``."""
        return Int(self.builder, self.builder.select(mask, self.make(yes).value, self.value))

    def as_float(self) -> Num:
        """The same bits as a float of this width."""
        element = {16: lanes.F16, 32: lanes.F32, 64: lanes.F64}[lanes.bit_width(self.type)]
        return Num(self.builder, lanes.bitcast(self.builder, self.value, element))

    def to_float(self, element: lanes.Type) -> Num:
        """The signed value, rounded to a float."""
        return Num(self.builder, self.builder.sitofp(self.value, lanes.like(self.type, element)))

    def resize(self, bits: int, signed: bool = True) -> Int:
        """Truncated or extended to another width."""
        here = lanes.bit_width(self.type)
        if here == bits:
            return self
        kind = lanes.like(self.type, ir.IntType(bits))
        if bits < here:
            return Int(self.builder, self.builder.trunc(self.value, kind))
        return Int(self.builder, (self.builder.sext if signed else self.builder.zext)(self.value, kind))


def horner(x: Num, coefficients: Sequence[float]) -> Num:
    """sum c_k x^k by a chain of FMAs (fewest operations, longest chain)."""
    total = x.make(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total.fma(x, c)
    return total


def where(mask: lanes.Value, yes: Num, no: Num) -> Num:
    """``mask ? yes : no`` lane by lane."""
    return no.where(mask, yes)
