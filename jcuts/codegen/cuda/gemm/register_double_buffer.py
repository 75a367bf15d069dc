"""Mainloop with register double buffering: the fragments of k-step i + 1 are read while step i multiplies.

The software pipeline crosses k-tiles: the last step of a tile waits for the next tile's ``cp.async`` copies and for the
other warps, and reads the fragments of the next tile's first step while its own multiplications run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernel
from jcuts.codegen.cuda.gemm.smem_tile import FragmentReader, TileLoader
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L

Values = list[list[L.Value]]
"""What a step begins with, of one operand."""
Later = Callable[[], list[L.Value]]
"""Advances to the next k-tile: its addresses for both operands."""


class MainloopStep(Protocol):
    """Emits one k-step.

    Args:
        places: shared-memory addresses of both operands' k-tile.
        first: the step's first k in the tile.
        near: the fragments that the step begins with.
        sums: accumulators, which it changes.
        later: gives the addresses of the next step's operands where these are in the next k-tile.
    Returns: the fragments that the next step begins with.
    """

    def __call__(
        self, places: Sequence[L.Value], first: int, near: list[Values], sums: Totals, later: Later | None = None
    ) -> list[Values]: ...


class DoubleBufferedMmaKernel(MmaKernel):
    """Emits one thread of a GEMM whose fragments are double-buffered in registers; subclasses give the k-step.

    Attributes:
        terms: k per step.
        zero: initial value of the accumulators.
    """

    terms: int
    zero: L.Value

    def _begin(self, readers: list[FragmentReader], places: Sequence[L.Value]) -> list[Values]:
        """Fragments of the first k-step (pipeline prologue)."""
        raise NotImplementedError

    def _stepper(self, readers: list[FragmentReader]) -> MainloopStep:
        """An emitter of k-steps with these fragment readers."""
        raise NotImplementedError

    def _loop(
        self, copiers: list[TileLoader], readers: list[FragmentReader], left: L.Value, skipped: L.Value
    ) -> Totals:
        builder, shape, step = self.builder, self.shape, self._stepper(readers)
        count, ahead = shape.share, shape.prefetch_distance
        ptx_mma.cp_async_wait(builder, ahead - 1)
        ptx_mma.barrier(builder)
        near = self._begin(readers, self._first(readers, L.I32(0)))
        tiles = (shape.left.warp // 16, shape.right.warp // 8)
        zeros = [[[self.zero] * 4 for _ in range(tiles[1])] for _ in range(tiles[0])]
        loop = CarriedLoop(builder, "terms", [L.I32(0), L.I32(0), L.I32(ahead * shape.stage)], near, zeros)
        number, reading, writing = loop.numbers
        self._copy_ahead(copiers, number, writing, left, skipped)
        steps, places = shape.left.terms // self.terms // shape.warps[2], self._first(readers, reading)
        near, sums = loop.near, loop.sums
        if steps > 2:
            near, sums, places = self._pairs(readers, step, places, (steps - 1) // 2, near, sums)
        following = self.next_stage(reading)

        def later() -> list[L.Value]:
            ptx_mma.cp_async_wait(builder, ahead - 1)
            ptx_mma.barrier(builder)
            return self._first(readers, following)

        last = (1 - steps % 2) * self.terms
        if last:
            near = step(places, 0, near, sums)
        near = step(places, last, near, sums, later)
        done = builder.add(number, L.I32(1))
        again = builder.icmp_signed("<", done, L.I32(count))
        loop.close([done, following, self.next_stage(writing)], near, sums, again)
        return sums

    def _first(self, readers: list[FragmentReader], stage: L.Value) -> list[L.Value]:
        """Addresses of the warp's first k in a stage, for both operands."""
        builder, shape = self.builder, self.shape
        if shape.warps[2] == 1:
            return [stage, stage]
        share = shape.left.terms // shape.warps[2]
        return [builder.add(stage, builder.mul(self.deep, L.I32(r.advance(share)))) for r in readers]

    def _pairs(
        self,
        readers: list[FragmentReader],
        step: MainloopStep,
        places: list[L.Value],
        pairs: int,
        near: list[Values],
        sums: Totals,
    ) -> tuple[list[Values], Totals, list[L.Value]]:
        """Emits pairs of k-steps: with two, double-buffered registers need no moves."""
        builder = self.builder
        loop = None
        if pairs > 1:
            count = ptx_mma.asm(builder, f"mov.u32 $0, {pairs};", L.I32, [], effects=True)  # not to be unrolled
            loop = CarriedLoop(builder, "steps", [L.I32(0), *places], near, sums)
            number, *places = loop.numbers
            near, sums = loop.near, loop.sums
        for turn in range(2):
            near = step(places, turn * self.terms, near, sums)
        places = [builder.add(p, L.I32(r.advance(2 * self.terms))) for p, r in zip(places, readers, strict=True)]
        if loop is not None:
            done = builder.add(number, L.I32(1))
            loop.close([done, *places], near, sums, builder.icmp_signed("<", done, count))
        return near, sums, places


class CarriedLoop:
    """An LLVM loop whose phi nodes carry counters, fragments of both operands and accumulators.

    Attributes:
        numbers: carried counters and addresses.
        near: carried fragments.
        sums: carried accumulators.
    """

    def __init__(
        self, builder: GpuBuilder, name: str, numbers: list[L.Value], near: list[Values], sums: Totals
    ) -> None:
        """Begins the loop body with the carried values as phi nodes."""
        self.builder = builder
        self.before = builder.block
        self.start, self.after = builder.append_basic_block(name), builder.append_basic_block(f"{name}.done")
        builder.branch(self.start)
        builder.position_at_end(self.start)
        self.phis: list[L.Value] = []
        self.numbers = [self._carried(n) for n in numbers]
        self.near = [[[self._carried(v) for v in term] for term in grain] for grain in near]
        self.sums = [[[self._carried(v) for v in tile] for tile in row] for row in sums]

    def _carried(self, value: L.Value) -> L.Value:
        phi = self.builder.phi(value.type)
        phi.add_incoming(value, self.before)
        self.phis.append(phi)
        return phi

    def close(self, numbers: list[L.Value], near: list[Values], sums: Totals, again: L.Value) -> None:
        """Ends the loop body: next values of the phi nodes, and the loop condition."""
        made = [*numbers, *(v for g in near for term in g for v in term), *(v for r in sums for t in r for v in t)]
        for phi, value in zip(self.phis, made, strict=True):
            phi.add_incoming(value, self.builder.block)
        self.builder.cbranch(again, self.start, self.after)
        self.builder.position_at_end(self.after)
