"""Inline PTX of tensor-core kernels: ``cp.async``, ``ldmatrix``, ``mma.sync`` (TF32, 16-bit, FP64), shared memory.

Distributed shared memory, barriers, rounding to TF32 and prefetches are here, too.

Fragments are those of ``mma.m16n8k8`` (TF32) and ``mma.m16n8k16`` (16-bit floats): 32 bytes of k at a time in both.  Of
the A operand a lane holds rows ``lane / 4`` and eight more, of B one column ``lane / 4``; of the result rows ``lane /
4`` and eight more, columns ``2 * (lane % 4)`` and the next (PTX ISA, warp-level matrix instructions).
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.llvm import lanes as L

VOID = ir.VoidType()
MOST_CONSTANT = 2**31 - 17
"""Bytes, a whole access less than those that fit."""
STEP = 32
"""Bytes of k of one operand row that one instruction takes."""


def dynamic_shared(builder: GpuBuilder, name: str, align: int = 128) -> L.Value:
    """Address (i32), aligned to ``align``, of the dynamic shared memory."""
    found = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=3)
    found.linkage, found.align = "external", align  # type: ignore[attr-defined]
    return builder.ptrtoint(found, L.I32)


def with_immediate_offset(builder: GpuBuilder, place: tuple[L.Value, int]) -> tuple[L.Value, int]:
    """A global address with its constant reduced to the 32-bit immediate offset of an instruction."""
    register, constant = place
    return place if abs(constant) <= MOST_CONSTANT else (builder.add(register, L.I64(constant)), 0)


def cp_async(
    builder: GpuBuilder,
    target: tuple[L.Value, int],
    source: tuple[L.Value, int],
    size: int,
    live: L.Value | None,
    where: L.Value | None = None,
    cached: bool = False,
    read: L.Value | None = None,
    hint: str = "",
) -> None:
    """``cp.async``: starts a copy of ``size`` (4, 8 or 16) bytes from global into shared memory.

    Args: target, source: addresses as (register, bytes to add). live: a condition under which it reads; else it writes
        zeros. where: a condition under which it happens. cached: by the L1 cache, whatever its size. read: bytes that
        it reads (``size``), zeros behind them. hint: a prefetch size, as ``.L2::128B``.
    """
    source = with_immediate_offset(builder, source)
    kind = "cg" if size == 16 and not cached else "ca"  # only whole 16 bytes may pass by the L1 cache
    places = [f"[${k}{f'+{offset}' if offset else ''}]" for k, (_, offset) in enumerate((target, source))]
    text, args = f"cp.async.{kind}.shared.global{hint} {places[0]}, {places[1]}, {size}", [target[0], source[0]]
    if live is not None:
        text += f", ${len(args)}"
        args.append(builder.select(live, L.I32(size) if read is None else read, L.I32(0)))
    if where is not None:
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${len(args)}, 0; @p {text}; }}"
        args.append(builder.zext(where, L.I32))
    else:
        text += ";"
    asm(builder, text, VOID, args, effects=True)


def load_words(
    builder: GpuBuilder, source: tuple[L.Value, int], count: int, live: L.Value | None, *, ordered: bool = False
) -> list[L.Value]:
    """``ld.global``: 1, 2 or 4 neighbouring words; zeros, without access, where ``live`` does not hold.

    Args: ordered: not ``.nc``, which ptxas would issue before barriers that come first.
    """
    source, names = with_immediate_offset(builder, source), [f"${k}" for k in range(count)]
    target = f"{{{', '.join(names)}}}" if count > 1 else names[0]
    where = f"[${count}+{source[1]}]" if source[1] else f"[${count}]"
    vector, path = f".v{count}" if count > 1 else "", "" if ordered else ".nc"
    text, args = f"ld.global{path}{vector}.b32 {target}, {where};", [source[0]]
    outs = "=r"
    if live is not None:
        zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p {text} }}"
        args.append(builder.zext(live, L.I32))
        outs = "=&r"  # written before the address is read
    result = ir.LiteralStructType([L.I32] * count) if count > 1 else L.I32
    kind = ir.FunctionType(result, [a.type for a in args])
    letters = ["l", "r"][: len(args)]
    found = builder.call(ir.InlineAsm(kind, text, ",".join([outs] * count + letters), side_effect=True), args)
    return [builder.extract_value(found, k) for k in range(count)] if count > 1 else [found]


def prefetch_l2(builder: GpuBuilder, source: tuple[L.Value, int], live: L.Value | None) -> None:
    """``prefetch.global.L2`` of an address. ``live``: predicate."""
    _early(builder, "prefetch.global.L2 ", source, live)


def prefetch_l1(builder: GpuBuilder, source: tuple[L.Value, int], live: L.Value | None) -> None:
    """Prefetch into L1: loads a word of read-only global memory and drops it. ``live``: predicate."""
    _early(builder, "ld.global.nc.b32 r, ", source, live)


def _early(builder: GpuBuilder, text: str, source: tuple[L.Value, int], live: L.Value | None) -> None:
    source = with_immediate_offset(builder, source)
    place, args = f"[$0+{source[1]}]" if source[1] else "[$0]", [source[0]]
    text = f"{text}{place};"
    if live is not None:
        text = f".reg .pred p; setp.ne.b32 p, $1, 0; @p {text}"
        args.append(builder.zext(live, L.I32))
    asm(builder, f"{{ .reg .b32 r; {text} }}", VOID, args, effects=True)


def cp_async_commit(builder: GpuBuilder) -> None:
    """``cp.async.commit_group``: ends a group of copies."""
    asm(builder, "cp.async.commit_group;", VOID, effects=True)


def cp_async_wait(builder: GpuBuilder, groups: int) -> None:
    """``cp.async.wait_group``: waits until at most so many of the thread's newest groups are pending."""
    asm(builder, f"cp.async.wait_group {groups};", VOID, effects=True)


