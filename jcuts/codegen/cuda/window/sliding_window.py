"""Sliding window in registers: a thread iterates over tiles along an axis and reuses the values that consecutive tiles
share.

A window that slides down an image reads every row once: rows that a tile shares with the next stay in registers, and so
do values that both compute (which element of a window its maximum was).  The other loads are issued ``ahead`` tiles
before the one that needs them (software prefetch), or where it begins (0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant, indexed_phase
from jcuts.codegen.cuda.graph.node_emitter import Emitter, fill_bits, from_word
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import Buffer, Program, Red
from jcuts.kernel_ir.register_tiling import Extent, Tile, body_tile, exit_tile


@dataclass(frozen=True)
class SlidingWindow:
    """The loop of one thread.

    Attributes:
        axis: along which it goes.
        tiles: register tiles per thread.
        ahead: tiles by which loads are issued early.
    """

    axis: str
    tiles: int
    ahead: int


def walk_of(program: Program) -> SlidingWindow | None:
    """The sliding window of a schedule. Raises CompileRejected where tiles do not divide the axis."""
    params = dict(program.params)
    if "walk" not in params:
        return None
    name, tiles = params["walk"]  # type: ignore[misc]
    found = SlidingWindow(str(name), int(str(tiles)), int(str(params.get("ahead", 0))))
    axis = next((a for a in program.phases[0].axes if a.name == found.axis), None)
    if axis is None or axis.extent % axis.unroll or found.tiles < 1:
        raise CompileRejected(f"{program.name}: no walk of {found.tiles} tiles along {found.axis}")
    return found


Run = tuple[int, ...]
"""Nodes of neighbouring elements that one access loads."""


@dataclass(frozen=True)
class _Path:
    """A loop range: values of a variable from ``first`` to before ``end``, at least one, ``step`` apart."""

    name: str
    step: int
    first: L.Value
    end: L.Value
    ahead: int


class SlidingWindowEmitter(RegisterTileEmitter):
    """Emits the tiles of one thread along a sliding window."""

    given: Mapping[int, E.Lanes] = MappingProxyType({})
    """What the walk has already, by node."""

    def walk(self, walk: SlidingWindow) -> None:
        """All tiles of the thread, from where the axis' variable stands."""
        builder = self.builder
        axis = next(a for a in self.phase.axes if a.name == walk.axis)
        step = 1 if walk.axis in self.by_tile else axis.unroll
        count = axis.extent // axis.unroll
        first = self.variables[walk.axis]
        end = builder.add(first, L.I32(walk.tiles * step))
        if count % walk.tiles:  # the last thread along the axis has fewer
            last = L.I32(count * step)
            end = builder.select(builder.icmp_signed("<", end, last), end, last)

        def frame(at: L.Value) -> M.Frame:
            self.variables[walk.axis] = at
            return self._frame({}, {}, {})

        def compute(at: L.Value) -> None:
            self.variables[walk.axis] = at
            self._emit()

        graph, wanted = self._graph(frame(first).ranges)
        self._tiles(_Path(walk.axis, step, first, end, walk.ahead), graph, wanted, frame, compute)

    def walk_terms(
        self,
        red: Red,
        ahead: int,
        fixed: dict[str, Extent],
        bases: dict[str, L.Value],
        ranges: dict[str, int],
        steps: dict[str, int],
    ) -> None:
        """Accumulates a tile over all points of one reduction, ``red.unroll`` at a time."""
        inside = {**fixed, red.name: Extent(red.name, red.unroll)}
        bounds = {**ranges, red.name: red.extent - red.unroll + 1}
        multiples = {**steps, red.name: red.unroll}

        def frame(at: L.Value) -> M.Frame:
            return self._frame({**bases, red.name: at}, bounds, multiples)

        def compute(at: L.Value) -> None:
            self._body(inside, {**bases, red.name: at}, bounds, multiples)

        start = L.I32(0)
        reds = [inside[r.name] for r in self.phase.reds]
        graph, wanted = _terms(body_tile(self.phase, self.axes, reds, frame(start).ranges))
        self._tiles(_Path(red.name, red.unroll, start, L.I32(red.extent), ahead), graph, wanted, frame, compute)

    def _tiles(
        self,
        path: _Path,
        graph: Graph,
        wanted: Sequence[int],
        frame: Callable[[L.Value], M.Frame],
        compute: Callable[[L.Value], None],
    ) -> None:
        """The loop over tiles. Args: graph, wanted: of one tile; frame, compute: of the tile at the variable's
        value.
        """
        builder = self.builder
        here = frame(path.first)
        follows = _reused_nodes(path, graph, wanted, here.ranges)
        values = _carried_values(graph, wanted, follows)
        plan = Emitter(here, graph, self.buffers)
        needed = (n for n in graph.needed(wanted, values) if graph.nodes[n].op == "load")
        plan.vectorize_loads(n for n in needed if not _data(graph.nodes[n]))
        runs = list(dict.fromkeys(tuple(members) for members in plan.runs.values()))
        still = [r for r in runs if path.name not in _axes(graph.nodes[r[0]])]
        moving = [r for r in runs if r not in set(still)]
        again = {r: q for r in moving if (q := tuple(follows.get(n, -1) for n in r)) in set(moving)}
        kept = [r for r in moving if path.ahead or r in again]
        start = {r: self._words(here, graph, r) for r in (*still, *kept)}
        fresh = [r for r in kept if r not in again]
        early = [self._prefetch(path, graph, fresh, frame, path.first, k) for k in range(1, path.ahead)]
        self.given = self._lanes(graph, start)
        first = self._body_emitter(here, graph)
        first.vectorize_loads(values)
        made = dict(zip(values, first.emit(values), strict=True))
        before = builder.block
        loop, after = builder.append_basic_block("walk"), builder.append_basic_block("walked")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(L.I32, "at")
        phis = {r: [builder.phi(w.type) for w in start[r]] for r in kept}
        carried = {n: replace(lanes, value=builder.phi(lanes.value.type)) for n, lanes in made.items()}
        queue = [{r: [builder.phi(w.type) for w in words] for r, words in stage.items()} for stage in early]
        following = builder.add(at, L.I32(path.step))
        now: dict[Run, list[L.Value]] = {**{r: start[r] for r in still}, **phis}
        arriving: list[Mapping[Run, list[L.Value]]] = [*queue]
        if path.ahead:
            arriving.append(self._prefetch(path, graph, fresh, frame, at, path.ahead))
        else:
            here = frame(at)
            now |= {r: self._words(here, graph, r) for r in moving if r not in again}
        self.given = {**self._lanes(graph, now), **carried}
        compute(at)
        last = [follows[n] for n in values]
        self.emitter.vectorize_loads(last)
        coming = self.emitter.emit(last)
        pairs = [(at, path.first, following)]
        pairs += [(phi.value, made[n].value, new.value) for (n, phi), new in zip(carried.items(), coming, strict=True)]
        for r, found in phis.items():
            pairs += zip(found, start[r], now[again[r]] if r in again else arriving[0][r], strict=True)
        for stage, old_words, new_words in zip(queue, early, arriving[1:], strict=True):
            for r, found in stage.items():
                pairs += zip(found, old_words[r], new_words[r], strict=True)
        for phi, old, new in pairs:
            phi.add_incoming(old, before)
            phi.add_incoming(new, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, path.end), loop, after)
        builder.position_at_end(after)

    def _prefetch(
        self, path: _Path, graph: Graph, runs: Sequence[Run], frame: Callable[[L.Value], M.Frame], at: L.Value, by: int
    ) -> dict[Run, list[L.Value]]:
        """Prefetches the loads of the tile so many further on, where there is one."""
        there = self.builder.add(at, L.I32(by * path.step))
        inside = self.builder.icmp_signed("<", there, path.end)
        place = frame(there)
        return {r: self._words(place, graph, r, inside) for r in runs}

    def _body_emitter(self, frame: M.Frame, graph: Graph) -> Emitter:
        """An emitter with the carried values bound."""
        self.emitter = Emitter(frame, graph, self.buffers)
        for number, lanes in self.given.items():
            self.emitter.bind(number, lanes)
        return self.emitter

    def _exit_emitter(self, frame: M.Frame, graph: Graph) -> Emitter:
        return Emitter(frame, graph, self.buffers) if self.phase.reds else self._body_emitter(frame, graph)

    def _graph(self, ranges: Mapping[str, int]) -> tuple[Graph, list[int]]:
        """The graph of a tile of the sliding axis, and its results."""
        if not self.phase.reds:
            tile = exit_tile(self.phase, self.axes, ranges)
            return tile.graph, [value for _, _, value, _, _ in tile.stores]
        reds = [Extent(r.name, r.extent, fixed=True) for r in self.phase.reds]
        return _terms(body_tile(self.phase, self.axes, reds, ranges))

    def _words(self, frame: M.Frame, graph: Graph, run: Run, only: L.Value | None = None) -> list[L.Value]:
        """The registers of an access, predicated by ``only``."""
        node = graph.nodes[run[0]]
        assert node.index is not None
        fill = fill_bits(node.value, node.dtype)
        return M.load_words(frame, node.buffer, M.item_size(node.dtype), node.index, len(run), node.guards, fill, only)

    def _lanes(self, graph: Graph, words: Mapping[Run, Sequence[L.Value]]) -> dict[int, E.Lanes]:
        """Values of the loads, by node."""
        found = {}
        for run, registers in words.items():
            dtype = graph.nodes[run[0]].dtype
            elements = M.elements(self.builder, registers, M.item_size(dtype), len(run))
            found |= {n: from_word(self.builder, word, dtype) for n, word in zip(run, elements, strict=True)}
        return found


