"""Time model of one memory-bound GPU launch: DRAM, L2 and L1 traffic, loads in flight, occupancy, the last wave.

For kernels that keep their data in registers (element-wise operations, reductions, norms, transposes):

    seconds = longest(FLOP / R_peak, t_DRAM + l2_share t_L2 + l1_share t_L1) / occupancy / loads in flight / last wave

* t_DRAM: compulsory bytes at the memory's bandwidth; t_L2: the 32-byte sectors that the blocks move by the L2 cache;
  t_L1: one 128-byte line per cycle and busy multiprocessor for every line that a warp's access touches.  Fewer blocks
  than multiprocessors leave the others' rates unused, those of the L2 cache as well.
* loads in flight: 1 / (1 + latency_share / u), u = bytes under way / (BW_global * latency), Little's law rounded off.
* occupancy: resident over possible threads, to a small power.
* last wave: 1 / (1 + tail_share min(1, 1 / waves)); a wave is what all multiprocessors hold at once.

The shares are fitted (`MemoryRates`): 10,307 measured schedules of fifteen operations, drawn without the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.arch.gpu import GpuArch
from jcuts.base.errors import ModelError
from jcuts.estimate.time_model import Resource, TimeTerm, at_least, longest, on_sms, scaled, serial, term

REGISTER_UNIT = 256
"""Registers are given to warps in portions of this many."""
SECTOR = 32
"""Bytes: the least that global memory moves."""


@dataclass(frozen=True)
class LaunchUse:
    """Resource use and traffic of one kernel launch.

    Attributes:
        blocks, threads: thread blocks; threads of each.
        registers: of a thread; shared: bytes of a block.
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
class MemoryRates:
    """Fitted coefficients of memory-bound launches.

    Attributes:
        latency_seconds: of a load from global memory. launch_seconds: of a launch that does nothing.
        l2_share, l1_share: of the caches' time that is not hidden behind the memory's.
        latency_share: of the latency that loads under way do not hide. occupancy_exponent: of resident threads.
        tail_share: what the last, partly filled wave costs at most.
    """

    latency_seconds: float
    launch_seconds: float
    l2_share: float
    l1_share: float
    latency_share: float
    occupancy_exponent: float
    tail_share: float


def resident_blocks(use: LaunchUse, arch: GpuArch) -> int:
    """Occupancy: blocks that one multiprocessor holds at once; 0 where not even one fits (COEF_r).

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


def launch_time(use: LaunchUse, arch: GpuArch, rates: MemoryRates, unit: str = "ffma") -> TimeTerm:
    """Seconds of one launch by their terms, as above; as if one block were resident where none fits.

    Args: unit: that does the FLOP. Raises: ModelError for a launch without blocks.
    """
    fitting = max(1, resident_blocks(use, arch))
    threads = min(use.blocks, fitting * arch.num_sm) * use.threads
    in_flight = max(1.0, threads * use.under_way) / (arch.bw_global * rates.latency_seconds)
    occupancy = use.active * min(1.0, fitting * use.threads / arch.max_threads_per_sm)
    tail = rates.tail_share * min(1.0, fitting * arch.num_sm / use.blocks)
    busy = min(1.0, use.blocks / arch.num_sm)  # what few multiprocessors ask for, they get at their own rates
    moving = [
        term(Resource.DRAM, use.compulsory / arch.bw_global, use.compulsory),
        term(Resource.L2, rates.l2_share * use.moved / arch.bw_l2 / busy, use.moved),
        term(Resource.L1, rates.l1_share * use.lines / (arch.num_sm * arch.clock) / busy),
    ]
    alu = term(Resource.ALU, use.flop / arch.peak(unit), use.flop / use.blocks)
    work = longest((serial(moving), on_sms(alu, blocks=use.blocks, sms=arch.num_sm)))
    work = scaled("occupancy", occupancy**-rates.occupancy_exponent, work)
    work = scaled("loads in flight", 1.0 + rates.latency_share / in_flight, work)
    return at_least(rates.launch_seconds, scaled("last wave", 1.0 + tail, work))


def least_seconds(moved: float, arch: GpuArch, *, resident: float = 0.0) -> float:
    """Roofline bound: compulsory bytes at the DRAM's bandwidth, all bytes at the L2 cache's [s].

    Args: moved: bytes that must be read or written at least once; resident: how many of them the L2 cache may hold from
        before, or keep without writing them back.
    """
    return max(max(0.0, moved - min(resident, arch.l2_bytes)) / arch.bw_global, moved / arch.bw_l2)
