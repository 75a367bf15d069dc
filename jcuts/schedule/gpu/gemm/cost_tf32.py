"""What schedules for warp groups of float32 products of many blocks take whose weights are rounded: counted cycles.

Those of few blocks are counted by `region.gpu_count`.

As in `region.gpu_products`, per tile of terms the longest of what works at the same time, and a share of the rest:

    the units, the port of shared memory, the L2 cache, a load's way over the tiles that are under way

and what nobody hides where a multiprocessor has one block alone: a gap per group of instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.lower.patterns.gemm import k_tiles_per_split
from jcuts.schedule.gpu.gemm.mma import EXIT, MEMORY, PORT, SECOND
from jcuts.schedule.gpu.gemm.problem import STEP, GemmProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import HIGH, WgmmaTile


@dataclass(frozen=True)
class Tf32CostCoefficients:
    """Constants of rounded weights: products and bytes of the L2 cache per cycle, cycles, shares of what overlaps.

    ``fetch`` is a load's, ``step`` a group of instructions' that nothing hides, ``cluster`` that of blocks that meet
    (``push``: that store into each other's memory), ``late`` that of asking for what is added to the results when it is
    needed, ``memory`` what is left of its time.
    """

    unit: float
    cache: float
    fetch: float
    round: float
    step: float
    latency: float
    cluster: float
    push: float
    late: float
    overlap: float
    memory: float


RATES = Tf32CostCoefficients(910.0, 62.0, 900.0, 50.0, 19.0, 3600.0, 4200.0, 4200.0, 0.0, 0.15, 0.29)
"""Fitted to 115 schedules of 20 products and convolutions on an H200: 14 % off in the mean square; the schedule with
the least cycles took 2 % more than the fastest, on average."""


def cycles(counter: GemmProblem, tiling: WgmmaTile, beside: int, waves: int, rates: Tf32CostCoefficients) -> float:
    """Estimated cycles of a launch, and of the second one where terms are split.

    Args: beside: blocks of a multiprocessor; waves: how often they are replaced.
    """
    rows, columns = tiling.rows, tiling.columns
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    inner = k_tile_cycles(counter, tiling, beside, rates)
    written = 4.0 * rows * columns * (1.0 if tiling.split > 1 else counter.results / max(1.0, counter.partial))
    leave = EXIT + beside * written / tiling.cluster / rates.cache + (0.0 if tiling.early else rates.late)
    if tiling.cluster > 1:
        leave += rates.push if tiling.push else rates.cluster
        leave += beside * 4.0 * rows * columns * (2 / PORT + 1 / rates.cache)
    moved = counter.moved / MEMORY
    total = waves * (rates.latency + share * inner + leave)
    total = max(total, moved + rates.latency) + rates.memory * min(total, moved)
    return total + (SECOND + (2 * tiling.split + 1) * counter.partial / MEMORY if tiling.split > 1 else 0.0)


def k_tile_cycles(counter: GemmProblem, tiling: WgmmaTile, beside: int, rates: Tf32CostCoefficients) -> float:
    """Estimated cycles of a tile of terms of all blocks of a multiprocessor."""
    rows, columns, line = tiling.rows, tiling.columns, tiling.terms * counter.item
    copied, read = float((rows + columns) * line), rows // HIGH * (HIGH + columns) * line
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    ahead = share if tiling.stages >= share else tiling.stages - 2
    limits = [
        beside * rows * columns * tiling.terms / rates.unit,
        beside * (read + copied) / PORT,
        beside * copied / rates.cache,
        rates.fetch / ahead + rates.round,
    ]
    inner = max(limits) + rates.overlap * (sum(limits) - max(limits))
    if beside == 1:  # nobody else fills the gaps between groups of instructions
        inner += rates.step * line / STEP / tiling.group * (rows // HIGH / tiling.groups[0])
    return inner
