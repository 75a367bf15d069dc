"""Residual (source matrix C) loads through the pipeline stages of the warp-specialised kernel.

Behind the last k-tile the producer warps go on with the residual: one stage for each consumer warpgroup, filled while
the warpgroups still multiply, or run the epilogue of the tile before.  So the epilogue does not wait for memory, and
producers are as many stages ahead in the epilogue as in the mainloop.

Rows of a warpgroup's results follow each other without gaps.  In odd ones every two pieces of 64 bytes are exchanged
(swizzle): the lanes of an access read 64 bytes of an even row and of the next, without bank conflicts.
"""

from __future__ import annotations

from dataclasses import replace

from jcuts.codegen.cuda.gemm.epilogue_bulk_copy import EpilogueStaging
from jcuts.codegen.cuda.gemm.smem_tile import SmemTile
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import COLUMNS, ROWS
from jcuts.schedule.gpu.gemm.epilogue_smem import PIECE, StagedEpilogue, StagedMatrix

SWIZZLED = 64
"""The bit of an address that depends on the row."""


def _swizzle(builder: GpuBuilder, row: L.Value) -> L.Value:
    """XOR mask of byte offsets in a row (swizzle)."""
    return builder.mul(builder.and_(row, L.I32(1)), L.I32(SWIZZLED))


class ResidualLoader:
    """Fills stages with a block's rows of the residual, as one producer thread."""

    def __init__(
        self,
        frame: M.Frame,
        kept: StagedMatrix,
        tiles: tuple[SmemTile, SmemTile],
        threads: int,
        thread: L.Value,
        shared: L.Value,
    ) -> None:
        """Args: frame: at the block's first row and column; shared: address of the first stage."""
        builder = self.builder = frame.builder
        self.frame, self.kept, self.tiles = frame, kept, tiles
        along = tiles[1].size * kept.item // PIECE
        self.abreast = threads // along
        self.line, piece = builder.udiv(thread, L.I32(along)), builder.urem(thread, L.I32(along))
        turned = builder.xor(builder.mul(piece, L.I32(PIECE)), _swizzle(builder, self.line))
        self.into = builder.add(builder.add(shared, builder.mul(self.line, L.I32(kept.pitch))), turned)
        column = builder.add(frame.variables[COLUMNS], builder.mul(piece, L.I32(PIECE // kept.item)))
        self.column = self._inside(1, column, PIECE // kept.item)
        self.source = self._source(0)

    def start(self, group: int, stage: L.Value) -> None:
        """Starts the copies of a warpgroup's rows. Args: stage: byte offset from the first stage."""
        builder, rows, step = self.builder, self.tiles[0], self.kept.index.stride(ROWS)
        into = builder.add(self.into, stage)
        for first in range(0, rows.warp, self.abreast):
            down = group * rows.warp + first
            if rows.extent % rows.size or step is None:
                source, far = self._source(down), 0
            else:
                source, far = self.source, down * step * self.kept.item
            ptx_mma.cp_async(builder, (into, first * self.kept.pitch), (source, far), PIECE, None)

    def _source(self, down: int) -> L.Value:
        """Global address of this thread's piece of its row, a number of rows further, clamped to the last row."""
        builder = self.builder
        row = builder.add(self.frame.variables[ROWS], builder.add(self.line, L.I32(down)))
        variables = {**self.frame.variables, ROWS: self._inside(0, row, 1), COLUMNS: self.column}
        frame = replace(self.frame, variables=variables, cache={})
        place, constant = M.address(frame, self.kept.buffer, self.kept.item, self.kept.index)
        return builder.add(place, L.I64(constant)) if constant else place

    def _inside(self, number: int, place: L.Value, count: int) -> L.Value:
        """A row (0), or first column of a few (1), clamped to an existing one; results of others are never stored."""
        builder, tile = self.builder, self.tiles[number]
        if tile.extent % tile.size == 0:
            return place
        last = L.I32(tile.extent - count)
        return builder.select(builder.icmp_signed("<", place, last), place, last)


class ResidualReader(EpilogueStaging):
    """Reads a warpgroup's rows of the residual from their stage."""

    def __init__(
        self, frame: M.Frame, kept: StagedMatrix, tiles: tuple[SmemTile, SmemTile], stage: L.Value, first: L.Value
    ) -> None:
        """Args: stage: its address; first: row of the block's tile where the group's rows begin."""
        super().__init__(frame, StagedEpilogue((kept,)), tiles, stage, L.I32(0))
        self.first = first

    def bind_lane(self, row: L.Value, column: L.Value, step: int) -> None:
        builder, (kept,) = self.builder, self.held.loaded
        self.step = step
        row = builder.sub(builder.add(self.warp[0], row), self.first)
        column = builder.add(self.warp[1], column)
        self.row = builder.add(self.shared, builder.mul(row, L.I32(kept.pitch)))
        self.column, self.turn = builder.mul(column, L.I32(kept.item)), _swizzle(builder, row)
        self.places: dict[int, L.Value] = {}

    def _where(self, kept: StagedMatrix, down: int, byte: int) -> tuple[L.Value, int]:
        builder, turned = self.builder, byte & SWIZZLED
        if turned not in self.places:  # rows further down by 8 are turned alike
            inside = builder.xor(builder.add(self.column, L.I32(turned)), self.turn)
            self.places[turned] = builder.add(self.row, inside)
        return self.places[turned], down * kept.pitch + byte - turned
