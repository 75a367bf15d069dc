"""Warp-specialised ``wgmma`` GEMM and implicit-GEMM convolution: producer warps, consumer warpgroups (capability 9.0).

Producer warps fill a ring of shared-memory stages with ``cp.async``, consumer warpgroups run ``wgmma``, and an optional
warp of a third role issues the proxy fences (which wait for pending ``wgmma``).  float32 activations are rounded to
TF32 in registers; weights must already be TF32.  Where all warps copy, fetch, round and multiply in step, tensor cores
wait at every barrier; here consumers wait for a stage's ``mbarrier`` alone (`mbarrier_ring`): while one warpgroup
fetches and rounds, others multiply, and while they run the epilogue of a tile, copies of the block's next one are in
flight (persistent blocks).  ``setmaxnreg`` distributes the registers.  A convolution's halo may stay in shared memory
for all taps (`halo_loads`); a residual matrix may come through stages of its own, behind those of a tile's k-tiles
(`residual_loads`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from jcuts.codegen.cuda.conv.halo_loads import HaloFragments, HaloLoader
from jcuts.codegen.cuda.gemm import epilogue_prefetch, wgmma_register_operand
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernel
from jcuts.codegen.cuda.gemm.prologue import Prologue
from jcuts.codegen.cuda.gemm.smem_tile import TileLoader
from jcuts.codegen.cuda.gemm.wgmma_mainloop import WgmmaKernel
from jcuts.codegen.cuda.gemm.wgmma_register_operand import RegisterOperandA
from jcuts.codegen.cuda.gemm.wgmma_tile import WARPS
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.mbarrier_ring import MbarrierRing
from jcuts.codegen.cuda.ptx.mma import VOID
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.cuda.warp_specialized.residual_loads import ResidualLoader, ResidualReader
from jcuts.codegen.cuda.warp_specialized.tile import WarpSpecializedTile
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, prologue

WHOLE = wgmma.LINE // ptx_mma.STEP
"""k-steps of a tile: all are one ``wgmma`` commit group."""


class WarpSpecializedKernel(WgmmaKernel):
    """Emits one thread of the warp-specialised kernel: the warp's number decides its role."""

    shape: WarpSpecializedTile  # type: ignore[assignment]
    rows: RegisterOperandA | HaloFragments  # type: ignore[assignment]

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: WarpSpecializedTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        super().__init__(builder, program, tile, buffers, pointers, integers, symbol, shared)
        self.block = integers["block"]

    def emit(self) -> None:
        """All output tiles of the block, branching by role."""
        builder, shape = self.builder, self.shape
        self.ring = MbarrierRing(builder, builder.add(self.shared, L.I32(shape.barriers)), shape.stages, self.lane)
        self.ring.init(self.thread, WARP * shape.carriers, shape.warps[0])
        self.runs = builder.add(self.shared, L.I32(shape.ring))
        self.zeros = builder.add(self.shared, L.I32(shape.kept_until - wgmma.LINE))
        if shape.window is not None:
            with builder.if_then(builder.icmp_unsigned("<", self.thread, L.I32(wgmma.LINE // 4))):
                place = builder.add(self.zeros, builder.shl(self.thread, L.I32(2)))
                ptx_mma.write_words(builder, place, 0, [L.I32(0)])
        ptx_mma.barrier(builder)
        frame, variables = self.frame, self.variables
        with builder.if_else(builder.icmp_unsigned("<", self.thread, L.I32(shape.consumer_threads))) as (
            then,
            otherwise,
        ):
            with then:
                self.frame = replace(frame, cache={})
                self.setmaxnreg(0)
                self.consumer()
            with otherwise:
                self.frame = replace(frame, cache={})
                self.setmaxnreg(1)
                warp = builder.sub(builder.lshr(self.thread, L.I32(5)), L.I32(shape.warps[0]))
                with builder.if_then(builder.icmp_unsigned("<", warp, L.I32(shape.carriers))):
                    self.producer()
                self.frame, self.variables = replace(frame, cache={}), variables
                if shape.has_fence_warp:
                    with builder.if_then(builder.icmp_unsigned("==", warp, L.I32(shape.carriers))):
                        self._tiles([L.I32(0), L.I32(0)], self.fence_warp)

    def setmaxnreg(self, number: int) -> None:
        """``setmaxnreg``: consumer warpgroups (0) take registers that producer warps (1) give up."""
        found = self.shape.registers
        if found is not None:
            text = f"setmaxnreg.{('inc', 'dec')[number]}.sync.aligned.u32 {found[number]};"
            asm(self.builder, text, VOID, effects=True)

    def _tiles(self, state: list[L.Value], work: Callable[[list[L.Value]], list[L.Value]]) -> None:
        """Runs a body for every output tile of the block (persistent loop). Args: state: loop-carried values."""
        builder, shape = self.builder, self.shape
        if shape.rounds == 1:
            work(state)
            return
        before = builder.block
        loop, after = builder.append_basic_block("tiles"), builder.append_basic_block("tiles.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        phis = [builder.phi(L.I32) for _ in range(1 + len(state))]
        for phi, value in zip(phis, (self.block, *state), strict=True):
            phi.add_incoming(value, before)
        self.variables = self._places(phis[0])
        self.frame = replace(self.frame, variables=self.variables, cache={})
        state = work(phis[1:])
        tile = builder.add(phis[0], L.I32(shape.blocks))
        for phi, value in zip(phis, (tile, *state), strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", tile, L.I32(shape.tiles)), loop, after)
        builder.position_at_end(after)

    # -- copies -------------------------------------------------------------------------------------------------
    def producer(self) -> None:
        """Code of a producer warp; state: the next stage to fill, its parity, offset of the run."""
        builder, shape, found = self.builder, self.shape, self.shape.window
        threads = WARP * shape.carriers
        mine = builder.sub(self.thread, L.I32(shape.consumer_threads))

        if prologue(self.program) is not None:
            self._prologue().start(L.I32(0), threads, mine)

        def tile(state: list[L.Value]) -> list[L.Value]:
            row, column = (self.variables[axis] for axis in (ROWS, COLUMNS))
            weights = TileLoader(self.frame, shape.right, threads, mine, column, self.shared)
            left, pixels, begin = None, None, None
            if found is None:
                left = TileLoader(self.frame, shape.left, threads, mine, row, self.shared)
            else:
                pixels = HaloLoader(self.frame, found, shape.span, threads, mine, self.runs)
                begin = pixels.first(row)
            if shape.early:
                tiles = (shape.left, shape.right)
                known = () if shape.beside is None else (shape.beside,)
                epilogue_prefetch.prefetch_epilogue_operands(
                    self.frame, self.phase, tiles, (mine, threads), (L.I32(0), 1), known
                )

            def step(number: L.Value, state: list[L.Value]) -> list[L.Value]:
                stage, parity, run = state
                self.ring.wait(self.ring.empty(stage), parity)
                place = builder.mul(stage, L.I32(shape.stage))
                if found is None:
                    term = builder.mul(number, L.I32(shape.left.terms))
                    rest = builder.sub(L.I32(shape.terms), term)
                    assert left is not None
                    left.start(term, place, rest)
                    weights.start(term, place, rest)
                    after = run
                else:
                    assert pixels is not None and begin is not None
                    tap, chunk = builder.urem(number, L.I32(found.taps)), builder.udiv(number, L.I32(found.taps))
                    with builder.if_then(builder.icmp_signed("==", tap, L.I32(0))):
                        pixels.all(begin, chunk, run)
                    channel = builder.mul(chunk, L.I32(found.channels_per_tile))
                    term = builder.add(builder.mul(tap, L.I32(found.channels)), channel)
                    weights.start(term, place, builder.sub(L.I32(found.channels), channel))
                    after = self._next_run(tap, run)
                self.ring.arrive_on_cp_async(self.ring.full(stage))
                return [*self.ring.next(stage, parity), after]

            return self.produce_residual(mine, self._loop_over(state, step))

        self._tiles([L.I32(0), L.I32(1), L.I32(0)], tile)

    def produce_residual(self, thread: L.Value, state: list[L.Value]) -> list[L.Value]:
        """Fills the residual's stages. Args: thread: number among the producers; state: as of `producer`."""
        builder, shape = self.builder, self.shape
        if shape.beside is None:
            return state
        stage, parity, run = state
        tiles, threads = (shape.left, shape.right), WARP * shape.carriers
        copies = ResidualLoader(self.frame, shape.beside, tiles, threads, thread, self.shared)
        for group in range(shape.residual_stages):
            self.ring.wait(self.ring.empty(stage), parity)
            copies.start(group, builder.mul(stage, L.I32(shape.stage)))
            self.ring.arrive_on_cp_async(self.ring.full(stage))
            stage, parity = self.ring.next(stage, parity)
        return [stage, parity, run]

    def fence_warp(self, state: list[L.Value]) -> list[L.Value]:
        """Issues the async-proxy fences of an output tile's stages. Args: state: the first stage, its parity."""

        def step(number: L.Value, state: list[L.Value]) -> list[L.Value]:
            stage, parity = state
            self.ring.wait(self.ring.full(stage), parity)
            wgmma.proxy_fence(self.builder)
            self.ring.arrive(self.ring.fenced(stage))
            return list(self.ring.next(stage, parity))

        return self._loop_over(state, step, self.shape.share + self.shape.residual_stages)

    def _prologue(self) -> Prologue:
        """The prologue of the A operand, whose vectors arrive with the first k-tile."""
        builder, shape = self.builder, self.shape
        place = builder.add(self.shared, L.I32(shape.kept_until))
        return Prologue(self.frame, self.program, shape.share * shape.left.terms, place, self.lane)

    def _loop_over(
        self, state: list[L.Value], step: Callable[[L.Value, list[L.Value]], list[L.Value]], count: int = 0
    ) -> list[L.Value]:
        """Runs a body for every k-tile, or a number of times."""
        builder, before = self.builder, self.builder.block
        loop, after = builder.append_basic_block("terms"), builder.append_basic_block("terms.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        phis = [builder.phi(L.I32) for _ in range(1 + len(state))]
        for phi, value in zip(phis, (L.I32(0), *state), strict=True):
            phi.add_incoming(value, before)
        state = step(phis[0], phis[1:])
        number = builder.add(phis[0], L.I32(1))
        for phi, value in zip(phis, (number, *state), strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", number, L.I32(count or self.shape.share)), loop, after)
        builder.position_at_end(after)
        return state

    def _next_run(self, tap: L.Value, run: L.Value) -> L.Value:
        """Address of the run of pixels after a tap."""
        builder, shape = self.builder, self.shape
        assert shape.window is not None
        moved = builder.add(run, L.I32(shape.run))
        moved = builder.select(builder.icmp_signed("==", moved, L.I32(shape.run * shape.kept)), L.I32(0), moved)
        return builder.select(builder.icmp_signed("==", tap, L.I32(shape.window.taps - 1)), moved, run)

    # -- products -----------------------------------------------------------------------------------------------
    def consumer(self) -> None:
        """Code of a consumer warp."""
        builder, shape = self.builder, self.shape
        self.before = None if prologue(self.program) is None else self._prologue()
        self.weights = self._descriptor(shape.right, self.column_warp)
        if shape.window is None:
            self.rows = RegisterOperandA(builder, shape.left, self.shared, self.row_warp, self.lane)  # type: ignore[assignment]
        else:
            tiles = shape.left.warp // wgmma.ROWS
            self.rows = HaloFragments(self.frame, shape.window, tiles, self.runs, self.zeros)  # type: ignore[assignment]
        self._tiles([L.I32(0), L.I32(0), L.I32(0)], self._tile)

    def _tile(self, state: list[L.Value]) -> list[L.Value]:
        """One output tile of a consumer. Args: state: the next stage to read, its parity, address of the run."""
        builder, shape = self.builder, self.shape
        if isinstance(self.rows, HaloFragments):
            self.rows.begin(self.variables[ROWS], self.row_warp, self.lane)
        high, wide = shape.left.warp // wgmma.ROWS, shape.right.warp // 8
        zero = [[[L.F32(0.0) for _ in range(4)] for _ in range(wide)] for _ in range(high)]
        numbers, totals = [L.I32(0), *state], zero
        if shape.share % 2:  # before the others: the assembler has no registers for it behind them
            numbers, totals = self._step(numbers, totals)
            totals = wgmma.wgmma_wait_all(builder, totals)
        before = builder.block
        loop, after = builder.append_basic_block("products"), builder.append_basic_block("products.done")
        builder.branch(loop)
        builder.position_at_end(loop)

        def carried(start: L.Value) -> L.Value:
            phi = builder.phi(start.type)
            phi.add_incoming(start, before)
            return phi

        numbers = [carried(value) for value in numbers]
        totals = [[[carried(value) for value in four] for four in line] for line in totals]
        phis = [*numbers, *(v for line in totals for four in line for v in four)]
        for _ in range(2):  # tiles whose fragments are in registers at once
            numbers, totals = self._step(numbers, totals)
        for phi, value in zip(phis, [*numbers, *(v for line in totals for four in line for v in four)], strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", numbers[0], L.I32(shape.share)), loop, after)
        builder.position_at_end(after)
        totals = wgmma.wgmma_wait_all(builder, totals)
        self.ring.arrive(self.ring.empty(self._before(numbers[1])))
        mine, *numbers[1:3] = self.acquire_residual(numbers[1], numbers[2])
        self.consumer_epilogue(totals)
        if shape.beside is not None:
            self.ring.arrive(self.ring.empty(mine))
        return numbers[1:]

    def acquire_residual(self, stage: L.Value, parity: L.Value) -> tuple[L.Value, L.Value, L.Value]:
        """Waits for the own warpgroup's residual stage and releases those of the others: returns the own stage; next
        stage and parity.
        """
        builder, shape, mine = self.builder, self.shape, stage
        if shape.beside is None:
            return mine, stage, parity
        group = builder.lshr(self.flat, L.I32(WARPS.bit_length() - 1))
        ring = self.ring
        others: list[tuple[L.Value, L.Value]] = []
        for number in range(shape.residual_stages):
            other = builder.icmp_signed("!=", group, L.I32(number))
            others.append((stage, other))
            mine = builder.select(other, mine, stage)
            if number == shape.residual_stages - 1:  # what is copied comes in order: the last stage tells of all
                ring.wait((ring.fenced if shape.has_fence_warp else ring.full)(stage), parity)
            stage, parity = ring.next(stage, parity)
        for one, other in others:
            ring.arrive(ring.empty(one), other)
        place = builder.add(self.shared, builder.mul(mine, L.I32(shape.stage)))
        self.keeper = ResidualReader(self.frame, shape.beside, (shape.left, shape.right), place, self.group_row)
        return mine, stage, parity

    def _step(self, numbers: list[L.Value], totals: Totals) -> tuple[list[L.Value], Totals]:
        """The ``wgmma``s of a k-tile; releases the previous stage."""
        builder, shape, found = self.builder, self.shape, self.shape.window
        number, stage, parity, run = numbers
        self.ring.wait((self.ring.fenced if shape.has_fence_warp else self.ring.full)(stage), parity)
        if not shape.has_fence_warp:
            wgmma.proxy_fence(builder)
        place = builder.mul(stage, L.I32(shape.stage))
        right = builder.add(self.weights, builder.zext(builder.lshr(place, L.I32(4)), L.I64))
        if found is not None:
            tap = builder.urem(number, L.I32(found.taps))
            self.rows.select_tap(tap, run)  # type: ignore[union-attr]
            run = self._next_run(tap, run)
        totals = wgmma_register_operand.wgmma_from_registers(
            builder,
            self.rows,
            right,
            shape.right,
            place,
            number,
            self.before,
            totals,
            [],
            WHOLE,
        )
        self.ring.arrive(self.ring.empty(self._before(stage)), builder.icmp_signed(">", number, L.I32(0)))
        return [builder.add(number, L.I32(1)), *self.ring.next(stage, parity), run], totals

    def _before(self, stage: L.Value) -> L.Value:
        """The previous stage."""
        builder = self.builder
        first = builder.icmp_signed("==", stage, L.I32(0))
        return builder.select(first, L.I32(self.shape.stages - 1), builder.sub(stage, L.I32(1)))

    def consumer_epilogue(self, totals: Totals) -> None:
        """Runs the epilogue."""
        kept = self.lane
        if self.shape.rounds > 1:  # what depends on it is not kept over the loop
            self.lane = asm(self.builder, "mov.b32 $0, $1;", L.I32, [kept], effects=True)
        MmaKernel.epilogue(self, totals, L.I32(0), L.I32(0))
        self.lane = kept
