"""Cost model of window kernels, with and without a sliding window: footprint of blocks, lines, issue, loads in flight.

    seconds = (memory + shares of L2 cache, L1 lines and issued instructions)
              * occupancy * latency that loads in flight do not hide * last wave

as for other memory-bound launches (`estimate.gpu_kernel`), and the instructions besides: a depthwise convolution has
nine multiply-adds per output.  The shares are fitted to 3,615 schedules of five operations on an H200, drawn without
the model; of each operation that a fit did not know, the best of five of about 505 was within 3.6 % of the fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jcuts.estimate.time_model import Resource, TimeTerm, at_least, on_sms, scaled, serial, term
from jcuts.schedule.gpu.launch_stats import memory_rates
from jcuts.schedule.gpu.machine import WARP, GpuMachine

REGISTER_UNIT = 8
"""Registers of a thread are allocated in portions of this many."""
MOST_REGISTERS = 255
SCHEDULERS = 4
"""Of a multiprocessor: each issues one warp instruction per cycle."""


@dataclass(frozen=True)
class WindowRates:
    """Fitted coefficients.

    Attributes:
        clock_hertz: of the GPU while measured.
        l2_share, l1_share, issue_share: of these resources' times that are not hidden behind the memory's.
        latency_share: of the latency that loads in flight do not hide. occupancy_exponent: of resident threads.
        tail_share: what the last, partly filled wave costs at most.
        access_instructions, exit_instructions, tile_instructions: per access, per operation of the epilogue, per tile.
        register_base, register_per_value: of a thread; per value that it loads, or makes.
        sliding_no_prefetch: values of the next tile that are in registers where none are loaded early.
    """

    clock_hertz: float
    l2_share: float
    l1_share: float
    issue_share: float
    latency_share: float
    occupancy_exponent: float
    tail_share: float
    access_instructions: float
    exit_instructions: float
    tile_instructions: float
    register_base: float
    register_per_value: float
    sliding_no_prefetch: float


@dataclass(frozen=True)
class WindowCost:
    """One window schedule, in the counts that decide its time.

    Attributes:
        tile: outputs of a thread's register tile.
        values: values that it loads.
        fresh: values that a next tile adds.
        steps: tiles of a sliding window, 1 without.
        ahead: tiles that are loaded early, -1 without a sliding window.
        lane: neighbouring outputs of a thread.
        taps: values per output.
        exit_ops: operations per output after the sum.
        size: bytes of a value.
        tiles: threads with work.
        threads: of a block.
        compulsory: bytes of operands and results.
        moved, lines: bytes of sectors that all blocks touch, 128-byte lines of all accesses.
    """

    tile: int
    values: int
    fresh: int
    steps: int
    ahead: int
    lane: int
    taps: int
    exit_ops: int
    size: int
    tiles: int
    threads: int
    compulsory: float
    moved: float
    lines: float

    @property
    def blocks(self) -> int:
        """Of the launch."""
        return -(-self.tiles // self.threads)

    def registers(self, rates: WindowRates) -> float:
        """Registers of a thread, estimated."""
        loaded = float(self.values)
        if self.steps > 1:
            loaded += (self.ahead if self.ahead > 0 else rates.sliding_no_prefetch) * self.fresh
        kept = loaded * max(1.0, self.size / 4) + self.tile
        return min(float(MOST_REGISTERS), rates.register_base + rates.register_per_value * kept)

    def instructions(self, rates: WindowRates) -> float:
        """Warp instructions of the launch."""
        loaded, stored = self.values + (self.steps - 1) * self.fresh, self.tile * self.steps
        accesses = (loaded + stored) / min(self.lane, max(1, 16 // self.size))
        each = rates.access_instructions * accesses + stored * (self.taps + rates.exit_instructions * self.exit_ops)
        return self.tiles / WARP * (each + rates.tile_instructions)

    def time(self, machine: GpuMachine) -> TimeTerm:
        """Seconds of a launch by their terms."""
        rates, memory = machine.record("gpu/window", "cost", WindowRates), memory_rates(machine)
        sms, arch, blocks = machine.sms, machine.arch, self.blocks
        held = self._resident_blocks(machine, rates)
        resident = min(blocks, held * sms) * self.threads
        active = self.tiles / (blocks * self.threads)
        ahead = max(0.5, self.ahead) * self.fresh if self.steps > 1 else self.values
        in_flight = max(1.0, resident * active * ahead * self.size) / (machine.bandwidth * memory.latency_seconds)
        occupancy = active * min(1.0, held * self.threads / machine.threads_per_sm)
        busy = min(1.0, blocks / sms)  # what few multiprocessors ask for, they get at their own rates
        issued = self.instructions(rates)
        issue = term(Resource.ISSUE, rates.issue_share * issued / (sms * SCHEDULERS * rates.clock_hertz) / busy)
        flop = term(Resource.ALU, 0.0, 2.0 * self.tile * self.steps * self.taps * self.tiles / blocks)
        work = serial(
            [
                term(Resource.DRAM, self.compulsory / machine.bandwidth, self.compulsory),
                term(Resource.L2, rates.l2_share * self.moved / arch.bw_l2 / busy, self.moved),
                term(Resource.L1, rates.l1_share * self.lines / (sms * arch.clock) / busy),
                issue,
                on_sms(flop, blocks=blocks, sms=sms),
            ]
        )
        work = scaled("occupancy", occupancy**-rates.occupancy_exponent, work)
        work = scaled("loads in flight", 1.0 + rates.latency_share / in_flight, work)
        work = scaled("last wave", 1.0 + rates.tail_share * min(1.0, held * sms / blocks), work)
        return at_least(memory.launch_seconds, work)

    def _resident_blocks(self, machine: GpuMachine, rates: WindowRates) -> int:
        """Occupancy: blocks that one multiprocessor holds at once."""
        taken = REGISTER_UNIT * math.ceil(self.registers(rates) / REGISTER_UNIT) * self.threads
        limits = machine.limits
        by_registers = int(limits.registers_per_sm // taken)
        return max(1, min(machine.threads_per_sm // self.threads, limits.blocks_per_sm, by_registers))

    def seconds(self, machine: GpuMachine) -> float:
        """Estimated time of a launch."""
        return self.time(machine).value
