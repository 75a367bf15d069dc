"""LLVM builder helpers for vectors of lanes: splats, masks, intrinsics, (masked) loads and stores.

Everything takes either a vector value ``<N x T>`` or a plain scalar ``T`` (one lane), so that a kernel's remainder loop
can use the same emitters as its body.  Nothing here is specific to a processor: the intrinsics used exist on every LLVM
target, which expands what its hardware lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from llvmlite.ir.instructions import CastInstr

from jcuts.base.errors import IRError

# ``ir.IRBuilder``, ``ir.Value`` and ``ir.Type``.  llvmlite has no annotations: its decorated methods read as returning
# None and its values as having no type, so a type checker must not look inside.
Builder: TypeAlias = Any
Value: TypeAlias = Any
Type: TypeAlias = Any

F32 = ir.FloatType()
F64 = ir.DoubleType()
F16 = ir.HalfType()
I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)

_ELEMENT = {
    "float32": F32,
    "float64": F64,
    "float16": F16,
    "bfloat16": I16,
    "bool": I1,
    **{f"{sign}int{bits}": ir.IntType(bits) for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def element_type(dtype: str) -> Type:
    """LLVM type of one lane of a jax dtype while it is in a register.

    bfloat16 is held as its 16 bits (``i16``) and converted to float32 for arithmetic; bool is ``i1``.

    Raises: IRError for a dtype that kernels do not hold.
    """
    try:
        return _ELEMENT[dtype]
    except KeyError:
        raise IRError(f"dtype {dtype!r} has no register form: one of {sorted(_ELEMENT)}", dtype=dtype) from None


def vector_type(dtype: str, lanes: int) -> ir.VectorType:
    """``<lanes x T>`` for a jax dtype name."""
    return ir.VectorType(element_type(dtype), lanes)


def element(kind: Type) -> Type:
    """Element type of a vector, or the scalar type itself."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


def lane_count(kind: Type) -> int:
    """Lanes of a vector type; 1 for a scalar."""
    return kind.count if isinstance(kind, ir.VectorType) else 1


def like(kind: Type, new_element: Type) -> Type:
    """The type of the same shape as ``kind`` with another element."""
    return ir.VectorType(new_element, kind.count) if isinstance(kind, ir.VectorType) else new_element


def bit_width(kind: Type) -> int:
    """Bits of one lane."""
    one = element(kind)
    if isinstance(one, ir.IntType):
        return one.width
    for known, bits in ((F16, 16), (F32, 32), (F64, 64)):
        if one == known:
            return bits
    raise IRError(f"{one} is no lane type", type=str(one))


def const(kind: Type, value: float | int) -> ir.Constant:
    """The constant ``value`` in every lane."""
    if not isinstance(kind, ir.VectorType):
        return ir.Constant(kind, value)
    # Kept, with the text that they remember: a kernel has thousands.  0.0 and -0.0 are equal but not the same.
    key = (str(kind.element), kind.count, repr(value))
    if key not in _constants:
        if len(_constants) >= 4096:
            _constants.clear()
        _constants[key] = ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return _constants[key]


_constants: dict[tuple[str, int, str], ir.Constant] = {}


@functools.lru_cache(maxsize=64)
def _splat_parts(lanes: int) -> tuple[ir.Constant, ir.Constant]:
    """First lane, and the mask that repeats it."""
    return ir.Constant(I32, 0), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)


def splat(builder: Builder, scalar: Value, lanes: int) -> Value:
    """``<lanes x T>`` with a run-time scalar in every lane."""
    kind = ir.VectorType(scalar.type, lanes)
    first, mask = _splat_parts(lanes)
    blank = ir.Constant(kind, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(blank, scalar, first), blank, mask)


def iota(kind: Type) -> ir.Constant:
    """0, 1, 2, ... along the lanes of an integer vector type."""
    return ir.Constant(kind, [ir.Constant(kind.element, k) for k in range(kind.count)])


