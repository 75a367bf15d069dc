"""Mainloop of the implicit-GEMM convolution: channel chunks outside, filter taps inside, over one halo in shared
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from jcuts.codegen.cuda.conv.halo_loads import HaloFragments, HaloLoader
from jcuts.codegen.cuda.conv.implicit_gemm_tile import ImplicitGemmKernelTile, KLoopSegment
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.smem_tile import TileLoader
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L

Words = list[list[list[L.Value]]]
"""Fragments that are not rounded yet: [k-step][64 rows][4]."""


class MainloopKernel(Protocol):
    """The interface that the mainloop needs of its kernel (`implicit_gemm.ImplicitGemmKernel`).

    Attributes:
        chunk: number of the first channel chunk of the block.  lane, row_warp: lane of the thread; first row of its
        warp in the tile.  pixels, weights: the copies of both operands to shared memory.  rows: the left operand's
        fragments.
    """

    builder: GpuBuilder
    shape: ImplicitGemmKernelTile
    chunk: L.Value
    lane: L.Value
    row_warp: L.Value
    pixels: HaloLoader
    rows: HaloFragments
    weights: TileLoader

    def next_tile_row(self, row: L.Value) -> L.Value:
        """The first row of the block's next tile."""
        ...

    def has_tile(self, row: L.Value) -> L.Value:
        """Whether there is a tile that begins at a row."""
        ...

    def next_stage(self, stage: L.Value) -> L.Value:
        """Byte offset of the following stage."""
        ...

    def filters(self, tap: L.Value, chunk: L.Value, stage: L.Value, where: L.Value | None) -> Iterator[None]:
        """Starts the copies of a weight tile, one at a time."""
        ...

    def products(
        self, number: L.Value, reading: L.Value, totals: Totals, beside: list[Iterator[None]], most: int | None = None
    ) -> Totals:
        """Issues the ``wgmma``s of a tap's k-tile (the given number of k-steps)."""
        ...

    def weights_at(self, reading: L.Value) -> L.Value:
        """Matrix descriptor of a warpgroup's weights at a byte offset from the first."""
        ...


