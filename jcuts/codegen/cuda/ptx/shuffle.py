"""Communication within a block: warp shuffles (``shfl.sync``), votes, and words in static shared memory."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.llvm import lanes as L

WARP = 32


def warp_barrier(builder: GpuBuilder) -> None:
    """``bar.warp.sync``: waits for all lanes of the warp; what they wrote to shared memory before is visible after."""
    asm(builder, "bar.warp.sync 0xffffffff;", ir.VoidType(), effects=True)


def allocate_static(builder: GpuBuilder, name: str, size: int) -> L.Value:
    """Address (i32) of a new static shared-memory allocation."""
    kind = ir.ArrayType(ir.IntType(8), size)
    found: Any = ir.GlobalVariable(builder.module, kind, name, addrspace=3)
    found.linkage, found.align = "internal", 16
    found.initializer = ir.Constant(kind, ir.Undefined)
    return builder.ptrtoint(found, L.I32)


def write_word(
    builder: GpuBuilder, place: L.Value, offset: int, value: L.Value, size: int, where: L.Value | None = None
) -> None:
    """``st.shared``: stores a value of ``size`` (4 or 8) bytes, predicated by ``where``."""
    word = _wide(builder, value, size)
    text = f"st.shared.b{8 * size} [$0{f'+{offset}' if offset else ''}], $1;"
    if where is None:
        asm(builder, text, ir.VoidType(), [place, word], effects=True)
        return
    guarded = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p {text} }}"
    asm(builder, guarded, ir.VoidType(), [place, word, builder.zext(where, L.I32)], effects=True)


def read_word(builder: GpuBuilder, place: L.Value, offset: int, kind: L.Type, size: int) -> L.Value:
    """``ld.shared``: the value that `write_word` has stored."""
    text = f"ld.shared.b{8 * size} $0, [$1{f'+{offset}' if offset else ''}];"
    found = asm(builder, text, ir.IntType(8 * size), [place], effects=True)
    return _unword(builder, found if L.bit_width(kind) > 32 or size == 4 else builder.trunc(found, L.I32), kind)


def shuffle(builder: GpuBuilder, value: L.Value, distance: int) -> L.Value:
    """``shfl.sync.bfly``: the value of the lane whose number differs in one bit."""
    word = _word(builder, value)
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
    if word.type.width == 32:
        return _unword(builder, asm(builder, text, L.I32, [word], effects=True), value.type)
    low, high = builder.trunc(word, L.I32), builder.trunc(builder.lshr(word, L.I64(32)), L.I32)
    low, high = (builder.zext(asm(builder, text, L.I32, [part], effects=True), L.I64) for part in (low, high))
    return _unword(builder, builder.or_(low, builder.shl(high, L.I64(32))), value.type)


def shuffle_up(builder: GpuBuilder, value: L.Value, distance: int, *, from_last: bool = False) -> L.Value:
    """``shfl.sync.up``: the value of the lane so many before, or the own one; ``from_last``: of the warp's last
    lane.
    """
    word = _word(builder, value)
    how = f"idx.b32 $0, $1, {WARP - 1}, 31" if from_last else f"up.b32 $0, $1, {distance}, 0"
    text = f"shfl.sync.{how}, 0xffffffff;"
    if word.type.width == 32:
        return _unword(builder, asm(builder, text, L.I32, [word], effects=True), value.type)
    low, high = builder.trunc(word, L.I32), builder.trunc(builder.lshr(word, L.I64(32)), L.I32)
    low, high = (builder.zext(asm(builder, text, L.I32, [part], effects=True), L.I64) for part in (low, high))
    return _unword(builder, builder.or_(low, builder.shl(high, L.I64(32))), value.type)


def vote_all(builder: GpuBuilder, predicate: L.Value) -> L.Value:
    """``vote.sync.all``: whether a predicate (i1) holds in all lanes of the warp."""
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.all.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    voted = asm(builder, text, L.I32, [builder.zext(predicate, L.I32)], effects=True)
    return builder.icmp_signed("!=", voted, L.I32(0))


def _wide(builder: GpuBuilder, value: L.Value, size: int) -> L.Value:
    word = _word(builder, value)
    return builder.zext(word, L.I64) if word.type.width < 8 * size else word


def _word(builder: GpuBuilder, value: L.Value) -> L.Value:
    """A value as an integer of 32 or 64 bits."""
    bits = L.bit_width(value.type)
    if isinstance(value.type, ir.IntType):
        return builder.zext(value, L.I32) if bits < 32 else value
    return builder.bitcast(value, ir.IntType(bits))


def _unword(builder: GpuBuilder, word: L.Value, kind: L.Type) -> L.Value:
    if isinstance(kind, ir.IntType):
        return builder.trunc(word, kind) if kind.width < word.type.width else word
    return builder.bitcast(word, kind)


def recomputed(builder: GpuBuilder, value: L.Value) -> L.Value:
    """The same i32, by a ``shfl.sync`` with oneself: neither LLVM nor ptxas knows, so that what depends on it is
    computed where it is needed, not kept in registers.  All lanes of the warp take part; of constants ptxas knows.
    """
    return asm(builder, "shfl.sync.bfly.b32 $0, $1, 0, 31, 0xffffffff;", L.I32, [value], effects=True)
