"""Block tile of flash attention: shared-memory layout of K/V stages, split of queries and keys over warps.

A block takes ``rows`` queries of one head and goes over the keys, ``keys`` at a time: tiles of keys and of values lie
side by side in a ring of ``stages``.  Warps divide the rows, and, where ``warps[1]`` is more than 1, the keys of every
tile: their softmax states are merged at the end.  Where heads are few (decoding), the blocks of a ``cluster`` have a
slice of the keys each (split-KV), and the first merges the states of all.  Lines have an odd number of 16 bytes, so
that a warp's reads have no bank conflicts: keys and 16-bit values are read as matrices (``ldmatrix``), float32 values
as pairs of neighbours of two lines that follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.attention import Attention, Operand, match
from jcuts.schedule.gpu.machine import WARP

SIXTEEN = 16
"""Rows of an mma instruction."""
STEP = 32
"""Bytes along K of an instruction."""
PAD = 16
"""Bytes behind a line in shared memory."""
STATE = 2
"""Words that a row of scores keeps: its largest score, its sum."""
FLAGS = ("rounded", "skips")
"""Parameters that are set or left out."""
EIGHT = 8
"""Rows of which a lane of a warp has one."""
FOUR = 4
"""Words of the widest access; lanes that share a row; words between the halves of a row of an A fragment."""


@dataclass(frozen=True)
class FlashTile:
    """Block tile of flash attention.

    Attributes:
        attention: the operands.
        rows, keys: queries and keys of a tile.
        warps: warps along rows, along keys.
        stages: tiles of keys and values in shared memory.
        rounded: whether float32 tiles are rounded to TF32 in shared memory, once, instead of by every warp that reads
            them.
        skips: whether a warp leaves out what is multiplied by weights of 0.
        cluster: blocks that have the same rows and a slice of the keys each.
    """

    attention: Attention
    rows: int
    keys: int
    warps: tuple[int, int]
    stages: int
    rounded: bool = False
    skips: bool = False
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.warps[0] * self.warps[1]

    @property
    def warp(self) -> tuple[int, int]:
        """Rows and keys of a warp's tile."""
        return self.rows // self.warps[0], self.keys // self.warps[1]

    @property
    def fits(self) -> bool:
        """Whether warps divide the tile into whole fragments."""
        high, wide = self.warp
        whole = self.rows == high * self.warps[0] and self.keys == wide * self.warps[1] and high > 0 and wide > 0
        even = self.tiles % self.cluster == 0
        return whole and even and high % SIXTEEN == wide % SIXTEEN == 0 and self.stages >= 1

    @property
    def steps(self) -> int:
        """k-steps of QK^T (instructions along the head dimension)."""
        return -(-self.attention.key.length * self.attention.key.item // STEP)

    @property
    def padded_head_dim(self) -> int:
        """Features of the output, padded to whole pairs of fragments."""
        return -(-self.attention.value.length // SIXTEEN) * SIXTEEN

    def line(self, operand: Operand) -> int:
        """Elements of a line of keys or values in shared memory, zero padding included."""
        if operand is self.attention.value:
            return self.padded_head_dim
        return self.steps * STEP // operand.item

    def pitch(self, operand: Operand) -> int:
        """Bytes from one line to the next: an odd number of 16 bytes."""
        return PAD * (self.line(operand) * operand.item // PAD | 1)

    @property
    def stage(self) -> int:
        """Bytes of one stage: a tile of keys and one of values."""
        return self.keys * (self.pitch(self.attention.key) + self.pitch(self.attention.value))

    @property
    def lane_rows(self) -> int:
        """Rows of every sixteen that a lane keeps: one where there are eight queries at most (decoding), else two."""
        return 1 if self.attention.rows <= EIGHT else 2

    @property
    def state_words(self) -> int:
        """Words of a lane's softmax state, in whole accesses: accumulators, a maximum and a sum per row."""
        rows = self.lane_rows * self.warp[0] // SIXTEEN
        return FOUR * -(-rows * (2 * self.padded_head_dim // EIGHT + STATE) // FOUR)

    @property
    def exchange_bytes(self) -> int:
        """Bytes through which one warp hands over its softmax state."""
        return 4 * WARP * self.state_words

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        states = self.warps[1] - 1 + (self.cluster > 1)
        return max(self.stages * self.stage, self.exchange_bytes * self.warps[0] * states)

    @property
    def tiles(self) -> int:
        """Number of key tiles."""
        return -(-self.attention.keys // self.keys)

    @property
    def walked(self) -> int:
        """Key tiles that a block walks over."""
        return self.tiles // self.cluster

    @property
    def ahead(self) -> int:
        """Tiles whose copies start before the first is read: all of them where each has a stage of its own."""
        return self.walked if self.stages >= self.walked else max(1, self.stages - 1)

    @property
    def blocks(self) -> tuple[int, int]:
        """Heads, and tiles of a head's rows."""
        return self.attention.batches, -(-self.attention.rows // self.rows)

    @property
    def block_count(self) -> int:
        """Blocks of the grid: of heads, rows and slices of the keys."""
        heads, groups = self.blocks
        return heads * groups * self.cluster


def shape_of(program: Program) -> FlashTile | Refusal:
    """The block tile of a schedule."""
    params: Any = dict(program.params)
    found = match(program)
    if isinstance(found, Refusal):
        return found
    high, across = (int(v) for v in params["warps"])
    rows, keys = (int(v) for v in params["tile"])
    flags = (bool(params.get(name, False)) for name in FLAGS)
    cluster = int(params.get("cluster", 1))
    return FlashTile(found, rows, keys, (high, across), int(params["stages"]), *flags, cluster=cluster)
