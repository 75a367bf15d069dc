"""GEMM prologue fusion: element-wise operations on A fragments in registers, between shared memory and ``wgmma``.

They are a norm with known statistics (a scale and a shift per k) and an activation.

The vectors that it needs (one element per k) are copied into shared memory once, behind the tiles.  The k that a lane
holds are those of `wgmma_register_operand`: of float32 two that are 4 apart, of bfloat16 two pairs that are 8 apart.
bfloat16 is computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from jcuts.codegen.cuda.graph.node_emitter import Emitter, to_words
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import K, gemm_operands, k_extent, k_vectors, prologue

ITEM = 4  # bytes of an element of a vector
HALF = "bfloat16"


class Prologue:
    """The element-wise operations before a GEMM, applied to fragments of its A operand."""

    def __init__(self, frame: M.Frame, program: Program, terms: int, shared: L.Value, lane: L.Value) -> None:
        """Args: terms: K extent of the block; shared: address of the vectors."""
        self.builder, self.frame, self.terms, self.shared = frame.builder, frame, terms, shared
        self.total = k_extent(program)
        self.vectors = k_vectors(program)
        self.graph, self.given, self.result = _template(program, self.vectors)
        self.half = gemm_operands(program)[0].item == 2
        self.step = 16 if self.half else 8  # terms of an instruction
        mine = self.builder.and_(lane, L.I32(3))
        self.place = self.builder.add(shared, self.builder.shl(mine, L.I32(4 if self.half else 3)))

    def start(self, skipped: L.Value, threads: int, thread: L.Value) -> None:
        """Starts the copies of all vectors. Args: skipped: k of the split before the block's own."""
        builder = self.builder
        for first in range(0, self.terms, threads):
            place = builder.add(thread, L.I32(first)) if first else thread
            inside = None if first + threads <= self.terms else builder.icmp_unsigned("<", place, L.I32(self.terms))
            target = builder.add(self.shared, builder.shl(self._moved(place), L.I32(2)))
            term = builder.add(place, skipped)
            if inside is not None:  # addresses are computed by all threads
                term = builder.select(inside, term, skipped)
            there = None
            if self.total % self.terms:  # terms beyond the last are zeros
                there = builder.icmp_unsigned("<", term, L.I32(self.total))
                term = builder.select(there, term, skipped)
            frame = replace(self.frame, variables={**self.frame.variables, K: term}, cache={})
            for number, node in enumerate(self.vectors):
                assert node.index is not None
                source = M.address(frame, node.buffer, ITEM, node.index)
                ptx_mma.cp_async(builder, (target, number * self.terms * ITEM), source, ITEM, there, inside)

    def _moved(self, place: L.Value) -> L.Value:
        """Index of a k in the vectors: by the lane's position within a step, then by its k."""
        builder = self.builder
        first = builder.and_(place, L.I32(~(self.step - 1)))
        if self.half:
            mine, other = builder.and_(place, L.I32(6)), builder.and_(place, L.I32(8))
            moved = builder.or_(builder.shl(mine, L.I32(1)), builder.lshr(other, L.I32(2)))
            return builder.or_(builder.or_(first, moved), builder.and_(place, L.I32(1)))
        low, high = builder.and_(place, L.I32(3)), builder.and_(place, L.I32(4))
        return builder.or_(builder.or_(builder.shl(low, L.I32(1)), builder.lshr(high, L.I32(2))), first)

    def apply(self, words: list[list[L.Value]], tile: L.Value, step: int) -> list[list[L.Value]]:
        """Applies the prologue to fragments. Args: words: [64 rows][4]; tile: k of the block before the tile's."""
        builder = self.builder
        place = builder.add(self.place, builder.shl(tile, L.I32(2)))
        offsets = [(number * self.terms + step * self.step) * ITEM for number in range(len(self.vectors))]
        if not self.half:
            pairs = [ptx_mma.read_pair(builder, place, offset) for offset in offsets]
            return [
                [builder.bitcast(self._value(word, [p[k // 2] for p in pairs]), L.I32) for k, word in enumerate(row)]
                for row in words
            ]
        fours = [[w for at in (0, 8) for w in ptx_mma.read_pair(builder, place, offset + at)] for offset in offsets]
        return [[self._bf16_pair(word, fours, k // 2) for k, word in enumerate(row)] for row in words]

    def _bf16_pair(self, word: L.Value, fours: list[list[L.Value]], half: int) -> L.Value:
        """Both elements of a word of bfloat16. Args: half: of the k-step."""
        builder = self.builder
        parts = builder.shl(word, L.I32(16)), builder.and_(word, L.I32(-65536))
        made = [self._value(part, [four[2 * half + k] for four in fours]) for k, part in enumerate(parts)]
        (found,), _ = to_words(builder, [E.Lanes(value, HALF) for value in made])
        return found

    def _value(self, word: L.Value, mine: list[L.Value]) -> L.Value:
        """The prologue's float32 result for an element. Args: word: its bits, as float32; mine: those of the
        vectors.
        """
        builder = self.builder
        emitter = Emitter(replace(self.frame, values={}, cache={}), self.graph, {})
        for number, value in zip(self.given, (word, *mine), strict=True):
            emitter.bind(number, E.Lanes(builder.bitcast(value, L.F32), "float32"))
        (found,) = emitter.emit([self.result])
        return found.value


def _template(program: Program, known: list[Node]) -> tuple[Graph, list[int], int]:
    """The prologue graph with accumulators for loads: graph, numbers of operand and vectors, number of the result."""
    body, last = program.phases[0].body, prologue(program)
    assert last is not None
    found, numbers, given = Graph(), {}, [0] * (1 + len(known))
    needed = list(body.needed([last]))
    uses = Counter(a for n in needed for a in body.nodes[n].args)
    half = gemm_operands(program)[0].item == 2
    for number in needed:
        node = body.nodes[number]
        if half and node.op in ("widen", "convert"):
            numbers[number] = numbers[node.args[0]]
            continue
        if node.op == "load":
            place = 1 + known.index(node) if node in known else 0
            given[place] = numbers[number] = found.add(Node("acc", "float32", attrs=(("number", place),)))
            continue
        args = tuple(numbers[a] for a in node.args)
        product = next((a for a in node.args if body.nodes[a].op == "mul" and uses[a] == 1), None)
        if half and node.op == "add" and product is not None:  # bfloat16 hides what one rounding is about
            other = node.args[1] if node.args[0] == product else node.args[0]
            args = (*(numbers[a] for a in body.nodes[product].args), numbers[other])
            node = replace(node, op="fma")
        numbers[number] = found.add(replace(node, dtype="float32" if half else node.dtype, args=args))
    return found, given, numbers[last]
