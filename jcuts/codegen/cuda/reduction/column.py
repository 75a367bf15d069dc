"""Column reduction: a block of threads reduces neighbouring outputs together (column sums, filter gradients).

This is the *columns* form.  The reduced points of an output lie far apart, those of neighbouring outputs side by side.
``across`` threads lie along the last axis, each with a vector of outputs, so that a row of them reads whole lines
(coalesced); ``deep`` such rows divide the reduced points, ``flight`` of which a thread has in flight.  Partial sums are
combined by shuffles (rows within a warp) and through shared memory, one line per row of threads.

`codegen.cuda.reduction.split` brings a program into the form expected here: axes ``s`` (the group of points of a block,
where the reduction is split over the grid) and ``f`` (points of a group), and short reductions inside that a thread
unrolls.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant
from jcuts.codegen.cuda.graph.accumulators import acc_types
from jcuts.codegen.cuda.graph.predication import drop_guard, restrict_to_guard
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP, allocate_static, read_word, shuffle, write_word
from jcuts.codegen.cuda.window.sliding_window import SlidingWindowEmitter
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.kernel_ir.program import Axis, Buffer, Phase, Program
from jcuts.kernel_ir.register_tiling import Extent, Point, points

GROUP = "s"
TERM = "f"
SHARED = 24 << 10  # bytes of shared memory that the rows of threads meet in


@dataclass(frozen=True)
class ColumnShape:
    """Mapping of a thread block onto outputs and reduced points.

    Attributes:
        across: threads along the last axis.
        deep: rows of threads, which share the reduced points.
        threads: of a block; those beyond ``across * deep`` only take part in barriers.
        flight: reduced points that a thread loads at once.
        terms: reduced points of all groups (``f`` counts those of one).
        walked: the inner reduction along which a thread keeps a sliding window (`window.sliding_window`), or ''.
        ahead: tiles by which its loads are issued early.
    """

    across: int
    deep: int
    threads: int
    flight: int
    terms: int
    walked: str = ""
    ahead: int = 0


def shape_of(program: Program) -> ColumnShape:
    """The block shape of a program's schedule. Raises CompileRejected where it does not fit the program."""
    params = dict(program.params)
    threads, across, flight = (int(str(params[k])) for k in ("threads", "across", "flight"))
    phase = program.phases[0]
    lane = phase.axes[-1]
    if across < 1 or across > threads or lane.extent % lane.unroll or across * lane.unroll > threads:
        raise CompileRejected(
            f"{program.name}: {across} threads of {threads} along {lane.extent} outputs in steps of {lane.unroll}"
        )
    walked = str(params.get("walked", ""))
    if walked and flight > 1:
        raise CompileRejected(f"{program.name}: {flight} terms at once, each with a walk")
    terms = int(str(params["terms"]))
    return ColumnShape(across, threads // across, threads, flight, terms, walked, int(str(params.get("ahead", 0))))


def lane_blocks(phase: Phase, shape: ColumnShape) -> int:
    """Blocks along the last axis."""
    lane = phase.axes[-1]
    return -(-lane.extent // (lane.unroll * shape.across))


class ColumnReductionKernel:
    """Emits one thread of the column reduction."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: ColumnShape,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.shape, self.buffers, self.pointers = builder, tile, buffers, pointers
        self.program, self.phase, self.symbol = program, program.phases[0], symbol
        self.lane: Axis = self.phase.axes[-1]
        self.thread = integers["thread"]
        self.x, self.y = self._thread_place()
        self.first = integers[self.lane.name]  # of the block, counted in vectors
        self.outer = {a.name: integers[a.name] for a in self.phase.axes[:-1]}
        self.share = next(r.extent for r in self.phase.reds if r.name == TERM)
        split = any(a.name == GROUP for a in self.phase.axes)
        number = Index.axis(GROUP) * self.share + Index.axis(TERM) if split else Index.axis(TERM)
        self.guard = Guard(number, None, tile.terms - 1)
        self.split = split
        self.walked = next((r for r in self.phase.reds if r.name == tile.walked), None)

    def _thread_place(self) -> tuple[L.Value, L.Value]:
        """The thread's number along the outputs and along the reduced points."""
        across = L.I32(self.shape.across)
        return self.builder.urem(self.thread, across), self.builder.udiv(self.thread, across)

    def emit(self) -> None:
        """Everything that the thread does."""
        builder, shape = self.builder, self.shape
        variables = self._column_variables()
        bare = replace(self.program, phases=(drop_guard(self.phase, self.guard),))
        body = self._points(bare.phases[0], variables)
        body._start()
        step = shape.deep * shape.flight
        active = builder.icmp_signed("<", self.y, L.I32(shape.deep)) if shape.threads % shape.across else None
        if self.split:
            left = builder.sub(L.I32(shape.terms), builder.mul(self.outer[GROUP], L.I32(self.share)))
            mine = builder.select(builder.icmp_signed("<", left, L.I32(self.share)), left, L.I32(self.share))
            whole: L.Value = builder.udiv(mine, L.I32(step))
            rest = builder.icmp_signed("<", builder.mul(whole, L.I32(step)), mine)
            pieces = shape.flight if shape.terms % step else 0
        else:
            whole = L.I32(self.share // step)
            rest, pieces = None, -(-(self.share % step) // shape.deep)
        many = self.share >= step
        if many:
            with builder.if_then(active) if active is not None else nullcontext():
                self._loop(body, whole)
        if pieces:
            tail = self._points(restrict_to_guard(self.phase, self.guard) if not self.split else self.phase, variables)
            tail.slots = body.slots
            wanted = [c for c in (rest, active) if c is not None]
            with builder.if_then(wanted[0] if len(wanted) == 1 else builder.and_(*wanted)) if wanted else nullcontext():
                self._terms(tail, builder.mul(whole, L.I32(step)), pieces, guarded=True)
        self._finish(body)

    def _column_variables(self) -> dict[str, L.Value]:
        """Where the thread's outputs lie; threads beyond the last output follow along on it and store nothing."""
        builder = self.builder
        last = L.I32(self.lane.extent // self.lane.unroll - 1)
        vector = builder.add(self.first, self.x)
        inside = builder.select(builder.icmp_signed("<", vector, last), vector, last)
        return {**self.outer, self.lane.name: builder.mul(inside, L.I32(self.lane.unroll))}

    def _points(self, phase: Phase, variables: Mapping[str, L.Value]) -> SlidingWindowEmitter:
        counts = tuple((a.name, a.unroll) for a in phase.axes)
        multiples = {self.lane.name: self.lane.unroll}
        return SlidingWindowEmitter(
            self.builder, phase, TileVariant(counts), self.buffers, self.pointers, variables, multiples
        )

    def _loop(self, body: SlidingWindowEmitter, whole: L.Value) -> None:
        """Full groups of ``deep * flight`` reduced points; at least one where the count is a constant."""
        builder = self.builder
        step = L.I32(self.shape.deep * self.shape.flight)
        before = builder.block
        head, loop, after = (builder.append_basic_block(f"terms.{n}") for n in ("head", "loop", "done"))
        end = builder.mul(whole, step)
        builder.branch(head)
        builder.position_at_end(head)
        base = builder.phi(L.I32, "base")
        base.add_incoming(L.I32(0), before)
        builder.cbranch(builder.icmp_signed("<", base, end), loop, after)
        builder.position_at_end(loop)
        self._terms(body, base, self.shape.flight, guarded=False)
        base.add_incoming(builder.add(base, step), builder.block)
        builder.branch(head)
        builder.position_at_end(after)

    def _terms(self, body: SlidingWindowEmitter, base: L.Value, pieces: int, *, guarded: bool) -> None:
        """``pieces`` reduced points of this thread, the first one at ``base + y``."""
        fixed, bases, reach = self._extents(body, base, pieces, guarded=guarded)
        if self.walked is not None:
            body.walk_terms(self.walked, self.shape.ahead, fixed, bases, reach, {TERM: 1})
            return
        (body._body if guarded else body._both_bodies)(fixed, bases, reach, {TERM: 1})

    def _extents(
        self, body: SlidingWindowEmitter, base: L.Value, pieces: int, *, guarded: bool
    ) -> tuple[dict[str, Extent], dict[str, L.Value], dict[str, int]]:
        """What ``pieces`` reduced points of this thread are: extents, the first of them, and its exclusive bound."""
        fixed = {r.name: Extent(r.name, r.extent, fixed=True) for r in body.phase.reds if r.name != TERM}
        fixed[TERM] = Extent(TERM, pieces, self.shape.deep)
        step = self.shape.deep * self.shape.flight
        # What bounds base + y; beyond the last term the guards decide, so they must not seem to hold always.
        reach = -(-self.share // step) * step if guarded else self.share - (pieces - 1) * self.shape.deep
        return fixed, {TERM: self.builder.add(base, self.y)}, {TERM: reach}

    # -- across threads -----------------------------------------------------------------------------------------
    def _finish(self, body: RegisterTileEmitter) -> None:
        """Totals over all rows of threads, and what is computed from them."""
        end, _ = self._block_totals(body)
        end._finish()

    def _shuffle_distances(self) -> list[int]:
        """Distances of the lanes whose sums are combined by shuffles: rows of threads that a warp holds."""
        across = self.shape.across
        return [d for d in (16, 8, 4, 2, 1) if d >= across] if WARP % across == 0 else []

    def _partial_line(self, distances: list[int]) -> tuple[int, L.Value, L.Value | None]:
        """(lines of partial results in shared memory, this thread's, whether it writes) after the shuffles."""
        builder, shape = self.builder, self.shape
        if distances:
            line = builder.udiv(self.thread, L.I32(WARP))
            writes = builder.icmp_signed("<", builder.urem(self.thread, L.I32(WARP)), L.I32(shape.across))
            return shape.threads // WARP, line, writes
        every = shape.threads % shape.across == 0
        return shape.deep, self.y, None if every else builder.icmp_signed("<", self.y, L.I32(shape.deep))

    def _block_totals(self, body: RegisterTileEmitter) -> tuple[RegisterTileEmitter, L.Value]:
        """Totals over all rows of threads: thread t takes column ``t % across`` of vector element ``t // across``.

        Returns: the emitter of this thread's outputs, with their totals, and the number of its column in the block.
        """
        builder, shape, width = self.builder, self.shape, self.lane.unroll
        distances = self._shuffle_distances()
        rows, line, writes = self._partial_line(distances)
        columns = shape.across * width
        mine = builder.select(builder.icmp_signed("<", self.thread, L.I32(columns)), self.thread, L.I32(columns - 1))
        column = self._column(mine)
        live = builder.icmp_signed("<", self.thread, L.I32(columns))
        if self.lane.extent % columns:
            inside = builder.icmp_signed("<", column, L.I32(self.lane.extent))
            live = builder.and_(live, inside)
            column = builder.select(inside, column, L.I32(self.lane.extent - 1))
        alone = TileVariant(tuple((a.name, 1 if a is self.lane else a.unroll) for a in self.phase.axes))
        variables = {**self.outer, self.lane.name: column}
        end = RegisterTileEmitter(builder, self.phase, alone, self.buffers, self.pointers, variables, {})
        end.live = live
        todo = [(number, point) for number in range(len(self.phase.accs)) for point in points(end.axes)]
        size = max(max(4, L.bit_width(k) // 8) for acc in self.phase.accs for k in acc_types(acc))
        most = max(len(acc_types(acc)) for acc in self.phase.accs)
        line_bytes = rows * columns * size
        per_round = max(1, SHARED // (line_bytes * most))
        if line_bytes * most > 48 << 10:
            message = f"{self.program.name}: {line_bytes * most} bytes of shared memory per result"
            raise CompileRejected(message, resource="shared memory")
        place = allocate_static(builder, f"{self.symbol}_columns", min(per_round, len(todo)) * most * line_bytes)
        there = builder.add(builder.mul(line, L.I32(columns)), self.x)
        there = builder.add(place, builder.mul(there, L.I32(size)))
        for start in range(0, len(todo), per_round):
            if start:
                asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
            some = todo[start : start + per_round]
            for k, (number, point) in enumerate(some):
                for j in range(width):
                    for i, value in enumerate(self._row_total(body, number, point, j, distances)):
                        at = (k * most + i) * line_bytes + j * shape.across * size
                        write_word(builder, there, at, value, size, writes)
            asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
            base = builder.add(place, builder.mul(mine, L.I32(size)))
            for k, (number, point) in enumerate(some):
                acc = self.phase.accs[number]
                kinds = acc_types(acc)
                total: tuple[L.Value, ...] = ()
                for row in range(rows):
                    at = [(k * most + i) * line_bytes + row * columns * size for i in range(len(kinds))]
                    found = tuple(read_word(builder, base, a, kind, size) for a, kind in zip(at, kinds, strict=True))
                    total = E.combine(builder, acc.combine, acc.dtype, total, found) if total else found
                end.slots[number, point, 0] = new_slots(builder, total)
        return end, mine

    def _column(self, thread: L.Value) -> L.Value:
        builder, across = self.builder, L.I32(self.shape.across)
        vector = builder.add(self.first, builder.urem(thread, across))
        return builder.add(builder.mul(vector, L.I32(self.lane.unroll)), builder.udiv(thread, across))

    def _row_total(
        self, body: RegisterTileEmitter, number: int, point: Point, j: int, distances: list[int]
    ) -> tuple[L.Value, ...]:
        """This thread's partial result for one output, combined over lanes at the given distances."""
        builder, acc = self.builder, self.phase.accs[number]
        here = tuple((name, j if name == self.lane.name else offset) for name, offset in point)
        values = tuple(builder.load(slot) for slot in body.slots[number, here, 0])
        for distance in distances:
            other = tuple(shuffle(builder, v, distance) for v in values)
            values = E.combine(builder, acc.combine, acc.dtype, values, other)
        return values


def new_slots(builder: GpuBuilder, values: tuple[L.Value, ...]) -> list[L.Value]:
    """Memory slots that hold an accumulator's values (LLVM promotes them to registers)."""
    slots = []
    for value in values:
        with builder.goto_entry_block():
            slot = builder.alloca(value.type)
        builder.store(value, slot)
        slots.append(slot)
    return slots