def suffix(kind: Type) -> str:
    """The type's name inside an overloaded intrinsic's name, e.g. ``v16f32``."""
    one = element(kind)
    if isinstance(kind, ir.PointerType):
        return "p0"
    name = f"i{one.width}" if isinstance(one, ir.IntType) else f"f{bit_width(one)}"
    return f"v{kind.count}{name}" if isinstance(kind, ir.VectorType) else name


def intrinsic(
    builder: Builder,
    name: str,
    result: Type,
    args: Sequence[Value],
    overloads: Sequence[Type] | None = None,
) -> Value:
    """Calls ``llvm.<name>``; ``overloads`` are the types in its mangled name (the result's by default).

    A builder with a method ``special`` (`codegen.cuda.ptx.builder`) makes intrinsics its own way.
    """
    special = getattr(builder, "special", None)
    if special is not None:
        return special(name, result, args)
    mangled = ".".join(["llvm", name, *(suffix(kind) for kind in (overloads or [result]))])
    return builder.call(declare(builder, mangled, result, [a.type for a in args]), list(args))


def declare(builder: Builder, name: str, result: Type, args: Sequence[Type]) -> ir.Function:
    """The module's function of that name, declared on first use."""
    module = builder.module
    found = module.globals.get(name)
    if found is None:
        found = ir.Function(module, ir.FunctionType(result, list(args)), name)
    return found


