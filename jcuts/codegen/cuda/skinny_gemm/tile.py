"""Block tile of the skinny GEMM: which columns and which k a block, a warp and a lane take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, B, GemmOperand, K, S, gemm_operands, k_extent, k_tiles_per_split
from jcuts.schedule.gpu.coalescing import LINE
from jcuts.schedule.gpu.machine import ACCESS
from jcuts.schedule.gpu.skinny_gemm.schedules import (
    LANES,
    LINE_BYTES,
    M_TILE,
    N_TILE,
    SEGMENTS,
    WORD,
    reads_as_it_lies,
)

WORDS = ACCESS // WORD
"""Registers of an access of a lane."""
PADDING = WORDS
"""Words between lines of partial sums in shared memory, so that a warp's stores have no bank conflicts."""


@dataclass(frozen=True)
class SkinnyTile:
    """Mapping of a thread block onto columns and k.

    Attributes:
        left, right: the operands x and W.
        extents: rows of x and columns of W that there are.
        rows: rows of x, in whole tiles of 8. columns: of the block.
        terms: k of a block's step. share: steps of a block. total: k of the whole product.
        warps: warps along the columns, and along K.
        flight: tiles of k that a warp has on the way (stages of its ring in shared memory).
        cluster: blocks that split K and add up through DSMEM.
        segment: bytes of a row of W[k, n] that a group of a warp's columns has.
    """

    left: GemmOperand
    right: GemmOperand
    extents: tuple[int, int]
    rows: int
    columns: int
    terms: int
    share: int
    total: int
    warps: tuple[int, int]
    flight: int
    cluster: int
    segment: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARP * math.prod(self.warps)

    @property
    def vector(self) -> int:
        """k of a lane in a tile: elements of 16 bytes."""
        return ACCESS // self.right.item

    @property
    def depth(self) -> int:
        """k of a tile: those of the lanes of a group."""
        return LANES * self.vector

    @property
    def warp_columns(self) -> int:
        """Columns of a warp."""
        return self.columns // self.warps[0]

    @property
    def group(self) -> int:
        """Columns of a warp that one set of accesses covers."""
        return M_TILE if self.right.along_terms else N_TILE * self.lane_columns

    @property
    def lane_columns(self) -> int:
        """Neighbouring columns of W[k, n] that a lane has."""
        return self.segment // N_TILE // self.right.item

    @property
    def blocks_along(self) -> int:
        """Blocks along the columns."""
        return -(-self.extents[1] // self.columns)

    @property
    def rows_per_thread(self) -> int:
        """Rows of a column whose sums and epilogue a thread has: a divisor of all rows."""
        rows, beside = self.extents[0], self.threads // self.columns
        return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= beside)

    @property
    def pitch(self) -> int:
        """Words from a row of partial sums to the next."""
        return self.columns + PADDING

    @property
    def partial(self) -> int:
        """Bytes of the partial sums of a block's warps along K."""
        return WORD * self.warps[1] * self.rows * self.pitch

    @property
    def stage(self) -> int:
        """Bytes of a tile of k of a warp: accesses of x, then of W."""
        return (self.rows + self.warp_columns) // N_TILE * LINE_BYTES

    @property
    def totals(self) -> int:
        """Where in shared memory the sums of the block lie, which other blocks read."""
        return max(math.prod(self.warps) * self.flight * self.stage, self.partial)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: rings of its warps, in their place partial sums; sums of the block."""
        return self.totals + (WORD * self.rows * self.columns if self.cluster > 1 else 0)


def skinny_tile(program: Program) -> SkinnyTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    params: Any = dict(program.params)
    (rows, columns, terms), (across, deep) = params["tile"], params["warps"]
    extents = program.phases[0].ranges()
    left, right = gemm_operands(program)
    cluster, flight, total = int(params.get("cluster", 1)), int(params["flight"]), k_extent(program)
    share, ranks = k_tiles_per_split(extents[K], terms, cluster)
    found, segment = (extents[ROWS], extents[COLUMNS]), int(params.get("segment", LINE))
    tile = SkinnyTile(left, right, found, rows, columns, terms, share, total, (across, deep), flight, cluster, segment)
    fits = rows % N_TILE == 0 and rows - N_TILE < found[0] <= rows and across * tile.warp_columns == columns
    fits = fits and tile.warp_columns % tile.group == 0 and terms == deep * flight * tile.depth
    fits = fits and segment in SEGMENTS and ("segment" in params) != right.along_terms
    fits = fits and tile.threads == int(params["threads"]) and columns <= tile.threads
    fits = fits and ranks == cluster and (cluster == 1 or S not in extents)
    if not fits or not reads_as_it_lies(program):
        raise CompileRejected(f"{program.name}: no skinny product of tiles {params['tile']} by warps {params['warps']}")
    return tile


def block_count(program: Program, tile: SkinnyTile) -> int:
    """Blocks of the grid."""
    others = math.prod(a.extent for a in program.phases[0].axes if a.name in (S, B))
    return others * tile.blocks_along * tile.cluster
