"""What a kernel of windows takes, by threads on their own or that walk: bytes, lines, instructions, loads under way.

    seconds = (bytes / memory + lines / L1 + instructions / issue + what is read again / L2)
              * what nobody hides of loads * what the last wave leaves idle

Narrow accesses are as good as wide ones where the threads of a warp read whole lines; they need fewer registers, and
the window of a thread may be larger.  The constants are fitted to 1,109 schedules of five operations on an H200; of
each operation that the fit did not know, the best of eight was within 4 % of the fastest (`docs/gpu_proofs.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jcuts.schedule.gpu.machine import WARP, GpuMachine, fastest_memory

CLOCK, L2, LINE = 1.755e9, 5.5e12, 128
"""Cycles per second, bytes per second, bytes: of the GPU that the constants are fitted to."""
LINES, ISSUE, AGAIN = 0.24, 0.335, 0.08
"""What is left of each beside the memory's time."""
LOAD, OWN = 1.25, 24.0
"""Instructions per access; of a tile besides."""
AHEAD, LATENT, LATENCY, OCCUPANCY = 1.5, 0.043, 6.5e-7, 0.025
"""Loads of a tile ahead; what latency costs over bytes under way, seconds of it; power of the threads at once."""
TAIL, ROUND, WALK, WASTE, LARGE, BEGIN = 0.2, 0.05, 0.034, 0.2, 0.021, 1.2e-6
"""Of the last wave, of waves that are not full, of a walk's beginning, of points outside, of registers; seconds."""


@dataclass(frozen=True)
class WindowCost:
    """One schedule.

    Attributes:
        tile, values: outputs of a thread's tile and values that it loads. fresh: those that a next tile adds.
        steps: tiles of a walk, 1 without. ahead: tiles that are loaded early, -1 without a walk.
        lane: neighbours of a thread. taps: terms of an output. size: bytes of a value.
        tiles: of the whole operation. waste: points of all tiles over those of the operation.
        read, written: bytes. threads: of a block.
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
        """Of a thread, roughly."""
        if self.steps > 1:
            kept = self.values + (self.ahead if self.ahead > 0 else -0.75) * self.fresh
            return min(255.0, 0.8 * (24 + self.tile + kept * self.size / 4))
        return 27 + 0.77 * self.tile + 0.67 * self.lane

    def seconds(self, machine: GpuMachine) -> float:
        """Estimated time of a launch."""
        loaded = self.values + (self.steps - 1) * self.fresh
        stored = self.tile * self.steps
        lines = self.tiles * (loaded + stored) * self.size / LINE / (machine.sms * CLOCK)
        accesses = (loaded + stored) / min(self.lane, max(1, 16 // self.size))
        issued = LOAD * accesses + stored * self.taps + OWN
        issue = self.tiles / WARP * issued / (machine.sms * 4 * CLOCK)
        again = max(0.0, loaded / stored - self.read / self.written) * self.written / L2
        total = (self.read + self.written) / fastest_memory() + LINES * lines + ISSUE * issue + AGAIN * again
        taken = 8 * math.ceil(self.registers / 8) * self.threads
        held = max(1, min(machine.threads_per_sm // self.threads, WARP, int(65536 // taken)))
        blocks = -(-self.tiles // self.threads)
        slots = held * machine.sms
        there = min(blocks, slots) * self.threads
        waves = blocks / slots
        ahead = max(0.5, self.ahead * AHEAD) * self.fresh if self.steps > 1 else self.values
        ahead = max(1.0, ahead)  # windows of a number read nothing
        total *= 1.0 + LATENT * LATENCY * fastest_memory() / (there * ahead * self.size)
        total *= (there / machine.threads) ** -OCCUPANCY
        total *= 1.0 + TAIL * min(1.0, 1 / waves) + ROUND * (math.ceil(waves) / waves - 1 if waves < 4 else 0.0)
        total *= 1.0 + (WALK / self.steps if self.steps > 1 else LARGE * max(0.0, (self.registers - 64) / 64))
        return total * (1.0 + WASTE * (self.waste - 1.0)) + BEGIN
