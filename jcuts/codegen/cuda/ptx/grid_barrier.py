"""Grid barrier of a cooperative launch: ``red.release.gpu`` on one counter in global memory, ``ld.acquire.gpu`` until
all blocks have arrived.

Memory order: a block's stores come before its ``bar.sync``, which orders them before the release of its first thread
(releases are cumulative); who acquires a count that this release is part of passes a ``bar.sync`` of its own before it
reads.  Nobody waits for a block that is not running: all blocks of a cooperative launch are resident.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llvmlite import ir

from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.mma import barrier
from jcuts.codegen.llvm import lanes as L

Loaded = TypeVar("Loaded")
MOST_POLLS = 1 << 24
"""Loads after which a kernel traps: about ten seconds, where every one takes 0.6 us."""


def grid_barrier(builder: GpuBuilder, counter: L.Value, arrived: L.Value, thread: L.Value) -> None:
    """Waits for all blocks of the grid.

    Args: counter: address (i64) of a u32 that was 0 at the launch; arrived: its value (i32) once every block is here,
        modulo 2^32; thread: the number of the thread in its block.
    """

    def counted() -> tuple[L.Value, None]:
        found = asm(builder, "ld.acquire.gpu.global.u32 $0, [$1];", L.I32, [counter], effects=True)
        return builder.icmp_signed("<", builder.sub(found, arrived), L.I32(0)), None

    barrier(builder)
    with builder.if_then(builder.icmp_signed("==", thread, L.I32(0))):
        asm(builder, "red.release.gpu.global.add.u32 [$0], 1;", ir.VoidType(), [counter], effects=True)
        poll(builder, counted)
    barrier(builder)


def poll(builder: GpuBuilder, load: Callable[[], tuple[L.Value, Loaded]]) -> Loaded:
    """Loads again until nothing is missing; traps after `MOST_POLLS` times.

    Args: load: emits the loads, and whether (i1) anything that they are to bring is missing.
    """
    before = builder.block
    loop, late, done = (builder.append_basic_block(f"grid.{name}") for name in ("poll", "late", "done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    polls = builder.phi(L.I32, "polls")
    polls.add_incoming(L.I32(0), before)
    missing, found = load()
    builder.cbranch(missing, late, done)
    builder.position_at_end(late)
    again = builder.add(polls, L.I32(1))
    with builder.if_then(builder.icmp_signed("==", again, L.I32(MOST_POLLS)), likely=False):
        asm(builder, "trap;", ir.VoidType(), effects=True)
    polls.add_incoming(again, builder.block)
    builder.branch(loop)
    builder.position_at_end(done)
    return found
