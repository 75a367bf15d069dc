"""Column sums of a block's output tile in the GEMM epilogue: registers, ``shfl.bfly``, shared memory, one partial each.

A lane adds the rows of its accumulator fragment, the eight lanes of a column combine by ``shfl.sync.bfly``, the warps
along the rows through shared memory, in a fixed order.  One value per column and tile goes to global memory.  Of
statistics the tile's mean comes first; then every lane adds the squared distances of its values, still in registers,
from it: partial results are as accurate as two passes (`lower.reduction.welford`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jcuts.codegen.cuda.gemm.column_sums import TilePartials, tile_partials
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import read_word, shuffle, write_word
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower.patterns.column_sums import TYPE

WORD = ITEM_SIZE[TYPE]
SAME_COLUMN = (4, 8, 16)
"""Distances of the lanes that have the same columns of an accumulator fragment."""
ROW_TILE = "row_tile"
COLUMN = "column"


class ReducingKernel(Protocol):
    """What column sums need of a GEMM kernel (`mma_mainloop.MmaKernel`).

    Attributes:
        shape: its tile. thread, lane: numbers of the thread. column_warp: first column of its warp in the tile.
    """

    builder: GpuBuilder
    program: Program
    shape: Any
    thread: L.Value
    lane: L.Value
    column_warp: L.Value

    def row_slot(self) -> L.Value:
        """Number of the warp among those along the rows."""
        ...

    def column_sums_place(self) -> tuple[L.Value, bool]:
        """Shared memory of column sums, and whether operands may lie there."""
        ...


@dataclass(frozen=True)
class BlockPlace:
    """Where a thread stands in its block's tile.

    Attributes:
        thread, threads: its number, and how many a block has. lane: of its warp.
        slot, slots: number of its warp among those along the rows, and how many there are.
        column: first column of its warp in the tile.
        rows, columns: of the tile. extents: rows and columns of the whole GEMM.
        shared: shared memory for ``4 * planes * slots * columns`` bytes, a plane for every partial result.
        busy: whether others may still use that memory.
    """

    thread: L.Value
    threads: int
    lane: L.Value
    slot: L.Value
    slots: int
    column: L.Value
    rows: int
    columns: int
    extents: tuple[int, int]
    shared: L.Value
    busy: bool

    @classmethod
    def of(cls, kernel: ReducingKernel) -> BlockPlace:
        """The place of a kernel's thread."""
        shape, (shared, busy) = kernel.shape, kernel.column_sums_place()
        return cls(
            kernel.thread,
            shape.threads,
            kernel.lane,
            kernel.row_slot(),
            shape.warps[0],
            kernel.column_warp,
            shape.left.size,
            shape.right.size,
            (shape.left.extent, shape.right.extent),
            shared,
            busy,
        )


