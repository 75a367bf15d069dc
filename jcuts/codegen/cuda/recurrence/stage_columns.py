"""Products of a stage: a column reduction whose totals are spread over the threads of the block, one point each.

What a point's epilogue reads besides its sums is loaded before them.  Others have written it in this launch, so nothing
is read by ``ld.global.nc``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant
from jcuts.codegen.cuda.graph.accumulators import acc_types
from jcuts.codegen.cuda.graph.node_emitter import Emitter
from jcuts.codegen.cuda.graph.predication import drop_guard, restrict_to_guard
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.global_memory import Flagged
from jcuts.codegen.cuda.ptx.mma import barrier
from jcuts.codegen.cuda.ptx.shuffle import allocate_static, read_word, write_word
from jcuts.codegen.cuda.recurrence.tile import FIRST, digits
from jcuts.codegen.cuda.reduction.column import TERM, ColumnReductionKernel, ColumnShape, new_slots
from jcuts.codegen.cuda.window.sliding_window import SlidingWindowEmitter
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Phase, Program
from jcuts.kernel_ir.register_tiling import Extent, body_tile, points
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.recurrence.residency import PARTIAL


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
        self.flagged: Mapping[str, Flagged] = {}
        """Carried values that the step writes for other blocks."""
        self.held: dict[bool, Mapping[int, E.Lanes]] = {}
        """Operands in registers, by node: of whole trips and of the last terms."""
        self.outer[FIRST] = integers[self.lane.name]
        self.rows = [a for a in self.phase.axes[:-1] if a.unroll > 1]
        self.count = math.prod(a.extent for a in self.rows)
        if self.count * tile.across > tile.threads:
            raise CompileRejected(f"{program.name}: {self.count} rows of {tile.across} columns, {tile.threads} threads")

    def hold(self, operands: Collection[str]) -> None:
        """Loads operands that are the same in every step into registers, for all terms of the thread.

        Raises: CompileRejected: the thread's terms are several trips of a loop.
        """
        shape, step = self.shape, self.shape.deep * self.shape.flight
        if self.share >= 2 * step or shape.threads % shape.across:
            raise CompileRejected(f"{self.program.name}: operands of {self.share} terms in registers")
        variables = self._column_variables()
        if self.share >= step:
            self._hold(operands, drop_guard(self.phase, self.guard), variables, 0, shape.flight, guarded=False)
        if self.share % step:
            pieces, first = -(-(self.share % step) // shape.deep), self.share // step * step
            phase = restrict_to_guard(self.phase, self.guard)
            self._hold(operands, phase, variables, first, pieces, guarded=True)

    def _hold(
        self,
        operands: Collection[str],
        phase: Phase,
        variables: Mapping[str, L.Value],
        first: int,
        pieces: int,
        *,
        guarded: bool,
    ) -> None:
        body = self._points(phase, variables)
        fixed, bases, reach = self._extents(body, L.I32(first), pieces, guarded=guarded)
        frame = body._frame(bases, reach, {TERM: 1})
        graph = body_tile(phase, body.axes, [fixed[r.name] for r in phase.reds], frame.ranges).graph
        emitter = Emitter(frame, graph, self.buffers)
        loads = [n for n, node in enumerate(graph.nodes) if node.op == "load" and node.buffer in operands]
        loads = [n for n in loads if STEP not in graph.nodes[n].index.axes()]  # type: ignore[union-attr]
        emitter.vectorize_loads(loads)
        self.held[guarded] = dict(zip(loads, emitter.emit(loads), strict=True))

    def _terms(self, body: SlidingWindowEmitter, base: L.Value, pieces: int, *, guarded: bool) -> None:
        body.given = self.held.get(guarded, {})
        super()._terms(body, base, pieces, guarded=guarded)

    def step(self, number: L.Value) -> None:
        """The products of a step and what is computed from them."""
        self.outer[STEP] = number
        self.emit()

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
        end.live, end.in_place, end.shared, end.flagged = live, True, self.in_shared, self.flagged
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
