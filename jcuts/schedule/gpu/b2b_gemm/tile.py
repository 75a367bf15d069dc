"""Block tile of the back-to-back GEMM: rows, chunks of the hidden dimension, swizzled shared memory between both GEMMs.

    expand a chunk -> hidden tile | barrier | project: accumulators += hidden tile @ weights

Of several chunks there are two hidden tiles, which take turns: a warp may expand the next chunk while others still
project this one, so that one barrier per chunk is enough.  Shared memory: two chunks (or the only one) of both GEMMs'
weights, the input rows, the hidden tiles.  Input rows that warps hold in registers (``held``) leave their place to the
hidden tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jcuts.arch.sm_limits import SM_90
from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.b2b_gemm import B2bGemm, match_b2b_gemm
from jcuts.schedule.gpu.b2b_gemm.pair_tile import ALIGNED, COLUMN_TILE, HELD, ROW_TILE, GemmPairTile, Warps

FORM = "b2b"


@dataclass(frozen=True)
class B2bGemmTile(GemmPairTile):
    """Block tile of the back-to-back GEMM. Attributes: rows: of a tile; the others: as of `GemmPairTile`."""

    block: B2bGemm
    rows: int
    chunk: int
    expand: Warps
    project: Warps
    held: bool = False
    beside: int = 1

    @property
    def fits(self) -> bool:
        """Whether the parameters are consistent."""
        found = math.prod(self.expand) == math.prod(self.project) and self.threads <= SM_90.threads_per_block
        found = found and self.rows % (ROW_TILE * self.expand[0]) == self.rows % (ROW_TILE * self.project[0]) == 0
        found = found and self.chunk % (COLUMN_TILE * self.expand[1]) == 0 and self.beside > 0
        columns = self.chunk // self.expand[1]  # a lane's places in the hidden tile differ by an XOR
        return found and not columns & (columns - 1) and (not self.held or self.input_registers <= HELD)

    @property
    def pixels(self) -> int:
        """Rows of a tile."""
        return self.rows

    @property
    def outputs(self) -> int:
        """Rows of a tile."""
        return self.rows

    @property
    def tiles(self) -> int:
        """Thread blocks of the grid."""
        return -(-self.block.rows // self.rows)

    @property
    def is_linear(self) -> bool:
        """Rows are neighbours in the hidden tile."""
        return True

    @property
    def patch_pitch(self) -> int:
        """Elements from one row of the hidden tile to the next: whole lines of all banks, whose pieces are swizzled."""
        return -(-self.chunk * self.item // ALIGNED) * ALIGNED // self.item

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a hidden tile."""
        return self.rows * self.patch_pitch * self.item

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a thread block."""
        first, later = self.operand_bytes[0], self.weight_stages * self.hidden_bytes
        return self.weights + (max(first, later) if self.held else first + later)


def shape_of(program: Program) -> B2bGemmTile | None:
    """The block tile of a schedule of `b2b_gemm.schedules`; None for other programs."""
    params: Any = dict(program.params)
    found = match_b2b_gemm(program)
    if isinstance(found, Refusal):
        return None
    expand, project = tuple(params["expand"]), tuple(params["project"])
    more = bool(params.get("held", False)), int(params.get("beside", 1))
    return B2bGemmTile(found, int(params["tile"]), int(params["chunk"]), expand, project, *more)
