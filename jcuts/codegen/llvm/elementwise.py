"""LLVM IR of one element-wise node of a data-flow graph, on vectors of lanes.

Register types: bfloat16 and float16 are carried as float32, bool as ``i1``, everything else as itself.  bfloat16 is
rounded where it is stored, converted or compared; float16 after every operation, as XLA does: its range is so much
smaller than float32's that an unrounded value would be finite where XLA's has become infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from jcuts.codegen import vecmath
from jcuts.codegen.llvm import lanes as L
from jcuts.codegen.vecmath import exact
from jcuts.kernel_ir.node import Scalar

HALVES = ("bfloat16", "float16")
_NARROW = ("int8", "uint8", "int16", "uint16")
FLOATS = ("float32", "float64", *HALVES)


@dataclass(frozen=True)
class Lanes:
    """A value in registers. ``rounded`` is False for a 16-bit float that still carries float32 precision."""

    value: L.Value
    dtype: str
    rounded: bool = True

    @property
    def is_vector(self) -> bool:
        """One value per lane, or one for all."""
        return isinstance(self.value.type, ir.VectorType)


def register_dtype(dtype: str) -> str:
    """The type that arithmetic on a storage type is carried in."""
    return "float32" if dtype in HALVES else dtype


def register_type(dtype: str) -> L.Type:
    """LLVM type of `register_dtype`."""
    return L.element_type(register_dtype(dtype))


def constant(value: Scalar, dtype: str) -> ir.Constant:
    """A scalar constant in register type."""
    kind = register_type(dtype)
    if dtype in FLOATS:
        number = float(value)
        if register_dtype(dtype) == "float32" and math.isfinite(number):
            import numpy as np

            with np.errstate(over="ignore"):
                number = float(np.float32(number))
        return ir.Constant(kind, number)
    return ir.Constant(kind, int(value))


def memory_constant(value: Scalar, dtype: str) -> ir.Constant:
    """A scalar constant in memory type (bool as a byte, bfloat16 as its bits)."""
    if dtype == "bool":
        return L.I8(int(bool(value)))
    if dtype == "bfloat16":
        import ml_dtypes
        import numpy as np

        return L.I16(int(np.asarray(value, ml_dtypes.bfloat16).view(np.uint16)))
    if dtype == "float16":
        return ir.Constant(L.F16, float(value))
    return constant(value, dtype)


def from_memory(builder: L.Builder, value: L.Value, dtype: str) -> Lanes:
    """Memory type -> register type."""
    if dtype == "bool":
        return Lanes(builder.icmp_unsigned("!=", value, L.const(value.type, 0)), dtype)
    if dtype in HALVES:
        return Lanes(exact.emit_exact(builder, "convert", [value], dtype, target="float32"), dtype)
    return Lanes(value, dtype)


def to_memory(builder: L.Builder, lanes: Lanes) -> L.Value:
    """Register type -> memory type (this rounds 16-bit floats)."""
    if lanes.dtype == "bool":
        return builder.zext(lanes.value, L.like(lanes.value.type, L.I8))
    if lanes.dtype in HALVES:
        return exact.emit_exact(builder, "convert", [lanes.value], "float32", target=lanes.dtype)
    return lanes.value


def rounded(builder: L.Builder, lanes: Lanes) -> Lanes:
    """The value as its storage type holds it."""
    if lanes.rounded or lanes.dtype not in HALVES:
        return lanes
    return from_memory(builder, to_memory(builder, lanes), lanes.dtype)


_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_INT = {"add": "add", "sub": "sub", "mul": "mul", "and": "and_", "or": "or_", "xor": "xor"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def apply(builder: L.Builder, op: str, dtype: str, args: Sequence[Lanes], attrs: dict[str, object]) -> Lanes:
    """The code of one element operation. Operands may mix scalars and vectors; scalars are repeated."""
    result = _apply(builder, op, dtype, args, attrs)
    return rounded(builder, result) if dtype == "float16" else result


def _apply(builder: L.Builder, op: str, dtype: str, args: Sequence[Lanes], attrs: dict[str, object]) -> Lanes:
    args = _align(builder, args)
    source = args[0].dtype
    if op in _COMPARE:
        left, right = (rounded(builder, a).value for a in args)
        if source == "float16":
            left, right = L.fence(builder, left), L.fence(builder, right)
        if source in FLOATS:
            compare = builder.fcmp_unordered if op == "ne" else builder.fcmp_ordered
            return Lanes(compare(_COMPARE[op], left, right), "bool")
        unsigned = source.startswith("u") or source == "bool"
        compare = builder.icmp_unsigned if unsigned else builder.icmp_signed
        return Lanes(compare(_COMPARE[op], left, right), "bool")
    if op == "select":
        both = args[1].rounded and args[2].rounded
        return Lanes(builder.select(args[0].value, args[1].value, args[2].value), dtype, both)
    if op == "convert":
        return _convert(builder, args[0], dtype)
    if op == "widen":  # a 16-bit float as it is carried, not yet rounded
        return Lanes(args[0].value, dtype)
    register = register_dtype(dtype)
    values = [a.value for a in args]
    fresh = dtype not in HALVES
    if op == "is_finite":
        return Lanes(exact.emit_exact(builder, op, [rounded(builder, args[0]).value], register_dtype(source)), "bool")
    if register in ("float32", "float64"):
        if op in _FLOAT:
            return Lanes(getattr(builder, _FLOAT[op])(*values), dtype, fresh)
        if op == "square":
            return Lanes(builder.fmul(values[0], values[0]), dtype, fresh)
        if op == "fma":
            return Lanes(L.fma(builder, values[0], values[1], values[2]), dtype, fresh)
        if vecmath.supported(op, register):
            return Lanes(vecmath.emit(builder, op, values, register), dtype, fresh)
        if op in ("floor", "ceil", "round", "sign", "nextafter", "rem"):
            values = [rounded(builder, a).value for a in args]
    elif register == "bool":
        if op == "not":
            return Lanes(builder.not_(values[0]), dtype)
        if op in ("and", "min", "mul"):
            return Lanes(builder.and_(*values), dtype)
        if op in ("or", "max", "add"):
            return Lanes(builder.or_(*values), dtype)
        if op == "xor":
            return Lanes(builder.xor(*values), dtype)
    else:
        if op in _INT:
            return Lanes(getattr(builder, _INT[op])(*values), dtype)
        if op == "not":
            return Lanes(builder.not_(values[0]), dtype)
        if op == "square":
            return Lanes(builder.mul(values[0], values[0]), dtype)
    keep = fresh or op in ("neg", "abs", "max", "min", "clamp", "sign", "floor", "ceil", "round")
    exactly = keep and all(a.rounded for a in args)
    return Lanes(exact.emit_exact(builder, op, values, register, **attrs), dtype, exactly)


def _align(builder: L.Builder, args: Sequence[Lanes]) -> list[Lanes]:
    width = max(L.lane_count(a.value.type) if a.is_vector else 0 for a in args)
    if width == 0:
        return list(args)
    return [a if a.is_vector else Lanes(L.splat(builder, a.value, width), a.dtype, a.rounded) for a in args]


def _convert(builder: L.Builder, arg: Lanes, target: str) -> Lanes:
    arg = rounded(builder, arg)
    if arg.dtype == target:
        return arg
    source = register_dtype(arg.dtype)
    if target in HALVES and source == "float32":
        return Lanes(arg.value, target, arg.dtype == target)
    if source == register_dtype(target):
        return Lanes(arg.value, target)
    if target in HALVES:
        narrow = exact.emit_exact(builder, "convert", [arg.value], source, target=target)
        return from_memory(builder, narrow, target)
    found = exact.emit_exact(builder, "convert", [arg.value], source, target=target)
    cut = target in _NARROW and source not in ("float32", "float64")
    return Lanes(L.sealed(builder, found) if cut else found, target)


def combine(
    builder: L.Builder, how: str, dtype: str, left: tuple[L.Value, ...], right: tuple[L.Value, ...]
) -> tuple[L.Value, ...]:
    """One step of a reduction; argmax and argmin carry (value, position)."""
    if how in ("argmax", "argmin"):
        return _arg_step(builder, how, dtype, left, right)
    a, b = left[0], right[0]
    if how in ("add", "mul") and dtype in FLOATS:
        return ((builder.fadd if how == "add" else builder.fmul)(a, b),)
    if how in ("add", "mul", "and", "or", "xor") and dtype != "bool":
        return (getattr(builder, _INT[how])(a, b),)
    result = apply(builder, how, dtype, [Lanes(a, dtype), Lanes(b, dtype)], {})
    return (result.value,)


def _arg_step(
    builder: L.Builder, how: str, dtype: str, left: tuple[L.Value, ...], right: tuple[L.Value, ...]
) -> tuple[L.Value, ...]:
    """The better of two (value, position) pairs: NaN beats numbers, the smaller position beats an equal value."""
    (a, i), (b, j) = left, right
    op = ">" if how == "argmax" else "<"
    if dtype in FLOATS:
        a_nan, b_nan = builder.fcmp_unordered("uno", a, a), builder.fcmp_unordered("uno", b, b)
        better = builder.or_(builder.fcmp_ordered(op, b, a), builder.and_(b_nan, builder.not_(a_nan)))
        tie = builder.or_(builder.fcmp_ordered("==", a, b), builder.and_(a_nan, b_nan))
    else:
        compare = builder.icmp_unsigned if dtype.startswith("u") else builder.icmp_signed
        better, tie = compare(op, b, a), builder.icmp_signed("==", a, b)
    first = builder.icmp_unsigned("<", j, i)
    take = builder.or_(better, builder.and_(tie, first))
    return builder.select(take, b, a), builder.select(take, j, i)
