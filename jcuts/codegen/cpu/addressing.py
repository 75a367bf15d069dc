"""LLVM IR for memory access in CPU kernels: index expressions, guards, (masked) loads and stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

from jcuts.base.errors import IRError
from jcuts.codegen.llvm import lanes as L
from jcuts.codegen.llvm.division import floor_division
from jcuts.kernel_ir.index import Atom, Index
from jcuts.kernel_ir.node import Guard
from jcuts.kernel_ir.program import ITEM_SIZE

I64 = L.I64
FILL_LIMIT = 1 << 16  # bytes of constant memory that a failing guard may read instead


@dataclass
class Frame:
    """Emission context: the builder, the loop variables, which of them is the lane axis.

    ``vector`` names the axis along which lanes run ('' in scalar code); ``active`` is the number of live lanes, all
    ``lanes`` of them unless this is a remainder.
    """

    builder: L.Builder
    variables: dict[str, L.Value]
    pointers: Mapping[str, L.Value]
    ranges: Mapping[str, int]
    vector: str = ""
    lanes: int = 1
    active: int = 1
    values: dict[int, L.Value] = field(default_factory=dict)
    cache: dict[object, L.Value] = field(default_factory=dict)

    @property
    def masked(self) -> bool:
        """True in a remainder, where some lanes are dead."""
        return self.vector != "" and self.active < self.lanes

    def live_mask(self) -> ir.Constant:
        """The constant mask of live lanes."""
        kind = ir.VectorType(L.I1, self.lanes)
        return ir.Constant(kind, [ir.Constant(L.I1, int(k < self.active)) for k in range(self.lanes)])


def is_lanewise(index: Index, frame: Frame) -> bool:
    """Does the expression differ between lanes?"""
    if frame.vector and frame.vector in index.axes():
        return True
    return any(isinstance(frame.values[v].type, ir.VectorType) for v in index.values())


def scalar_index(frame: Frame, index: Index) -> L.Value:
    """The expression as an i64 (for the first lane, where it differs between lanes)."""
    key = ("scalar", index)
    if key in frame.cache:
        return frame.cache[key]
    builder = frame.builder
    total: L.Value | None = None
    for atom, coef in index.terms:
        part = _scalar_atom(frame, atom)
        if coef != 1:
            part = builder.mul(part, I64(coef))
        total = part if total is None else builder.add(total, part)
    if total is None:
        result: L.Value = I64(index.const)
    else:
        result = builder.add(total, I64(index.const)) if index.const else total
    frame.cache[key] = result
    return result


def _scalar_atom(frame: Frame, atom: Atom) -> L.Value:
    if atom.kind == "axis":
        try:
            return frame.variables[atom.name]
        except KeyError:
            raise IRError(f"axis {atom.name!r} is used outside its loop") from None
    if atom.kind == "value":
        return frame.values[atom.value]
    assert atom.inner is not None
    low, _ = atom.inner.bounds(frame.ranges)
    return floor_division(frame.builder, atom.kind, scalar_index(frame, atom.inner), atom.modulus, low, I64)


def vector_index(frame: Frame, index: Index) -> L.Value:
    """The expression per lane, as ``<lanes x i32>`` where its range fits, else ``<lanes x i64>``."""
    low, high = index.bounds(frame.ranges)
    narrow = (
        not index.values()
        and low is not None
        and high is not None
        and low > -(2**30)
        and high < 2**30
        and _small(index, frame)
    )
    base = L.I32 if narrow else I64
    key = ("vector", index, narrow)
    if key not in frame.cache:
        frame.cache[key] = _vector_index(frame, index, base)
    return frame.cache[key]


def _small(index: Index, frame: Frame) -> bool:
    for atom, coef in index.terms:
        low, high = Index(0, ((atom, coef),)).bounds(frame.ranges)
        if low is None or high is None or max(-low, high) >= 2**30:
            return False
        if atom.inner is not None and not _small(atom.inner, frame):
            return False
    return True


def _vector_index(frame: Frame, index: Index, base: ir.IntType) -> L.Value:
    builder, kind = frame.builder, ir.VectorType(base, frame.lanes)
    total: L.Value = L.const(kind, index.const)
    for atom, coef in index.terms:
        if atom.kind == "axis":
            scalar = frame.variables[atom.name]
            scalar = builder.trunc(scalar, base) if base != I64 else scalar
            part = L.splat(builder, scalar, frame.lanes)
            if atom.name == frame.vector:
                part = builder.add(part, L.iota(kind))
        elif atom.kind == "value":
            part = frame.values[atom.value]
            if not isinstance(part.type, ir.VectorType):
                part = L.splat(builder, part, frame.lanes)
        else:
            assert atom.inner is not None
            low, _ = atom.inner.bounds(frame.ranges)
            part = floor_division(builder, atom.kind, _vector_index(frame, atom.inner, base), atom.modulus, low, base)
        if coef != 1:
            part = builder.mul(part, L.const(kind, coef))
        total = builder.add(total, part)
    return total


def guard_condition(frame: Frame, guards: tuple[Guard, ...]) -> L.Value | None:
    """``i1`` or ``<lanes x i1>``: all guards hold; None where there are none."""
    builder = frame.builder
    uniform: L.Value | None = None
    lanewise: L.Value | None = None
    for guard in guards:
        vector = is_lanewise(guard.index, frame)
        value = vector_index(frame, guard.index) if vector else scalar_index(frame, guard.index)
        for op, bound in ((">=", guard.low), ("<=", guard.high)):
            if bound is None:
                continue
            limit = L.const(value.type, bound) if vector else I64(bound)
            holds = builder.icmp_signed(op, value, limit)
            if vector:
                lanewise = holds if lanewise is None else builder.and_(lanewise, holds)
            else:
                uniform = holds if uniform is None else builder.and_(uniform, holds)
    if lanewise is None:
        return uniform
    if uniform is None:
        return lanewise
    return builder.and_(lanewise, L.splat(builder, uniform, frame.lanes))


def element_pointer(frame: Frame, buffer: str, dtype: str, offset: L.Value) -> L.Value:
    """Address of an element of a buffer."""
    return frame.builder.gep(
        frame.pointers[buffer], [offset], source_etype=L.I8 if dtype == "bool" else memory_type(dtype)
    )


def memory_type(dtype: str) -> L.Type:
    """LLVM type of one element in memory."""
    return L.I8 if dtype == "bool" else L.element_type(dtype)


def load(
    frame: Frame, buffer: str, dtype: str, index: Index, guards: tuple[Guard, ...], fill: ir.Constant, inner: str
) -> L.Value:
    """An element (or one per lane) in its memory type.

    Args: fill: the memory-type constant where a guard fails; inner: the innermost reduction axis, whose part of the
        address is added after the guard has chosen between the buffer and a constant array.
    """
    builder = frame.builder
    kind = memory_type(dtype)
    stride = index.stride(frame.vector) if frame.vector else 0
    lanewise_guards = any(is_lanewise(g.index, frame) for g in guards)
    if is_lanewise(index, frame) or lanewise_guards:
        if stride == 1 and not any(isinstance(frame.values[v].type, ir.VectorType) for v in index.values()):
            return _load_row(frame, buffer, kind, dtype, index, guards, fill, inner, lanewise_guards)
        return _load_scattered(frame, buffer, kind, dtype, index, guards, fill)
    pointer = _chosen_pointer(frame, buffer, dtype, kind, index, guards, fill, inner, 1)
    return builder.load(pointer, align=ITEM_SIZE[dtype], typ=kind)


def _load_row(
    frame: Frame,
    buffer: str,
    kind: L.Type,
    dtype: str,
    index: Index,
    guards: tuple[Guard, ...],
    fill: ir.Constant,
    inner: str,
    lanewise: bool,
) -> L.Value:
    builder = frame.builder
    row = ir.VectorType(kind, frame.lanes)
    if lanewise:
        pointer = element_pointer(frame, buffer, dtype, scalar_index(frame, index))
        mask = guard_condition(frame, guards)
        assert mask is not None
        if frame.masked:
            mask = builder.and_(mask, frame.live_mask())
        return L.masked_load(builder, pointer, mask, L.const(row, fill.constant), ITEM_SIZE[dtype])
    pointer = _chosen_pointer(frame, buffer, dtype, kind, index, guards, fill, inner, frame.lanes)
    if frame.masked:
        return L.masked_load(builder, pointer, frame.live_mask(), L.const(row, 0), ITEM_SIZE[dtype])
    return builder.load(pointer, align=ITEM_SIZE[dtype], typ=row)


def _load_scattered(
    frame: Frame, buffer: str, kind: L.Type, dtype: str, index: Index, guards: tuple[Guard, ...], fill: ir.Constant
) -> L.Value:
    builder = frame.builder
    row = ir.VectorType(kind, frame.lanes)
    mask = guard_condition(frame, guards)
    if mask is not None and not isinstance(mask.type, ir.VectorType):
        mask = L.splat(builder, mask, frame.lanes)
    if frame.masked:
        mask = frame.live_mask() if mask is None else builder.and_(mask, frame.live_mask())
    if mask is None:
        mask = L.const(ir.VectorType(L.I1, frame.lanes), 1)
    stride = index.stride(frame.vector)
    if stride is not None and not any(isinstance(frame.values[v].type, ir.VectorType) for v in index.values()):
        base = element_pointer(frame, buffer, dtype, scalar_index(frame, index))
        narrow = abs(stride) * frame.lanes < 2**31
        offsets = builder.mul(
            L.iota(ir.VectorType(L.I32 if narrow else I64, frame.lanes)),
            L.const(ir.VectorType(L.I32 if narrow else I64, frame.lanes), stride),
        )
    else:
        base = frame.pointers[buffer]
        offsets = vector_index(frame, index)
    if ITEM_SIZE[dtype] >= 4:
        return L.gather(builder, base, offsets, mask, L.const(row, fill.constant))
    # No gather instruction for narrow elements: dead lanes read element 0 of the base, which a guard may exclude,
    # hence offset 0 of the buffer itself, which always exists.
    zero = L.const(offsets.type, 0)
    if base is not frame.pointers[buffer]:
        start = scalar_index(frame, index)
        wide = builder.sext(offsets, ir.VectorType(I64, frame.lanes)) if offsets.type.element != I64 else offsets
        offsets = builder.add(wide, L.splat(builder, start, frame.lanes))
        zero = L.const(offsets.type, 0)
    safe = builder.select(mask, offsets, zero)
    result: L.Value = ir.Constant(row, ir.Undefined)
    for k in range(frame.lanes):
        offset = builder.extract_element(safe, L.I32(k))
        offset = builder.sext(offset, I64) if offset.type != I64 else offset
        one = builder.load(element_pointer(frame, buffer, dtype, offset), align=ITEM_SIZE[dtype], typ=kind)
        result = builder.insert_element(result, one, L.I32(k))
    return builder.select(mask, result, L.const(row, fill.constant))


def _chosen_pointer(
    frame: Frame,
    buffer: str,
    dtype: str,
    kind: L.Type,
    index: Index,
    guards: tuple[Guard, ...],
    fill: ir.Constant,
    inner: str,
    width: int,
) -> L.Value:
    """Address in the buffer, or in an array full of ``fill`` where a guard fails: no branch, no read out of bounds."""
    builder = frame.builder
    if not guards:
        return element_pointer(frame, buffer, dtype, scalar_index(frame, index))
    outer, moving, span = index, Index(), 0
    if inner and not any(inner in g.index.axes() for g in guards):
        terms = tuple((a, c) for a, c in index.terms if a.kind == "axis" and a.name == inner and c > 0)
        moving = Index(0, terms)
        outer = index - moving
        _, high = moving.bounds(frame.ranges)
        span = high or 0
    length = span + width
    if length * ITEM_SIZE[dtype] > FILL_LIMIT:
        outer, moving, length = index, Index(), width
    condition = guard_condition(frame, guards)
    assert condition is not None
    array = _fill_array(builder, kind, fill, length)
    chosen = builder.select(condition, element_pointer(frame, buffer, dtype, scalar_index(frame, outer)), array)
    if moving.is_const and not moving.const:
        return chosen
    return builder.gep(chosen, [scalar_index(frame, moving)], source_etype=kind)


def _fill_array(builder: L.Builder, kind: L.Type, fill: ir.Constant, length: int) -> L.Value:
    """A private constant array of ``length`` copies of ``fill`` (rounded up so that kernels share sizes)."""
    length = max(64, 1 << (length - 1).bit_length())
    text = "".join(c if c.isalnum() else "_" for c in str(fill.constant))
    name = f"jcuts_fill_{kind}_{text}_{length}"
    found = builder.module.globals.get(name)
    if found is None:
        array = ir.ArrayType(kind, length)
        found: Any = ir.GlobalVariable(builder.module, array, name)
        found.linkage = "internal"
        found.global_constant = True
        found.align = 64
        found.initializer = ir.Constant(array, [fill] * length)
    return builder.bitcast(found, ir.PointerType()) if not getattr(found.type, "is_opaque", False) else found


def store(frame: Frame, buffer: str, dtype: str, index: Index, value: L.Value, guards: tuple[Guard, ...] = ()) -> None:
    """Writes an element, or one per live lane; ``value`` is in memory type.  Predicated by the guards."""
    builder = frame.builder
    if guards:
        _store_guarded(frame, buffer, dtype, index, value, guards)
        return
    if not is_lanewise(index, frame):
        if isinstance(value.type, ir.VectorType):
            raise IRError(f"a vector is stored to one address of {buffer}")
        builder.store(value, element_pointer(frame, buffer, dtype, scalar_index(frame, index)), align=ITEM_SIZE[dtype])
        return
    if not isinstance(value.type, ir.VectorType):
        value = L.splat(builder, value, frame.lanes)
    if index.stride(frame.vector) == 1 and not index.values():
        pointer = element_pointer(frame, buffer, dtype, scalar_index(frame, index))
        if frame.active == 1 < frame.lanes:
            # Not a masked store: of one set lane LLVM 22 makes a scalar store, as wide as the lanes were before a
            # truncation (a 4-byte store of a bfloat16).
            one = builder.extract_element(value, L.I32(0))
            builder.store(one, pointer, align=ITEM_SIZE[dtype])
        elif frame.masked:
            L.masked_store(builder, value, pointer, frame.live_mask(), ITEM_SIZE[dtype])
        else:
            builder.store(value, pointer, align=ITEM_SIZE[dtype])
        return
    offsets = vector_index(frame, index)
    for k in range(frame.active):
        offset = builder.extract_element(offsets, L.I32(k))
        offset = builder.sext(offset, I64) if offset.type != I64 else offset
        one = builder.extract_element(value, L.I32(k))
        builder.store(one, element_pointer(frame, buffer, dtype, offset), align=ITEM_SIZE[dtype])


def _store_guarded(
    frame: Frame, buffer: str, dtype: str, index: Index, value: L.Value, guards: tuple[Guard, ...]
) -> None:
    """A store that goes to a spare place on the stack where a guard fails: no branch."""
    builder = frame.builder
    if any(is_lanewise(g.index, frame) for g in guards):
        raise IRError(f"a store into {buffer} is guarded by the lane axis")
    lanewise = is_lanewise(index, frame)
    if lanewise and (index.stride(frame.vector) != 1 or index.values()):
        raise IRError(f"a guarded store into {buffer} is not contiguous")
    if lanewise and not isinstance(value.type, ir.VectorType):
        value = L.splat(builder, value, frame.lanes)
    if not lanewise and isinstance(value.type, ir.VectorType):
        raise IRError(f"a vector is stored to one address of {buffer}")
    with builder.goto_entry_block():
        spare = builder.alloca(value.type)
    condition = guard_condition(frame, guards)
    assert condition is not None
    pointer = builder.select(
        condition,
        element_pointer(frame, buffer, dtype, scalar_index(frame, index)),
        builder.bitcast(spare, ir.PointerType()),
    )
    if lanewise and frame.active == 1 < frame.lanes:
        builder.store(builder.extract_element(value, L.I32(0)), pointer, align=ITEM_SIZE[dtype])
    elif lanewise and frame.masked:
        L.masked_store(builder, value, pointer, frame.live_mask(), ITEM_SIZE[dtype])
    else:
        builder.store(value, pointer, align=ITEM_SIZE[dtype])
