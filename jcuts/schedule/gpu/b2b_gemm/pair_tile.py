"""Block tile of two fused GEMMs: fragments, chunks of the hidden dimension, shared memory of operands and weights.

`b2b_gemm.tile.B2bGemmTile` and `inverted_residual.tile.InvertedResidualTile` are such tiles.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property

from jcuts.lower.patterns.gemm import GemmOperand
from jcuts.lower.patterns.gemm_pair import GemmPair
from jcuts.schedule.gpu.machine import WARP

BANKS = 32
"""Banks of shared memory."""
WORD = 4
"""Bytes of a bank's word."""
ROW_TILE = 16
"""Rows that fragments are read for at once."""
COLUMN_TILE = 16
"""Columns that fragments are read for at once."""
STEP = 32
"""Bytes along K of an instruction."""
PADDING = 16
"""Bytes between lines of the input."""
ALIGNED = 128
"""Bytes that the start of every array in shared memory is a multiple of."""
HELD = 40
"""Most registers of a lane's share of the input."""
Warps = tuple[int, int]
"""Warps along (rows, columns)."""


class GemmPairTile(ABC):
    """What tiles of two fused GEMMs have in common.

    Attributes:
        block: the operation.
        chunk: hidden columns per chunk.
        expand: warps along rows and along hidden columns of the expand GEMM.
        project: warps along rows and along columns of the project GEMM.
        held: whether a warp keeps its input rows in registers.
        beside: resident blocks per multiprocessor that registers must allow.
    """

    block: GemmPair
    chunk: int
    expand: Warps
    project: Warps
    held: bool
    beside: int

    @property
    @abstractmethod
    def pixels(self) -> int:
        """Input rows of a tile."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Output rows of a tile."""

    @property
    @abstractmethod
    def tiles(self) -> int:
        """Thread blocks of the grid."""

    @property
    @abstractmethod
    def is_linear(self) -> bool:
        """Whether neighbouring input rows are neighbours in what the expand GEMM writes."""

    @property
    @abstractmethod
    def patch_pitch(self) -> int:
        """Elements from one row to the next of what the expand GEMM writes."""

    @property
    @abstractmethod
    def shared(self) -> int:
        """Bytes of shared memory of a thread block."""

    @property
    def item(self) -> int:
        """Bytes of an operand element."""
        return self.block.item

    @property
    def step(self) -> int:
        """k of an instruction."""
        return STEP // self.item

    @property
    def lanes(self) -> int:
        """Elements of a 32-bit word."""
        return WORD // self.item

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * math.prod(self.expand)

    # -- fragments ----------------------------------------------------------------------------------------------
    @property
    def m_fragments_in(self) -> int:
        """Fragments of 16 input rows per warp."""
        return -(-self.pixels // (ROW_TILE * self.expand[0]))

    @property
    def m_fragments_out(self) -> int:
        """Fragments of 16 output rows per warp."""
        return -(-self.outputs // (ROW_TILE * self.project[0]))

    @property
    def n_per_warp(self) -> int:
        """Output columns per warp."""
        return -(-self.block.out_channels // (COLUMN_TILE * self.project[1])) * COLUMN_TILE

    @property
    def padded_in_channels(self) -> int:
        """K of the expand GEMM, zero padding included."""
        return -(-self.block.in_channels // self.step) * self.step

    @property
    def channel_chunks(self) -> int:
        """Number of chunks."""
        return -(-self.block.expanded_channels // self.chunk)

    @property
    def words(self) -> int:
        """32-bit words of a chunk of hidden columns."""
        return self.chunk * self.item // WORD

    @property
    def input_registers(self) -> int:
        """Registers of a lane for a warp's input rows."""
        return self.m_fragments_in * self.padded_in_channels * self.item // 8

    # -- shared memory --------------------------------------------------------------------------------------------
    @property
    def input_pitch(self) -> int:
        """Elements from one input row to the next: 16 bytes of padding."""
        return self.padded_in_channels + PADDING // self.item

    @property
    def weight_stages(self) -> int:
        """Pipeline stages of weight chunks."""
        return min(2, self.channel_chunks)

    @cached_property
    def operand_bytes(self) -> tuple[int, int, int]:
        """Bytes of the input, and of a chunk of either GEMM's weights."""
        first, second = self.block.weights
        elements = (
            0 if first is None else self.m_fragments_in * self.expand[0] * ROW_TILE * self.input_pitch,
            0 if first is None else _weights(first, self.chunk, self.padded_in_channels),
            _weights(second, self.n_per_warp * self.project[1], self.chunk),
        )
        down, up, back = (aligned(self.item * count) for count in elements)
        return down, up, back

    @property
    def weights(self) -> int:
        """Bytes of both GEMMs' weights in shared memory, all stages."""
        return self.weight_stages * sum(self.operand_bytes[1:])


def aligned(size: int) -> int:
    """Bytes of an array in shared memory, padding included."""
    return -(-size // ALIGNED) * ALIGNED


def _weights(side: GemmOperand, size: int, terms: int) -> int:
    """Elements of a tile of weights, as `codegen.cuda.gemm.smem_tile` lays it out."""
    lines, length = (size, terms) if side.along_terms else (terms, size)
    words = length * side.item // WORD
    apart = (4 - words) % 8 if side.along_terms or side.item < WORD else (8 - words) % BANKS
    return lines * (length + apart * WORD // side.item)
