"""What is computed from the left operand of a product on its way through registers: norms, activations.

The vectors that it needs, one element per term, are copied into shared memory once, behind the tiles; pairs of terms 4
apart lie side by side, as lanes hold them (`group_fragments`).
"""

from __future__ import annotations

from dataclasses import replace

from jcuts.codegen import elements as E
from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import memory as M
from jcuts.codegen.cuda import tensor
from jcuts.codegen.cuda.values import Emitter
from jcuts.dfg.node import Graph, Node
from jcuts.dfg.program import Program
from jcuts.region.products import K, prologue, vectors

ITEM, STEP = 4, 8  # bytes of an element; terms of an instruction


class Prologue:
    """The element-wise operations before a product, for fragments of its left operand."""

    def __init__(self, frame: M.Frame, program: Program, terms: int, shared: L.Value, lane: L.Value) -> None:
        """Args: terms: of the block; shared: where their vectors go."""
        self.builder, self.frame, self.terms, self.shared = frame.builder, frame, terms, shared
        self.vectors = vectors(program)
        self.graph, self.given, self.result = _template(program, self.vectors)
        pair = self.builder.and_(lane, L.I32(3))
        self.place = self.builder.add(shared, self.builder.shl(pair, L.I32(3)))

    def start(self, skipped: L.Value, threads: int, thread: L.Value) -> None:
        """Starts the copies of all vectors. Args: skipped: terms of the block's group before its own."""
        builder = self.builder
        for first in range(0, self.terms, threads):
            place = builder.add(thread, L.I32(first)) if first else thread
            inside = None if first + threads <= self.terms else builder.icmp_unsigned("<", place, L.I32(self.terms))
            low, high = builder.and_(place, L.I32(3)), builder.and_(place, L.I32(4))
            moved = builder.or_(builder.shl(low, L.I32(1)), builder.lshr(high, L.I32(2)))
            moved = builder.or_(moved, builder.and_(place, L.I32(~(STEP - 1))))
            target = builder.add(self.shared, builder.shl(moved, L.I32(2)))
            term = builder.add(place, skipped)
            if inside is not None:  # addresses are computed by all threads
                term = builder.select(inside, term, skipped)
            frame = replace(self.frame, variables={**self.frame.variables, K: term}, cache={})
            for number, node in enumerate(self.vectors):
                assert node.index is not None
                source = M.address(frame, node.buffer, ITEM, node.index)
                tensor.copy(builder, (target, number * self.terms * ITEM), source, ITEM, None, inside)

    def apply(self, words: list[list[L.Value]], tile: L.Value, step: int) -> list[list[L.Value]]:
        """The values of fragments. Args: words: [64 rows][4]; tile: bytes of a vector before the tile's terms."""
        builder = self.builder
        place = builder.add(self.place, tile)
        pairs = [
            tensor.read_pair(builder, place, (number * self.terms + step * STEP) * ITEM)
            for number in range(len(self.vectors))
        ]
        return [[self._value(word, [pair[k // 2] for pair in pairs]) for k, word in enumerate(row)] for row in words]

    def _value(self, word: L.Value, mine: list[L.Value]) -> L.Value:
        builder = self.builder
        emitter = Emitter(replace(self.frame, values={}, cache={}), self.graph, {})
        for number, value in zip(self.given, (word, *mine), strict=True):
            emitter.give(number, E.Lanes(builder.bitcast(value, L.F32), "float32"))
        (found,) = emitter.emit([self.result])
        return builder.bitcast(found.value, L.I32)


def _template(program: Program, known: list[Node]) -> tuple[Graph, list[int], int]:
    """The prologue with accumulators in place of loads: graph, their numbers (the operand, vectors), the result's."""
    body, last = program.phases[0].body, prologue(program)
    assert last is not None
    found, numbers, given = Graph(), {}, [0] * (1 + len(known))
    for number in body.needed([last]):
        node = body.nodes[number]
        if node.op == "load":
            place = 1 + known.index(node) if node in known else 0
            given[place] = numbers[number] = found.add(Node("acc", "float32", attrs=(("number", place),)))
        else:
            numbers[number] = found.add(replace(node, args=tuple(numbers[a] for a in node.args)))
    return found, given, numbers[last]
