"""Thread-block clusters: cluster barrier, and ``st.async`` into another block's shared memory (DSMEM; capability 9.0).

An ``mbarrier`` counts bytes: its block says how many it expects, every store reports how many have come (PTX ISA,
"mbarrier", ``st.async``).  So no fence is needed, which would wait for all memory that a block has written.
"""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.mma import VOID
from jcuts.codegen.llvm import lanes as L


def arrive(builder: GpuBuilder) -> None:
    """``barrier.cluster.arrive.relaxed``: arrives at the cluster barrier without releasing this thread's writes."""
    asm(builder, "barrier.cluster.arrive.relaxed.aligned;", VOID, effects=True)


def wait(builder: GpuBuilder) -> None:
    """``barrier.cluster.wait``: waits until all threads of the cluster have arrived."""
    asm(builder, "barrier.cluster.wait.aligned;", VOID, effects=True)


def mbarrier_expect_tx(builder: GpuBuilder, barrier: L.Value, size: int, thread: L.Value) -> None:
    """Initialises an ``mbarrier`` that expects a number of bytes; `arrive`, `wait` and the stores follow."""
    with builder.if_then(builder.icmp_signed("==", thread, L.I32(0))):
        asm(builder, "mbarrier.init.shared.b64 [$0], 1;", VOID, [barrier], effects=True)
        asm(builder, "fence.mbarrier_init.release.cluster;", VOID, effects=True)
        asm(builder, f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {size};", VOID, [barrier], effects=True)


def st_async_v4(builder: GpuBuilder, place: L.Value, offset: int, values: Sequence[L.Value], barrier: L.Value) -> None:
    """``st.async``: stores four floats asynchronously in another block. Args: place, barrier: addresses in the same
    block (`mapa`).
    """
    where = f"[$0+{offset}]" if offset else "[$0]"
    text = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
    words = [builder.bitcast(v, L.I32) for v in values]
    asm(builder, f"{text} {where}, {{$1, $2, $3, $4}}, [$5];", VOID, [place, *words, barrier], effects=True)


def ld_shared_f32(builder: GpuBuilder, place: L.Value, offset: int = 0) -> L.Value:
    """``ld.shared::cluster``: one float of any block of the cluster (`mma.mapa`)."""
    where = f"[$1+{offset}]" if offset else "[$1]"
    return asm(builder, f"ld.shared::cluster.f32 $0, {where};", L.F32, [place], effects=True)


def mbarrier_wait(builder: GpuBuilder, barrier: L.Value) -> None:
    """Waits until all bytes that an ``mbarrier`` expects have arrived."""
    loop, after = builder.append_basic_block("waits"), builder.append_basic_block("waits.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    text = "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], 0; selp.b32 $0, 1, 0, p; }"
    done = asm(builder, text, L.I32, [barrier], effects=True)
    builder.cbranch(builder.icmp_signed("!=", done, L.I32(0)), after, loop)
    builder.position_at_end(after)
