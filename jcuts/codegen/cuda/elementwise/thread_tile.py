"""SIMT kernel: every thread computes a register tile of output points by itself.

This is the *point* form: element-wise chains, windows, depthwise and other convolutions, gathers, and reductions that
run inside a thread.  Reductions short enough to be unrolled are straight-line code, so that points of a tile share
loads (the rows of a depthwise window stay in registers); longer ones are loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jcuts.codegen.cuda.graph.accumulators import acc_start, acc_types, accumulate
from jcuts.codegen.cuda.graph.node_emitter import Emitter, store_all
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Buffer, Phase, Program, Red
from jcuts.kernel_ir.register_tiling import Extent, Point, Tile, body_tile, exit_tile, points
from jcuts.ops.window import identity

LEAST_GUARDED = 6  # guarded loads in a tile that make a second, unguarded version worth its code


@dataclass(frozen=True)
class TileVariant:
    """Points per axis of one tile variant; ``fixed``: an axis whose coordinate is one constant for all points."""

    counts: tuple[tuple[str, int], ...]
    fixed: tuple[tuple[str, int], ...] = ()


def fix_axis(phase: Phase, name: str, place: int) -> Phase:
    """Specialises a phase without reductions to one coordinate of an axis (dead code for other coordinates is
    removed).
    """
    exit_ = Graph()
    ranges = phase.ranges()
    where = {name: Index(place)}
    numbers = phase.exit.copy_into(exit_, [s.value for s in phase.stores], where, ranges)
    stores = tuple(
        replace(s, value=number, address=s.address.substitute(where, ranges))
        for s, number in zip(phase.stores, numbers, strict=True)
    )
    return replace(phase, axes=tuple(a for a in phase.axes if a.name != name), exit=exit_, stores=stores)


def tile_indexed_axes(phase: Phase) -> frozenset[str]:
    """Axes whose loop variable counts tiles: those divided in some address (strided windows, dilation, reshapes).

    With ``i = tile * unroll + offset`` quotients and remainders of an unrolled point are simplified away.
    """
    found = set()
    graphs = (phase.body, phase.exit) if phase.reds else (phase.exit,)
    indices = [n.index for g in graphs for n in g.nodes] + [d.index for g in graphs for n in g.nodes for d in n.guards]
    for index in (*indices, *(s.address for s in phase.stores)):
        if index is not None:
            found |= {a.name for a in phase.axes if a.unroll > 1 and index.stride(a.name) is None}
    return frozenset(found)


class RegisterTileEmitter:
    """Emits one register tile of a phase at the builder's position."""

    def __init__(
        self,
        builder: GpuBuilder,
        phase: Phase,
        shape: TileVariant,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        variables: Mapping[str, L.Value],
        multiples: Mapping[str, int],
        by_tile: frozenset[str] = frozenset(),
    ) -> None:
        self.by_tile = by_tile
        self.builder, self.phase, self.buffers, self.pointers = builder, phase, buffers, pointers
        self.variables, self.multiples, self.shape = dict(variables), dict(multiples), shape
        counts = dict(shape.counts)
        self.axes = [Extent(a.name, counts[a.name], scale=a.unroll if a.name in by_tile else 1) for a in phase.axes]
        # Base + offset stays inside the axis, so the base is bounded by what is left.
        self.ranges = {
            a.name: max(
                1, (a.extent - counts[a.name]) // a.unroll + 1 if a.name in by_tile else a.extent - counts[a.name] + 1
            )
            for a in phase.axes
        }
        self.slots: dict[tuple[int, Point, int], list[L.Value]] = {}
        self.bare = False
        """All guards of loads hold: they are left out."""
        self.live: L.Value | None = None
        """What every store needs, where not every thread has a point of its own."""
        self.in_place = False
        """Whether stores may overwrite what the same thread has loaded."""
        self.shared: Mapping[str, L.Value] = {}
        """Buffers in shared memory -> their address (i32)."""
        self.flagged: Mapping[str, M.Flagged] = {}
        """Buffers whose stores go elsewhere, with a number."""
        self.ahead: tuple[Tile, Emitter] | None = None
        """The exit graph and what is emitted of it (`load_ahead`)."""

    def _frame(self, bases: Mapping[str, L.Value], ranges: Mapping[str, int], steps: Mapping[str, int]) -> M.Frame:
        return M.Frame(
            self.builder,
            {**self.variables, **bases},
            self.pointers,
            {**self.ranges, **ranges},
            {**self.multiples, **steps},
            live=self.live,
            in_place=self.in_place,
            shared=self.shared,
            flagged=self.flagged,
        )

    def emit(self) -> None:
        """The whole tile; where loads have guards, a second unguarded version for interior tiles."""
        inside = self._inside()
        if inside is None:
            self._emit()
            return
        bare = RegisterTileEmitter(
            self.builder,
            self.phase,
            self.shape,
            self.buffers,
            self.pointers,
            self.variables,
            self.multiples,
            self.by_tile,
        )
        bare.bare, bare.live, bare.in_place = True, self.live, self.in_place
        bare.shared, bare.flagged = self.shared, self.flagged
        with self.builder.if_else(inside, likely=True) as (then, otherwise):
            with then:
                bare._emit()
            with otherwise:
                self._emit()

    def _inside(self) -> L.Value | None:
        """Whether all guards of all loads hold in the whole tile; None where testing does not pay."""
        if any(r.extent > r.unroll for r in self.phase.reds):
            return None
        reds = [Extent(r.name, r.extent, fixed=True) for r in self.phase.reds]
        frame = self._frame({}, {}, {})

        graphs = [exit_tile(self.phase, self.axes, frame.ranges).graph]
        if self.phase.reds:
            graphs.append(body_tile(self.phase, self.axes, reds, frame.ranges).graph)
        return all_in_bounds(frame, graphs)

    def _emit(self) -> None:
        if self.phase.reds:
            self._start()
            self._reduce(0, {}, {}, {}, {})
        self._finish()

    def _chains(self) -> int:
        chains = 1
        for red in self.phase.reds:
            chains *= red.chains
        return chains

    def _start(self) -> None:
        single = all(r.extent == 1 for r in self.phase.reds)
        for number, acc in enumerate(self.phase.accs):
            for point in points(self.axes):
                for chain in range(self._chains()):
                    slots = []
                    for kind, start in zip(acc_types(acc), acc_start(acc, single), strict=True):
                        with self.builder.goto_entry_block():
                            slot = self.builder.alloca(kind)
                        self.builder.store(start, slot)
                        slots.append(slot)
                    self.slots[number, point, chain] = slots

    def _reduce(
        self,
        level: int,
        fixed: dict[str, Extent],
        bases: dict[str, L.Value],
        ranges: dict[str, int],
        steps: dict[str, int],
    ) -> None:
        if level == len(self.phase.reds):
            self._body(fixed, bases, ranges, steps)
            return
        red = self.phase.reds[level]
        whole, rest = divmod(red.extent, red.unroll)
        if red.extent <= red.unroll:
            self._reduce(level + 1, {**fixed, red.name: Extent(red.name, red.extent, fixed=True)}, bases, ranges, steps)
            return
        self._loop(level, red, whole, fixed, bases, ranges, steps)
        if rest:
            first = whole * red.unroll
            part = {**fixed, red.name: Extent(red.name, rest)}
            self._reduce(
                level + 1,
                part,
                {**bases, red.name: L.I32(first)},
                {**ranges, red.name: first + 1},
                {**steps, red.name: first},
            )

    def _loop(
        self,
        level: int,
        red: Red,
        whole: int,
        fixed: dict[str, Extent],
        bases: dict[str, L.Value],
        ranges: dict[str, int],
        steps: dict[str, int],
    ) -> None:
        builder = self.builder
        before = builder.block
        loop, after = builder.append_basic_block(f"reduce.{red.name}"), builder.append_basic_block(f"done.{red.name}")
        builder.branch(loop)
        builder.position_at_end(loop)
        variable = builder.phi(L.I32, red.name)
        variable.add_incoming(L.I32(0), before)
        inside = {**fixed, red.name: Extent(red.name, red.unroll)}
        bounds = {**ranges, red.name: red.extent - red.unroll + 1}
        self._reduce(level + 1, inside, {**bases, red.name: variable}, bounds, {**steps, red.name: red.unroll})
        following = builder.add(variable, L.I32(red.unroll))
        variable.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, L.I32(whole * red.unroll)), loop, after)
        builder.position_at_end(after)

    def _both_bodies(
        self, fixed: dict[str, Extent], bases: dict[str, L.Value], ranges: dict[str, int], steps: dict[str, int]
    ) -> None:
        """Accumulates the reduced elements of a tile; with many guards, a second version without them."""
        frame = self._frame(bases, ranges, steps)
        tile = body_tile(self.phase, self.axes, [fixed[r.name] for r in self.phase.reds], frame.ranges)
        hold = all_in_bounds(frame, [tile.graph])
        if hold is None:
            self._body(fixed, bases, ranges, steps)
            return
        with self.builder.if_else(hold) as (then, otherwise):
            with then:
                self.bare = True
                self._body(fixed, bases, ranges, steps)
                self.bare = False
            with otherwise:
                self._body(fixed, bases, ranges, steps)

    def _body(
        self, fixed: dict[str, Extent], bases: dict[str, L.Value], ranges: dict[str, int], steps: dict[str, int]
    ) -> None:
        frame = self._frame(bases, ranges, steps)
        tile = body_tile(self.phase, self.axes, [fixed[r.name] for r in self.phase.reds], frame.ranges)
        if self.bare:
            _strip(tile.graph)
        emitter = self._body_emitter(frame, tile.graph)
        emitter.vectorize_loads(value for _, _, _, values in tile.terms for value in values)
        for point, red_point, number, values in sorted(tile.terms, key=lambda t: _memory_order(tile.graph, t[3])):
            if self._changes_nothing(tile.graph, number, values):
                continue
            chain = 0
            offsets = dict(red_point)
            for red in self.phase.reds:
                chain = chain * red.chains + offsets[red.name] % red.chains
            several = any(r.extent > 1 for r in self.phase.reds)
            accumulate(emitter, self.phase.accs[number], self.slots[number, point, chain], values, several=several)

    def _body_emitter(self, frame: M.Frame, graph: Graph) -> Emitter:
        return Emitter(frame, graph, self.buffers)

    def _exit_emitter(self, frame: M.Frame, graph: Graph) -> Emitter:
        return Emitter(frame, graph, self.buffers)

    def _changes_nothing(self, graph: Graph, number: int, values: tuple[int, ...]) -> bool:
        """Whether a reduced element is neutral in every tile: holes of a dilated operand, padding."""
        acc, node = self.phase.accs[number], graph.nodes[values[0]]
        if node.op != "const" or acc.index_dtype or all(r.extent == 1 for r in self.phase.reds):
            return False
        return node.value == identity(acc.combine, acc.dtype)

    def load_ahead(
        self, known: Mapping[int, E.Lanes] | None = None, only: Callable[[Node], bool] = lambda load: True
    ) -> dict[int, E.Lanes]:
        """Issues the exit graph's loads before what is reduced is known.

        Args: known: values of loads that have been made. only: which of the others to make.
        Returns: the values that were loaded, by number of the node.
        """
        tile, emitter = self._exit_tile()
        for number, lanes in (known or {}).items():
            emitter.bind(number, lanes)
        wanted = emitter.graph.needed([value for _, _, value, _, _ in tile.stores], emitter.done)
        emitter.vectorize_loads(wanted)
        loads = [n for n in wanted if tile.graph.nodes[n].op == "load" and not tile.graph.nodes[n].index.values()]  # type: ignore[union-attr]
        loads = [n for n in loads if only(tile.graph.nodes[n])]
        emitter.emit(loads)
        self.ahead = tile, emitter
        return {number: emitter.done[number] for number in loads}

    def exit_tile(self) -> Tile:
        """The exit graph of all points."""
        tile = exit_tile(self.phase, self.axes, self.ranges)
        if self.bare:
            _strip(tile.graph)
        return tile

    def _exit_tile(self) -> tuple[Tile, Emitter]:
        tile = self.exit_tile()
        return tile, self._exit_emitter(self._frame({}, {}, {}), tile.graph)

    def _finish(self) -> None:
        tile, emitter = self.ahead or self._exit_tile()
        for node, (point, number) in tile.accs.items():
            emitter.bind(node, self._accumulated(number, point))
        # no schedule of this form has stores under guards: tiles that reach beyond the result have guarded threads
        values = [value for _, _, value, _, _ in tile.stores]
        emitter.vectorize_loads(values)
        if self.in_place:  # all loads are in flight before the first store, which the compiler moves none across
            emitter.emit([n for n in tile.graph.needed(values, emitter.done) if tile.graph.nodes[n].op == "load"])
        store_all(emitter, [(self.phase.stores[k].buffer, where, value) for _, k, value, where, _ in tile.stores])

    def _accumulated(self, number: int, point: Point) -> E.Lanes:
        builder, acc = self.builder, self.phase.accs[number]
        parts = [tuple(builder.load(s) for s in self.slots[number, point, c]) for c in range(self._chains())]
        total = parts[0]
        for part in parts[1:]:
            total = E.combine(builder, acc.combine, acc.dtype, total, part)
        return E.Lanes(total[-1], acc.index_dtype or acc.dtype)