def barrier(builder: GpuBuilder) -> None:
    """``bar.sync``: waits for all threads of the block."""
    asm(builder, "bar.sync 0;", VOID, effects=True)


def barrier_and(builder: GpuBuilder, predicate: L.Value) -> L.Value:
    """``bar.red.and``: waits for all threads of the block, and tells whether a predicate (i1) holds in all of them."""
    text = "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; bar.red.and.pred q, 0, p; selp.b32 $0, 1, 0, q; }"
    every = asm(builder, text, L.I32, [builder.zext(predicate, L.I32)], effects=True)
    return builder.icmp_signed("!=", every, L.I32(0))


def cluster_barrier(builder: GpuBuilder) -> None:
    """``barrier.cluster``: waits for all threads of the cluster; earlier shared-memory writes are visible after it."""
    asm(builder, "barrier.cluster.arrive.release.aligned;", VOID, effects=True)
    asm(builder, "barrier.cluster.wait.acquire.aligned;", VOID, effects=True)


def mapa(builder: GpuBuilder, place: L.Value, rank: int) -> L.Value:
    """``mapa``: the address of an own shared-memory location in another block of the cluster."""
    return asm(builder, f"mapa.shared::cluster.u32 $0, $1, {rank};", L.I32, [place])


def ldmatrix_x4(builder: GpuBuilder, place: L.Value, offset: int, *, transposed: bool = False) -> list[L.Value]:
    """``ldmatrix.x4``: four 8x8 matrices of 16-bit elements; lane k gives the address of row ``k % 8`` of matrix ``k /
    8``.
    """
    trans = ".trans" if transposed else ""
    where = f"[$4+{offset}]" if offset else "[$4]"
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, {where};"
    found = asm(builder, text, ir.LiteralStructType([L.I32] * 4), [place], effects=True)
    return [builder.extract_value(found, k) for k in range(4)]


def ld_shared_b32(builder: GpuBuilder, place: L.Value, offset: int) -> L.Value:
    """``ld.shared``: one 32-bit word."""
    where = f"[$1+{offset}]" if offset else "[$1]"
    return asm(builder, f"ld.shared.b32 $0, {where};", L.I32, [place], effects=True)


def ld_shared_b16(builder: GpuBuilder, place: L.Value, offset: int) -> L.Value:
    """``ld.shared``: 16 bits."""
    where = f"[$1+{offset}]" if offset else "[$1]"
    return asm(builder, f"ld.shared.b16 $0, {where};", ir.IntType(16), [place], effects=True)


def pack_b16x2(builder: GpuBuilder, low: L.Value, high: L.Value) -> L.Value:
    """Packs two 16-bit halves into a word."""
    return builder.or_(builder.zext(low, L.I32), builder.shl(builder.zext(high, L.I32), L.I32(16)))


def read_pair(builder: GpuBuilder, place: L.Value, offset: int) -> list[L.Value]:
    """``ld.shared.v2``: two neighbouring words."""
    return read_words(builder, place, offset, 2)


def read_words(builder: GpuBuilder, place: L.Value, offset: int, count: int) -> list[L.Value]:
    """``ld.shared.v2`` or ``.v4``: two or four neighbouring words, naturally aligned."""
    where = f"[${count}+{offset}]" if offset else f"[${count}]"
    text = f"ld.shared.v{count}.b32 {{{', '.join(f'${k}' for k in range(count))}}}, {where};"
    found = asm(builder, text, ir.LiteralStructType([L.I32] * count), [place], effects=True)
    return [builder.extract_value(found, k) for k in range(count)]


