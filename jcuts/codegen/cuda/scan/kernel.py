"""Parallel scan: along rows by cooperating threads (shuffles, shared memory), along columns serially in one thread
each.

These are the *scan_rows* and *scan_columns* forms.  Along a dimension that is not the last, neighbouring threads take
neighbouring columns and scan down them; long columns are split into groups whose carries are computed before
(`lower.split_scan`).  Along the last dimension ``team`` cooperating threads take ``team * vector`` points of a row at a
time: every thread scans its own, totals are scanned by shuffles and in shared memory, and the carry of what came before
is added.  Nothing depends on the order in which threads run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.graph.node_emitter import Emitter, store_all
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP, allocate_static, read_word, shuffle_up, write_word
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Axis, Buffer, Phase, Program
from jcuts.lower.scan_axes import CARRY, TIME
from jcuts.lower.split_scan import GROUP, STEP, scan_operator
from jcuts.ops.window import identity


@dataclass(frozen=True)
class ScanShape:
    """Mapping of threads onto a scan.

    Attributes:
        rows: whether several threads share a row; else a thread scans ``vector`` columns, ``unroll`` steps at a time.
        threads: of a block.
        vector: neighbouring points of a thread.
        team: threads per row.
        unroll: steps per loop iteration along columns.
    """

    rows: bool
    threads: int
    vector: int
    team: int = 1
    unroll: int = 1


def scan_shape(program: Program) -> ScanShape:
    """The block shape of a schedule. Raises CompileRejected where it does not fit the program."""
    params = {k: v for k, v in program.params if k != "cuda"}
    number = {k: int(str(v)) for k, v in params.items()}
    rows = dict(program.params)["cuda"] == "scan_rows"
    shape = ScanShape(rows, number["threads"], number["vector"], number.get("team", 1), number.get("unroll", 1))
    axis = scan_axis(program) if rows else program.phases[0].axes[-1]
    if axis.extent % shape.vector or shape.threads % shape.team or shape.threads % WARP:
        raise CompileRejected(f"{program.name}: {number} does not fit {axis.extent} points along {axis.name}")
    if rows and (
        shape.team < WARP or shape.team & (shape.team - 1) or (shape.team > WARP and shape.team != shape.threads)
    ):
        raise CompileRejected(f"{program.name}: teams of {shape.team} in blocks of {shape.threads}")
    return shape


def scan_axis(program: Program) -> Axis:
    """The scanned axis."""
    return next(a for a in program.phases[0].axes if a.name in (TIME, STEP))


def scans_of_grid(program: Program, shape: ScanShape) -> dict[str, int]:
    """Grid dimensions: rows, or groups of columns per thread; axis -> extent."""
    axes = program.phases[0].axes
    time = scan_axis(program)
    found = {a.name: a.extent for a in axes if a is not time}
    if not shape.rows and axes[-1] is not time:
        found[axes[-1].name] //= shape.vector
    return found


class ScanEmitter:
    """Common base of row and column scans: copies of the two phases' graphs at one step."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: ScanShape,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.program, self.shape, self.symbol = builder, program, tile, symbol
        self.buffers, self.pointers, self.integers = buffers, pointers, integers
        self.carry, self.result = program.phases
        self.time = scan_axis(program)
        self.extents = {a.name: a.extent for a in self.carry.axes}
        # Steps beyond the end of a short group are never taken, so what guards against them is left out.
        known = Index.axis(GROUP) * self.time.extent + Index.axis(self.time.name)
        self.known = Guard(known, None, int(str(dict(program.params).get("terms", 0))) - 1)
        self.dtype = next(b.dtype for b in program.locals if b.name == CARRY)

    def _frame(
        self, variables: Mapping[str, L.Value], ranges: Mapping[str, int], multiples: Mapping[str, int]
    ) -> M.Frame:
        return M.Frame(self.builder, dict(variables), self.pointers, {**self.extents, **ranges}, multiples)

    def _copy(
        self,
        emitter: Emitter,
        phase: Phase,
        wanted: list[int],
        places: Mapping[str, Index],
        carry: int | None,
        inside: tuple[Guard, ...] = (),
    ) -> list[int]:
        """Nodes of a phase at a step; ``carry``: the node that replaces the carry buffer."""
        source, target, ranges = phase.exit, emitter.graph, emitter.frame.ranges
        numbers: dict[int, int] = {}
        for number in source.needed(wanted):
            node = source.nodes[number]
            if node.op == "load" and node.buffer == CARRY:
                assert carry is not None
                numbers[number] = carry
                continue
            index = None if node.index is None else node.index.substitute(places, ranges).renumber(numbers)
            guards = tuple(
                Guard(g.index.substitute(places, ranges).renumber(numbers), g.low, g.high)
                for g in node.guards
                if g != self.known
            )
            guards = tuple(g for g in ((*guards, *inside) if node.op == "load" else guards) if not g.always(ranges))
            args = tuple(numbers[a] for a in node.args)
            if node.op == "guard" and (not guards or any(g.never(ranges) for g in guards)):
                numbers[number] = target.const(not guards, "bool")
                continue
            if node.op == "select" and target.nodes[args[0]].op == "const":
                numbers[number] = args[1] if target.nodes[args[0]].value else args[2]
                continue
            value = node.value if node.op != "load" or node.guards else (0 if guards else None)
            numbers[number] = target.add(Node(node.op, node.dtype, args, node.buffer, index, guards, value, node.attrs))
        return [numbers[w] for w in wanted]


