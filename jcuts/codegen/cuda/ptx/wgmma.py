"""PTX of ``wgmma`` (capability 9.0 only): matrix descriptors, 128B swizzle, commit groups, the async proxy fence.

Operands are read from lines of 128 bytes whose pieces of 16 are swizzled: piece p of line l lies at ``p ^ (l % 8)``;
eight lines, which start at a multiple of 1024 bytes, are an *atom*.  A *descriptor* says where a tile begins and how
far apart its atoms are (PTX ISA, "Matrix descriptor format").  A line holds k of one row, or, of 16-bit types only,
rows of one k.  The unit reads by a proxy of its own: what threads have written needs `proxy_fence` and a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.mma import STEP, VOID
from jcuts.codegen.llvm import lanes as L

LINE = 128
"""Bytes of a line of shared memory."""
PIECE = 16
"""Bytes of a swizzled piece of a line."""
ATOM = 1024
"""Bytes of eight lines: a swizzle atom."""
ROWS = 64
"""Rows of the result of one instruction."""
WIDEST = 256
"""Most columns of it; they are a multiple of 8."""
_SWIZZLED = 1 << 62


def descriptor(builder: GpuBuilder, place: L.Value, leading: int, stride: int) -> L.Value:
    """Matrix descriptor (i64) of the tile that begins at an address (i32) of shared memory.

    Args: leading: bytes from 64 rows of a k to the next 64 (unused where lines hold k); stride: bytes from eight
        lines to the next eight.
    """
    start = builder.zext(builder.and_(builder.lshr(place, L.I32(4)), L.I32(0x3FFF)), L.I64)
    return builder.or_(start, L.I64(_SWIZZLED | (stride >> 4) << 32 | (leading >> 4) << 16))


def advance_descriptor(builder: GpuBuilder, found: L.Value, distance: int) -> L.Value:
    """The matrix descriptor of a tile so many bytes further on."""
    return builder.add(found, L.I64(distance >> 4)) if distance else found


def wgmma_async(
    builder: GpuBuilder,
    kind: str,
    pairs: Sequence[Sequence[tuple[Sequence[L.Value], L.Value]]],
    turned: tuple[bool, bool],
    totals: list[list[list[L.Value]]],
) -> list[list[list[L.Value]]]:
    """Issues ``wgmma.mma_async``: ``totals + left * right`` as one commit group; sums are valid after `wgmma_wait_all`.

    Args:
        kind: ``tf32``, ``bf16`` or ``f16``.
        pairs: operands: [64 rows of the result][k-step of `STEP` bytes]; the left one as its descriptor alone,
            or as the four registers of a lane (fragments of ``mma`` of a warp's 16 rows), which nothing may
            change before the group has been waited for; the right one as its descriptor.
        turned: whether lines of the left, of the right operand hold rows of one k (M/N-major).
        totals: [64 rows][8 columns][4], of a lane.
    """
    columns = 8 * len(totals[0])
    item = 4 if kind == "tf32" else 2
    flat = [value for rows in totals for tile in rows for value in tile]
    each, args = len(flat) // len(totals), []
    lines = ["wgmma.fence.sync.aligned;"]
    for step in range(len(pairs[0])):
        for number, steps in enumerate(pairs):
            names = ", ".join(f"${number * each + k}" for k in range(each))
            first = 2 * len(flat) + len(args)
            left, right = steps[step]
            args += [*left, right]
            last = first + len(left)
            taken = f"${first}" if last == first + 1 else f"{{{', '.join(f'${k}' for k in range(first, last))}}}"
            across = turned if len(left) == 1 else turned[1:]  # registers lie one way only
            how = "1, 1, 1" + ("" if item == 4 else "".join(f", {int(t)}" for t in across))
            lines.append(
                f"wgmma.mma_async.sync.aligned.m{ROWS}n{columns}k{STEP // item}.f32.{kind}.{kind} "
                f"{{{names}}}, {taken}, ${last}, {how};"
            )
    lines.append("wgmma.commit_group.sync.aligned;")
    return _shaped(_asm_inout(builder, "\n\t".join(lines), flat, args), totals)


def wgmma_wait_group(builder: GpuBuilder, groups: int) -> None:
    """``wgmma.wait_group``: waits until at most so many of the newest commit groups are pending."""
    asm(builder, f"wgmma.wait_group.sync.aligned {groups};", VOID, effects=True)


def wgmma_wait_all(builder: GpuBuilder, totals: list[list[list[L.Value]]]) -> list[list[list[L.Value]]]:
    """``wgmma.wait_group 0``: waits for all instructions, after which their accumulators are valid."""
    flat = [value for rows in totals for tile in rows for value in tile]
    return _shaped(_asm_inout(builder, "wgmma.wait_group.sync.aligned 0;", flat, []), totals)


def proxy_fence(builder: GpuBuilder) -> None:
    """``fence.proxy.async``: makes this thread's shared-memory writes visible to ``wgmma``, after a barrier."""
    asm(builder, "fence.proxy.async.shared::cta;", VOID, effects=True)


def _asm_inout(builder: GpuBuilder, text: str, flat: Sequence[L.Value], args: Sequence[L.Value]) -> list[L.Value]:
    """Inline PTX that changes registers where they are: ``$0`` .. are results and operands at once."""
    count = len(flat)
    parts = [*["=f"] * count, *map(str, range(count)), *("l" if a.type == L.I64 else "r" for a in args), "~{memory}"]
    result = ir.LiteralStructType([L.F32] * count)
    kind = ir.FunctionType(result, [L.F32] * count + [a.type for a in args])
    found = builder.call(ir.InlineAsm(kind, text, ",".join(parts), side_effect=True), [*flat, *args])
    return [builder.extract_value(found, k) for k in range(count)]


def _shaped(flat: list[L.Value], like: list[list[list[L.Value]]]) -> list[list[list[L.Value]]]:
    values = iter(flat)
    return [[[next(values) for _ in tile] for tile in rows] for rows in like]
