"""Row reduction by cooperating threads: softmax, layer norm, statistics, row and full reductions.

This is the *team* form: a sub-warp, a warp, or a whole block computes a row; partial results are combined by ``shfl``
and, across warps, through shared memory.  Every thread of the group then holds the row's values, so values between
phases stay in registers.

Where a thread's part of the row is small (*resident*), all phases are one straight-line graph: a load that two phases
need is one node and happens once.  Otherwise every phase is a loop over the row, which then comes from the L2 cache.

The row's points are numbered by one axis ``k``; a thread takes ``vector`` neighbours at ``k = lane * vector`` and again
``team * vector`` further on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llvmlite import ir

from jcuts.base.errors import CompileRejected, IRError
from jcuts.codegen.cuda.graph.accumulators import acc_start, acc_types, accumulate
from jcuts.codegen.cuda.graph.node_emitter import Emitter, store_all
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP, allocate_static, read_word, shuffle, write_word
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index, unflatten
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Buffer, Phase, Program, Store

K = "k"
Merge = Callable[[tuple[L.Value, ...], tuple[L.Value, ...]], tuple[L.Value, ...]]


@dataclass(frozen=True)
class RowReductionTile:
    """Mapping of cooperating threads onto rows.

    Attributes:
        team: threads per row, a power of two; more than a warp means one row per block.
        threads: threads per block.
        vector: neighbouring points per access.
        chunks: accesses of ``team * vector`` points that are unrolled together.
    """

    team: int
    threads: int
    vector: int
    chunks: int


def row_axes(program: Program) -> tuple[str, ...]:
    """Axes that number the rows."""
    first = program.phases[0]
    return program.serial if len(program.phases) > 1 else tuple(a.name for a in first.axes)


def row_count(program: Program) -> int:
    """Number of rows."""
    extents = {a.name: a.extent for phase in program.phases for a in phase.axes}
    return math.prod(extents[a] for a in row_axes(program))


def row_length(program: Program) -> int:
    """Points of one row. Raises CompileRejected where phases run over different points."""
    outer = set(row_axes(program))
    lengths = set()
    for phase in program.phases:
        inner = [r.extent for r in phase.reds] + [a.extent for a in phase.axes if a.name not in outer]
        lengths.add(math.prod(inner))
    if len(lengths) != 1:
        raise CompileRejected(f"{program.name}: phases over rows of different lengths {sorted(lengths)}")
    return lengths.pop()


class RowReductionKernel:
    """Emits one thread of the row reduction."""

    at = 0  # the column in hand, where a thread has several
    is_backwards = False  # whether loops over the row begin at its end

    def _column(self) -> dict[str, Index]:
        """Index of the current column."""
        return {}

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: RowReductionTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.program, self.shape, self.buffers, self.pointers = builder, program, tile, buffers, pointers
        self.symbol = symbol
        self.length, self.rows = row_length(program), row_count(program)
        if self.length % tile.vector:
            raise IRError(f"{program.name}: accesses of {tile.vector} do not divide rows of {self.length}")
        self.lane = integers["lane"]
        self.outer = {a.name: a.extent for p in program.phases for a in p.axes if a.name in row_axes(program)}
        self.step = tile.team * tile.vector
        self.pieces = -(-self.length // self.step)
        self.resident = self.pieces <= tile.chunks
        self._start_row(integers["row"], self.rows % (tile.threads // tile.team) == 0)

    def _start_row(self, row: L.Value, is_whole: bool) -> None:
        """Begins with a row. Args: is_whole: whether no thread is beyond the last row."""
        last = self.builder.icmp_signed("<", row, L.I32(self.rows))
        self.live = None if is_whole else last
        # Threads beyond the last row follow along on it (they take part in shuffles) and store nothing.
        self.row = row if is_whole else self.builder.select(last, row, L.I32(self.rows - 1))
        self.kept: dict[str, tuple[Phase, Store]] = {}
        self.scalars: dict[tuple[str, int], E.Lanes] = {}
        self.reductions = 0
        self.graph = Graph()
        frame = self._frame(self._thread_start(), self.step - self.shape.vector + 1)
        self.emitter = Emitter(frame, self.graph, self.buffers)

    # -- the row and its points ---------------------------------------------------------------------------------
    def _thread_start(self) -> L.Value:
        return self.builder.mul(self.lane, L.I32(self.shape.vector))

    def _frame(self, k: L.Value, k_range: int) -> M.Frame:
        variables: dict[str, L.Value] = {K: k}
        rest = self.row
        for name in reversed(row_axes(self.program)):
            extent = self.outer[name]
            outermost = name == row_axes(self.program)[0]
            variables[name] = rest if outermost else self.builder.urem(rest, L.I32(extent))
            rest = rest if outermost else self.builder.udiv(rest, L.I32(extent))
        return M.Frame(
            self.builder, variables, self.pointers, {**self.outer, K: k_range}, {K: self.shape.vector}, live=self.live
        )

    def _places(self, phase: Phase, offset: int, ranges: Mapping[str, int]) -> dict[str, Index]:
        """Reduced axes of a phase at the point ``k + offset``."""
        inner = [(r.name, r.extent) for r in phase.reds]
        inner += [(a.name, a.extent) for a in phase.axes if a.name not in self.outer]
        where = unflatten(Index.axis(K) + offset, tuple(e for _, e in inner), ranges)
        return dict(zip((n for n, _ in inner), where, strict=True))

    @contextmanager
    def _iterations(self) -> Iterator[tuple[Emitter, list[int], bool]]:
        """(emitter, offsets of the unrolled accesses, whether they may exceed the row), in a loop where necessary."""
        shape, builder = self.shape, self.builder
        if self.resident:
            yield self.emitter, [c * self.step for c in range(self.pieces)], self.length % self.step != 0
            return
        span = self.step * shape.chunks
        before = builder.block
        loop, after = builder.append_basic_block("row"), builder.append_basic_block("row.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        base = builder.phi(L.I32, "base")
        whole = -(-self.length // span) * span
        base.add_incoming(L.I32(whole - span if self.is_backwards else 0), before)
        k = builder.add(base, self._thread_start())
        frame = self._frame(k, whole - (shape.chunks - 1) * self.step - shape.vector + 1)
        yield Emitter(frame, Graph(), self.buffers), [c * self.step for c in range(shape.chunks)], self.length != whole
        following = builder.add(base, L.I32(-span if self.is_backwards else span))
        base.add_incoming(following, builder.block)
        how, end = (">=", 0) if self.is_backwards else ("<", self.length)
        builder.cbranch(builder.icmp_signed(how, following, L.I32(end)), loop, after)
        builder.position_at_end(after)

    # -- copying graphs -----------------------------------------------------------------------------------------
    def _copy(
        self,
        emitter: Emitter,
        phase: Phase,
        source: Graph,
        wanted: Sequence[int],
        offset: int | None,
        tail: bool,
        accs: Mapping[int, E.Lanes],
    ) -> list[int]:
        """Instantiates nodes at point ``k + offset`` (None: at the row), with local buffers replaced by their
        values.
        """
        target, ranges = emitter.graph, emitter.frame.ranges
        places = {**self._column(), **({} if offset is None else self._places(phase, offset, ranges))}
        inside = () if offset is None or not tail else (Guard(Index.axis(K) + offset, None, self.length - 1),)
        numbers: dict[int, int] = {}
        for number in source.needed(wanted):
            node = source.nodes[number]
            if node.op == "acc":
                numbers[number] = self._given(
                    emitter, ("acc", self.reductions, node.attr("number"), self.at), accs[int(str(node.attr("number")))]
                )
                continue
            if node.op == "load" and (node.buffer, self.at) in self.scalars:
                place = (node.buffer, self.at)
                numbers[number] = self._given(emitter, ("local", *place), self.scalars[place])
                continue
            if node.op == "load" and node.buffer in self.kept:
                made, store = self.kept[node.buffer]
                numbers[number] = self._copy(emitter, made, made.exit, [store.value], offset, tail, {})[0]
                continue
            index = None
            if node.index is not None:
                index = node.index.substitute(places, ranges)
                index = index.renumber(numbers) if index.values() else index
            guards = tuple(
                Guard(g.index.substitute(places, ranges).renumber(numbers), g.low, g.high) for g in node.guards
            )
            if node.op == "load":
                assert index is not None
                moves = K in index.axes() or index.values()
                guards = (*guards, *(g for g in inside if moves))
            guards = tuple(g for g in guards if not g.always(ranges))
            value = node.value if node.op != "load" or node.guards else (0 if guards else None)
            args = tuple(numbers[a] for a in node.args)
            if node.op == "guard" and not guards:
                numbers[number] = target.const(True, "bool")
                continue
            numbers[number] = target.add(Node(node.op, node.dtype, args, node.buffer, index, guards, value, node.attrs))
        return [numbers[w] for w in wanted]

    @staticmethod
    def _given(emitter: Emitter, name: tuple[object, ...], lanes: E.Lanes) -> int:
        number = emitter.graph.add(Node("acc", lanes.dtype, attrs=(("given", name),)))
        emitter.bind(number, lanes)
        return number

    # -- phases -------------------------------------------------------------------------------------------------
    def emit(self) -> None:
        """All phases of the row."""
        for phase in self.program.phases:
            self._phase(phase)

    def _phase(self, phase: Phase) -> None:
        if phase.reds:
            self._reduce_phase(phase)
            return
        self._keep(phase)
        if stores := tuple(s for s in phase.stores if s.buffer not in self.kept):
            self._map_phase(replace(phase, stores=stores))

    def _keep(self, phase: Phase) -> None:
        """Local values of a row are recomputed where they are used: in the resident form equal nodes merge, so they are
        computed once.
        """
        self.kept.update({s.buffer: (phase, s) for s in phase.stores if self.buffers[s.buffer].role == "local"})

    def _slot(self, kind: L.Type, start: L.Value) -> L.Value:
        """A variable (LLVM promotes it to registers)."""
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(kind)
        self.builder.store(start, slot)
        return slot

    def _reduce_phase(self, phase: Phase) -> None:
        builder, shape = self.builder, self.shape
        chains = min(shape.vector, 4)
        slots: dict[tuple[int, int], list[L.Value]] = {}
        for number, acc in enumerate(phase.accs):
            for chain in range(chains):
                starts = zip(acc_types(acc), acc_start(acc, False), strict=True)
                slots[number, chain] = [self._slot(kind, start) for kind, start in starts]
        wanted = [value for acc in phase.accs for value in acc.values]
        with self._iterations() as (emitter, offsets, tail):
            terms: list[tuple[int, int, tuple[int, ...]]] = []
            for offset in offsets:
                for j in range(shape.vector):
                    values = iter(self._copy(emitter, phase, phase.body, wanted, offset + j, tail, {}))
                    for number, acc in enumerate(phase.accs):
                        terms.append((offset, number, tuple(next(values) for _ in acc.values)))
            emitter.vectorize_loads(v for _, _, values in terms for v in values)
            for place, (offset, number, values) in enumerate(terms):
                chain = place // len(phase.accs) % shape.vector % chains
                acc = phase.accs[number]
                values = self._mask_tail(emitter, acc, values, offset) if tail else values
                accumulate(emitter, acc, slots[number, chain], values)
        accs = {}
        for number, acc in enumerate(phase.accs):
            parts = [tuple(builder.load(s) for s in slots[number, c]) for c in range(chains)]
            total = parts[0]
            for part in parts[1:]:
                total = E.combine(builder, acc.combine, acc.dtype, total, part)
            total = self._team_reduce(acc, total, number)
            accs[number] = E.Lanes(total[-1], acc.index_dtype or acc.dtype)
        self._row_results(phase, accs)
        self.reductions += 1

    def _mask_tail(self, emitter: Emitter, acc: Acc, values: tuple[int, ...], offset: int) -> tuple[int, ...]:
        """The reduced values, or the neutral element where the point lies beyond the row."""
        guard = Guard(Index.axis(K) + offset, None, self.length - 1)
        if guard.always(emitter.frame.ranges):
            return values
        graph = emitter.graph
        holds = graph.add(Node("guard", "bool", guards=(guard,)))
        result = []
        for value, constant in zip(values, acc_start(acc, False), strict=True):
            dtype = graph.nodes[value].dtype
            result.append(graph.apply("select", dtype, holds, value, graph.const(constant.constant, dtype)))
        return tuple(result)

    def _row_results(self, phase: Phase, accs: Mapping[int, E.Lanes]) -> None:
        """The exit graph: every cooperating thread computes it, the first one stores."""
        emitter = self.emitter if self.resident else Emitter(self._frame(L.I32(0), 1), Graph(), self.buffers)
        frame = emitter.frame
        numbers = self._copy(emitter, phase, phase.exit, [s.value for s in phase.stores], None, False, accs)
        emitter.vectorize_loads(numbers)
        rows = []
        for store, number in zip(phase.stores, numbers, strict=True):
            if self.buffers[store.buffer].role == "local":
                self.scalars[store.buffer, self.at] = emitter.emit([number])[0]
            else:
                rows.append((store.buffer, store.address, number))
        if rows:
            first = self.builder.icmp_signed("==", self.lane, L.I32(0))
            saved, frame.live = frame.live, first if frame.live is None else self.builder.and_(frame.live, first)
            store_all(emitter, rows)
            frame.live = saved

    def _map_phase(self, phase: Phase) -> None:
        with self._iterations() as (emitter, offsets, tail):
            frame = emitter.frame
            pieces = []
            for offset in offsets:
                rows = []
                for j in range(self.shape.vector):
                    places = self._places(phase, offset + j, frame.ranges)
                    numbers = self._copy(
                        emitter, phase, phase.exit, [s.value for s in phase.stores], offset + j, tail, {}
                    )
                    rows += [
                        (s.buffer, s.address.substitute(places, frame.ranges), n)
                        for s, n in zip(phase.stores, numbers, strict=True)
                    ]
                pieces.append((offset, rows))
            emitter.vectorize_loads(n for _, rows in pieces for _, _, n in rows)
            for offset, rows in pieces:
                saved = frame.live
                inside = M.condition(frame, (Guard(Index.axis(K) + offset, None, self.length - 1),)) if tail else None
                if inside is not None:
                    frame.live = inside if saved is None else self.builder.and_(saved, inside)
                store_all(emitter, rows)
                frame.live = saved

    # -- across threads -----------------------------------------------------------------------------------------
    def _team_reduce(self, acc: Acc, values: tuple[L.Value, ...], number: int) -> tuple[L.Value, ...]:
        """Combines the partial results of the cooperating threads; every thread gets the total."""
        builder = self.builder
        return self._across_team(values, number, lambda a, b: E.combine(builder, acc.combine, acc.dtype, a, b))

    def _across_team(self, values: tuple[L.Value, ...], number: int, merge: Merge) -> tuple[L.Value, ...]:
        """Merges the cooperating threads' values in a fixed order. Args: merge: combines those of two threads."""
        values = self._shuffled(values, min(self.shape.team, WARP), merge)
        warps = self.shape.team // WARP
        if warps <= 1:
            return values
        builder = self.builder
        sizes = [max(4, L.bit_width(v.type) // 8) for v in values]
        # Every reduction has memory of its own, so one barrier is enough.
        places = [
            allocate_static(builder, f"{self.symbol}_shared_{self.reductions}_{number}_{i}", warps * size)
            for i, size in enumerate(sizes)
        ]
        warp = builder.udiv(self.lane, L.I32(WARP))
        inside = builder.urem(self.lane, L.I32(WARP))
        leads = builder.icmp_signed("==", inside, L.I32(0))
        for value, size, place in zip(values, sizes, places, strict=True):
            write_word(builder, builder.add(place, builder.mul(warp, L.I32(size))), 0, value, size, leads)
        asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
        slot = builder.urem(inside, L.I32(warps))
        read = []
        for value, size, place in zip(values, sizes, places, strict=True):
            where = builder.add(place, builder.mul(slot, L.I32(size)))
            read.append(read_word(builder, where, 0, value.type, size))
        return self._shuffled(tuple(read), warps, merge)

    def _shuffled(self, values: tuple[L.Value, ...], count: int, merge: Merge) -> tuple[L.Value, ...]:
        distance = count // 2
        while distance:
            values = merge(values, tuple(shuffle(self.builder, v, distance) for v in values))
            distance //= 2
        return values