def fma(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """x*y + z with one rounding."""
    return intrinsic(builder, "fma", x.type, [x, y, z])


def fence(builder: Builder, value: Value) -> Value:
    """The same float, which the optimiser knows nothing of; no instruction.

    LLVM (20 to 22, InstCombine) sees a minimum in ``x > 0 ? 0 : x`` where comparison and selection are on different
    types (x was converted for one of them), and rewrites it with the other comparison: ``x < 0 ? x : 0`` is +0 for -0.
    """
    return value if isinstance(value, ir.Constant) else intrinsic(builder, "arithmetic.fence", value.type, [value])


def sealed(builder: Builder, value: Value) -> Value:
    """The same narrow integer, of which the optimiser does not know what it was cut from (see `GpuBuilder.sealed`)."""
    found = getattr(builder, "sealed", None)
    return value if found is None or isinstance(value, ir.Constant) else found(value)


def select(builder: Builder, mask: Value, yes: Value, no: Value) -> Value:
    """Lane-wise ``mask ? yes : no``."""
    return builder.select(mask, yes, no)


def bitcast(builder: Builder, value: Value, new_element: Type) -> Value:
    """The same bits with another element type of the same width."""
    return builder.bitcast(value, like(value.type, new_element))


def per_lane(builder: Builder, symbol: str, args: Sequence[Value]) -> Value:
    """Calls a scalar C function once per lane (libm symbols: slow, for the cases with no vector form)."""
    kind = args[0].type
    libm = getattr(builder, "libm", None)
    if libm is not None:
        return libm(symbol, args)
    function = declare(builder, symbol, element(kind), [element(a.type) for a in args])
    if not isinstance(kind, ir.VectorType):
        return builder.call(function, list(args))
    result: Value = ir.Constant(kind, ir.Undefined)
    for k in range(kind.count):
        index = ir.Constant(I32, k)
        lane = builder.call(function, [builder.extract_element(a, index) for a in args])
        result = builder.insert_element(result, lane, index)
    return result


def any_lane(builder: Builder, mask: Value) -> Value:
    """One ``i1``: is any lane of the mask set?"""
    if not isinstance(mask.type, ir.VectorType):
        return mask
    if mask.type.count == 1:
        return builder.extract_element(mask, ir.Constant(I32, 0))
    return intrinsic(builder, "vector.reduce.or", I1, [mask], [mask.type])


def reduce_lanes(builder: Builder, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Folds the lanes of a vector to one scalar by halves: ``combine`` is called log2(N) times on shorter vectors.

    The order is fixed (lane k with lane k + N/2 first), so results do not depend on the target.  ``combine`` sees
    vectors of N/2, N/4, ..., 1 lanes; any emitter of this package will do.
    """
    if not isinstance(value.type, ir.VectorType):
        return value
    while value.type.count > 1:
        half = value.type.count // 2
        if 2 * half != value.type.count:
            raise IRError(f"{value.type.count} lanes cannot be halved", lanes=value.type.count)
        parts = [slice_lanes(builder, value, start, half) for start in (0, half)]
        value = combine(parts[0], parts[1])
    return builder.extract_element(value, ir.Constant(I32, 0))


def slice_lanes(builder: Builder, value: Value, start: int, count: int) -> Value:
    """Lanes ``[start, start + count)`` as a shorter vector."""
    mask = ir.Constant(ir.VectorType(I32, count), [ir.Constant(I32, start + k) for k in range(count)])
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def join_lanes(builder: Builder, low: Value, high: Value) -> Value:
    """Two vectors of N lanes as one of 2N."""
    count = 2 * lane_count(low.type)
    mask = ir.Constant(ir.VectorType(I32, count), [ir.Constant(I32, k) for k in range(count)])
    return builder.shuffle_vector(low, high, mask)


def tail_mask(builder: Builder, valid: Value, lanes: int) -> Value:
    """``<lanes x i1>`` with the first ``valid`` (an integer value) lanes set."""
    kind = ir.VectorType(valid.type, lanes)
    return builder.icmp_signed("<", iota(kind), splat(builder, valid, lanes))


def load(builder: Builder, pointer: Value, kind: Type, align: int | None = None) -> Value:
    """A vector (or scalar) from memory; ``align`` in bytes, one element's by default."""
    return builder.load(_as_pointer(builder, pointer), align=align or _bytes(kind), typ=kind)


def store(builder: Builder, value: Value, pointer: Value, align: int | None = None) -> None:
    """A vector (or scalar) to memory; ``align`` in bytes, one element's by default."""
    builder.store(value, _as_pointer(builder, pointer), align=align or _bytes(value.type))


def masked_load(builder: Builder, pointer: Value, mask: Value, other: Value, align: int | None = None) -> Value:
    """Lanes of the mask from memory, the rest from ``other``; memory of unset lanes is not touched."""
    kind = other.type
    plain = _as_pointer(builder, pointer)
    alignment = ir.Constant(I32, align or _bytes(kind))
    name = f"llvm.masked.load.{suffix(kind)}.p0"
    function = declare(builder, name, kind, [plain.type, I32, mask.type, kind])
    return builder.call(function, [plain, alignment, mask, other])


def masked_store(builder: Builder, value: Value, pointer: Value, mask: Value, align: int | None = None) -> None:
    """Writes the lanes of the mask; memory of unset lanes is not touched."""
    plain = _as_pointer(builder, pointer)
    alignment = ir.Constant(I32, align or _bytes(value.type))
    name = f"llvm.masked.store.{suffix(value.type)}.p0"
    function = declare(builder, name, ir.VoidType(), [value.type, plain.type, I32, mask.type])
    builder.call(function, [value, plain, alignment, mask])


def gather(builder: Builder, base: Value, index: Value, mask: Value, other: Value) -> Value:
    """``base[index[k]]`` for the lanes of the mask, the rest from ``other``; ``base`` points at elements."""
    one = element(other.type)
    addresses = builder.gep(_as_pointer(builder, base), [index], source_etype=one)
    kind = ir.VectorType(ir.PointerType(), lane_count(other.type))
    addresses.type = kind  # llvmlite types a gep by its base: over a vector of indices it is a vector of pointers
    name = f"llvm.masked.gather.{suffix(other.type)}.v{lane_count(other.type)}p0"
    function = declare(builder, name, other.type, [kind, I32, mask.type, other.type])
    return builder.call(function, [addresses, ir.Constant(I32, _bytes(one)), mask, other])


def _bytes(kind: Type) -> int:
    return max(1, bit_width(kind) // 8)


def _as_pointer(builder: Builder, pointer: Value) -> Value:
    """The pointer without the pointee that llvmlite may know of (no code in LLVM, where pointers are opaque)."""
    if getattr(pointer.type, "is_opaque", False):
        return pointer
    # not builder.bitcast: it takes the two types for equal and returns its argument
    cast = CastInstr(builder.block, "bitcast", pointer, ir.PointerType())
    builder._insert(cast)
    return cast
