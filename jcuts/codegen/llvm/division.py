"""Strength-reduced integer division: floor division and remainder by a positive constant, for addresses on CPU and GPU.

Where a lower bound of the dividend is known, it is made non-negative and divided unsigned, which LLVM turns into a
multiplication and shifts.
"""

from __future__ import annotations

from llvmlite import ir

from jcuts.codegen.llvm import lanes as L


def floor_division(
    builder: L.Builder, kind: str, value: L.Value, modulus: int, low: int | None, base: ir.IntType
) -> L.Value:
    """The quotient rounded down, or where ``kind`` is ``mod`` the remainder, which is never negative."""
    typ = value.type

    def const(number: int) -> ir.Constant:
        return L.const(typ, number) if isinstance(typ, ir.VectorType) else base(number)

    if low is not None:
        shift = 0 if low >= 0 else -(low // modulus)
        moved = builder.add(value, const(shift * modulus)) if shift else value
        if kind == "mod":
            return builder.urem(moved, const(modulus))
        quotient = builder.udiv(moved, const(modulus))
        return builder.sub(quotient, const(shift)) if shift else quotient
    quotient = builder.sdiv(value, const(modulus))
    rest = builder.sub(value, builder.mul(quotient, const(modulus)))
    negative = builder.icmp_signed("<", rest, const(0))
    if kind == "mod":
        return builder.select(negative, builder.add(rest, const(modulus)), rest)
    return builder.select(negative, builder.sub(quotient, const(1)), quotient)