class ScanColumnsEmitter(ScanEmitter):
    """Emits one thread of a scan along columns; the carries stay in registers."""

    def emit(self) -> None:
        """All steps."""
        builder, vector = self.builder, self.shape.vector
        zero = E.constant(0, self.dtype)
        self.slots = []
        for _ in range(vector):
            with builder.goto_entry_block():
                slot = builder.alloca(E.register_type(self.dtype))
            builder.store(zero, slot)
            self.slots.append(slot)
        count: L.Value = L.I32(self.time.extent)
        if GROUP in self.extents:  # the last group may be short
            whole = int(str(dict(self.program.params)["terms"]))
            left = builder.sub(L.I32(whole), builder.mul(self.integers[GROUP], count))
            count = builder.select(builder.icmp_signed("<", left, count), left, count)
        unroll = self.shape.unroll
        most = builder.mul(builder.udiv(count, L.I32(unroll)), L.I32(unroll))
        self._walk(L.I32(0), most, unroll)
        if unroll > 1 and (GROUP in self.extents or self.time.extent % unroll):
            self._walk(most, count, 1)

    def _walk(self, start: L.Value, end: L.Value, unroll: int) -> None:
        builder = self.builder
        before = builder.block
        head, loop, after = (builder.append_basic_block(f"steps.{n}") for n in ("head", "loop", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        step = builder.phi(L.I32, "step")
        step.add_incoming(start, before)
        builder.cbranch(builder.icmp_signed("<", step, end), loop, after)
        builder.position_at_end(loop)
        self._steps(step, unroll)
        step.add_incoming(builder.add(step, L.I32(unroll)), builder.block)
        builder.branch(head)
        builder.position_at_end(after)

    def _steps(self, step: L.Value, unroll: int) -> None:
        vector, builder = self.shape.vector, self.builder
        lane = self.carry.axes[-1]
        variables = {a.name: self.integers[a.name] for a in self.carry.axes if a is not self.time}
        variables[self.time.name] = step
        ranges = {self.time.name: max(1, self.time.extent - unroll + 1)}
        multiples = {self.time.name: unroll}
        if lane is not self.time:
            ranges[lane.name] = lane.extent - vector + 1
            multiples[lane.name] = vector
        emitter = Emitter(self._frame(variables, ranges, multiples), Graph(), self.buffers)
        carries = []
        for column, slot in enumerate(self.slots):
            number = emitter.graph.add(Node("acc", self.dtype, attrs=(("column", column),)))
            emitter.bind(number, E.Lanes(builder.load(slot), self.dtype))
            carries.append(number)
        (carried,) = [s.value for s in self.carry.stores]
        rows: list[tuple[str, Index, int]] = []
        for j in range(unroll):
            for column in range(vector):
                places = {self.time.name: Index.axis(self.time.name) + j} if j else {}
                if column:
                    places[lane.name] = Index.axis(lane.name) + column
                (carries[column],) = self._copy(emitter, self.carry, [carried], places, carries[column])
                values = self._copy(
                    emitter, self.result, [s.value for s in self.result.stores], places, carries[column]
                )
                rows += [
                    (s.buffer, s.address.substitute(places, emitter.frame.ranges), v)
                    for s, v in zip(self.result.stores, values, strict=True)
                ]
        emitter.vectorize_loads([n for _, _, n in rows] + carries)
        last = emitter.emit(carries)
        store_all(emitter, rows)
        for slot, lanes in zip(self.slots, last, strict=True):
            builder.store(lanes.value, slot)


class ScanRowsEmitter(ScanEmitter):
    """Emits one thread of a scan along rows, ``team * vector`` points at a time."""

    def emit(self) -> None:
        """The whole row."""
        builder, shape = self.builder, self.shape
        found = scan_operator(self.program)
        if found is None:
            raise CompileRejected(f"{self.program.name}: a cumulative operation that does not associate")
        self.combine, self.value = found
        self.kind = E.register_type(self.dtype)
        neutral = E.constant(identity(self.combine, self.dtype), self.dtype)
        self.lane = builder.urem(self.integers["thread"], L.I32(shape.team))
        step = shape.team * shape.vector
        if shape.team > WARP:
            size = max(4, L.bit_width(self.kind) // 8)
            self.totals = allocate_static(builder, f"{self.symbol}_totals", shape.team // WARP * size)
        before = builder.block
        loop, after = builder.append_basic_block("row"), builder.append_basic_block("row.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        base = builder.phi(L.I32, "base")
        base.add_incoming(L.I32(0), before)
        carry = builder.phi(self.kind, "carry")
        carry.add_incoming(neutral, before)
        total = self._piece(base, carry)
        following = builder.add(base, L.I32(step))
        base.add_incoming(following, builder.block)
        carry.add_incoming(total, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, L.I32(self.time.extent)), loop, after)
        builder.position_at_end(after)

    def _join(self, a: L.Value, b: L.Value) -> L.Value:
        return E.combine(self.builder, self.combine, self.dtype, (a,), (b,))[0]

    def _piece(self, base: L.Value, carry: L.Value) -> L.Value:
        """Scans and stores the next points; returns the updated carry."""
        builder, shape, time = self.builder, self.shape, self.time
        step = shape.team * shape.vector
        variables = {a.name: self.integers[a.name] for a in self.carry.axes if a is not time}
        variables[time.name] = builder.add(base, builder.mul(self.lane, L.I32(shape.vector)))
        whole = -(-time.extent // step) * step
        frame = self._frame(variables, {time.name: whole - shape.vector + 1}, {time.name: shape.vector})
        inside = Guard(Index.axis(time.name), None, time.extent - 1)  # whole vectors lie inside or outside
        guards = () if inside.always(frame.ranges) else (inside,)
        emitter = Emitter(frame, Graph(), self.buffers)
        numbers = []
        for j in range(shape.vector):
            places = {time.name: Index.axis(time.name) + j} if j else {}
            numbers += self._copy(emitter, self.carry, [self.value], places, None, guards)
        emitter.vectorize_loads(numbers)
        values = [lanes.value for lanes in emitter.emit(numbers)]
        holds = M.condition(frame, guards)
        if holds is not None:
            neutral = E.constant(identity(self.combine, self.dtype), self.dtype)
            values = [builder.select(holds, v, neutral) for v in values]
        for j in range(1, shape.vector):
            values[j] = self._join(values[j - 1], values[j])
        before, total = self._before(values[-1])
        before = self._join(carry, before)
        values = [self._join(before, v) for v in values]
        frame.live = holds
        rows = []
        for j, value in enumerate(values):
            places = {time.name: Index.axis(time.name) + j} if j else {}
            given = emitter.graph.add(Node("acc", self.dtype, attrs=(("point", j),)))
            emitter.bind(given, E.Lanes(value, self.dtype))
            wanted = [s.value for s in self.result.stores]
            made = self._copy(emitter, self.result, wanted, places, given, guards)
            rows += [
                (s.buffer, s.address.substitute(places, frame.ranges), n)
                for s, n in zip(self.result.stores, made, strict=True)
            ]
        emitter.vectorize_loads(n for _, _, n in rows)
        store_all(emitter, rows)
        return self._join(carry, total)

    def _before(self, mine: L.Value) -> tuple[L.Value, L.Value]:
        """Exclusive prefix over the preceding threads, and the total of all threads of the row."""
        builder, shape = self.builder, self.shape
        inside = builder.urem(self.lane, L.I32(WARP))
        neutral = E.constant(identity(self.combine, self.dtype), self.dtype)
        distance = 1
        while distance < WARP:
            other = shuffle_up(builder, mine, distance)
            reached = builder.icmp_signed(">=", inside, L.I32(distance))
            mine = builder.select(reached, self._join(other, mine), mine)
            distance *= 2
        first = builder.icmp_signed("==", inside, L.I32(0))
        before = builder.select(first, neutral, shuffle_up(builder, mine, 1))
        if shape.team == WARP:
            return before, shuffle_up(builder, mine, WARP - 1, from_last=True)
        size = max(4, L.bit_width(self.kind) // 8)
        warp = builder.udiv(self.lane, L.I32(WARP))
        last = builder.icmp_signed("==", inside, L.I32(WARP - 1))
        write_word(builder, builder.add(self.totals, builder.mul(warp, L.I32(size))), 0, mine, size, last)
        asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
        running: L.Value = neutral
        below: L.Value = neutral
        for k in range(shape.team // WARP):
            below = builder.select(builder.icmp_signed("==", warp, L.I32(k)), running, below)
            running = self._join(running, read_word(builder, self.totals, k * size, self.kind, size))
        asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
        return self._join(below, before), running


def grid_of(program: Program, shape: ScanShape) -> int:
    """Units of work: rows, or threads' columns."""
    return math.prod(scans_of_grid(program, shape).values())
