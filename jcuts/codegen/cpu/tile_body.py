"""LLVM IR of one register tile of a phase on a CPU: reduction loops around the body graph, then the exit graph
(epilogue).

Loops run at least once, so that what does not change in them can be hoisted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jcuts.base.errors import IRError
from jcuts.codegen.cpu import addressing as A
from jcuts.codegen.cpu.accumulators import Accumulators
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Buffer, Phase, Red
from jcuts.kernel_ir.register_tiling import Extent, Point, Term, Tile, body_tile, exit_tile, points

MANY_STORES = 16
"""From here on, results are stored as soon as they are known: together they would not fit the registers."""


@dataclass(frozen=True)
class Shape:
    """Tile sizes of one variant: points per output axis; live lanes of the last vector (0: all of them)."""

    counts: tuple[tuple[str, int], ...]
    active: int = 0


class BodyEmitter:
    """Emits one tile of ``phase`` at the builder's position."""

    def __init__(
        self,
        builder: L.Builder,
        phase: Phase,
        shape: Shape,
        lanes: int,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        variables: Mapping[str, L.Value],
        ranges: Mapping[str, int],
    ) -> None:
        self.builder, self.phase, self.shape, self.lanes = builder, phase, shape, lanes
        self.buffers, self.pointers = buffers, pointers
        axis = phase.vector_axis
        self.vector = axis.name if axis is not None else ""
        self.lane_reduced = isinstance(axis, Red)
        self.variables = dict(variables)
        self.outer_ranges = dict(ranges)
        self.axes = self._extents()
        self.accumulators = Accumulators(builder, phase, lanes if self.vector else 0, self.lane_reduced)

    def _extents(self) -> list[Extent]:
        counts = dict(self.shape.counts)
        return [Extent(a.name, counts[a.name], self.lanes if a.vector else 1) for a in self.phase.axes]

    def ranges(self, reds: Mapping[str, int]) -> dict[str, int]:
        """Extents that bound each variable: what a tile's base can be, so that base + offset stays inside."""
        result = dict(self.outer_ranges)
        for extent, axis in zip(self.axes, self.phase.axes, strict=True):
            last = (extent.count - 1) * extent.step
            if extent.name == self.vector and self.shape.active:
                last -= self.lanes - self.shape.active  # dead lanes of the last vector are live in those before it
            result[axis.name] = max(1, axis.extent - last)
        result.update(reds)
        return result

    def emit(self) -> None:
        """The whole tile."""
        if self.phase.reds:
            self.accumulators.start(list(points(self.axes)))
            self._reduce(0, {}, {}, {})
        self._finish()

    # -- reduction loops ----------------------------------------------------------------------------------------
    def _reduce(self, level: int, fixed: dict[str, Extent], bases: dict[str, L.Value], ranges: dict[str, int]) -> None:
        """Loops over reduction ``level`` and everything inside it."""
        if level == len(self.phase.reds):
            self._body(fixed, bases, ranges)
            return
        red = self.phase.reds[level]
        width = self.lanes if red.vector else 1
        step = red.unroll * width
        whole, rest = divmod(red.extent, step)
        if (whole == 1 and rest == 0) or red.extent <= step:
            self._part(level, red, None, red.extent, fixed, bases, ranges)
            return
        if whole:
            self._loop(level, red, whole, step, fixed, bases, ranges)
        if rest:
            self._part(level, red, whole * step, rest, fixed, bases, ranges)

    def _part(
        self,
        level: int,
        red: Red,
        start: int | None,
        length: int,
        fixed: dict[str, Extent],
        bases: dict[str, L.Value],
        ranges: dict[str, int],
    ) -> None:
        """Straight-line code for ``length`` points from ``start`` (None: the whole axis, coordinates are numbers)."""
        width = self.lanes if red.vector else 1
        count = -(-length // width)
        active = length - (count - 1) * width if red.vector else 0
        if red.vector and active < width and count > 1:  # a full part and a masked last vector
            self._part(level, red, start or 0, (count - 1) * width, fixed, bases, ranges)
            self._part(level, red, (start or 0) + (count - 1) * width, active, fixed, bases, ranges)
            return
        numbers = start is None and not red.vector
        extent = Extent(red.name, count, width, fixed=numbers)
        base = dict(bases) if numbers else {**bases, red.name: A.I64(start or 0)}
        saved = self._active_red
        if red.vector and active < width:
            self._active_red = active
        bound = (start or 0) + 1
        self._reduce(level + 1, {**fixed, red.name: extent}, base, {**ranges, red.name: max(bound, red.extent)})
        self._active_red = saved

    _active_red = 0

    def _loop(
        self,
        level: int,
        red: Red,
        whole: int,
        step: int,
        fixed: dict[str, Extent],
        bases: dict[str, L.Value],
        ranges: dict[str, int],
    ) -> None:
        width = self.lanes if red.vector else 1
        extent = Extent(red.name, red.unroll, width)
        inside = {**ranges, red.name: max(1, red.extent - (red.unroll - 1) * width)}
        per_block = self.accumulators.per_block(level)

        def iteration(variable: L.Value) -> None:
            self._reduce(level + 1, {**fixed, red.name: extent}, {**bases, red.name: variable}, inside)
            if per_block == 1:
                self.accumulators.flush()

        def block(first: L.Value) -> None:
            end = builder.add(first, A.I64(per_block * step))
            if whole % per_block:  # the last block has fewer iterations
                last = A.I64(whole * step)
                end = builder.select(builder.icmp_signed("<", end, last), end, last)
            self._counted(red.name, first, end, step, iteration)
            self.accumulators.flush()

        builder, end = self.builder, A.I64(whole * step)
        if 1 < per_block < whole:
            self._counted(f"{red.name}.block", A.I64(0), end, per_block * step, block)
        else:
            self._counted(red.name, A.I64(0), end, step, iteration)

    def _counted(
        self, name: str, first: L.Value, end: L.Value, step: int, iteration: Callable[[L.Value], None]
    ) -> None:
        """A loop over values from ``first`` to before ``end``, at least one."""
        builder = self.builder
        before = builder.block
        loop, after = builder.append_basic_block(f"reduce.{name}"), builder.append_basic_block(f"done.{name}")
        builder.branch(loop)
        builder.position_at_end(loop)
        variable = builder.phi(A.I64, name)
        variable.add_incoming(first, before)
        iteration(variable)
        following = builder.add(variable, A.I64(step))
        variable.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
        builder.position_at_end(after)

    def _body(self, fixed: dict[str, Extent], bases: dict[str, L.Value], ranges: dict[str, int]) -> None:
        reds = [fixed[r.name] for r in self.phase.reds]
        known = self.ranges(ranges)
        tile = body_tile(self.phase, self.axes, reds, known)
        inner = self.phase.reds[-1].name
        frame = self._frame(bases, known, self._active_red)
        moving = inner if inner in bases else ""
        masked = self._masked_loads(tile)
        emitted: dict[int, E.Lanes] = {}
        order = self._in_register_order(tile)
        wanted = [self._product(tile.graph, self.phase.accs[t[2]], t[3]) or t[3] for t in order]
        if not self._broadcasts():
            self._nodes(frame, tile, set().union(*wanted), moving, emitted=emitted, masked=masked)
        for (point, red_point, number, values), needed in zip(order, wanted, strict=True):
            self._nodes(frame, tile, set(needed), moving, emitted=emitted, masked=masked)
            self._contribute(frame, tile, emitted, point, self._chain(red_point), number, values)

    def _broadcasts(self) -> bool:
        """Whether some load is one element for all lanes: then values are loaded where they are used.

        Without one (a depthwise window) every vector is used by several points of the reduction, and LLVM does better
        with all loads in front of it.
        """
        loads = (n for n in self.phase.body.nodes if n.op == "load" and n.index is not None)
        return any(self.vector not in n.index.axes() for n in loads if n.index is not None)

    def _in_register_order(self, tile: Tile) -> list[Term]:
        """The contributions of each reduction point so that the fewer operands stay in registers.

        A tile of R rows and V vectors multiplies V vectors with R broadcast elements.  Row by row, the V vectors stay
        and broadcasts come one at a time; vector by vector, R broadcasts stay.  LLVM's scheduler keeps this order, and
        spills where accumulators and what stays exceed the registers.  Every accumulator's own order is untouched.
        """
        counts = dict(self.shape.counts)
        vectors = counts.get(self.vector, 1)
        rows = math.prod(counts.values()) // max(1, vectors)
        steps = {red_point: step for step, red_point in enumerate(dict.fromkeys(term[1] for term in tile.terms))}

        def place(term: Term) -> tuple[object, ...]:
            lane = dict(term[0]).get(self.vector, 0)
            others = tuple(offset for name, offset in term[0] if name != self.vector)
            return (steps[term[1]], others, lane) if vectors <= rows else (steps[term[1]], lane, others)

        return sorted(tile.terms, key=place)

    def _chain(self, red_point: Point) -> int:
        """Which independent accumulator an unrolled reduction point feeds."""
        chain = 0
        offsets = dict(red_point)
        for red in self.phase.reds:
            if red.chains > 1:
                width = self.lanes if red.vector else 1
                chain = chain * red.chains + (offsets[red.name] // width) % red.chains
        return chain

    def _product(self, graph: Graph, acc: Acc, values: tuple[int, ...]) -> tuple[int, ...]:
        """The factors of a contribution that becomes a fused multiply-add, or ()."""
        node = graph.nodes[values[0]]
        fused = (acc.combine, node.op, node.dtype) == ("add", "mul", acc.dtype) and acc.dtype in ("float32", "float64")
        return node.args if fused and not (self.lane_reduced and self._active_red) else ()

    def _contribute(
        self,
        frame: A.Frame,
        tile: Tile,
        emitted: dict[int, E.Lanes],
        point: Point,
        chain: int,
        number: int,
        values: tuple[int, ...],
    ) -> None:
        builder, acc = self.builder, self.phase.accs[number]
        slots = self.accumulators.slots[number, point, chain]
        old = [builder.load(slot) for slot in slots]
        factors = self._product(tile.graph, acc, values)
        if factors:
            x, y = (self._wide(emitted[f]) for f in factors)
            builder.store(L.fma(builder, x, y, old[0]), slots[0])
            return
        new = [self._wide(emitted[v]) for v in values]
        result = E.combine(builder, acc.combine, acc.dtype, tuple(old), tuple(new))
        if self.lane_reduced and self._active_red:
            mask = frame.live_mask()
            result = tuple(builder.select(mask, r, o) for r, o in zip(result, old, strict=True))
        for value, slot in zip(result, slots, strict=True):
            builder.store(value, slot)

    def _wide(self, lanes: E.Lanes) -> L.Value:
        if self.vector and not lanes.is_vector:
            return L.splat(self.builder, lanes.value, self.lanes)
        return lanes.value

    # -- exit ---------------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        vector = "" if self.lane_reduced else self.vector
        tile = exit_tile(self.phase, self.axes, self.ranges({}))
        builder = self.builder
        accs: dict[tuple[int, Point], E.Lanes] = {}
        for point, number in sorted(set(tile.accs.values())):
            accs[number, point] = self._accumulated(number, point)
        groups: dict[int, list[tuple[Point, int, int, Index, tuple[Guard, ...]]]] = {}
        for row in tile.stores:
            groups.setdefault(self._active_of(row[0]), []).append(row)
        for active, rows in sorted(groups.items(), reverse=True):
            frame = self._frame({}, self.ranges({}), active, vector)
            emitted: dict[int, E.Lanes] = {}
            if len(rows) < MANY_STORES:
                self._nodes(frame, tile, {row[2] for row in rows}, "", accs, emitted)
            for _, k, value, address, guards in rows:
                self._nodes(frame, tile, {value}, "", accs, emitted)
                buffer = self.buffers[self.phase.stores[k].buffer]
                lanes = emitted[value]
                if lanes.dtype != buffer.dtype:
                    raise IRError(f"{lanes.dtype} value stored into {buffer.dtype} buffer {buffer.name}")
                A.store(frame, buffer.name, buffer.dtype, address, E.to_memory(builder, lanes), guards)

    def _active_of(self, point: Point) -> int:
        """Live lanes at a point: fewer at the last vector of a remainder tile."""
        if not self.vector or self.lane_reduced or not self.shape.active:
            return self.lanes
        extent = next(e for e in self.axes if e.name == self.vector)
        return self.shape.active if dict(point)[self.vector] == (extent.count - 1) * extent.step else self.lanes

    def _accumulated(self, number: int, point: Point) -> E.Lanes:
        builder, acc = self.builder, self.phase.accs[number]
        values = self.accumulators.result(number, point)
        if self.lane_reduced:
            width = self.lanes
            while width > 1:
                width //= 2
                low = tuple(L.slice_lanes(builder, v, 0, width) for v in values)
                high = tuple(L.slice_lanes(builder, v, width, width) for v in values)
                values = E.combine(builder, acc.combine, acc.dtype, low, high)
            values = tuple(builder.extract_element(v, L.I32(0)) for v in values)
        return E.Lanes(values[-1], acc.index_dtype or acc.dtype)

    # -- graphs -------------------------------------------------------------------------------------------------
    def _frame(
        self, bases: Mapping[str, L.Value], ranges: Mapping[str, int], active: int, vector: str | None = None
    ) -> A.Frame:
        axis = self.vector if vector is None else vector
        return A.Frame(
            self.builder, {**self.variables, **bases}, self.pointers, ranges, axis, self.lanes, active or self.lanes
        )

    def _nodes(
        self,
        frame: A.Frame,
        tile: Tile,
        wanted: set[int],
        inner: str,
        accs: Mapping[tuple[int, Point], E.Lanes] | None = None,
        emitted: dict[int, E.Lanes] | None = None,
        masked: Mapping[int, int] | None = None,
    ) -> dict[int, E.Lanes]:
        """Emits what ``wanted`` needs and is not there yet, in reverse post-order of the uses (arguments first)."""
        emitted = {} if emitted is None else emitted
        for number in tile.graph.needed(wanted):
            if number in emitted:
                continue
            node = tile.graph.nodes[number]
            if accs is not None and node.op == "acc":
                point, acc = tile.accs[number]
                emitted[number] = accs[acc, point]
            else:
                frame.active = masked.get(number, frame.active) if masked else frame.active
                emitted[number] = self._node(frame, node, emitted, inner)
                if masked:
                    frame.active = self.lanes
            frame.values[number] = emitted[number].value
        return emitted

    def _masked_loads(self, tile: Tile) -> dict[int, int]:
        """Body nodes that only the last, partly dead vector of the tile uses: their loads must be masked."""
        if not self.vector or self.lane_reduced or not self.shape.active:
            return {}
        full: set[int] = set()
        part: set[int] = set()
        for point, _, _, values in tile.terms:
            (part if self._active_of(point) != self.lanes else full).update(values)
        only = set(tile.graph.needed(part)) - set(tile.graph.needed(full))
        return dict.fromkeys(only, self.shape.active)

    def _node(self, frame: A.Frame, node: Node, emitted: Mapping[int, E.Lanes], inner: str) -> E.Lanes:
        builder = self.builder
        if node.op == "const":
            assert node.value is not None
            return E.Lanes(E.constant(node.value, node.dtype), node.dtype)
        if node.op == "load":
            assert node.index is not None
            fill = E.memory_constant(node.value if node.value is not None else 0, node.dtype)
            raw = A.load(frame, node.buffer, node.dtype, node.index, node.guards, fill, inner)
            return E.from_memory(builder, raw, node.dtype)
        if node.op == "index":
            assert node.index is not None
            return self._index_node(frame, node)
        if node.op == "guard":
            condition = A.guard_condition(frame, node.guards)
            return E.Lanes(condition if condition is not None else L.I1(1), "bool")
        return E.apply(builder, node.op, node.dtype, [emitted[a] for a in node.args], dict(node.attrs))

    def _index_node(self, frame: A.Frame, node: Node) -> E.Lanes:
        assert node.index is not None
        vector = A.is_lanewise(node.index, frame)
        value = A.vector_index(frame, node.index) if vector else A.scalar_index(frame, node.index)
        return E._convert(self.builder, E.Lanes(value, f"int{L.bit_width(value.type)}"), node.dtype)
