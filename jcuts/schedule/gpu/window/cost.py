"""Cost model of window kernels, with and without a sliding window: footprint of blocks, lines, issue, latency, waves.

    work    = memory + shares of (L2 cache for halos, L1 lines, issued accesses)
    seconds = work * (1 + latency_share * sqrt(waves * latency of a block / work))
              * (1 + tail_share * min(1, 1 / waves)) / occupancy^a / (threads with work)^b

Multiply-adds issue beside the memory: they add nothing.  The latency of a block is that of its loads in a row: a
register tile's loads need several rounds where registers do not hold them all, a sliding window waits once per step
over the steps that it loads early.  The shares are fitted to 3,615 schedules of five operations on an H200, drawn
without the model; of each operation that a fit did not know, the best of five of about 505 was within 3.6 % of the
fastest, and on an H100, which no fit knew, the best of two of 150 within 3.5 %, of a 5x5 window within 7.6 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jcuts.estimate.time_model import Resource, TimeTerm, at_least, on_sms, scaled, serial, term
from jcuts.schedule.gpu.launch_stats import memory_rates
from jcuts.schedule.gpu.machine import ACCESS, WARP, GpuMachine

REGISTER_UNIT = 8
"""Registers of a thread are allocated in portions of this many."""
MOST_REGISTERS = 255


@dataclass(frozen=True)
class WindowRates:
    """Fitted coefficients.

    Attributes:
        clock_hertz: of the GPU while measured.
        l2_share, l1_share, issue_share: of these resources' times that are not hidden behind the memory's.
        tile_accesses: what a thread's addresses and guards take, in accesses.
        latency_share: of the latency that is not hidden. load_register_share: of registers that loads under way fill.
        occupancy_exponent: of resident threads. idle_exponent: of threads with work.
        tail_share: what the last, partly filled wave costs at most.
        register_base, register_per_value, register_per_output: of a thread with a register tile.
        sliding_register_base, register_per_carried: of one with a sliding window; per value from step to step.
    """

    clock_hertz: float
    l2_share: float
    l1_share: float
    issue_share: float
    tile_accesses: float
    latency_share: float
    load_register_share: float
    occupancy_exponent: float
    idle_exponent: float
    tail_share: float
    register_base: float
    register_per_value: float
    register_per_output: float
    sliding_register_base: float
    register_per_carried: float


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
        threads: of a block. blocks: of the launch.
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
    blocks: int
    compulsory: float
    moved: float
    lines: float

    def registers(self, machine: GpuMachine, rates: WindowRates) -> float:
        """Registers of a thread, estimated: a sliding window keeps all rows that steps share, a register tile its sums.

        Registers that take no block's place are used for loads.
        """
        words, limits = max(1.0, self.size / 4), machine.limits
        if self.steps > 1:
            carried = self.values + (max(0, self.ahead) - 1) * self.fresh
            taken = rates.sliding_register_base + rates.register_per_carried * words * carried
        else:
            taken = rates.register_base + rates.register_per_value * words * self.values
            taken += rates.register_per_output * self.tile
            spare = limits.registers_per_sm // (limits.blocks_per_sm * self.threads)
            taken = max(taken, min(spare, rates.sliding_register_base + words * self.values))
        return min(taken, float(MOST_REGISTERS), limits.registers_per_sm / self.threads)

    def accesses(self, rates: WindowRates) -> float:
        """Warp instructions of the launch that access memory, and what its threads' addresses take besides."""
        loaded, stored = self.values + (self.steps - 1) * self.fresh, self.tile * self.steps
        each = (loaded + stored) / min(self.lane, max(1, ACCESS // self.size))
        return self.blocks * self.threads / WARP * (each + rates.tile_accesses)

    def waits(self, registers: float, rates: WindowRates) -> float:
        """How often a thread waits for a load, one after the other."""
        rounds = max(1.0, self.size / 4) / (rates.load_register_share * registers)
        if self.steps == 1:
            return max(1.0, self.values * rounds)
        step = 1.0 / self.ahead if self.ahead > 0 else max(1.0, self.fresh * rounds)
        return 1.0 + (self.steps - 1) * step

    def time(self, machine: GpuMachine) -> TimeTerm:
        """Seconds of a launch by their terms."""
        rates, memory = machine.record("gpu/window", "cost", WindowRates), memory_rates(machine)
        sms, arch, blocks = machine.sms, machine.arch, self.blocks
        registers = self.registers(machine, rates)
        held = self._resident_blocks(machine, registers)
        waves = blocks / (held * sms)
        active = self.tiles / (blocks * self.threads)
        occupancy = min(1.0, held * self.threads / machine.threads_per_sm)
        busy = min(1.0, blocks / sms)  # what few multiprocessors ask for, they get at their own rates
        cycles = self.accesses(rates) / (sms * arch.issue_per_clock)
        flop = term(Resource.ALU, 0.0, 2.0 * self.tile * self.steps * self.taps * self.tiles / blocks)
        halo = (self.moved - self.compulsory) / arch.bw_l2
        work = serial(
            [
                term(Resource.DRAM, self.compulsory / machine.bandwidth, self.compulsory),
                term(Resource.L2, rates.l2_share * halo / busy, self.moved),
                term(Resource.L1, rates.l1_share * self.lines / (sms * arch.clock) / busy),
                term(Resource.ISSUE, rates.issue_share * cycles / arch.clock / busy),
                on_sms(flop, blocks=blocks, sms=sms),
            ]
        )
        waiting = waves * memory.latency_seconds * self.waits(registers, rates)
        work = scaled("load latency", 1.0 + rates.latency_share * math.sqrt(waiting / work.value), work)
        work = scaled("occupancy", occupancy**-rates.occupancy_exponent, work)
        work = scaled("idle threads", active**-rates.idle_exponent, work)
        work = scaled("last wave", 1.0 + rates.tail_share * min(1.0, 1.0 / waves), work)
        return at_least(memory.launch_seconds, work)

    def _resident_blocks(self, machine: GpuMachine, registers: float) -> int:
        """Occupancy: blocks that one multiprocessor holds at once."""
        taken = REGISTER_UNIT * math.ceil(registers / REGISTER_UNIT) * self.threads
        limits = machine.limits
        by_registers = int(limits.registers_per_sm // taken)
        return max(1, min(machine.threads_per_sm // self.threads, limits.blocks_per_sm, by_registers))

    def seconds(self, machine: GpuMachine) -> float:
        """Estimated time of a launch."""
        return self.time(machine).value
