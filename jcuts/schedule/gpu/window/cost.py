"""Cost model of window kernels, with and without a sliding window: bytes, lines, instructions, loads in flight.

    seconds = (bytes / memory + lines / L1 + instructions / issue + repeated reads / L2)
              * unhidden latency of loads * idle part of the last wave

Narrow accesses are as good as wide ones where the threads of a warp read whole lines; they need fewer registers, and
the window of a thread may be larger.  The constants are fitted to 1,109 schedules of five operations on an H200; of
each operation that the fit did not know, the best of eight was within 4 % of the fastest (`docs/gpu_proofs.md`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jcuts.arch.sm_limits import SM_90
from jcuts.estimate.time_model import Resource, TimeTerm, scaled, serial, term
from jcuts.schedule import fit
from jcuts.schedule.gpu.machine import WARP, GpuMachine

_FIT = fit.coefficients("gpu/window", "cost")
_REGISTERS = fit.coefficients("gpu/window", "registers")
"""Cycles per second of the GPU that the coefficients are fitted to."""
LINE = SM_90.cache_line_bytes


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
        size: bytes of a value.
        tiles: register tiles of the whole operation.
        waste: points of all tiles over those of the operation.
        read, written: bytes.
        threads: of a block.
    """

    tile: int
    values: int
    fresh: int
    steps: int
    ahead: int
    lane: int
    taps: int
    size: int
    tiles: int
    waste: float
    read: float
    written: float
    threads: int

    @property
    def registers(self) -> float:
        """Registers of a thread, estimated."""
        if self.steps > 1:
            kept = self.values + (self.ahead if self.ahead > 0 else _REGISTERS.sliding_no_prefetch_factor) * self.fresh
            found = _REGISTERS.sliding_factor * (_REGISTERS.sliding_base + self.tile + kept * self.size / 4)
            return min(_REGISTERS.maximum, found)
        return _REGISTERS.point_base + _REGISTERS.point_per_output * self.tile + _REGISTERS.point_per_lane * self.lane

    def time(self, machine: GpuMachine) -> TimeTerm:
        """Seconds of a launch by their terms."""
        rates = machine.coefficients("gpu/window", "cost")
        loaded = self.values + (self.steps - 1) * self.fresh
        stored = self.tile * self.steps
        lines = self.tiles * (loaded + stored) * self.size / LINE / (machine.sms * rates.clock_hertz)
        accesses = (loaded + stored) / min(self.lane, max(1, 16 // self.size))
        issued = _FIT.access_instructions * accesses + stored * self.taps + _FIT.tile_instructions
        issue = self.tiles / WARP * issued / (machine.sms * 4 * rates.clock_hertz)
        again = max(0.0, loaded / stored - self.read / self.written) * self.written / rates.l2_bytes_per_second
        moved = self.read + self.written
        work = serial(
            [
                term(Resource.DRAM, moved / machine.bandwidth, moved),
                term(Resource.L1, _FIT.l1_lines_remainder * lines),
                term(Resource.ISSUE, _FIT.issue_remainder * issue),
                term(Resource.L2, _FIT.reread_remainder * again),
            ]
        )
        for name, factor in self._ratios(machine):
            work = scaled(name, factor, work)
        return serial([work, term(Resource.LAUNCH, _FIT.launch_seconds)])

    def _ratios(self, machine: GpuMachine) -> Iterator[tuple[str, float]]:
        """What lengthens the work: latency that loads in flight do not hide, occupancy, the last wave, idle points."""
        taken = 8 * math.ceil(self.registers / 8) * self.threads
        held = max(1, min(machine.threads_per_sm // self.threads, WARP, int(machine.limits.registers_per_sm // taken)))
        blocks = -(-self.tiles // self.threads)
        slots = held * machine.sms
        there = min(blocks, slots) * self.threads
        waves = blocks / slots
        ahead = max(0.5, self.ahead * _FIT.prefetch_loads_factor) * self.fresh if self.steps > 1 else self.values
        ahead = max(1.0, ahead)  # windows of a number read nothing
        latency = _FIT.latency_weight * _FIT.latency_seconds
        yield "loads in flight", 1.0 + latency * machine.bandwidth / (there * ahead * self.size)
        yield "occupancy", (there / machine.threads) ** -_FIT.occupancy_exponent
        partial = math.ceil(waves) / waves - 1 if waves < 4 else 0.0
        yield "last wave", 1.0 + _FIT.last_wave_weight * min(1.0, 1 / waves) + _FIT.partial_wave_weight * partial
        if self.steps > 1:
            yield "start of a sliding window", 1.0 + _FIT.sliding_start_weight / self.steps
        else:
            yield "registers", 1.0 + _FIT.register_weight * max(0.0, (self.registers - 64) / 64)
        yield "idle points", 1.0 + _FIT.waste_weight * (self.waste - 1.0)

    def seconds(self, machine: GpuMachine) -> float:
        """Estimated time of a launch."""
        return self.time(machine).value
