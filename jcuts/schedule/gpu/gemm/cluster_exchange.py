"""What blocks of a cluster, and slice-K warps of a block, gather from each other to add up their partial sums.

A warp's tile falls into as many even slices as there are sharers, at most (`wgmma_tile.cluster_slices`): where fewer
fit, as with three sharers of eight columns of tiles, some blocks add up nothing and the others gather more.
"""

from __future__ import annotations

import math
from typing import Any

from jcuts.estimate import batch
from jcuts.lower.patterns.gemm import GemmOperand
from jcuts.schedule.gpu.gemm.problem import MmaTile, MmaTiles
from jcuts.schedule.gpu.gemm.wgmma_tile import HIGH, WgmmaTile, WgmmaTiles, cluster_slices

FRAGMENT = (16, 8)
"""Rows and columns of an ``mma.sync`` accumulator tile."""
WORD = 4
"""Bytes of float32."""


def gathered(high: int, wide: int, sharers: int, *, step: int = 1) -> float:
    """Tiles that the sums of a block are gathered from, over those of even slices: at least 1.

    Args: high, wide: accumulator tiles of a warp; sharers: warps that have partial sums of them; step: of columns that
        stay together.

    >>> gathered(1, 16, 3, step=2), gathered(1, 12, 3, step=2)
    (1.5, 1.0)
    """
    return sharers / math.prod(cluster_slices(high, wide, step, sharers))


def gathered_by_warps(tiling: MmaTile | MmaTiles, right: GemmOperand) -> Any:
    """The same of ``mma.sync`` tiles: slice-K warps of all blocks of the cluster share.

    Args: right: the second operand; columns of float32 that lie across its terms are read in pairs of tiles.
    """
    along, across, deep = tiling.warps
    high, wide = tiling.rows // along // FRAGMENT[0], tiling.columns // across // FRAGMENT[1]
    is_split = not right.along_terms and right.item == WORD

    def of(high: int, wide: int, sharers: int) -> float:
        return gathered(max(1, high), max(1, wide), sharers, step=2 if is_split and wide % 2 == 0 else 1)

    return batch.per_distinct(of, high, wide, deep * tiling.cluster)


def remote_loads(tiling: MmaTile | MmaTiles, gather: Any) -> Any:
    """Loads of partial sums that a lane of such tiles makes, one after the other."""
    return gather * (tiling.rows // tiling.warps[0] // FRAGMENT[0]) * (tiling.columns // tiling.warps[1] // FRAGMENT[1])


def gathered_by_groups(tiling: WgmmaTile | WgmmaTiles) -> Any:
    """The same of ``wgmma`` tiles."""
    along, across = tiling.groups

    def of(high: int, wide: int, sharers: int) -> float:
        return gathered(high, wide, sharers, step=1 if wide % 2 else 2)

    return batch.per_distinct(of, tiling.rows // along // HIGH, tiling.columns // across // FRAGMENT[1], tiling.cluster)
