"""A stand-in for a GPU whose benchmark kernels take the times that an architecture says: for dry runs and tests.

Everything but the driver is as on a device: the kernels are assembled, launched by name with their arguments, timed,
and read back.  What comes out is the architecture that went in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jcuts.arch.gpu import GpuArch
from jcuts.tune.hardware import gpu_kernels
from jcuts.tune.hardware.gpu_kernels import Bench
from jcuts.tune.hardware.gpu_machine import ATTRIBUTES

LAUNCH_SECONDS = 2e-6
BARRIER_CYCLES = 2000
LATENCY = {"dram": 800, "l2": 260}
"""Cycles of a load."""
L2_SHARE = 0.6
"""Of the L2 cache's ceiling that loads reach."""


class ModelledDevice:
    """A device of an architecture, as `gpu_machine.Device`. Its allocations are numbers."""

    def __init__(self, arch: GpuArch) -> None:
        self.arch = arch
        self.name = f"{arch.name} (dry run, nothing was measured)"
        self.benches = {
            b.name: (unit, b) for unit, b in gpu_kernels.benches(divmod(arch.compute_capability, 10)).items()
        }
        self.live: dict[int, int] = {}
        """Address -> bytes of what is allocated."""
        self._addresses = itertools.count(1 << 32, 1 << 32)
        self._elapsed, self._cycles = 0.0, 0
        self._cold = False

    def attribute(self, number: int) -> int:
        """A device attribute."""
        name = next(key for key, known in ATTRIBUTES.items() if known == number)
        arch = self.arch
        major, minor = divmod(arch.compute_capability, 10)
        bus = 8192
        numbers = {"major": major, "minor": minor, "clock_khz": round(arch.clock / 1000), "memory_bus_bits": bus}
        numbers["memory_clock_khz"] = round(arch.bw_global / (2 * bus / 8) / 1000)
        return numbers[name] if name in numbers else int(getattr(arch, name))

    def allocate(self, size: int) -> int:
        """An address that nothing is at."""
        address = next(self._addresses)
        self.live[address] = size
        return address

    def release(self, address: int) -> None:
        """Forgets it."""
        del self.live[address]

    def fill(self, address: int, value: int, size: int) -> None:
        """What fills much memory leaves nothing of other arrays in the L2 cache."""
        del address, value
        self._cold = self._cold or size > self.arch.l2_bytes

    def upload(self, address: int, values: np.ndarray) -> None:
        """Nothing is kept."""
        del address, values
        self._cold = False

    def download(self, address: int, size: int) -> np.ndarray:
        """The cycles of every block of the last launch."""
        del address
        return np.full(size // 8, self._cycles, np.uint64).view(np.uint8)

    def function(self, code: bytes, name: str) -> str:
        """The kernel's name, which must be in the code."""
        assert name.encode() in code
        return name

    def launch_grid(
        self, function: str, blocks: int, threads: int, arguments: Sequence[Any], *, together: bool = False
    ) -> None:
        """Adds the time of a launch. Args: as of `cuda_driver.Driver.launch_grid`."""
        unit, bench = self.benches[function]
        assert threads == bench.threads and together == (function == "grid_barrier")
        _, _, count, mask = (argument.value for argument in arguments)
        cycles = count * self._per_iteration(unit, bench, blocks, gpu_kernels.VECTOR * (mask + 1))
        self._cycles = max(1, round(cycles))
        self._elapsed += LAUNCH_SECONDS + cycles / self.arch.clock

    def _per_iteration(self, unit: str, bench: Bench, blocks: int, moved: int) -> float:
        """Cycles of an iteration of every block."""
        arch = self.arch
        if unit in arch.flop_per_clock_sm:
            return bench.work / arch.flop_per_clock_sm[unit]
        if unit == "fp64_mma":
            return bench.work / arch.flop_per_clock_sm["fp64"]
        if unit == "read_global":
            rate = arch.bw_global if moved > arch.l2_bytes else L2_SHARE * arch.bw_l2
            return bench.work * blocks / (rate / arch.clock)
        if unit == "chase_global":
            return bench.work * LATENCY["dram" if self._cold else "l2"]
        rates = {"issue": arch.issue_per_clock, "read_shared": arch.shared_bytes_per_clock}
        rates |= {"chase_shared": 1.0 / arch.lat_shared, "grid_barrier": 1.0 / BARRIER_CYCLES}
        return bench.work / rates.get(unit, 1.0)

    def seconds(self, work: Callable[[], None]) -> float:
        """What the launches of ``work`` take."""
        self._elapsed = 0.0
        work()
        return self._elapsed

    def synchronize(self) -> None:
        """Nothing is under way."""