class ThreadTileKernel:
    """Emits one thread of the register-tiled kernel."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: TileVariant,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        phase, by_tile, multiples = indexed_phase(program, tile)
        self.tile = RegisterTileEmitter(builder, phase, tile, buffers, pointers, integers, multiples, by_tile)

    def emit(self) -> None:
        """The whole tile."""
        self.tile.emit()


def indexed_phase(program: Program, tile: TileVariant) -> tuple[Phase, frozenset[str], dict[str, int]]:
    """A program's phase at the tile's fixed coordinate, axes whose variable counts tiles, multiples of the others."""
    phase = program.phases[0]
    by_tile = tile_indexed_axes(phase)
    for name, place in tile.fixed:
        phase = fix_axis(phase, name, place)
    return phase, by_tile, {a.name: a.unroll for a in phase.axes if a.name not in by_tile}


def _strip(graph: Graph) -> None:
    """Makes the loads of a tile unconditional (the guards of values stay)."""
    for number, node in enumerate(graph.nodes):
        if node.op == "load" and node.guards:
            graph.nodes[number] = replace(node, guards=(), value=None)


def all_in_bounds(frame: M.Frame, graphs: Sequence[Graph]) -> L.Value | None:
    """Whether all guards of a tile's loads hold; None where testing does not pay (few guards, or never all true)."""
    loads = [n for g in graphs for n in g.nodes if n.op == "load" and n.guards]
    if len(loads) < LEAST_GUARDED:
        return None
    low: dict[Index, int] = {}
    high: dict[Index, int] = {}
    for guard in dict.fromkeys(g for n in loads for g in n.guards):
        if guard.index.values():
            return None
        moving = Index(0, guard.index.terms)
        if guard.low is not None:
            low[moving] = max(low.get(moving, guard.low - guard.index.const), guard.low - guard.index.const)
        if guard.high is not None:
            high[moving] = min(high.get(moving, guard.high - guard.index.const), guard.high - guard.index.const)
    bounds = [Guard(m, low.get(m), high.get(m)) for m in dict.fromkeys([*low, *high])]
    if any(g.never(frame.ranges) or (g.low is not None and g.high is not None and g.low > g.high) for g in bounds):
        return None
    return M.condition(frame, bounds)


def _memory_order(graph: Graph, values: tuple[int, ...]) -> int:
    """Sort key of reduced elements: address in their largest operand, so that rows of a window stream."""
    loads = [n for n in (graph.nodes[k] for k in graph.needed(values)) if n.op == "load" and n.index is not None]
    return max(((len(n.index.axes()), n.index.const) for n in loads if n.index is not None), default=(0, 0))[1]