def to_tf32(builder: GpuBuilder, word: L.Value) -> L.Value:
    """``cvt.rna.tf32.f32``: rounds float32 bits to nearest; the tensor core would truncate.

    Ties go to even where that is one instruction (from capability 9.0 on), else away from zero.
    """
    how = "rn" if builder.capability >= (9, 0) else "rna"
    return asm(builder, f"cvt.{how}.tf32.f32 $0, $1;", L.I32, [builder.bitcast(word, L.F32)])


def mma_sync(
    builder: GpuBuilder, kind: str, left: Sequence[L.Value], right: Sequence[L.Value], total: Sequence[L.Value]
) -> list[L.Value]:
    """``mma.sync``: ``total + left * right`` of one 16x8 tile.

    Args: kind: ``tf32``, ``bf16`` or ``f16``; left: 4 registers; right: 2; total: 4 floats.
    """
    shape = "m16n8k8" if kind == "tf32" else "m16n8k16"
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, "
        "{$10, $11, $12, $13};"
    )
    found = asm(builder, text, ir.LiteralStructType([L.F32] * 4), [*left, *right, *total])
    return [builder.extract_value(found, k) for k in range(4)]


def mma_f64(
    builder: GpuBuilder, left: Sequence[L.Value], right: Sequence[L.Value], total: Sequence[L.Value]
) -> list[L.Value]:
    """float64 ``mma`` with eight k: ``mma.m16n8k8``, or, below capability 9.0, the four ``m8n8k4`` that it consists of.

    Args: left: 4 values, of rows ``lane / 4`` and eight more at k ``lane % 4``, then both four k later; right:
        2, of column ``lane / 4`` at the same k; total: 4 values.
    """
    if builder.capability >= (9, 0):
        text = "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        text += "{$10, $11, $12, $13};"
        found = asm(builder, text, ir.LiteralStructType([L.F64] * 4), [*left, *right, *total])
        return [builder.extract_value(found, k) for k in range(4)]
    text = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {$0, $1}, {$2}, {$3}, {$4, $5};"
    made = list(total)
    for term in range(2):
        for row in range(2):
            args = [left[2 * term + row], right[term], *made[2 * row : 2 * row + 2]]
            found = asm(builder, text, ir.LiteralStructType([L.F64] * 2), args)
            made[2 * row : 2 * row + 2] = [builder.extract_value(found, k) for k in range(2)]
    return made


def read_doubles(builder: GpuBuilder, place: L.Value, offset: int, *, cluster: bool = False) -> list[L.Value]:
    """Loads two neighbouring float64 of shared memory. ``cluster``: of any block of the cluster, see `mapa`."""
    space = "shared::cluster" if cluster else "shared"
    where = f"[$2+{offset}]" if offset else "[$2]"
    text = f"ld.{space}.v2.f64 {{$0, $1}}, {where};"
    found = asm(builder, text, ir.LiteralStructType([L.F64] * 2), [place], effects=True)
    return [builder.extract_value(found, k) for k in range(2)]


def write_doubles(builder: GpuBuilder, place: L.Value, offset: int, values: Sequence[L.Value]) -> None:
    """Stores two float64 in shared memory."""
    where = f"[$0+{offset}]" if offset else "[$0]"
    asm(builder, f"st.shared.v2.f64 {where}, {{$1, $2}};", VOID, [place, *values], effects=True)


def st_shared_v4_f32(builder: GpuBuilder, place: L.Value, offset: int, values: Sequence[L.Value]) -> None:
    """``st.shared.v4``: stores four floats."""
    write_words(builder, place, offset, [builder.bitcast(v, L.I32) for v in values])


def write_words(
    builder: GpuBuilder, place: L.Value, offset: int, words: Sequence[L.Value], where: L.Value | None = None
) -> None:
    """``st.shared``: stores 1, 2 or 4 words, predicated by ``where``."""
    names = [f"${k + 1}" for k in range(len(words))]
    source = f"{{{', '.join(names)}}}" if len(words) > 1 else names[0]
    vector = f".v{len(words)}" if len(words) > 1 else ""
    text, args = f"st.shared{vector}.b32 {f'[$0+{offset}]' if offset else '[$0]'}, {source};", [place, *words]
    if where is not None:
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${len(args)}, 0; @p {text} }}"
        args.append(builder.zext(where, L.I32))
    asm(builder, text, VOID, args, effects=True)


def ld_shared_v4_f32(builder: GpuBuilder, place: L.Value, offset: int, *, cluster: bool = False) -> list[L.Value]:
    """``ld.shared.v4``: loads four floats. ``cluster``: from any block of the cluster, see `mapa`."""
    space = "shared::cluster" if cluster else "shared"
    where = f"[$4+{offset}]" if offset else "[$4]"
    text = f"ld.{space}.v4.b32 {{$0, $1, $2, $3}}, {where};"
    found = asm(builder, text, ir.LiteralStructType([L.I32] * 4), [place], effects=True)
    return [builder.bitcast(builder.extract_value(found, k), L.F32) for k in range(4)]
