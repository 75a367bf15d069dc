"""Vector code of ``convert_element_type``, with XLA's results on CPU.

Floats to integers truncate, saturate, and take NaN to 0; integers wrap; float64 and integers reach the 16-bit floats by
way of float32 (two roundings, as XLA does); bfloat16 is rounded such that denormals and NaN are kept.
"""

from __future__ import annotations

from llvmlite import ir

from jcuts.base.errors import IRError
from jcuts.codegen.llvm import lanes

FLOATS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


def is_float(dtype: str) -> bool:
    return dtype in FLOATS


def is_unsigned(dtype: str) -> bool:
    """Unsigned integers and bool."""
    return dtype == "bool" or dtype.startswith("uint")


def convert(builder: lanes.Builder, value: lanes.Value, source: str, target: str) -> lanes.Value:
    """Lanes of dtype ``source`` as lanes of dtype ``target`` (register types of ``lanes.element_type``).

    Raises: IRError if either is no dtype of a kernel.
    """
    want = lanes.like(value.type, lanes.element_type(target))
    if lanes.element(value.type) != lanes.element_type(source):
        raise IRError(f"a value of type {value.type} was named {source}", type=str(value.type), dtype=source)
    if source == target:
        return value
    if target == "bool":
        return _nonzero(builder, value, source)
    if is_float(source):
        if is_float(target):
            return _float_to_float(builder, value, source, target)
        return _to_integer(builder, _widened(builder, value, source), target, want)
    if is_float(target):
        if target in ("float16", "bfloat16"):
            return _float_to_float(builder, convert(builder, value, source, "float32"), "float32", target)
        return (builder.uitofp if is_unsigned(source) else builder.sitofp)(value, want)
    here, there = lanes.bit_width(value.type), lanes.bit_width(want)
    if there == here:
        return value
    if there < here:
        return builder.trunc(value, want)
    return (builder.zext if is_unsigned(source) else builder.sext)(value, want)


def _to_integer(builder: lanes.Builder, value: lanes.Value, target: str, want: lanes.Type) -> lanes.Value:
    """Towards zero, saturated; NaN gives 0.

    float64 goes through 64-bit integers, float32 to 64 bits through float64: LLVM 22 fails (VectorCombine,
    foldShuffleOfIntrinsics) where lanes of two conversions from different types to one type are mixed.
    """
    bits = lanes.bit_width(want)
    if bits == 64 and lanes.element(value.type) == lanes.F32:
        value = builder.fpext(value, lanes.like(value.type, lanes.F64))
    unsigned = is_unsigned(target)
    narrow = lanes.element(value.type) == lanes.F64 and bits < 64
    made = lanes.like(want, lanes.I64) if narrow else want
    sign = "u" if unsigned and not narrow else "s"
    result = lanes.intrinsic(builder, f"fpto{sign}i.sat", made, [value], [made, value.type])
    if not narrow:
        return result
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for op, bound in ((">", high), ("<", low)):
        limit = lanes.const(made, bound)
        result = builder.select(builder.icmp_signed(op, result, limit), limit, result)
    return builder.trunc(result, want)


def _nonzero(builder: lanes.Builder, value: lanes.Value, source: str) -> lanes.Value:
    """value != 0; a NaN is true."""
    if is_float(source):
        wide = _widened(builder, value, source)
        return builder.fcmp_unordered("!=", wide, lanes.const(wide.type, 0.0))
    return builder.icmp_signed("!=", value, lanes.const(value.type, 0))


def _widened(builder: lanes.Builder, value: lanes.Value, source: str) -> lanes.Value:
    """float32 from the 16-bit floats; others as they are."""
    if source in ("float16", "bfloat16"):
        return _float_to_float(builder, value, source, "float32")
    return value


def _float_to_float(builder: lanes.Builder, value: lanes.Value, source: str, target: str) -> lanes.Value:
    if source == "bfloat16":
        wide = builder.zext(value, lanes.like(value.type, lanes.I32))
        wide = builder.shl(wide, lanes.const(wide.type, 16))
        value, source = lanes.bitcast(builder, wide, lanes.F32), "float32"
    elif source == "float16":
        value, source = builder.fpext(value, lanes.like(value.type, lanes.F32)), "float32"
    if target == source:
        return value
    if target == "float64":
        return lanes.fence(builder, builder.fpext(value, lanes.like(value.type, lanes.F64)))
    if source == "float64":
        value = lanes.fence(builder, builder.fptrunc(value, lanes.like(value.type, lanes.F32)))
    if target == "float32":
        return value
    if target == "float16":
        half = lanes.like(value.type, lanes.F16)
        if getattr(value, "opname", "") == "fpext" and value.operands[0].type == half:
            return value.operands[0]  # a copy stays one
        return builder.fptrunc(lanes.fence(builder, value), half)
    return _to_bfloat16(builder, value)


def _to_bfloat16(builder: lanes.Builder, value: lanes.Value) -> lanes.Value:
    """The upper half of the bits, rounded to nearest even; any NaN becomes a quiet one.

    By the machine's instruction where there is one (``cvt.rn.bf16.f32``), else on the bits, where NaN keep their sign.
    Constants, and choices between them, are left to the optimiser, which knows the bits.
    """
    native = getattr(builder, "to_bfloat16", None)
    if native is not None and not _is_known(value):
        return native(value)
    bits = lanes.bitcast(builder, value, lanes.I32)
    kind = bits.type

    def number(n: int) -> ir.Constant:
        return lanes.const(kind, n)

    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, number(0x7FFF))), number(16))
    quiet = builder.or_(builder.and_(builder.lshr(bits, number(16)), number(0x8000)), number(0x7FC0))
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, number(0x7F800000))
    return builder.trunc(builder.select(is_nan, quiet, rounded), lanes.like(kind, lanes.I16))


def _is_known(value: lanes.Value) -> bool:
    """Whether a value is a constant, or one of two."""
    if isinstance(value, ir.Constant):
        return True
    return getattr(value, "opname", "") == "select" and all(isinstance(v, ir.Constant) for v in value.operands[1:])
