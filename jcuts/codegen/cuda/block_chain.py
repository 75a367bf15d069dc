"""What follows a sum between the products of the *block* form: element-wise operations, vectors along channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jcuts.codegen import elements as E
from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import memory as M
from jcuts.codegen.cuda.values import Emitter, to_words
from jcuts.dfg.index import Index
from jcuts.dfg.node import Graph, Guard, Node
from jcuts.dfg.program import Buffer, Phase
from jcuts.region.block_tiles import WORD


class Chain:
    """The exit graph of a phase that stores one value per channel and pixel."""

    def __init__(
        self, frame: M.Frame, phase: Phase, axis: str, channels: int, chunk: int, buffers: Mapping[str, Buffer]
    ) -> None:
        """Args: axis: that of channels; chunk: a piece of them, of which the last may have some that there are not."""
        self.frame, self.axis, self.buffers = frame, axis, buffers
        self.range = -(-channels // chunk) * chunk
        self.wanted = phase.stores[0].value
        self.graph = Graph()
        for node in phase.exit.nodes:
            if node.op == "load" and node.index is not None and axis in node.index.axes() and channels % chunk:
                node = replace(node, guards=(Guard(Index.axis(axis), None, channels - 1),), value=0.0)
            self.graph.add(node)
        self.accs = [k for k, node in enumerate(self.graph.nodes) if node.op == "acc"]

    def apply(
        self, first: L.Value, multiple: int, runs: Sequence[Sequence[tuple[int, Sequence[L.Value]]]]
    ) -> list[list[list[E.Lanes]]]:
        """The values of channels that begin at ``first``.

        Args: multiple: a number that divides it; runs: neighbouring channels (offset, sums of pixels).
        """
        reach = max((offset for run in runs for offset, _ in run), default=0)
        frame = replace(
            self.frame, variables={**self.frame.variables, self.axis: first}, values={}, cache={},
            ranges={**self.frame.ranges, self.axis: self.range - reach}, multiples={self.axis: multiple},
        )  # fmt: skip
        graph = Graph()
        emitter = Emitter(frame, graph, self.buffers)
        numbers = []
        for run in runs:
            numbers.append([])
            for offset, sums in run:
                where = {self.axis: Index.axis(self.axis) + offset}
                numbers[-1].append([])
                for pixel, value in enumerate(sums):
                    given = graph.add(Node("acc", "float32", attrs=(("number", 0), ("point", (offset, pixel)))))
                    emitter.give(given, E.Lanes(value, "float32"))
                    accs = dict.fromkeys(self.accs, given)
                    (made,) = self.graph.copy_into(graph, [self.wanted], where, frame.ranges, accs)
                    numbers[-1][-1].append(made)
        emitter.plan(n for run in numbers for column in run for n in column)
        return [[emitter.emit(column) for column in run] for run in numbers]


def words_of(frame: M.Frame, values: Sequence[E.Lanes]) -> list[L.Value]:
    """Neighbouring values as words of memory: float32 as they are, pairs of 16-bit floats rounded together."""
    words, size = to_words(frame.builder, values)
    assert size == WORD
    return words