class ImplicitGemmMainloop:
    """Mainloop of one output tile: all taps for every channel chunk."""

    def __init__(self, emitter: MainloopKernel, places: Sequence[L.Value]) -> None:
        """Args: places: bytes to the weights of the first step, to the place that is written next, to the run."""
        self.emitter, self.builder, self.places = emitter, emitter.builder, list(places)
        self.runs = (L.I32(0), L.I1(0), L.I32(0))

    def emit(self, row: L.Value) -> Totals:
        """All k-steps of the tile that begins at a row; `places` then hold the next tile's addresses."""
        emitter, builder, shape = self.emitter, self.builder, self.emitter.shape
        emitter.rows.begin(row, emitter.row_warp, emitter.lane)
        mine, more, other = emitter.pixels.first(row), L.I1(0), L.I32(0)
        if shape.rounds > 1:
            more, other = emitter.has_tile(emitter.next_tile_row(row)), emitter.pixels.first(emitter.next_tile_row(row))
        self.runs = mine, more, other
        fetched: Words = []
        if shape.fetched:
            self._arrived()
            emitter.rows.select_tap(L.I32(0), self.places[2])
            fetched = self._read()
        high, wide = shape.left.warp // wgmma.ROWS, shape.right.warp // 8
        state: list[L.Value] = [L.I32(0), L.I32(0), emitter.chunk, *self.places]
        totals: Totals = [[[L.F32(0.0) for _ in range(4)] for _ in range(wide)] for _ in range(high)]
        last = 0
        for part in shape.parts:
            last += part.taps
            state, totals, fetched = self._part(part, last, state, totals, fetched)
        self.places = state[3:]
        return wgmma.wgmma_wait_all(builder, totals)

    def _part(
        self, part: KLoopSegment, last: int, state: list[L.Value], totals: Totals, words: Words
    ) -> tuple[list[L.Value], Totals, Words]:
        """A loop over a segment of K. Args: last: number of the step behind it; the others as of `_step`."""
        builder, shape = self.builder, self.emitter.shape
        before, left = builder.block, part.taps % part.together
        loop, after = builder.append_basic_block("terms"), builder.append_basic_block("terms.done")
        builder.branch(loop)
        builder.position_at_end(loop)

        def carried(start: L.Value) -> L.Value:
            phi = builder.phi(start.type)
            phi.add_incoming(start, before)
            return phi

        state = [carried(value) for value in state]
        totals = [[[carried(value) for value in tile] for tile in row] for row in totals]
        words = [[[carried(word) for word in row] for row in step] for step in words]
        phis = [*state, *_flat(totals), *_flat(words)]
        for number in range(part.together):
            known = number % shape.window.taps if shape.unrolled else None
            state, totals, words = self._step(state, totals, words, known, part.steps)
        for phi, value in zip(phis, [*state, *_flat(totals), *_flat(words)], strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", state[0], L.I32(last - left)), loop, after)
        builder.position_at_end(after)
        for _ in range(left):
            state, totals, words = self._step(state, totals, words, None, part.steps)
        return state, totals, words

    def _step(
        self, state: list[L.Value], totals: Totals, words: Words, known: int | None, most: int
    ) -> tuple[list[L.Value], Totals, Words]:
        """One k-tile: the ``wgmma``s of one tap and channel chunk.

        Args: state: numbers of step, tap and chunk, and `places`; words: its fragments, where they have been fetched;
            known: the tap's number, where the code is its own; most: steps of the line.
        """
        emitter, builder, shape = self.emitter, self.builder, self.emitter.shape
        number, tap, chunk, reading, writing, run = state
        tap = tap if known is None else L.I32(known)
        comes = shape.window.taps - 1 if shape.fetched else 0  # the step from which on the next run is read
        if not shape.resident or known == comes:
            self._arrived()
        elif known is None:  # nothing new comes but with the next run
            with builder.if_then(builder.icmp_signed("==", tap, L.I32(comes))):
                self._arrived()
        last = builder.icmp_signed("==", tap, L.I32(shape.window.taps - 1))
        following = [
            builder.add(number, L.I32(1)),
            builder.select(last, L.I32(0), builder.add(tap, L.I32(1))),
            builder.add(chunk, builder.select(last, L.I32(1), L.I32(0))),
            emitter.next_stage(reading),
            emitter.next_stage(writing),
            builder.select(last, self._other(run), run),
        ]
        beside = self._beside(tap, chunk, writing, run)
        if shape.fetched:
            totals, words = self._fetched(number, (tap, run), (following[1], following[5]), reading, totals, words)
        else:
            emitter.rows.select_tap(tap, run)
            totals = emitter.products(number, reading, totals, beside if shape.spread else [], most)
        for copy in [] if shape.spread and not shape.fetched else beside:
            next(copy)
        ptx_mma.cp_async_commit(builder)
        if shape.fetched:
            wgmma.wgmma_wait_group(builder, 1)
        return following, totals, words

    def _fetched(
        self,
        number: L.Value,
        now: tuple[L.Value, L.Value],
        then: tuple[L.Value, L.Value],
        reading: L.Value,
        totals: Totals,
        words: Words,
    ) -> tuple[Totals, Words]:
        """Reads the next k-tile's fragments and issues the ``wgmma``s of the current ones.

        Args: now, then: tap and run of both; the last step of a tile asks for its own again.
        """
        emitter, builder, shape = self.emitter, self.builder, self.emitter.shape
        right, columns = emitter.weights_at(reading), shape.right
        pairs = []
        for row in range(shape.left.warp // wgmma.ROWS):
            rounded = [[ptx_mma.to_tf32(builder, word) for word in step[row]] for step in words]
            pairs.append(
                [(r, wgmma.advance_descriptor(builder, right, columns.step(k))) for k, r in enumerate(rounded)]
            )
        ends = builder.icmp_signed("==", number, L.I32(shape.share - 1))
        emitter.rows.select_tap(*(builder.select(ends, mine, other) for mine, other in zip(now, then, strict=True)))
        words = self._read()
        return wgmma.wgmma_async(builder, shape.kind, pairs, (False, False), totals), words

    def _read(self) -> Words:
        """Reads a tap's fragments (``ldmatrix``)."""
        return [self.emitter.rows.read(L.I32(0), step) for step in range(wgmma.LINE // ptx_mma.STEP)]

    def _arrived(self) -> None:
        """Waits for the copies of a k-tile, with a block barrier."""
        ptx_mma.cp_async_wait(self.builder, self.emitter.shape.prefetch_distance - 1)
        wgmma.proxy_fence(self.builder)
        ptx_mma.barrier(self.builder)

    def _other(self, run: L.Value) -> L.Value:
        """Address of the next run of pixels."""
        builder, shape = self.builder, self.emitter.shape
        return builder.sub(L.I32(shape.run), run) if shape.kept == 2 else run

    def _beside(self, tap: L.Value, chunk: L.Value, writing: L.Value, run: L.Value) -> list[Iterator[None]]:
        """Copies issued during a k-tile: weights of a later one, a part of the next run of pixels."""
        emitter, builder, shape = self.emitter, self.builder, self.emitter.shape
        mine, more, other = self.runs
        made: list[Iterator[None]] = []
        found, end = shape.window, builder.add(emitter.chunk, L.I32(shape.lines))
        if not shape.resident:
            later = builder.add(tap, L.I32(shape.prefetch_distance))
            wraps = builder.icmp_signed(">=", later, L.I32(found.taps))
            later = builder.select(wraps, builder.sub(later, L.I32(found.taps)), later)
            next_ = builder.add(chunk, builder.select(wraps, L.I32(1), L.I32(0)))
            inside = builder.icmp_signed("<", next_, end)
            if shape.rounds > 1:
                next_, inside = builder.select(inside, next_, L.I32(0)), builder.or_(inside, more)
            made += [emitter.filters(later, next_, writing, inside)] * len(emitter.weights.places)
        if shape.kept == 2:
            inside = builder.icmp_signed("<", builder.add(chunk, L.I32(1)), end)
            first = builder.select(inside, mine, other)
            later = builder.select(inside, builder.add(chunk, L.I32(1)), L.I32(0))
            where = builder.or_(inside, more)
            parts = emitter.pixels.part(first, later, self._other(run), tap, shape.copy_steps, where)
            made += [parts] * -(-emitter.pixels.count // shape.copy_steps)
        return made


def _flat(values: Totals | Words) -> list[L.Value]:
    return [value for rows in values for tile in rows for value in tile]
