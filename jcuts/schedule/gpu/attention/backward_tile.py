"""Block tile of the attention backward kernel: shared-memory layout of the rows' operands and of streamed column tiles.

A block takes ``rows`` rows (queries for dQ, keys for dK and dV) of one head and goes over the columns, ``columns`` at a
time.  Both operands of its rows lie in shared memory for the whole walk; the two operands of a column tile lie side by
side in a ring of ``stages``, and every tile is read as both factors that it is: of the recomputed products as columns
(``ldmatrix``), of the results' products as terms.  Lines have an odd number of 16 bytes (no bank conflicts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.attention import Operand
from jcuts.lower.patterns.attention_backward import AttentionBackward, match_backward
from jcuts.schedule.gpu.attention.tile import PAD, SIXTEEN, STEP
from jcuts.schedule.gpu.machine import WARP

FORM = "attention_backward"
FLAGS = ("rounded", "held", "skips")
"""Parameters that are set or left out."""


@dataclass(frozen=True)
class CopiedTile:
    """Lines of one operand in shared memory, as `codegen.cuda.attention.kv_tiles.TileCopier` fills them.

    Attributes:
        operand: of the lines. keys: lines of the tile. threads: that copy it.
    """

    operand: Operand
    keys: int
    threads: int

    def line(self, operand: Operand) -> int:
        """Elements of a line, zero padding included: whole pairs of fragments of columns."""
        return -(-operand.length // SIXTEEN) * SIXTEEN

    def pitch(self, operand: Operand) -> int:
        """Bytes from one line to the next: an odd number of 16 bytes."""
        return PAD * (self.line(operand) * operand.item // PAD | 1)

    @property
    def bytes(self) -> int:
        """Bytes of the tile."""
        return self.keys * self.pitch(self.operand)

    @property
    def steps(self) -> int:
        """k-steps of a product along the lines."""
        return -(-self.operand.length * self.operand.item // STEP)

    @property
    def padded(self) -> int:
        """Elements of a line, padded to whole pairs of fragments."""
        return self.line(self.operand)


@dataclass(frozen=True)
class BackwardTile:
    """Block tile of the backward kernel.

    Attributes:
        attention: the operands.
        rows, columns: of a tile.
        warps: warps, which divide the rows.
        stages: column tiles in shared memory.
        rounded: whether float32 column tiles are rounded to TF32 in shared memory, once, instead of by every warp that
            reads them.
        held: whether the rows' fragments are kept in registers.
        skips: whether a warp leaves out what is multiplied by weights of 0.
    """

    attention: AttentionBackward
    rows: int
    columns: int
    warps: int
    stages: int
    rounded: bool = False
    held: bool = False
    skips: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.warps

    @property
    def high(self) -> int:
        """Rows of a warp."""
        return self.rows // self.warps

    @property
    def fits(self) -> bool:
        """Whether warps divide the tile into whole fragments."""
        whole = self.rows == self.high * self.warps and self.high > 0 and self.columns > 0
        return whole and self.high % SIXTEEN == self.columns % SIXTEEN == 0 and self.stages >= 1

    @property
    def row_tiles(self) -> tuple[CopiedTile, CopiedTile]:
        """Tiles of the rows' operands."""
        sides = (self.attention.row_scores, self.attention.row_gradient)
        first, second = (CopiedTile(side, self.rows, self.threads) for side in sides)
        return first, second

    @property
    def column_tiles(self) -> tuple[CopiedTile, CopiedTile]:
        """Tiles of the columns' operands."""
        sides = (self.attention.scores, self.attention.gradient)
        first, second = (CopiedTile(side, self.columns, self.threads) for side in sides)
        return first, second

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows' operands, before the ring."""
        return sum(tile.bytes for tile in self.row_tiles)

    @property
    def stage(self) -> int:
        """Bytes of one stage."""
        return sum(tile.bytes for tile in self.column_tiles)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.row_bytes + self.stages * self.stage

    @property
    def tiles(self) -> int:
        """Number of column tiles."""
        return -(-self.attention.columns // self.columns)

    @property
    def blocks(self) -> tuple[int, int]:
        """Grid: heads, and blocks of a head."""
        return self.attention.batches, -(-self.attention.rows // self.rows)

    @property
    def block_count(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.blocks)


def backward_tile(program: Program) -> BackwardTile | Refusal:
    """The block tile of a schedule."""
    params: Any = dict(program.params)
    found = match_backward(program)
    if isinstance(found, Refusal):
        return found
    rows, columns = (int(v) for v in params["tile"])
    flags = (bool(params.get(name, False)) for name in FLAGS)
    return BackwardTile(found, rows, columns, int(params["warps"]), int(params["stages"]), *flags)