@dataclass
class ColumnReducer:
    """Collects the summed values of one thread, and reduces those of the block."""

    builder: GpuBuilder
    partials: TilePartials
    place: BlockPlace
    sums: list[dict[int, L.Value]]
    points: dict[int, list[tuple[L.Value, L.Value | None]]] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: ReducingKernel) -> ColumnReducer | None:
        """Of the column sums of a kernel's program, where it has some."""
        partials = tile_partials(kernel.program)
        if partials is None:
            return None
        return cls(kernel.builder, partials, BlockPlace.of(kernel), [{} for _ in partials.kept])

    def add(self, which: int, first: int, values: Sequence[L.Value], live: L.Value | None) -> None:
        """Adds a row's neighbouring values of a lane; where ``live`` fails there is no such row (or column)."""
        for column, value in enumerate(values, first):
            mine = value if live is None else self.builder.select(live, value, L.F32(0.0))
            before = self.sums[which].get(column)
            self.sums[which][column] = mine if before is None else self.builder.fadd(before, mine)
            if self.partials.moments:
                self.points.setdefault(column, []).append((value, live))

    def finish(self, frame: M.Frame, tile_row: L.Value, tile_column: L.Value, lane_column: L.Value) -> None:
        """Reduces over the block's rows and stores a partial result per column.

        Args: tile_row, tile_column: first ones of the tile; lane_column: the lane's first one in its warp's tile.
        """
        builder, place = self.builder, self.place
        lane_column = builder.add(place.column, lane_column)
        if place.busy:
            ptx_mma.cp_async_wait(builder, 0)
            ptx_mma.barrier(builder)
        for plane, sums in enumerate(self.sums):
            self._write(plane, sums, lane_column)
        ptx_mma.barrier(builder)
        left = builder.sub(L.I32(place.extents[0]), tile_row)
        rows = builder.select(builder.icmp_signed("<", left, L.I32(place.rows)), left, L.I32(place.rows))
        count = builder.uitofp(rows, L.F32)
        if self.partials.moments:
            self._write(1, self._deviations(lane_column, count), lane_column)
            ptx_mma.barrier(builder)
        self._store(frame, builder.udiv(tile_row, L.I32(place.rows)), tile_column, count)

    def _deviations(self, lane_column: L.Value, count: L.Value) -> dict[int, L.Value]:
        """Sums of the squared distances of the lane's values from the mean of the tile's rows."""
        builder = self.builder
        found: dict[int, L.Value] = {}
        for column, points in self.points.items():
            mean = builder.fdiv(self._total(0, lane_column, column), count)
            total: L.Value = L.F32(0.0)
            for value, live in points:
                gone = builder.fsub(value, mean)
                gone = gone if live is None else builder.select(live, gone, L.F32(0.0))
                total = L.fma(builder, gone, gone, total)
            found[column] = total
        return found

    # -- shared memory --------------------------------------------------------------------------------------------
    def _write(self, plane: int, sums: Mapping[int, L.Value], lane_column: L.Value) -> None:
        """Sums of the warp's rows to its line of shared memory."""
        builder, place = self.builder, self.place
        totals = dict(sums)
        for distance in SAME_COLUMN:
            totals = {c: builder.fadd(v, shuffle(builder, v, distance)) for c, v in totals.items()}
        word = builder.add(builder.mul(place.slot, L.I32(place.columns)), lane_column)
        where = builder.add(place.shared, builder.mul(word, L.I32(WORD)))
        with builder.if_then(builder.icmp_unsigned("<", place.lane, L.I32(min(SAME_COLUMN)))):
            for column, total in totals.items():
                write_word(builder, where, WORD * (plane * place.slots * place.columns + column), total, WORD)

    def _total(self, plane: int, column: L.Value, offset: int = 0) -> L.Value:
        """A column's sum over all warps along the rows, in their order."""
        builder, place = self.builder, self.place
        where = builder.add(place.shared, builder.mul(column, L.I32(WORD)))
        total: L.Value | None = None
        for slot in range(place.slots):
            word = (plane * place.slots + slot) * place.columns + offset
            more = read_word(builder, where, WORD * word, L.F32, WORD)
            total = more if total is None else builder.fadd(total, more)
        assert total is not None
        return total

    def _store(self, frame: M.Frame, row_tile: L.Value, tile_column: L.Value, count: L.Value) -> None:
        """A thread per column of the tile stores its partial results."""
        builder, place = self.builder, self.place
        extent = place.extents[1]
        for base in range(0, place.columns, place.threads):
            mine = builder.add(place.thread, L.I32(base)) if base else place.thread
            column = builder.add(tile_column, mine)
            inside = builder.icmp_signed("<", column, L.I32(extent))
            if place.columns - base < place.threads:
                inside = builder.and_(inside, builder.icmp_signed("<", mine, L.I32(place.columns)))
            with builder.if_then(inside):
                here = M.Frame(
                    builder,
                    {ROW_TILE: row_tile, COLUMN: column},
                    frame.pointers,
                    {ROW_TILE: -(-place.extents[0] // place.rows), COLUMN: extent},
                    {},
                )
                address = Index.axis(ROW_TILE) * extent + Index.axis(COLUMN)
                for plane, part in enumerate(self.partials.parts):
                    total = self._total(plane, mine)
                    if self.partials.moments and plane == 0:
                        total = builder.fdiv(total, count)
                    M.store(here, part, WORD, address, [builder.bitcast(total, L.I32)])
