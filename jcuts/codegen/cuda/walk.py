"""A thread of the point form that walks along an axis: tile after tile, keeping what the next tile reads again.

A window that slides down an image reads every row once: rows that a tile shares with the next stay in registers.  The
other loads of the next tile are asked for before the present one is computed (``ahead``), or where it begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import memory as M
from jcuts.codegen.cuda.point import PointEmitter
from jcuts.codegen.cuda.values import Emitter, fill_bits, from_word
from jcuts.dfg.index import Index
from jcuts.dfg.node import Graph, Guard, Node
from jcuts.dfg.program import Program
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


class WalkEmitter(PointEmitter):
    """Emits the walk of one thread."""

    def walk(self, walk: Walk) -> None:
        """All tiles of the thread, from where the axis' variable stands."""
        builder = self.builder
        axis = next(a for a in self.phase.axes if a.name == walk.axis)
        self.along, self.step = walk.axis, 1 if walk.axis in self.by_tile else axis.unroll
        graph = self._graph()
        plan = Emitter(self._frame({}, {}, {}), graph, self.buffers)
        plan.plan(n for n, node in enumerate(graph.nodes) if node.op == "load" and not _data(node))
        self.runs = plan.runs
        runs = list(dict.fromkeys(tuple(members) for members in plan.runs.values()))
        fixed = [r for r in runs if self._fixed(graph.nodes[r[0]])]
        moving = [r for r in runs if r not in set(fixed)]
        follows = self._follows(graph, moving)
        kept = [r for r in moving if walk.ahead or r in follows]
        first = self.variables[walk.axis]
        last = axis.extent // axis.unroll * self.step
        # Segments at the end of the axis may be shorter: the loop ends where the axis does.
        end = builder.add(first, L.I32(walk.tiles * self.step))
        if axis.extent // axis.unroll % walk.tiles:
            end = builder.select(builder.icmp_signed("<", end, L.I32(last)), end, L.I32(last))
        frame = self._frame({}, {}, {})
        held = {r: self._words(frame, graph, r) for r in fixed}
        start = {r: self._words(frame, graph, r) for r in kept}
        before = builder.block
        loop, after = builder.append_basic_block("walk"), builder.append_basic_block("walked")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(L.I32, "at")
        at.add_incoming(first, before)
        phis = {r: [builder.phi(w.type) for w in words] for r, words in start.items()}
        for r, words in start.items():
            for phi, word in zip(phis[r], words, strict=True):
                phi.add_incoming(word, before)
        self.variables[walk.axis] = at
        following = builder.add(at, L.I32(self.step))
        more = builder.icmp_signed("<", following, end)
        now: dict[Run, list[L.Value]] = {**held, **phis}
        if walk.ahead:
            ahead = replace(frame, variables={**frame.variables, walk.axis: following}, cache={})
            fresh = {r: self._words(ahead, graph, r, more) for r in kept if r not in follows}
        else:
            here = self._frame({}, {}, {})
            now |= {r: self._words(here, graph, r) for r in moving if r not in follows}
            fresh = {}
        self.given = {
            number: word for run, words in now.items() for number, word in zip(run, self._elements(graph, run, words))
        }
        self._emit()
        at.add_incoming(following, builder.block)
        for r, words in phis.items():
            for phi, word in zip(words, now[follows[r]] if r in follows else fresh[r], strict=True):
                phi.add_incoming(word, builder.block)
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

    def _graph(self) -> Graph:
        """The graph of a tile whose loads the walk carries."""
        ranges = self._frame({}, {}, {}).ranges
        if not self.phase.reds:
            return exit_tile(self.phase, self.axes, ranges).graph
        reds = [Extent(r.name, r.extent, fixed=True) for r in self.phase.reds]
        return body_tile(self.phase, self.axes, reds, ranges).graph

    def _fixed(self, node: Node) -> bool:
        """Whether a load is the same in all tiles."""
        indices = [node.index, *(g.index for g in node.guards)]
        return not any(i is not None and self.along in i.axes() for i in indices)

    def _follows(self, graph: Graph, runs: Sequence[Run]) -> dict[Run, Run]:
        """Loads of the next tile -> those of this one that have them already."""
        reach = max(1, self.ranges[self.along] - self.step)  # of a tile that has a next one
        ranges = {**self.ranges, self.along: reach}
        places = {(self._key(graph.nodes[r[0]], {}, ranges), len(r)): r for r in runs}
        shift = {self.along: Index.axis(self.along) + self.step}
        found = {r: places.get((self._key(graph.nodes[r[0]], shift, ranges), len(r))) for r in runs}
        return {r: other for r, other in found.items() if other is not None}

    @staticmethod
    def _key(node: Node, shift: Mapping[str, Index], ranges: Mapping[str, int]) -> object:
        assert node.index is not None
        guards = (Guard(g.index.substitute(shift, ranges), g.low, g.high) for g in node.guards)
        left = tuple(g for g in guards if not g.always(ranges))
        return node.buffer, node.index.substitute(shift, ranges), left, fill_bits(node.value, node.dtype) if left else 0

    def _words(self, frame: M.Frame, graph: Graph, run: Run, only: L.Value | None = None) -> list[L.Value]:
        """The registers of an access; nothing is read unless ``only`` holds."""
        node = graph.nodes[run[0]]
        assert node.index is not None
        size = M.item_size(node.dtype)
        fill = fill_bits(node.value, node.dtype)
        return M.load_words(frame, node.buffer, size, node.index, len(run), node.guards, fill, only)

    def _elements(self, graph: Graph, run: Run, words: Sequence[L.Value]) -> list[L.Value]:
        return M.elements(self.builder, words, M.item_size(graph.nodes[run[0]].dtype), len(run))


def _data(node: Node) -> bool:
    """Whether the address of a load is known at run time only."""
    return any(i is not None and i.values() for i in (node.index, *(g.index for g in node.guards)))
