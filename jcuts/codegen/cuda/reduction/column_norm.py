"""Softmax, norms and statistics along a dimension that is not the last, several phases in one kernel.

This is the *column_rows* form.  A block takes neighbouring columns and all their points: ``across`` threads with
``vector`` columns each lie along the last axis, ``deep`` of them divide the points of a column.  After every reduction
all threads of a column have its total, so all phases run in one kernel, as in `reduction.row`; few points per thread
stay in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.graph.accumulators import acc_start, acc_types, accumulate
from jcuts.codegen.cuda.graph.node_emitter import Emitter, store_all
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP, allocate_static, read_word, shuffle, write_word
from jcuts.codegen.cuda.reduction.row import K, RowReductionKernel, RowReductionTile
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard
from jcuts.kernel_ir.program import Axis, Buffer, Phase, Program

STATIC = 48 << 10  # bytes of shared memory that a kernel has without asking for more

Totals = dict[tuple[int, int], tuple[L.Value, ...]]  # (accumulator, column) -> its values
Merge = Callable[[int, tuple[L.Value, ...], tuple[L.Value, ...]], tuple[L.Value, ...]]


@dataclass(frozen=True)
class ColumnRowsShape:
    """Mapping of a thread block onto columns and their points.

    Attributes:
        across: threads along the last axis.
        deep: threads that share a column.
        vector: columns of a thread.
        chunks: points that a thread loads at once; a column's points stay in registers if these are all.
        groups: groups of points over the grid (one-pass statistics alone).
    """

    across: int
    deep: int
    vector: int
    chunks: int
    groups: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.across * self.deep

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.across * self.vector


def outer_axes(program: Program) -> tuple[Axis, ...]:
    """The axes that number the columns, the lanes' axis last."""
    return next(p for p in program.phases if p.reds).axes


