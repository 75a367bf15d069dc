"""A thread of the point form that walks along an axis: tile after tile, keeping what the next tile reads again.

A window that slides down an image reads every row once: rows that a tile shares with the next stay in registers.  The
other loads of the next tile are asked for before the present one is computed (``ahead``), or where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jcuts.base.errors import CompileRejected
from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import memory as M
from jcuts.codegen.cuda.point import PointEmitter
from jcuts.codegen.cuda.values import Emitter, fill_bits, from_word
from jcuts.dfg.index import Index
from jcuts.dfg.node import Graph, Guard, Node
from jcuts.dfg.program import Program, Red
from jcuts.dfg.tile import Extent, body_tile, exit_tile


@dataclass(frozen=True)
class Walk:
    """Along which axis a thread walks: ``tiles`` of its register tiles, the next one's loads ``ahead`` or not."""

    axis: str
    tiles: int
    ahead: bool


def walk_of(program: Program) -> Walk | None:
    """The walk that a schedule asks for. Raises CompileRejected where tiles do not divide the axis."""
    params = dict(program.params)
    if "walk" not in params:
        return None
    name, tiles = params["walk"]  # type: ignore[misc]
    found = Walk(str(name), int(str(tiles)), bool(params.get("ahead", 0)))
    axis = next((a for a in program.phases[0].axes if a.name == found.axis), None)
    if axis is None or axis.extent % axis.unroll or found.tiles < 1:
        raise CompileRejected(f"{program.name}: no walk of {found.tiles} tiles along {found.axis}")
    return found


Run = tuple[int, ...]
"""Nodes of neighbouring elements that one access loads."""


@dataclass(frozen=True)
class _Path:
    """Values of a variable from ``first`` to before ``end``, at least one, ``step`` apart."""

    name: str
    step: int
    first: L.Value
    end: L.Value
    ahead: bool


