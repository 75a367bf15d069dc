"""Bytes that the stores of a ``wgmma`` tile's results move: whole sectors.

Four lanes store eight neighbouring columns of a row.  Of 16-bit types these are half a sector, which the L2 cache
counts as a whole one, unless lanes exchange results first (``paired``).
"""

from __future__ import annotations

from typing import Any

from jcuts.arch.sm_limits import SM_90
from jcuts.estimate import batch
from jcuts.schedule.gpu.gemm.cluster_exchange import FRAGMENT, WORD
from jcuts.schedule.gpu.gemm.problem import GemmProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile, WgmmaTiles


def stored_bytes(counter: GemmProblem, tiling: WgmmaTile | WgmmaTiles) -> Any:
    """Of one block's tile; of partial sums where the grid splits K."""
    whole = 1.0 * WORD * tiling.rows * tiling.columns
    share = counter.results / max(1.0, counter.partial)
    row = FRAGMENT[1] * WORD * share * (2 if tiling.paired else 1)
    return batch.where(tiling.split > 1, whole, whole * share * max(1.0, SM_90.sector_bytes / row))
