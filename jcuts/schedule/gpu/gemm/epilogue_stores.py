"""Bytes that the stores of a ``wgmma`` tile's results move: whole sectors.

Four lanes store eight neighbouring columns of a row.  Of 16-bit types these are half a sector, which the L2 cache
counts as a whole one, unless lanes exchange results first (``paired``).
"""

from __future__ import annotations

from jcuts.arch.sm_limits import SM_90
from jcuts.schedule.gpu.gemm.cluster_exchange import FRAGMENT, WORD
from jcuts.schedule.gpu.gemm.problem import GemmProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile


def stored_bytes(counter: GemmProblem, tiling: WgmmaTile) -> float:
    """Of one block's tile; of partial sums where the grid splits K."""
    whole = float(WORD * tiling.rows * tiling.columns)
    if tiling.split > 1:
        return whole
    share = counter.results / max(1.0, counter.partial)
    row = FRAGMENT[1] * WORD * share * (2 if tiling.paired else 1)
    return whole * share * max(1.0, SM_90.sector_bytes / row)