class WalkEmitter(PointEmitter):
    """Emits the walk of one thread."""

    given: Mapping[int, L.Value] = MappingProxyType({})
    """Node -> bits of an element that the walk has already."""

    def walk(self, walk: Walk) -> None:
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

        graph = self._graph(frame(first).ranges)
        self._tiles(_Path(walk.axis, step, first, end, walk.ahead), graph, frame, compute)

    def walk_terms(
        self, red: Red, ahead: bool, fixed: dict[str, Extent], bases: dict[str, L.Value], ranges: dict[str, int],
        steps: dict[str, int],
    ) -> None:  # fmt: skip
        """The terms of a tile, with all points of one reduction, ``red.unroll`` of them at a time."""
        inside = {**fixed, red.name: Extent(red.name, red.unroll)}
        bounds = {**ranges, red.name: red.extent - red.unroll + 1}
        multiples = {**steps, red.name: red.unroll}

        def frame(at: L.Value) -> M.Frame:
            return self._frame({**bases, red.name: at}, bounds, multiples)

        def compute(at: L.Value) -> None:
            self._body(inside, {**bases, red.name: at}, bounds, multiples)

        start = L.I32(0)
        reds = [inside[r.name] for r in self.phase.reds]
        graph = body_tile(self.phase, self.axes, reds, frame(start).ranges).graph
        self._tiles(_Path(red.name, red.unroll, start, L.I32(red.extent), ahead), graph, frame, compute)

    def _tiles(
        self, path: _Path, graph: Graph, frame: Callable[[L.Value], M.Frame], compute: Callable[[L.Value], None]
    ) -> None:
        """The loop. Args: graph: of one tile; frame, compute: of the tile where the variable has a value."""
        builder = self.builder
        here = frame(path.first)
        plan = Emitter(here, graph, self.buffers)
        plan.plan(n for n, node in enumerate(graph.nodes) if node.op == "load" and not _data(node))
        runs = list(dict.fromkeys(tuple(members) for members in plan.runs.values()))
        still = [r for r in runs if path.name not in _axes(graph.nodes[r[0]])]
        moving = [r for r in runs if r not in set(still)]
        follows = _follows(path, graph, moving, here.ranges)
        kept = [r for r in moving if path.ahead or r in follows]
        held = {r: self._words(here, graph, r) for r in still}
        start = {r: self._words(here, graph, r) for r in kept}
        before = builder.block
        loop, after = builder.append_basic_block("walk"), builder.append_basic_block("walked")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(L.I32, "at")
        phis = {r: [builder.phi(w.type) for w in words] for r, words in start.items()}
        following = builder.add(at, L.I32(path.step))
        more = builder.icmp_signed("<", following, path.end)
        now: dict[Run, list[L.Value]] = {**held, **phis}
        if path.ahead:
            there = frame(following)
            fresh = {r: self._words(there, graph, r, more) for r in kept if r not in follows}
        else:
            here, fresh = frame(at), {}
            now |= {r: self._words(here, graph, r) for r in moving if r not in follows}
        self.given = {n: v for run, words in now.items() for n, v in self._elements(graph, run, words)}
        compute(at)
        at.add_incoming(path.first, before)
        at.add_incoming(following, builder.block)
        for r, found in phis.items():
            coming = now[follows[r]] if r in follows else fresh[r]
            for phi, old, new in zip(found, start[r], coming, strict=True):
                phi.add_incoming(old, before)
                phi.add_incoming(new, builder.block)
        builder.cbranch(more, loop, after)
        builder.position_at_end(after)

    def _body_emitter(self, frame: M.Frame, graph: Graph) -> Emitter:
        """An emitter that has the values of this tile's loads."""
        emitter = Emitter(frame, graph, self.buffers)
        for number, word in self.given.items():
            emitter.give(number, from_word(self.builder, word, graph.nodes[number].dtype))
        return emitter

    def _exit_emitter(self, frame: M.Frame, graph: Graph) -> Emitter:
        return Emitter(frame, graph, self.buffers) if self.phase.reds else self._body_emitter(frame, graph)

    def _graph(self, ranges: Mapping[str, int]) -> Graph:
        """The graph of a tile whose loads the walk carries."""
        if not self.phase.reds:
            return exit_tile(self.phase, self.axes, ranges).graph
        reds = [Extent(r.name, r.extent, fixed=True) for r in self.phase.reds]
        return body_tile(self.phase, self.axes, reds, ranges).graph

    def _words(self, frame: M.Frame, graph: Graph, run: Run, only: L.Value | None = None) -> list[L.Value]:
        """The registers of an access; nothing is read unless ``only`` holds."""
        node = graph.nodes[run[0]]
        assert node.index is not None
        fill = fill_bits(node.value, node.dtype)
        return M.load_words(
            frame, node.buffer, M.item_size(node.dtype), node.index, len(run), node.guards, fill, only
        )  # fmt: skip

    def _elements(self, graph: Graph, run: Run, words: Sequence[L.Value]) -> list[tuple[int, L.Value]]:
        found = M.elements(self.builder, words, M.item_size(graph.nodes[run[0]].dtype), len(run))
        return list(zip(run, found, strict=True))


def _follows(path: _Path, graph: Graph, runs: Sequence[Run], ranges: Mapping[str, int]) -> dict[Run, Run]:
    """Loads of the next tile -> those of this one that have them already."""
    reach = max(1, ranges[path.name] - path.step)  # of a tile that has a next one
    inside = {**ranges, path.name: reach}
    places = {(_key(graph.nodes[r[0]], {}, inside), len(r)): r for r in runs}
    shift = {path.name: Index.axis(path.name) + path.step}
    found = {r: places.get((_key(graph.nodes[r[0]], shift, inside), len(r))) for r in runs}
    return {r: other for r, other in found.items() if other is not None}


def _key(node: Node, shift: Mapping[str, Index], ranges: Mapping[str, int]) -> object:
    """What a load reads where a variable is replaced."""
    assert node.index is not None
    guards = (Guard(g.index.substitute(shift, ranges), g.low, g.high) for g in node.guards)
    left = tuple(g for g in guards if not g.always(ranges))
    return node.buffer, node.index.substitute(shift, ranges), left, fill_bits(node.value, node.dtype) if left else 0


def _axes(node: Node) -> frozenset[str]:
    indices = (node.index, *(g.index for g in node.guards))
    return frozenset().union(*(i.axes() for i in indices if i is not None))


def _data(node: Node) -> bool:
    """Whether the address of a load is known at run time only."""
    return any(i is not None and i.values() for i in (node.index, *(g.index for g in node.guards)))
