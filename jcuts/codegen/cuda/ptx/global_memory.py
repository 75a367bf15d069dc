"""Global loads and stores: index arithmetic, predicates, and vectors of up to 16 bytes (``ld.global.v4``), as inline
PTX.

Indices are 32 bits wide (a GPU emulates 64-bit division); byte addresses are 64 bits.  The constant part of an
address goes into the instruction, so that loads which differ by a constant share one address register.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llvmlite import ir

from jcuts.base.errors import IRError
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.mma import with_immediate_offset
from jcuts.codegen.llvm import lanes as L
from jcuts.codegen.llvm.division import floor_division
from jcuts.kernel_ir.index import Atom, Index
from jcuts.kernel_ir.node import Guard
from jcuts.kernel_ir.program import ITEM_SIZE

I32 = L.I32
I64 = L.I64
WIDEST = 16  # bytes of one access
LIMIT = 2**31 - 1  # elements of the largest buffer that 32-bit indices reach


@dataclass(frozen=True)
class Flagged:
    """Where stores into a buffer go as words of 64 bits, the value below a number (``st.relaxed.gpu.b64``).

    Attributes: buffer: of these words. number: an i32. replicas: of the buffer's ``words``, one behind the other.
    """

    buffer: str
    number: L.Value
    replicas: int
    words: int


@dataclass
class Frame:
    """Emission context: builder, loop variables, buffers.

    Attributes:
        variables: axis -> its value (i32).
        pointers: buffer -> its address (i64).
        ranges: axis -> its exclusive upper bound.
        multiples: axis -> a number that divides its value.
        values: data-flow node -> its value, for indices that are computed at run time.
        live: a condition that every store needs (threads beyond the last tile), or None.
        in_place: whether results may overwrite operands: loads are no ``.nc`` then, and stay in front of the stores.
        shared: buffers that lie in shared memory -> their address (i32): ``ld.shared`` and ``st.shared``.
        flagged: buffers whose stores go elsewhere, with a number.
        is_streaming: whether stores are ``st.global.cs``: what they write leaves the caches first.
    """

    builder: GpuBuilder
    variables: dict[str, L.Value]
    pointers: Mapping[str, L.Value]
    ranges: Mapping[str, int]
    multiples: Mapping[str, int]
    values: dict[int, L.Value] = field(default_factory=dict)
    live: L.Value | None = None
    in_place: bool = False
    is_streaming: bool = False
    shared: Mapping[str, L.Value] = field(default_factory=dict)
    flagged: Mapping[str, Flagged] = field(default_factory=dict)
    cache: dict[object, L.Value] = field(default_factory=dict)


def index(frame: Frame, expression: Index) -> L.Value:
    """The expression as an i32."""
    if expression.is_const:
        return I32(expression.const)
    if expression.const:
        return frame.builder.add(index(frame, Index(0, expression.terms)), I32(expression.const))
    key = ("index", expression)
    if key not in frame.cache:
        total: L.Value | None = None
        for atom, coef in expression.terms:
            part = _atom(frame, atom)
            if coef != 1:
                part = frame.builder.mul(part, I32(coef))
            total = part if total is None else frame.builder.add(total, part)
        assert total is not None
        frame.cache[key] = total
    return frame.cache[key]


def _atom(frame: Frame, atom: Atom) -> L.Value:
    builder = frame.builder
    if atom.kind == "axis":
        try:
            return frame.variables[atom.name]
        except KeyError:
            raise IRError(f"axis {atom.name!r} is used outside its loop") from None
    if atom.kind == "value":
        value = frame.values[atom.value]
        return builder.trunc(value, I32) if value.type.width > 32 else value
    assert atom.inner is not None
    low, _ = atom.inner.bounds(frame.ranges)
    return floor_division(builder, atom.kind, index(frame, atom.inner), atom.modulus, low, I32)


def known_divisor(frame: Frame, expression: Index) -> int:
    """A constant that divides the expression for all values of its variables (0: it is zero)."""
    result = abs(expression.const)
    for atom, coef in expression.terms:
        result = math.gcd(result, abs(coef) * _atom_multiple(frame, atom))
    return result


def _atom_multiple(frame: Frame, atom: Atom) -> int:
    if atom.kind == "axis":
        return frame.multiples.get(atom.name, 1)
    if atom.kind == "mod" and atom.inner is not None:
        return math.gcd(known_divisor(frame, atom.inner), atom.modulus)
    if atom.kind == "div" and atom.inner is not None:
        inner = known_divisor(frame, atom.inner)
        return inner // atom.modulus if inner and inner % atom.modulus == 0 else 1
    return 1


def condition(frame: Frame, guards: Sequence[Guard]) -> L.Value | None:
    """``i1``: all guards hold; None where there are none."""
    builder = frame.builder
    result: L.Value | None = None
    for guard in guards:
        if guard.always(frame.ranges):
            continue
        key = ("guard", guard)
        if key not in frame.cache:
            value = index(frame, guard.index)
            bounds = [
                builder.icmp_signed(op, value, I32(bound))
                for op, bound in ((">=", guard.low), ("<=", guard.high))
                if bound is not None
            ]
            frame.cache[key] = bounds[0] if len(bounds) == 1 else builder.and_(*bounds)
        holds = frame.cache[key]
        result = holds if result is None else builder.and_(result, holds)
    return result


def address(frame: Frame, buffer: str, size: int, offset: Index) -> tuple[L.Value, int]:
    """Byte address of an element as (register, constant)."""
    builder = frame.builder
    moving = Index(0, offset.terms)
    key = ("address", buffer, moving)
    if key not in frame.cache:
        kind = I32 if buffer in frame.shared else I64
        base = frame.shared[buffer] if buffer in frame.shared else frame.pointers[buffer]
        if moving.terms:
            wide = index(frame, moving) if kind is I32 else builder.sext(index(frame, moving), I64)
            base = builder.add(base, builder.mul(wide, kind(size)) if size != 1 else wide)
        frame.cache[key] = base
    return with_immediate_offset(builder, (frame.cache[key], offset.const * size))


def word_type(size: int) -> ir.IntType:
    """The integer that holds an element of so many bytes."""
    return ir.IntType(8 * size)


def _pieces(count: int, size: int) -> tuple[int, int]:
    """(registers, bytes of each) of an access of ``count`` elements of ``size`` bytes."""
    total = count * size
    each = 8 if size == 8 else min(4, total)
    return total // each, each


def load(
    frame: Frame, buffer: str, size: int, offset: Index, count: int, guards: Sequence[Guard], fill: int
) -> list[L.Value]:
    """``count`` neighbouring elements as integers; the bits ``fill`` where a guard fails (predicated off)."""
    words = load_words(frame, buffer, size, offset, count, guards, fill)
    return elements(frame.builder, words, size, count)


def load_words(
    frame: Frame,
    buffer: str,
    size: int,
    offset: Index,
    count: int,
    guards: Sequence[Guard],
    fill: int,
    only: L.Value | None = None,
) -> list[L.Value]:
    """The same as 32-bit registers. Args: only: a further predicate (i1)."""
    builder = frame.builder
    place, constant = address(frame, buffer, size, offset)
    registers, each = _pieces(count, size)
    kind = I32 if each == 1 else word_type(each)
    names = [f"${k}" for k in range(registers)]
    vector = f".v{registers}" if registers > 1 else ""
    typed = "u8" if each == 1 else f"b{8 * each}"
    target = f"{{{', '.join(names)}}}" if registers > 1 else names[0]
    holds = condition(frame, guards)
    if only is not None:
        holds = only if holds is None else builder.and_(holds, only)
    where = f"[${registers}+{constant}]" if constant else f"[${registers}]"
    result = ir.LiteralStructType([kind] * registers) if registers > 1 else kind
    space = "shared" if buffer in frame.shared else "global" if frame.in_place else "global.nc"
    if holds is None:
        text = f"ld.{space}{vector}.{typed} {target}, {where};"
        found = asm(builder, text, result, [place], effects=frame.in_place)
    else:
        packed = 0
        for k in range(each // size):
            packed |= fill << (8 * size * k)
        move = {1: "b32", 2: "b16", 4: "b32", 8: "b64"}[each]
        starts = " ".join(f"mov.{move} {name}, {packed:#x};" for name in names)
        text = (
            f"{{ .reg .pred p; setp.ne.b32 p, ${registers + 1}, 0; {starts} "
            f"@p ld.{space}{vector}.{typed} {target}, {where}; }}"
        )
        # Early-clobber: a result register is written before the address is read.
        found = _early(builder, text, result, [place, builder.zext(holds, I32)], effects=frame.in_place)
    return [builder.extract_value(found, k) for k in range(registers)] if registers > 1 else [found]


def elements(builder: GpuBuilder, words: Sequence[L.Value], size: int, count: int) -> list[L.Value]:
    """Splits the registers of a vector access into elements."""
    return _unpack(builder, words, size, _pieces(count, size)[1])


def _early(builder: GpuBuilder, text: str, result: L.Type, args: Sequence[L.Value], *, effects: bool) -> L.Value:
    kinds = result.elements if isinstance(result, ir.LiteralStructType) else [result]
    letters = {"i16": "h", "i32": "r", "i64": "l"}
    outs = ["=&" + letters[str(k)] for k in kinds]
    clobbers = ["~{memory}"] if effects else []
    constraint = ",".join([*outs, *(letters[str(a.type)] for a in args), *clobbers])
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(kind, text, constraint, side_effect=effects), list(args))


def _unpack(builder: GpuBuilder, parts: Sequence[L.Value], size: int, each: int) -> list[L.Value]:
    kind = word_type(size)
    if each == size:
        return [builder.trunc(p, kind) if p.type.width != kind.width else p for p in parts]
    return [
        builder.trunc(builder.lshr(part, part.type(8 * size * k)) if k else part, kind)
        for part in parts
        for k in range(each // size)
    ]


def store(
    frame: Frame, buffer: str, item: int, offset: Index, values: Sequence[L.Value], size: int | None = None
) -> None:
    """Writes neighbouring elements, given as integers of ``size`` bytes (those of an element, or of several)."""
    builder = frame.builder
    size = size or item
    if buffer in frame.flagged:
        if size != item:
            raise IRError(f"words of {size} bytes with a number, elements of {item}")
        _store_flagged(frame, frame.flagged[buffer], offset, values)
        return
    place, constant = address(frame, buffer, item, offset)
    registers, each = _pieces(len(values), size)
    parts: list[L.Value] = []
    for first in range(0, len(values), each // size):
        kind = I32 if each == 1 else word_type(each)
        total: L.Value | None = None
        for k, value in enumerate(values[first : first + each // size]):
            wide = builder.zext(value, kind) if value.type.width != kind.width else value
            wide = builder.shl(wide, kind(8 * size * k)) if k else wide
            total = wide if total is None else builder.or_(total, wide)
        parts.append(total)
    names = [f"${k + 1}" for k in range(registers)]
    vector = f".v{registers}" if registers > 1 else ""
    typed = "u8" if each == 1 else f"b{8 * each}"
    source = f"{{{', '.join(names)}}}" if registers > 1 else names[0]
    where = f"[$0+{constant}]" if constant else "[$0]"
    space = "shared" if buffer in frame.shared else "global.cs" if frame.is_streaming else "global"
    text = f"st.{space}{vector}.{typed} {where}, {source};"
    args = [place, *parts]
    if frame.live is not None:
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${registers + 1}, 0; @p {text} }}"
        args.append(builder.zext(frame.live, I32))
    asm(builder, text, ir.VoidType(), args, effects=True)


def _store_flagged(frame: Frame, flagged: Flagged, offset: Index, values: Sequence[L.Value]) -> None:
    builder = frame.builder
    number = builder.shl(builder.zext(flagged.number, I64), I64(32))
    for k, value in ((k + r * flagged.words, v) for k, v in enumerate(values) for r in range(flagged.replicas)):
        if value.type.width > I32.width:
            raise IRError(f"{value.type.width} bits with a number in 64")
        place, constant = address(frame, flagged.buffer, item_size("int64"), offset + k)
        text = f"st.relaxed.gpu.global.b64 [$0+{constant}], $1;"
        args = [place, builder.or_(number, builder.zext(value, I64))]
        if frame.live is not None:
            text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p {text} }}"
            args.append(builder.zext(frame.live, I32))
        asm(builder, text, ir.VoidType(), args, effects=True)


def max_vector_width(frame: Frame, size: int, offset: Index, available: int) -> int:
    """Most elements (a power of two, at most ``available``) of one aligned access that starts at ``offset``."""
    aligned = known_divisor(frame, offset) * size
    count = 1
    while 2 * count <= available and 2 * count * size <= WIDEST and aligned % (2 * count * size) == 0:
        count *= 2
    return count


def item_size(dtype: str) -> int:
    """Bytes of one element in memory."""
    return ITEM_SIZE[dtype]
