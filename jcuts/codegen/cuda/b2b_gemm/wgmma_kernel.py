"""Warp-specialised back-to-back GEMM by ``wgmma`` (capability 9.0): both GEMMs and their epilogues in one kernel.

This is the *b2b* form with ``groups`` (`schedule.gpu.b2b_gemm.wgmma_tile`), built as FlashAttention-3 is: producer
warps fill a ring of stages with chunks of both weights in turns (`wgmma_weights`); every consumer warpgroup keeps its
rows of x in shared memory and goes through the chunks at its own pace (`wgmma_consumer`), so that the element-wise
operations of one overlap with the ``wgmma``s of the others.  The hidden chunk stays in registers.  Where weights are
copied as they are, a warp of its own passes their proxy fences, which would wait for the ``wgmma``s of whoever issues
them; where they go through registers, the producers do.  Blocks are persistent (``rounds`` row tiles): the next tile's
rows are copied behind the last chunk's first GEMM.  ``setmaxnreg`` distributes the registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.b2b_gemm.wgmma_consumer import B2bConsumer
from jcuts.codegen.cuda.b2b_gemm.wgmma_weights import WeightProducer, weight_tiles
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.mbarrier_ring import MbarrierRing
from jcuts.codegen.cuda.ptx.mma import VOID
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.cuda.toolchain.target import GROUPED
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import B2bWgmmaTile, wgmma_shape_of
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, GROUP, KINDS

Step = Callable[[L.Value, list[L.Value]], list[L.Value]]
"""Emits an iteration, from its number and the loop-carried values: those of the next one."""


def b2b_wgmma_shape(program: Program) -> B2bWgmmaTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    shape, params = wgmma_shape_of(program), dict(program.params)
    if shape is None or not shape.fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no {params['groups']} warpgroups with chunks of {params['chunk']}")
    if tuple(tile.bytes for tile in weight_tiles(shape)) != (shape.weight_bytes(0), shape.weight_bytes(1)):
        raise CompileRejected(f"{program.name}: chunks of {params['chunk']} do not fill whole lines of shared memory")
    return shape


class B2bWgmmaKernel:
    """Emits one thread of the back-to-back GEMM by ``wgmma``: the warp's number decides its role."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: B2bWgmmaTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        if builder.capability != GROUPED:
            raise CompileRejected(f"{program.name}: products of warp groups need compute capability 9.0")
        self.builder, self.shape, self.buffers, self.pointers = builder, tile, buffers, pointers
        self.thread, self.block, self.shared = integers["thread"], integers["block"], shared
        lane = builder.and_(self.thread, L.I32(WARP - 1))
        self.ring = MbarrierRing(builder, builder.add(shared, L.I32(tile.barriers)), tile.stages, lane)

    def emit(self) -> None:
        """All row tiles of the block, branching by role."""
        builder, shape = self.builder, self.shape
        self.ring.init(self.thread, shape.producer_threads, shape.consumer_threads // WARP)
        with builder.if_then(builder.icmp_unsigned("<", self.thread, L.I32(shape.groups))):
            first = builder.add(self.shared, L.I32(shape.barriers + BARRIER * KINDS * shape.stages))
            place = builder.add(first, builder.mul(self.thread, L.I32(BARRIER)))
            asm(builder, f"mbarrier.init.shared.b64 [$0], {GROUP // WARP};", VOID, [place], effects=True)
            asm(builder, "fence.mbarrier_init.release.cluster;", VOID, effects=True)
        ptx_mma.barrier(builder)
        is_consumer = builder.icmp_unsigned("<", self.thread, L.I32(shape.consumer_threads))
        with builder.if_else(is_consumer) as (then, otherwise):
            with then:
                self._setmaxnreg(0)
                self._consume()
            with otherwise:
                self._setmaxnreg(1)
                mine = builder.sub(self.thread, L.I32(shape.consumer_threads))
                with builder.if_then(builder.icmp_unsigned("<", mine, L.I32(shape.producer_threads))):
                    self._produce(mine)
                if shape.has_fence_warp:
                    warp = builder.lshr(mine, L.I32(5))
                    with builder.if_then(builder.icmp_unsigned("==", warp, L.I32(shape.producer_threads // WARP))):
                        self._fence()

    def _setmaxnreg(self, role: int) -> None:
        """``setmaxnreg``: consumer warpgroups (0) take registers that the producer warpgroup (1) gives up."""
        found = self.shape.registers
        if found is not None:
            text = f"setmaxnreg.{('inc', 'dec')[role]}.sync.aligned.u32 {found[role]};"
            asm(self.builder, text, VOID, effects=True)

    # -- loops ------------------------------------------------------------------------------------------------------
    def _tiles(self, state: list[L.Value], step: Step) -> None:
        """Runs a body for every row tile of the block. Args: step: is given the tile's number."""
        shape = self.shape
        if shape.rounds == 1:
            step(self.block, state)
            return
        self._loop(self.block, L.I32(shape.blocks), L.I32(shape.tiles), state, step)

    def _chunks(self, state: list[L.Value], step: Step) -> list[L.Value]:
        """Runs a body for every chunk. Args: step: is given its first hidden column."""
        shape = self.shape
        return self._loop(L.I32(0), L.I32(shape.chunk), L.I32(shape.chunks * shape.chunk), state, step)

    def _loop(self, first: L.Value, by: L.Value, end: L.Value, state: list[L.Value], step: Step) -> list[L.Value]:
        builder, before = self.builder, self.builder.block
        loop, after = builder.append_basic_block("round"), builder.append_basic_block("round.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        phis = [builder.phi(L.I32) for _ in range(1 + len(state))]
        for phi, value in zip(phis, (first, *state), strict=True):
            phi.add_incoming(value, before)
        state = step(phis[0], phis[1:])
        number = builder.add(phis[0], by)
        for phi, value in zip(phis, (number, *state), strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", number, end), loop, after)
        builder.position_at_end(after)
        return state

    # -- roles ------------------------------------------------------------------------------------------------------
    def _frame(self) -> M.Frame:
        return M.Frame(self.builder, {}, self.pointers, {}, {})

    def _produce(self, thread: L.Value) -> None:
        """Code of a producer thread: loads of a chunk are issued before its stage is free."""
        builder, shape, ring = self.builder, self.shape, self.ring
        stages = builder.add(self.shared, L.I32(shape.ring))
        weights = [WeightProducer(self._frame(), shape, number, thread, stages) for number in (0, 1)]

        def chunk(column: L.Value, state: list[L.Value]) -> list[L.Value]:
            stage, parity = state
            for weight in weights:
                finish = weight.begin(column)
                ring.wait(ring.empty(stage), parity)
                finish(builder.mul(stage, L.I32(shape.stage)))
                if weight.is_copied:
                    ring.arrive_on_cp_async(ring.full(stage))
                else:
                    ring.arrive_thread(ring.full(stage))
                stage, parity = ring.next(stage, parity)
            return [stage, parity]

        self._tiles([L.I32(0), L.I32(1)], lambda tile, state: self._chunks(state, chunk))

    def _fence(self) -> None:
        """Code of the warp that passes proxy fences."""
        ring = self.ring

        def stage(state: list[L.Value]) -> list[L.Value]:
            ring.wait(ring.full(state[0]), state[1])
            wgmma.proxy_fence(self.builder)
            ring.arrive(ring.fenced(state[0]))
            return list(ring.next(*state))

        def chunk(column: L.Value, state: list[L.Value]) -> list[L.Value]:
            return stage(stage(state))

        self._tiles([L.I32(0), L.I32(0)], lambda tile, state: self._chunks(state, chunk))

    def _consume(self) -> None:
        """Code of a consumer thread."""
        consumer = B2bConsumer(self._frame(), self.shape, self.buffers, self.ring, self.thread, self.shared)
        consumer.start(self.block)

        def tile(number: L.Value, state: list[L.Value]) -> list[L.Value]:
            return consumer.run(number, self.builder.add(number, L.I32(self.shape.blocks)), state)

        self._tiles([L.I32(0), L.I32(0)], tile)
