"""Roofline bound and PUL ranking score of generated GPU kernels, from the resources that the assembler (ptxas) reports.

The thesis' kernels of simple operations pass data through shared memory; jcuts' keep it in registers, so two of the
four factors are redefined:

    PUL = GMRatio * LRatio * WBRatio * COEF_r

* GMRatio = (COMP / R_peak) / (t_DRAM + 0.35 t_L2 + 0.15 t_L1): compulsory bytes by the DRAM, the 32-byte sectors that
  the blocks move by the L2 cache, one 128-byte line per cycle and busy multiprocessor for every line that a warp's
  access touches; fewer blocks than multiprocessors leave the others' rates unused, those of the L2 cache as well.  The
  levels work at the same time, but not perfectly.  (The print has one level, and counts elements.)
* LRatio stands for SMRatio: the latency to be hidden is that of the global memory, and what hides it are the loads that
  the resident threads have under way: 1 / (1 + 0.08 / u) * occupancy^0.03, u = bytes under way / (BW_global * latency)
  (Little's law, rounded off).  How many threads are resident follows from the registers and the shared memory that the
  assembler reports.
* WBRatio = 1 / (1 + 0.1 min(1, 1 / waves)): what the last wave leaves idle; a wave is what all multiprocessors hold at
  once.  (The print counts one block per multiprocessor; with several a memory-bound kernel does not wait.)
* COEF_r is 1 where a block fits, else 0.

The five numbers (0.35, 0.15, 0.08, 0.03, 0.1) were fitted to 10,307 measured schedules of fifteen memory-bound
operations on an H200, drawn without the model (`docs/gpu_proofs.md`).

A call of several launches takes the sum of their times, and each launch costs `LAUNCH_S` at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jcuts.arch.gpu import GpuArch
from jcuts.base.errors import ModelError

LATENCY_S = 6.5e-7
"""Of a load from global memory: 500 to 800 ns on GPUs of the last years (Luo et al. 2024, memory latency)."""
LAUNCH_S = 7e-7
"""What an empty kernel in a CUDA graph takes (measured on an H200)."""
OF_L2 = 0.35
"""Weight of the L2 cache's time beside the DRAM's (fitted: see above)."""
OF_L1 = 0.15
"""Weight of the L1 caches' time."""
LATENT = 0.08
"""Of the latency that loads under way do not hide."""
OCCUPANCY = 0.03
"""Exponent of the part of an SM's threads that are resident."""
TAIL = 0.1
"""What the last, partly filled wave costs at most."""
REGISTER_UNIT = 256
"""Registers are given to warps in portions of this many."""
SECTOR = 32
"""Bytes: the least that global memory moves."""


@dataclass(frozen=True)
class LaunchUse:
    """Resource use and traffic of one kernel launch.

    Attributes:
        blocks, threads: thread blocks; threads of each.
        registers: of a thread; shared: bytes of a block, as the assembler reports them.
        flop: operations of the whole launch; compulsory: bytes that must be read and written at least once.
        moved: bytes of all sectors that its blocks load and store.
        lines: 128-byte lines that all accesses of all warps touch.
        under_way: bytes that one thread loads before it waits for the first of them, on average over threads with and
            without work.
        active: share of its threads that have work.
    """

    blocks: int
    threads: int
    registers: int
    shared: int
    flop: float
    compulsory: float
    moved: float
    lines: float
    under_way: float
    active: float = 1.0


@dataclass(frozen=True)
class LaunchScore:
    """The factors of one call, each in [0, 1] (of its longest launch), their product for the call, and its time [s]."""

    pul: float
    gm: float
    latency: float
    wb: float
    r: float
    seconds: float
    resident_threads: int


def resident_blocks(use: LaunchUse, arch: GpuArch) -> int:
    """Occupancy: blocks that one multiprocessor holds at once; 0 where not even one fits.

        min(blocks per SM, threads per SM / threads, registers per SM / registers of a block, shared per SM / shared)

    Source: CUDA C++ Programming Guide, "Multiprocessor level"; registers are given to warps in units of 256.
    """
    if use.blocks < 1 or use.threads < 1:
        raise ModelError(f"a launch of {use.blocks} blocks of {use.threads} threads", blocks=use.blocks)
    if use.threads > arch.max_thread or use.registers > arch.registers_per_thread or use.shared > arch.max_shared:
        return 0
    warps = -(-use.threads // arch.warp_size)
    per_warp = -(-max(1, use.registers) * arch.warp_size // REGISTER_UNIT) * REGISTER_UNIT
    limits = [
        arch.max_blocks_per_sm,
        arch.max_threads_per_sm // (warps * arch.warp_size),
        arch.registers_per_sm // per_warp // warps,
        arch.shared_per_sm // max(1, use.shared + arch.shared_reserved),  # before 8.0 nothing is reserved
    ]
    return max(0, min(limits))


def score(launches: Sequence[LaunchUse], arch: GpuArch, *, unit: str = "ffma") -> LaunchScore:
    """PUL of a call of one or more launches.

    Returns: `LaunchScore`; ``pul`` is COMP / R_peak over the predicted time, 0 where a launch does not fit.
    Raises: ModelError for no launch, or one without blocks.
    """
    if not launches:
        raise ModelError("a call without launches", launches=0)
    peak = arch.peak(unit)
    total, flop, longest = 0.0, 0.0, -1.0
    shown = (1.0, 1.0, 1.0, 0)
    for use in launches:
        fitting = resident_blocks(use, arch)
        if fitting == 0:
            return LaunchScore(0.0, 0.0, 0.0, 0.0, 0.0, math.inf, 0)
        threads = min(use.blocks, fitting * arch.num_sm) * use.threads
        under_way = max(1.0, threads * use.under_way) / (arch.bw_global * LATENCY_S)
        occupancy = use.active * min(1.0, fitting * use.threads / arch.max_threads_per_sm)
        hidden = occupancy**OCCUPANCY / (1.0 + LATENT / under_way)
        balance = 1.0 / (1.0 + TAIL * min(1.0, fitting * arch.num_sm / use.blocks))
        work = max(use.flop, 1.0)
        dram, l2 = use.compulsory / arch.bw_global, use.moved / arch.bw_l2
        busy = min(1.0, use.blocks / arch.num_sm)  # what few multiprocessors ask for, they get at their own rates
        moving = dram + (OF_L2 * l2 + OF_L1 * use.lines / (arch.num_sm * arch.clock)) / busy
        gm = min(1.0, work / peak / max(moving, 1e-12))
        seconds = max(LAUNCH_S, work / (peak * gm * hidden * balance))
        total, flop = total + seconds, flop + work
        if seconds > longest:
            longest, shown = seconds, (gm, hidden, balance, threads)
    return LaunchScore(min(1.0, flop / peak / total), shown[0], shown[1], shown[2], 1.0, total, shown[3])


def least_seconds(moved: float, arch: GpuArch, *, resident: float = 0.0) -> float:
    """Roofline bound: compulsory bytes at the DRAM's bandwidth, all bytes at the L2 cache's [s].

    Args: moved: bytes that must be read or written at least once; resident: how many of them the L2 cache may hold from
        before, or keep without writing them back.
    """
    return max(max(0.0, moved - min(resident, arch.l2_bytes)) / arch.bw_global, moved / arch.bw_l2)
