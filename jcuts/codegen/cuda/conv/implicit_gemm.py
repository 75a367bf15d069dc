"""Persistent implicit-GEMM convolution with halo reuse (``wgmma``, capability 9.0).

A block's outputs are neighbours, and so are nearly all pixels that they read (`lower.patterns.conv_window`): a run of
them is copied once per 128 bytes of channels, not once per tap, and read through registers where each tap lies
(`halo_loads`).  Weight tiles (a tap and a channel chunk) go through a ring of stages as in every GEMM, or stay resident
where the whole filter fits into shared memory.  A block computes ``rounds`` output tiles (persistent): copies of the
next tile are in flight while the one before is finished.  Where there are few outputs the blocks of a ``cluster`` split
the channels of one tile, and push their partial sums to each other (`split_k_reduce.reduce_through_dsmem`).

float32 with TF32-pre-rounded weights (see `wgmma_mainloop`), and 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jcuts.codegen.cuda.conv.halo_loads import HaloFragments, HaloLoader
from jcuts.codegen.cuda.conv.implicit_gemm_mainloop import ImplicitGemmMainloop
from jcuts.codegen.cuda.conv.implicit_gemm_tile import ImplicitGemmKernelTile
from jcuts.codegen.cuda.gemm import wgmma_register_operand
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.smem_tile import TileLoader
from jcuts.codegen.cuda.gemm.wgmma_mainloop import WgmmaKernel
from jcuts.codegen.cuda.ptx import cluster, wgmma
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import asm
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import COLUMNS, ROWS


class ImplicitGemmKernel(WgmmaKernel):
    """Emits one thread of the implicit-GEMM convolution."""

    shape: ImplicitGemmKernelTile  # type: ignore[assignment]
    rows: HaloFragments  # type: ignore[assignment]

    def emit(self) -> None:
        """Computes all output tiles of the block."""
        builder, shape = self.builder, self.shape
        self._expect()
        self._prepare()
        begin = [L.I32(0), L.I32(shape.prefetch_distance * shape.stage), L.I32(0)]
        if shape.rounds == 1:
            self._start(self.variables[ROWS])
            self._finish(ImplicitGemmMainloop(self, begin), self.variables[ROWS])
            return
        first = self.variables[ROWS]
        self._start(first)
        before = builder.block
        loop, after = builder.append_basic_block("tiles"), builder.append_basic_block("tiles.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        carried = [builder.phi(L.I32) for _ in range(4)]
        row, *places = carried
        for phi, value in zip(carried, (first, *begin), strict=True):
            phi.add_incoming(value, before)
        steps = ImplicitGemmMainloop(self, places)
        self._finish(steps, row)
        for phi, value in zip(carried, (self.next_tile_row(row), *steps.places), strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(self.has_tile(self.next_tile_row(row)), loop, after)
        builder.position_at_end(after)
        ptx_mma.cp_async_wait(builder, 0)

    # -- where the block stands ---------------------------------------------------------------------------------
    def _places(self, block: L.Value) -> dict[str, L.Value]:
        builder, shape = self.builder, self.shape
        if shape.rounds == 1:
            return super()._places(block)
        row, column = builder.udiv(block, L.I32(shape.columns)), builder.urem(block, L.I32(shape.columns))
        return {ROWS: builder.mul(row, L.I32(shape.left.size)), COLUMNS: builder.mul(column, L.I32(shape.right.size))}

    def column_sums_place(self) -> tuple[L.Value, bool]:
        shape = self.shape
        return self.builder.add(self.shared, L.I32(shape.column_sums_at)), shape.rounds == 1

    def next_tile_row(self, row: L.Value) -> L.Value:
        """The first row of the block's next tile."""
        return self.builder.add(row, L.I32(self.shape.high_blocks * self.shape.left.size))

    def has_tile(self, row: L.Value) -> L.Value:
        """Whether there is a tile that begins at a row."""
        return self.builder.icmp_signed("<", row, L.I32(self.shape.left.extent))

    # -- copies -------------------------------------------------------------------------------------------------
    def _prepare(self) -> None:
        """Set-up that all output tiles share."""
        builder, shape = self.builder, self.shape
        runs = builder.add(self.shared, L.I32(shape.ring))
        zeros = builder.add(self.shared, L.I32(shape.kept_until - wgmma.LINE))
        self.chunk = builder.mul(self.rank, L.I32(shape.lines))
        self.bases = [L.I64(0), self._descriptor(shape.right, self.column_warp)]
        self.weights = TileLoader(
            self.frame, shape.right, shape.threads, self.thread, self.variables[COLUMNS], self.shared
        )
        self.pixels = HaloLoader(self.frame, shape.window, shape.span, shape.threads, self.thread, runs)
        self.rows = HaloFragments(self.frame, shape.window, shape.left.warp // wgmma.ROWS, runs, zeros)  # type: ignore[assignment]
        with builder.if_then(builder.icmp_unsigned("<", self.thread, L.I32(wgmma.LINE // 4))):
            place = builder.add(zeros, builder.shl(self.thread, L.I32(2)))
            ptx_mma.write_words(builder, place, 0, [L.I32(0)])

    def _start(self, row: L.Value) -> None:
        """Pipeline prologue: copies issued before the first output tile is multiplied."""
        builder, shape = self.builder, self.shape
        self.pixels.all(self.pixels.first(row), self.chunk, L.I32(0))
        for number in range(shape.share if shape.resident else shape.prefetch_distance):
            tap, chunk = number % shape.window.taps, builder.add(self.chunk, L.I32(number // shape.window.taps))
            for _ in self.filters(L.I32(tap), chunk, L.I32(number * shape.stage), None):
                pass
            if not shape.resident:
                ptx_mma.cp_async_commit(builder)
        for _ in range(shape.prefetch_distance if shape.resident else 0):
            ptx_mma.cp_async_commit(builder)
        if shape.push and shape.dsmem_is_separate:
            cluster.wait(builder)
        self.prefetch_epilogue()

    def filters(self, tap: L.Value, chunk: L.Value, stage: L.Value, where: L.Value | None) -> Iterator[None]:
        """Starts the copies of a weight tile, one at a time."""
        builder, found = self.builder, self.shape.window
        channel = builder.mul(chunk, L.I32(found.channels_per_tile))
        term = builder.add(builder.mul(tap, L.I32(found.channels)), channel)
        return self.weights.copies(term, stage, builder.sub(L.I32(found.channels), channel), where)

    # -- a tile -------------------------------------------------------------------------------------------------
    def _finish(self, steps: ImplicitGemmMainloop, row: L.Value) -> None:
        totals = steps.emit(row)
        if self.shape.rounds > 1:
            lane = asm(self.builder, "mov.b32 $0, $1;", L.I32, [self.lane], effects=True)  # not kept over the loop
            kept, self.lane = self.lane, lane
            self.variables = {**self.variables, ROWS: row}
            self.frame = replace(self.frame, variables=self.variables, cache={})
            self.epilogue(totals, L.I32(0), L.I32(0))
            self.lane = kept
        else:
            ptx_mma.cp_async_wait(self.builder, 0)
            if self.shape.cluster > 1:
                self.split_k_reduce(totals)
            else:
                self.epilogue(totals, L.I32(0), L.I32(0))

    def products(
        self, number: L.Value, reading: L.Value, totals: Totals, beside: list[Iterator[None]], most: int | None = None
    ) -> Totals:
        """Issues the ``wgmma``s of a tap's k-tile (the given number of k-steps); see `WgmmaKernel.products`."""
        builder, shape = self.builder, self.shape
        rows, right = self.rows, self.weights_at(reading)
        return wgmma_register_operand.wgmma_from_registers(
            builder,
            rows,
            right,
            shape.right,
            reading,
            number,
            None,
            totals,
            beside,
            shape.steps,
            most,
        )

    def weights_at(self, reading: L.Value) -> L.Value:
        """Matrix descriptor of a warpgroup's weights at a byte offset from the first."""
        builder = self.builder
        return builder.add(self.bases[1], builder.zext(builder.lshr(reading, L.I32(4)), L.I64))
