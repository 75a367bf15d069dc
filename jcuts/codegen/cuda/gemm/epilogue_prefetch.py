"""Prefetches epilogue operands during the mainloop: bias vectors into L1, residual matrices into L2.

A GEMM with a small K ends soon after its first copies have arrived; without the prefetch it would then wait for memory
again.  Vectors along the columns are read into the L1 cache; whole matrices are brought into the L2 cache by
``prefetch.global.L2``, divided among the blocks of a cluster.
"""

from __future__ import annotations

from dataclasses import replace

from jcuts.codegen.cuda.gemm.smem_tile import SmemTile
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import ITEM_SIZE, Phase
from jcuts.lower.patterns.gemm import COLUMNS, ROWS
from jcuts.schedule.gpu.gemm.epilogue_smem import StagedMatrix

SECTOR = 32
"""Bytes that one access brings into the L1 cache."""
LINE = 64
"""Bytes that one access brings into the L2 cache."""


def prefetch_epilogue_operands(
    frame: M.Frame,
    phase: Phase,
    tiles: tuple[SmemTile, SmemTile],
    thread: tuple[L.Value, int],
    rank: tuple[L.Value, int],
    known: tuple[StagedMatrix, ...] = (),
) -> None:
    """Prefetches the block tile's operands of the exit graph.

    Args:
        frame: at the tile's first row and column.
        tiles: of the left and the right operand.
        thread: number of this thread, and how many there are.
        rank: number of the block in its cluster, and how many there are.
        known: matrices that are copied into shared memory instead (`epilogue_bulk_copy`).
    """
    builder, seen = frame.builder, {(kept.buffer, kept.index) for kept in known}
    for node in phase.exit.nodes:
        if node.op != "load" or node.index is None or node.index.values() or (node.buffer, node.index) in seen:
            continue
        seen.add((node.buffer, node.index))
        item, wide = ITEM_SIZE[node.dtype], node.index.stride(COLUMNS) == 1
        axes = node.index.axes()
        if not wide or node.guards:
            continue
        if ROWS not in axes:
            step, rows, columns = SECTOR // item, 1, tiles[1].size
            number, count = thread
        else:
            step, rows, columns = LINE // item, tiles[0].size, tiles[1].size
            number = builder.add(builder.mul(thread[0], L.I32(rank[1])), rank[0])
            count = thread[1] * rank[1]
        across = -(-columns // step)
        for first in range(0, rows * across, count):
            piece = builder.add(number, L.I32(first)) if first else number
            live = None if first + count <= rows * across else builder.icmp_signed("<", piece, L.I32(rows * across))
            places = {COLUMNS: builder.mul(builder.urem(piece, L.I32(across)), L.I32(step))}
            if rows > 1:
                places[ROWS] = builder.udiv(piece, L.I32(across))
            where = {
                axis: _inside(builder, builder.add(frame.variables[axis], place), tiles[axis == COLUMNS].extent)
                for axis, place in places.items()
            }
            here = replace(frame, variables={**frame.variables, **where}, cache={})
            source = M.address(here, node.buffer, item, node.index)
            # A word of narrower elements may lie across its own alignment.
            (ptx_mma.prefetch_l2 if rows > 1 or item < 4 else ptx_mma.prefetch_l1)(builder, source, live)


def _inside(builder: GpuBuilder, place: L.Value, extent: int) -> L.Value:
    """An index clamped to the last existing one."""
    last = L.I32(extent - 1)
    return builder.select(builder.icmp_signed("<", place, last), place, last)
