"""Accumulators of a register tile on a CPU, with blocked summation: stack slots that LLVM promotes to registers.

The rounding error of a sum grows with the number of terms in one accumulator (Higham, "The accuracy of floating point
summation", 1993, section 4).  From `LONG` terms on, an accumulator of floats holds the sum of a block, which is added
to a total at the end of the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from llvmlite import ir

from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Acc, Phase
from jcuts.kernel_ir.register_tiling import Point
from jcuts.ops.window import identity

LEAST_BLOCK = 256
"""Terms of the shortest block: a total costs an addition and what the registers cannot hold."""
LONG = 2 * LEAST_BLOCK
"""Terms of one accumulator from which on a sum is divided into blocks."""
TYPES = ("float32", "float64")
"""Of accumulators whose sums are divided."""

Slots = tuple[L.Value, ...]


class Accumulators:
    """The accumulators of one tile: ``slots`` by number, output point and chain.

    Args: lanes: of a vector, 0 where values are scalar; reduced: whether the lanes are terms of one sum.
    """

    def __init__(self, builder: L.Builder, phase: Phase, lanes: int, reduced: bool) -> None:
        self.builder, self.phase, self.lanes = builder, phase, lanes
        self.chains = math.prod(red.chains for red in phase.reds)
        self.abreast = self.chains * (lanes if reduced else 1)
        self.terms = math.prod(red.extent for red in phase.reds) / self.abreast
        self.slots: dict[tuple[int, Point, int], Slots] = {}
        self.totals: dict[tuple[int, Point, int], Slots] = {}

    def start(self, points: Sequence[Point]) -> None:
        """Makes the accumulators of these points, with the identity of their operation in them."""
        for (number, acc), point, chain in itertools.product(enumerate(self.phase.accs), points, range(self.chains)):
            self.slots[number, point, chain] = self._made(acc)
            if self._in_blocks(acc):
                self.totals[number, point, chain] = self._made(acc)

    def per_block(self, level: int) -> int:
        """Iterations of a reduction's loop after which sums go to their totals (`flush`), 0: not in this loop.

        It is the innermost one of two blocks or more.  A block has as many terms as a sum has blocks.
        """
        if not self.totals:
            return 0
        size = max(LEAST_BLOCK, 1 << round(math.log2(math.sqrt(self.terms))))
        inside = 1.0 / self.abreast
        for number, red in reversed([*enumerate(self.phase.reds)]):
            step = red.unroll * (self.lanes if red.vector else 1)
            if red.extent > step and inside * (red.extent - red.extent % step) >= 2 * size:
                return max(1, round(size / (inside * step))) if number == level else 0
            inside *= red.extent
        return 0

    def flush(self) -> None:
        """Adds the sums of a block to their totals; the next block starts."""
        for place, slots in self.slots.items():
            totals = self.totals.get(place)
            if totals is None:
                continue
            acc = self.phase.accs[place[0]]
            self._store(totals, self._combined(acc, totals, slots))
            self._store(slots, self._identity(acc))

    def result(self, number: int, point: Point) -> Slots:
        """What the chains of an accumulator have together."""
        acc = self.phase.accs[number]
        parts = []
        for chain in range(self.chains):
            slots, totals = self.slots[number, point, chain], self.totals.get((number, point, chain))
            parts.append(self._loaded(slots) if totals is None else self._combined(acc, totals, slots))
        while len(parts) > 1:
            pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
            parts = [E.combine(self.builder, acc.combine, acc.dtype, *p) if len(p) == 2 else p[0] for p in pairs]
        return parts[0]

    def _in_blocks(self, acc: Acc) -> bool:
        return acc.combine == "add" and acc.dtype in TYPES and self.terms >= LONG

    def _types(self, acc: Acc) -> list[L.Type]:
        kinds = [E.register_type(acc.dtype)] + ([L.element_type(acc.index_dtype)] if acc.index_dtype else [])
        return [ir.VectorType(k, self.lanes) if self.lanes else k for k in kinds]

    def _identity(self, acc: Acc) -> list[L.Value]:
        kinds = self._types(acc)
        first = identity(acc.combine, acc.dtype)
        if acc.combine == "add" and isinstance(first, float) and all(r.extent == 1 for r in self.phase.reds):
            first = -0.0  # a single term keeps its sign; longer sums start from 0, as XLA's do
        start = [L.const(kinds[0], first)]
        if acc.index_dtype:  # a position after every real one (unsigned), so that ties with the identity lose
            start.append(L.const(kinds[1], -1))
        return start

    def _made(self, acc: Acc) -> Slots:
        slots = []
        for kind in self._types(acc):
            with self.builder.goto_entry_block():
                slots.append(self.builder.alloca(kind))
        self._store(slots, self._identity(acc))
        return tuple(slots)

    def _store(self, slots: Sequence[L.Value], values: Sequence[L.Value]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self.builder.store(value, slot)

    def _loaded(self, slots: Slots) -> Slots:
        return tuple(self.builder.load(slot) for slot in slots)

    def _combined(self, acc: Acc, first: Slots, second: Slots) -> Slots:
        parts = self._loaded(first), self._loaded(second)
        return tuple(E.combine(self.builder, acc.combine, acc.dtype, *parts))
