"""Ring of ``mbarrier`` objects (full, fenced, empty per stage) of a producer/consumer pipeline (capability 9.0).

A barrier counts arrivals; each time that all have come, its phase ends.  Producer threads arrive at a stage's *full*
barrier when their copies have landed, without waiting for them (``cp.async.mbarrier.arrive``).  A warp with nothing
else in flight may wait there, issue the proxy fence, and arrive at the *fenced* one: the fence would wait for the
copies and ``wgmma``s of the warp that issues it.  Consumer warps arrive at *empty* when they have read the stage.
Waiting names the parity of the phase: a new barrier counts as one whose phase of parity 1 has ended (PTX ISA,
"mbarrier").
"""

from __future__ import annotations

from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.mma import VOID
from jcuts.codegen.cuda.ptx.shuffle import warp_barrier
from jcuts.codegen.llvm import lanes as L
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, KINDS


class MbarrierRing:
    """The ``mbarrier``s of a ring of pipeline stages: *full*, *fenced* and *empty*, one kind behind the other."""

    def __init__(self, builder: GpuBuilder, place: L.Value, stages: int, lane: L.Value) -> None:
        """Args: place: address of the first barrier in shared memory; lane: of the thread in its warp."""
        self.builder, self.place, self.stages, self.lane = builder, place, stages, lane

    def init(self, thread: L.Value, filling: int, reading: int) -> None:
        """Initialises all barriers, by the first threads of the block; a block barrier has to follow.

        Args: filling: threads that do; reading: warps.
        """
        builder, stages = self.builder, self.stages
        with builder.if_then(builder.icmp_unsigned("<", thread, L.I32(KINDS * stages))):
            full, seen = (builder.icmp_unsigned("<", thread, L.I32(n * stages)) for n in (1, 2))
            count = builder.select(full, L.I32(filling), builder.select(seen, L.I32(1), L.I32(reading)))
            where = builder.add(self.place, builder.mul(thread, L.I32(BARRIER)))
            asm(builder, "mbarrier.init.shared.b64 [$0], $1;", VOID, [where, count], effects=True)
            asm(builder, "fence.mbarrier_init.release.cluster;", VOID, effects=True)

    def full(self, stage: L.Value) -> L.Value:
        """The barrier that completes when a stage's copies have arrived."""
        return self.builder.add(self.place, self.builder.mul(stage, L.I32(BARRIER)))

    def fenced(self, stage: L.Value) -> L.Value:
        """The barrier that consumers of a stage wait on."""
        return self.builder.add(self.full(stage), L.I32(self.stages * BARRIER))

    def empty(self, stage: L.Value) -> L.Value:
        """The barrier that producers of a stage wait on."""
        return self.builder.add(self.full(stage), L.I32(2 * self.stages * BARRIER))

    def wait(self, barrier: L.Value, parity: L.Value) -> None:
        """Waits for the end of the phase with the given parity."""
        builder = self.builder
        loop, after = builder.append_basic_block("stage"), builder.append_basic_block("stage.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        text = "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
        done = asm(builder, text, L.I32, [barrier, parity], effects=True)
        builder.cbranch(builder.icmp_signed("!=", done, L.I32(0)), after, loop)
        builder.position_at_end(after)

    def arrive(self, barrier: L.Value, where: L.Value | None = None) -> None:
        """Arrives for the warp: it is done with a stage, if ``where`` holds (uniform over the warp)."""
        builder = self.builder
        warp_barrier(builder)
        mine = builder.icmp_unsigned("==", self.lane, L.I32(0))
        mine = mine if where is None else builder.and_(mine, where)
        text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared.b64 _, [$0]; }"
        asm(builder, text, VOID, [barrier, builder.zext(mine, L.I32)], effects=True)

    def arrive_thread(self, barrier: L.Value) -> None:
        """Arrives for this thread, whose writes come before."""
        asm(self.builder, "mbarrier.arrive.shared.b64 _, [$0];", VOID, [barrier], effects=True)

    def arrive_on_cp_async(self, barrier: L.Value) -> None:
        """Arrives for this thread once all ``cp.async`` copies it has issued are complete."""
        asm(self.builder, "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", VOID, [barrier], effects=True)

    def next(self, stage: L.Value, parity: L.Value) -> tuple[L.Value, L.Value]:
        """The stage after this one, and the parity of its phase."""
        builder = self.builder
        later = builder.add(stage, L.I32(1))
        wraps = builder.icmp_signed("==", later, L.I32(self.stages))
        return builder.select(wraps, L.I32(0), later), builder.xor(parity, builder.zext(wraps, L.I32))
