"""Products of a stage: a column reduction whose totals are spread over the threads of the block, one point each.

What a point's epilogue reads besides its sums is loaded before them.  Others have written it in this launch, so nothing
is read by ``ld.global.nc``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant
from jcuts.codegen.cuda.graph.accumulators import acc_types
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.mma import barrier
from jcuts.codegen.cuda.ptx.shuffle import allocate_static, read_word, write_word
from jcuts.codegen.cuda.recurrence.tile import FIRST, digits
from jcuts.codegen.cuda.reduction.column import ColumnReductionKernel, ColumnShape, new_slots
from jcuts.codegen.cuda.window.sliding_window import SlidingWindowEmitter
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Phase, Program
from jcuts.kernel_ir.register_tiling import Extent, points

PARTIAL = 40 << 10
"""Bytes of shared memory that partial sums of a block may take."""


class StageColumns(ColumnReductionKernel):
    """Emits one thread of a stage's products."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: ColumnShape,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: Mapping[str, L.Value],
    ) -> None:
        """Args: as of `TileKernel`; shared: addresses (i32) of buffers that lie in shared memory."""
        super().__init__(builder, program, tile, buffers, pointers, integers, symbol, L.I32(0))
        self.in_shared = shared
        self.outer[FIRST] = integers[self.lane.name]
        self.rows = [a for a in self.phase.axes[:-1] if a.unroll > 1]
        self.count = math.prod(a.extent for a in self.rows)
        if self.count * tile.across > tile.threads:
            raise CompileRejected(f"{program.name}: {self.count} rows of {tile.across} columns, {tile.threads} threads")

    def emit(self) -> None:
        """Everything that the thread does; what its point needs besides sums is on its way while these are made."""
        self.end = self._point()
        self.end.load_ahead()
        super().emit()

    def _points(self, phase: Phase, variables: Mapping[str, L.Value]) -> SlidingWindowEmitter:
        body = super()._points(phase, variables)
        body.in_place, body.shared = True, self.in_shared
        return body

    def _point(self) -> RegisterTileEmitter:
        """The emitter of this thread's point: threads along the columns are neighbours, then come the rows."""
        builder, across = self.builder, L.I32(self.shape.across)
        count = L.I32(self.count * self.shape.across)
        self.mine = builder.select(builder.icmp_signed("<", self.thread, count), self.thread, L.I32(0))
        column = builder.add(self.first, builder.urem(self.mine, across))
        self.row = builder.udiv(self.mine, across)
        variables = {**self.outer, **digits(builder, self.row, self.rows)}
        live, last = builder.icmp_signed("<", self.thread, count), L.I32(self.lane.extent - 1)
        if self.lane.extent % self.shape.across:
            inside = builder.icmp_signed("<=", column, last)
            live, column = builder.and_(live, inside), builder.select(inside, column, last)
        variables[self.lane.name] = column
        one = TileVariant(tuple((a.name, 1) for a in self.phase.axes))
        end = RegisterTileEmitter(builder, self.phase, one, self.buffers, self.pointers, variables, {})
        end.live, end.in_place, end.shared = live, True, self.in_shared
        return end

    def _block_totals(self, body: RegisterTileEmitter) -> tuple[RegisterTileEmitter, L.Value]:
        builder, accs, across = self.builder, self.phase.accs, self.shape.across
        distances = self._shuffle_distances()
        lines, line, writes = self._partial_line(distances)
        kinds = [acc_types(acc) for acc in accs]
        size = max(max(4, L.bit_width(kind) // 8) for each in kinds for kind in each)
        line_bytes, most = across * size, max(map(len, kinds))
        slot = lines * line_bytes  # of one value of one row
        total = len(accs) * most * self.count * slot
        if total > PARTIAL:
            raise CompileRejected(f"{self.program.name}: {total} bytes of partial sums", resource="shared memory")
        place = allocate_static(builder, f"{self.symbol}_columns", total)
        there = builder.add(place, builder.mul(builder.add(builder.mul(line, L.I32(across)), self.x), L.I32(size)))
        tile = [Extent(a.name, a.unroll) for a in self.phase.axes]
        for number in range(len(accs)):
            for row, point in enumerate(points(tile)):
                for i, value in enumerate(self._row_total(body, number, point, 0, distances)):
                    at = ((number * most + i) * self.count + row) * slot
                    write_word(builder, there, at, value, size, writes)
        barrier(builder)
        column = builder.mul(builder.urem(self.mine, L.I32(across)), L.I32(size))
        base = builder.add(builder.add(place, column), builder.mul(self.row, L.I32(slot)))
        (alone,) = points([Extent(a.name, 1) for a in self.phase.axes])
        for number, acc in enumerate(accs):
            found: tuple[L.Value, ...] = ()
            for k in range(lines):
                at = [(number * most + i) * self.count * slot + k * line_bytes for i in range(len(kinds[number]))]
                part = tuple(read_word(builder, base, a, kind, size) for a, kind in zip(at, kinds[number], strict=True))
                found = E.combine(builder, acc.combine, acc.dtype, found, part) if found else part
            self.end.slots[number, alone, 0] = new_slots(builder, found)
        return self.end, self.mine
