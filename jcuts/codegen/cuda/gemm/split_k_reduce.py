"""Split-K reduction: warps of a block (shared memory) and blocks of a cluster (DSMEM) sum their partial accumulators.

Every warp stores its partial accumulators in its block's shared memory; then each takes its slice of the output tile,
adds up what all have for it, block by block and warp by warp in a fixed order, and runs the epilogue on that slice.
`reduce_through_dsmem` pushes instead: every block stores its partial sums into the block that needs them
(``st.async``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.ptx import cluster
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.schedule.gpu.gemm.wgmma_tile import FOUR, cluster_slices


def reduce_across_warps_and_cluster(
    builder: GpuBuilder,
    totals: Totals,
    shared: L.Value,
    lanes: int,
    lane: L.Value,
    deep: tuple[L.Value, int],
    rank: tuple[L.Value, int],
    step: int,
    height: int,
    leave: Callable[[Totals, L.Value, L.Value], None],
) -> None:
    """Sums the partial accumulators of warps and blocks in a fixed order, by reading (``mapa``,
    ``ld.shared::cluster``).

    Args:
        lanes: threads of a block that have different parts of the tile.
        lane: the number of this one among them.
        deep: number of the warp among those that split K, and how many there are.
        rank: number of the block in its cluster, and how many there are.
        step: tiles of columns that stay together.
        height: rows from one accumulator tile to the next.
        leave: the epilogue; is given sums, and the first row and column that they belong to in the warp's tile.
    """
    high, wide = len(totals), len(totals[0])
    half = lanes * FOUR  # each lane's 16 bytes lie beside its neighbour's: four floats, or half of four doubles
    plane = half * (2 if totals[0][0][0].type == L.F64 else 1)
    place = builder.add(shared, builder.mul(lane, L.I32(FOUR)))
    ptx_mma.cp_async_wait(builder, 0)
    ptx_mma.barrier(builder)
    mine = builder.add(place, builder.mul(deep[0], L.I32(high * wide * plane)))
    for number, tile in enumerate(t for row in totals for t in row):
        _store_partial(builder, mine, number * plane, half, tile)
    together = ptx_mma.barrier if rank[1] == 1 else ptx_mma.cluster_barrier
    together(builder)
    down, aside = cluster_slices(high, wide, step, deep[1] * rank[1])
    rows, columns = high // down, wide // aside
    sharer = builder.add(builder.mul(rank[0], L.I32(deep[1])), deep[0])
    idle = down * aside < deep[1] * rank[1]
    with builder.if_then(builder.icmp_signed("<", sharer, L.I32(down * aside))) if idle else nullcontext():
        row = builder.mul(builder.udiv(sharer, L.I32(aside)), L.I32(rows))
        column = builder.mul(builder.urem(sharer, L.I32(aside)), L.I32(columns))
        first = builder.mul(builder.add(builder.mul(row, L.I32(wide)), column), L.I32(plane))
        places = [builder.add(place, first)]
        if rank[1] > 1:
            places = [ptx_mma.mapa(builder, places[0], number) for number in range(rank[1])]
        parts = [(p, number * high * wide * plane) for p in places for number in range(deep[1])]
        found: Totals = []
        for i in range(rows):
            found.append([])
            for j in range(columns):
                offset = (i * wide + j) * plane
                total: list[L.Value] | None = None
                for where, skipped in parts:
                    more = _load_partial(builder, where, offset + skipped, (plane, half), cluster=rank[1] > 1)
                    total = more if total is None else [builder.fadd(x, y) for x, y in zip(total, more, strict=True)]
                assert total is not None
                found[-1].append(total)
        leave(found, builder.mul(row, L.I32(height)), builder.mul(column, L.I32(8)))
    if rank[1] > 1:
        ptx_mma.cluster_barrier(builder)  # no block may end while others read its shared memory


def _store_partial(builder: GpuBuilder, place: L.Value, offset: int, half: int, tile: list[L.Value]) -> None:
    if tile[0].type != L.F64:
        ptx_mma.st_shared_v4_f32(builder, place, offset, tile)
        return
    for number in range(2):
        ptx_mma.write_doubles(builder, place, offset + number * half, tile[2 * number : 2 * number + 2])


def _load_partial(
    builder: GpuBuilder, place: L.Value, offset: int, sizes: tuple[int, int], *, cluster: bool
) -> list[L.Value]:
    """What `_store_partial` left. Args: sizes: bytes of a plane, and of what lies beside each other in it."""
    plane, half = sizes
    if plane == half:
        return ptx_mma.ld_shared_v4_f32(builder, place, offset, cluster=cluster)
    return [v for part in range(2) for v in ptx_mma.read_doubles(builder, place, offset + part * half, cluster=cluster)]


def reduce_through_dsmem(
    builder: GpuBuilder,
    totals: Totals,
    places: tuple[L.Value, L.Value],
    lane: L.Value,
    lanes: int,
    rank: tuple[L.Value, int],
    step: int,
    height: int,
    leave: Callable[[Totals, L.Value, L.Value], None],
) -> None:
    """Sums the partial accumulators of a cluster's blocks by pushing: each block stores into the memory of the one that
    needs it.

    Args: places: of `room` bytes that nobody uses in any block of the cluster, and of a barrier that expects them.
    """
    high, wide = len(totals), len(totals[0])
    plane, (number, sharers) = lanes * FOUR, rank
    down, aside = cluster_slices(high, wide, step, sharers)
    rows, columns = high // down, wide // aside
    each = rows * columns
    place = builder.add(places[0], builder.mul(lane, L.I32(FOUR)))
    mine = builder.add(place, builder.mul(number, L.I32(each * plane)))
    for part in range(down * aside):
        first, left = part // aside * rows, part % aside * columns
        there, barrier = (ptx_mma.mapa(builder, p, part) for p in (mine, places[1]))
        for k in range(each):
            tile = totals[first + k // columns][left + k % columns]
            cluster.st_async_v4(builder, there, k * plane, tile, barrier)
    idle = down * aside < sharers
    with builder.if_then(builder.icmp_signed("<", number, L.I32(down * aside))) if idle else nullcontext():
        cluster.mbarrier_wait(builder, places[1])
        found: Totals = []
        for i in range(rows):
            found.append([])
            for j in range(columns):
                total: list[L.Value] | None = None
                for sender in range(sharers):
                    more = ptx_mma.ld_shared_v4_f32(builder, place, (sender * each + i * columns + j) * plane)
                    total = more if total is None else [builder.fadd(x, y) for x, y in zip(total, more, strict=True)]
                assert total is not None
                found[-1].append(total)
        row = builder.mul(builder.udiv(number, L.I32(aside)), L.I32(rows * height))
        column = builder.mul(builder.urem(number, L.I32(aside)), L.I32(columns * 8))
        leave(found, row, column)