def _terms(tile: Tile) -> tuple[Graph, list[int]]:
    return tile.graph, [value for _, _, _, values in tile.terms for value in values]


def _reused_nodes(path: _Path, graph: Graph, wanted: Sequence[int], ranges: Mapping[str, int]) -> dict[int, int]:
    """Nodes of the next tile -> equal nodes of this one (reused values); without loop-invariant ones."""
    reach = max(1, ranges[path.name] - path.step)  # of a tile that has a next one
    inside = {**ranges, path.name: reach}
    both = Graph()
    needed = graph.needed(wanted)
    now = dict(zip(needed, graph.copy_into(both, needed, {}, inside), strict=True))
    shift = {path.name: Index.axis(path.name) + path.step}
    then = dict(zip(needed, graph.copy_into(both, needed, shift, inside), strict=True))
    places = {there: number for number, there in reversed(now.items())}
    return {n: places[there] for n, there in then.items() if there in places and there != now[n]}


def _carried_values(graph: Graph, wanted: Sequence[int], follows: Mapping[int, int]) -> list[int]:
    """Carried values: those that cost more than a conversion of a loaded value."""
    found, seen, stack = set(), set(), list(wanted)
    while stack:
        number = stack.pop()
        if number in seen:
            continue
        seen.add(number)
        node = graph.nodes[number]
        plain = not node.args or (node.op in ("widen", "convert") and graph.nodes[node.args[0]].op == "load")
        if number in follows and not plain:
            found.add(number)
        else:
            stack.extend(node.args)
    return sorted(found)


def _axes(node: Node) -> frozenset[str]:
    indices = (node.index, *(g.index for g in node.guards))
    return frozenset().union(*(i.axes() for i in indices if i is not None))


def _data(node: Node) -> bool:
    """Whether a load's address is data-dependent."""
    return any(i is not None and i.values() for i in (node.index, *(g.index for g in node.guards)))


class SlidingWindowKernel:
    """Emits one thread of the sliding-window kernel."""

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
        walk = walk_of(program)
        assert walk is not None
        phase, by_tile, multiples = indexed_phase(program, tile)
        self.walk = walk
        self.tiles = SlidingWindowEmitter(builder, phase, tile, buffers, pointers, integers, multiples, by_tile)

    def emit(self) -> None:
        """All tiles of the thread."""
        self.tiles.walk(self.walk)