def column_rows_shape(program: Program) -> ColumnRowsShape:
    """The block shape of a schedule. Raises CompileRejected where it does not fit the program."""
    params = {k: int(str(v)) for k, v in program.params if k != "cuda"}
    shape = ColumnRowsShape(params["across"], params["threads"] // params["across"], params["vector"], params["chunks"])
    lane = outer_axes(program)[-1]
    if shape.threads != params["threads"] or shape.threads % WARP or lane.extent % shape.vector:
        raise CompileRejected(f"{program.name}: {params} does not fit {lane.extent} columns")
    if shape.columns > shape.threads:
        raise CompileRejected(f"{program.name}: {shape.columns} columns for {shape.threads} threads")
    return shape


class ColumnSoftmaxKernel(RowReductionKernel):
    """Emits one thread of softmax, norms and statistics along columns."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: ColumnRowsShape,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.program, self.buffers, self.pointers = builder, program, buffers, pointers
        self.symbol, self.layout = symbol, tile
        self.shape = RowReductionTile(tile.deep, tile.threads, 1, tile.chunks)
        axes = outer_axes(program)
        self.lane_axis = axes[-1]
        self.length = _length(program)
        self.thread = integers["thread"]
        self.x = builder.urem(self.thread, L.I32(tile.across))
        self.lane = builder.udiv(self.thread, L.I32(tile.across))  # the thread's place among those of its columns
        first = builder.mul(integers[self.lane_axis.name], L.I32(tile.columns))
        mine = builder.add(first, builder.mul(self.x, L.I32(tile.vector)))
        self.first = first
        last = L.I32(self.lane_axis.extent - tile.vector)
        # Threads beyond the last column follow along on it (they take part in barriers) and store nothing.
        inside = builder.icmp_signed("<=", mine, last)
        self.live = None if self.lane_axis.extent % tile.columns == 0 else inside
        self.variables = {a.name: integers[a.name] for a in axes[:-1]}
        self.variables[self.lane_axis.name] = mine if self.live is None else builder.select(inside, mine, last)
        self.outer = {a.name: a.extent for a in axes}
        self.kept, self.scalars = {}, {}
        self.step = tile.deep
        self.pieces = -(-self.length // self.step)
        self.resident = self.pieces <= tile.chunks
        self.reductions = self.shared = 0
        self.graph = Graph()
        self.emitter = Emitter(self._frame(self._thread_start(), self.step), self.graph, buffers)

    def _frame(self, k: L.Value, k_range: int) -> M.Frame:
        ranges = {**self.outer, self.lane_axis.name: self.lane_axis.extent - self.layout.vector + 1, K: k_range}
        multiples = {self.lane_axis.name: self.layout.vector}
        return M.Frame(self.builder, {**self.variables, K: k}, self.pointers, ranges, multiples, live=self.live)

    def _column(self) -> dict[str, Index]:
        return {self.lane_axis.name: Index.axis(self.lane_axis.name) + self.at} if self.at else {}

    # -- phases -------------------------------------------------------------------------------------------------
    def _reduce_phase(self, phase: Phase) -> None:
        slots: dict[tuple[int, int], list[L.Value]] = {}
        for number, acc in enumerate(phase.accs):
            for column in range(self.layout.vector):
                slots[number, column] = [
                    self._slot(kind, start) for kind, start in zip(acc_types(acc), acc_start(acc, False), strict=True)
                ]
        wanted = [value for acc in phase.accs for value in acc.values]
        with self._iterations() as (emitter, offsets, tail):
            terms: list[tuple[int, int, int, tuple[int, ...]]] = []
            for offset in offsets:
                for column in range(self.layout.vector):
                    self.at = column
                    values = iter(self._copy(emitter, phase, phase.body, wanted, offset, tail, {}))
                    for number, acc in enumerate(phase.accs):
                        terms.append((offset, column, number, tuple(next(values) for _ in acc.values)))
            emitter.vectorize_loads(v for _, _, _, values in terms for v in values)
            for offset, column, number, values in terms:
                acc = phase.accs[number]
                values = self._mask_tail(emitter, acc, values, offset) if tail else values
                accumulate(emitter, acc, slots[number, column], values)
        found = {key: tuple(self.builder.load(s) for s in made) for key, made in slots.items()}
        self._column_results(phase, self._totals(phase, found))
        self.reductions += 1

    def _column_results(self, phase: Phase, totals: Totals) -> None:
        """The exit graph of every column: all its threads compute it, the first one stores."""
        emitter = self.emitter if self.resident else Emitter(self._frame(L.I32(0), 1), Graph(), self.buffers)
        rows, numbers = [], {}
        for column in range(self.layout.vector):
            self.at = column
            accs = {n: E.Lanes(totals[n, column][-1], a.index_dtype or a.dtype) for n, a in enumerate(phase.accs)}
            made = self._copy(emitter, phase, phase.exit, [s.value for s in phase.stores], None, False, accs)
            numbers[column] = made
        emitter.vectorize_loads(n for made in numbers.values() for n in made)
        for column, made in numbers.items():
            self.at = column
            for store, number in zip(phase.stores, made, strict=True):
                if self.buffers[store.buffer].role == "local":
                    self.scalars[store.buffer, self.at] = emitter.emit([number])[0]
                else:
                    address = store.address.substitute(self._column(), emitter.frame.ranges)
                    rows.append((store.buffer, address, number))
        self._store(emitter, rows, self.builder.icmp_signed("==", self.lane, L.I32(0)))

    def _map_phase(self, phase: Phase) -> None:
        with self._iterations() as (emitter, offsets, tail):
            pieces = []
            for offset in offsets:
                rows = []
                for column in range(self.layout.vector):
                    self.at = column
                    places = {**self._column(), **self._places(phase, offset, emitter.frame.ranges)}
                    values = [s.value for s in phase.stores]
                    numbers = self._copy(emitter, phase, phase.exit, values, offset, tail, {})
                    rows += [
                        (s.buffer, s.address.substitute(places, emitter.frame.ranges), n)
                        for s, n in zip(phase.stores, numbers, strict=True)
                    ]
                pieces.append((offset, rows))
            emitter.vectorize_loads(n for _, rows in pieces for _, _, n in rows)
            for offset, rows in pieces:
                guard = Guard(Index.axis(K) + offset, None, self.length - 1)
                self._store(emitter, rows, M.condition(emitter.frame, (guard,)) if tail else None)

    def _store(self, emitter: Emitter, rows: list[tuple[str, Index, int]], where: L.Value | None) -> None:
        frame = emitter.frame
        saved = frame.live
        if where is not None:
            frame.live = where if saved is None else self.builder.and_(saved, where)
        store_all(emitter, rows)
        frame.live = saved

    # -- across threads -----------------------------------------------------------------------------------------
    def _totals(self, phase: Phase, found: Totals) -> Totals:
        """Combines the partial results of all threads of a column; each gets the total."""

        def merge(number: int, a: tuple[L.Value, ...], b: tuple[L.Value, ...]) -> tuple[L.Value, ...]:
            acc = phase.accs[number]
            return E.combine(self.builder, acc.combine, acc.dtype, a, b)

        return self._team_reduce([acc_types(acc) for acc in phase.accs], found, merge)

    def _team_reduce(self, kinds: Sequence[Sequence[L.Type]], found: Totals, merge: Merge) -> Totals:
        """Combines threads' values. ``kinds``: types of every accumulator's values; ``merge(number, a, b)`` combines
        two threads' values of one.
        """
        builder, layout = self.builder, self.layout
        warps = layout.across < WARP and WARP % layout.across == 0
        if warps:
            found = {key: self._in_warp(key[0], values, merge) for key, values in found.items()}
        rows = layout.threads // WARP if warps else layout.deep
        if rows == 1:
            return found
        line = builder.udiv(self.thread, L.I32(WARP)) if warps else self.lane
        inside = builder.urem(self.thread, L.I32(WARP))
        writes = builder.icmp_signed("<", inside, L.I32(layout.across)) if warps else None
        parts = [(number, i, kind) for number, types in enumerate(kinds) for i, kind in enumerate(types)]
        size = max(max(4, L.bit_width(kind) // 8) for _, _, kind in parts)
        plane = rows * layout.columns * size
        self.shared += (plane + layout.columns * size) * len(parts)
        if self.shared > STATIC:
            message = f"{self.program.name}: {self.shared} bytes of shared memory, there are {STATIC}"
            raise CompileRejected(message, resource="shared memory")
        place = allocate_static(builder, f"{self.symbol}_rows{self.reductions}", plane * len(parts))
        ends = allocate_static(builder, f"{self.symbol}_ends{self.reductions}", layout.columns * size * len(parts))
        there = builder.add(builder.mul(line, L.I32(layout.columns)), self.x)
        there = builder.add(place, builder.mul(there, L.I32(size)))
        for k, (number, i, _) in enumerate(parts):
            for column in range(layout.vector):
                at = k * plane + column * layout.across * size
                write_word(builder, there, at, found[number, column][i], size, writes)
        asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
        columns = L.I32(layout.columns)
        sums = builder.icmp_signed("<", self.thread, columns)
        mine = builder.select(sums, self.thread, L.I32(0))
        base = builder.mul(mine, L.I32(size))
        lines = [
            tuple(
                read_word(builder, builder.add(place, base), k * plane + row * layout.columns * size, kind, size)
                for k, (_, _, kind) in enumerate(parts)
            )
            for row in range(rows)
        ]
        combined: list[L.Value] = []
        for number, types in enumerate(kinds):
            start = len(combined)
            total = lines[0][start : start + len(types)]
            for line_ in lines[1:]:
                total = merge(number, total, line_[start : start + len(types)])
            combined += total
        for k, value in enumerate(combined):
            write_word(builder, builder.add(ends, base), k * layout.columns * size, value, size, sums)
        asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
        here = builder.add(ends, builder.mul(self.x, L.I32(size)))
        result: Totals = {}
        for column in range(layout.vector):
            at = column * layout.across * size
            for k, (number, _, kind) in enumerate(parts):
                value = read_word(builder, here, at + k * layout.columns * size, kind, size)
                result[number, column] = (*result.get((number, column), ()), value)
        return result

    def _in_warp(self, number: int, values: tuple[L.Value, ...], merge: Merge) -> tuple[L.Value, ...]:
        distance = WARP // 2
        while distance >= self.layout.across:
            values = merge(number, values, tuple(shuffle(self.builder, v, distance) for v in values))
            distance //= 2
        return values


def _length(program: Program) -> int:
    """Points of a column. Raises CompileRejected where phases run over different points."""
    outer = {a.name for a in outer_axes(program)}
    lengths = {
        math.prod([*(r.extent for r in p.reds), *(a.extent for a in p.axes if a.name not in outer)])
        for p in program.phases
    }
    if len(lengths) != 1:
        raise CompileRejected(f"{program.name}: phases over columns of different lengths {sorted(lengths)}")
    return lengths.pop()
