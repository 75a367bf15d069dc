"""Hidden tile of the back-to-back GEMM: XOR-swizzled shared memory that the first GEMM's fragments go through.

16-byte piece p of row r lies at piece p ^ reversed(r % 8) of its line, whose pitch is a multiple of 128 bytes (all
banks).  ``reversed`` exchanges the first and the last of three bits: then ``ldmatrix`` (8 rows), stores of two words
(4 rows) and of four words (2 rows) all meet every bank once.
"""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.codegen.cuda.b2b_gemm.expand_gemm import EIGHT
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.schedule.gpu.b2b_gemm.pair_tile import ALIGNED, ROW_TILE, STEP
from jcuts.schedule.gpu.b2b_gemm.tile import B2bGemmTile

PIECE = 4
"""log2 of the bytes of a piece."""


class HiddenTile:
    """The chunk of hidden columns between both GEMMs, one tile or two that take turns."""

    def __init__(self, builder: GpuBuilder, shape: B2bGemmTile, lane: L.Value, start: L.Value) -> None:
        """Args: start: address of the first tile in shared memory."""
        self.builder, self.shape, self.lane, self.start = builder, shape, lane, start
        self.pitch = shape.patch_pitch * shape.item

    def write_to(self, row: L.Value, column: L.Value) -> L.Value:
        """Address of this lane's first store. Args: row, column: of the lane, in the chunk."""
        builder = self.builder
        line = builder.mul(row, L.I32(self.pitch))
        place = builder.add(builder.add(self.start, line), builder.mul(column, L.I32(self.shape.item)))
        return builder.xor(place, self._swizzle(builder.lshr(self.lane, L.I32(2))))

    def read_from(self, row: L.Value) -> L.Value:
        """``ldmatrix`` address of this lane in the first A fragment. Args: row: of the warp."""
        builder = self.builder
        line = builder.mul(builder.add(row, builder.and_(self.lane, L.I32(15))), L.I32(self.pitch))
        half = builder.shl(builder.lshr(self.lane, L.I32(4)), L.I32(PIECE))
        place = builder.add(builder.add(self.start, line), half)
        return builder.xor(place, self._swizzle(builder.and_(self.lane, L.I32(7))))

    def write(self, place: L.Value, number: int, column: int, words: Sequence[L.Value], odd: L.Value) -> None:
        """Stores neighbouring columns of a row. Args: number: of its 8 rows in the warp; column: offset in elements."""
        near, far = self._split(place, column * self.shape.item, odd)
        ptx_mma.write_words(self.builder, near, far + EIGHT * number * self.pitch, words)

    def read(self, place: L.Value, fragment: int, step: int, odd: L.Value) -> list[L.Value]:
        """An A fragment of 16 rows, at a step along K."""
        near, far = self._split(place, step * STEP, odd)
        return ptx_mma.ldmatrix_x4(self.builder, near, far + fragment * ROW_TILE * self.pitch)

    def _split(self, place: L.Value, size: int, odd: L.Value) -> tuple[L.Value, int]:
        """An address and a constant so many bytes along a swizzled line: the address has none of these bits."""
        builder, near = self.builder, size % ALIGNED
        place = builder.xor(place, L.I32(near)) if near else place
        if self.shape.weight_stages > 1:
            place = builder.add(place, builder.mul(odd, L.I32(self.shape.hidden_bytes)))
        return place, size - near

    def _swizzle(self, row: L.Value) -> L.Value:
        """What the bits of a piece's number in rows of this place of eight are changed by."""
        builder = self.builder
        first, last = builder.shl(builder.and_(row, L.I32(1)), L.I32(2)), builder.lshr(row, L.I32(2))
        bits = builder.or_(builder.or_(first, last), builder.and_(row, L.I32(2)))
        return builder.shl(bits, L.I32(PIECE))
