"""Measures a GPU as an architecture file: rates per SM and cycle, bandwidths, latencies, launch and grid-barrier costs.

Limits are device attributes (cuDeviceGetAttribute), rates are measured by `tune.hardware.gpu_kernels`.  What a bound
needs is a ceiling: the hardware's rates per cycle are powers of two, so what a kernel reached is rounded up to one, and
the file says both.  Clock and memory bandwidth are the highest that the attributes name.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jcuts.arch.gpu import COMPUTE_UNITS, GpuArch
from jcuts.arch.sm_limits import nearest_limits
from jcuts.base.errors import NativeError
from jcuts.codegen.cuda.toolchain import ptxas
from jcuts.tune.hardware import gpu_kernels
from jcuts.tune.hardware.gpu_kernels import Bench

ATTRIBUTES = {
    "max_thread": 1,
    "warp_size": 10,
    "clock_khz": 13,
    "num_sm": 16,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "max_threads_per_sm": 39,
    "major": 75,
    "minor": 76,
    "shared_per_sm": 81,
    "registers_per_sm": 82,
    "max_shared": 97,
    "max_blocks_per_sm": 106,
    "shared_reserved": 111,
}
"""Numbers of CUdevice_attribute (cuda.h)."""
COUNT = 2000
"""Iterations of a kernel that counts cycles."""
LONG = 200_000
"""Of one that shows the clock: beside it a launch takes no time."""
ROUNDS = 5
"""Runs of a kernel; the fastest counts."""
BLOCKS_PER_SM = 4
"""Of kernels that read memory."""
BEYOND = 8
"""Memory that is read from DRAM, in sizes of the L2 cache; a quarter of the cache is read from it."""
CHASED = 2048
"""Lines that a chain of loads follows in memory, each once."""
CHASED_L2 = 1024
LINE = 128
LAUNCHES = (20, 220)
BARRIERS = (500, 2500)
NEAR = 0.02
"""A rate that exceeds a power of two by less is that power: cycles are counted by one thread."""
BANK_BYTES = 4

Progress = Callable[[str], None]


class Device(Protocol):
    """Interface of `cuda_driver.Driver` that measuring needs."""

    @property
    def name(self) -> str: ...
    def attribute(self, number: int) -> int: ...
    def allocate(self, size: int) -> int: ...
    def release(self, address: int) -> None: ...
    def fill(self, address: int, value: int, size: int) -> None: ...
    def upload(self, address: int, values: np.ndarray) -> None: ...
    def download(self, address: int, size: int) -> np.ndarray: ...
    def function(self, code: bytes, name: str) -> Any: ...
    def launch_grid(
        self, function: Any, blocks: int, threads: int, arguments: Sequence[Any], *, together: bool = False
    ) -> None: ...
    def seconds(self, work: Callable[[], None]) -> float: ...
    def synchronize(self) -> None: ...


class Runner:
    """The benchmark kernels on a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.capability = device.attribute(ATTRIBUTES["major"]), device.attribute(ATTRIBUTES["minor"])
        self.sms = device.attribute(ATTRIBUTES["num_sm"])
        text = gpu_kernels.module_text(self.capability)
        newer = self.capability > gpu_kernels.NEWEST  # which the driver compiles for
        self.code = text.encode() + b"\0" if newer else ptxas.assemble(text, "sm_{}{}".format(*self.capability))
        self.benches = gpu_kernels.benches(self.capability)
        self.cycles_at = device.allocate(8 * self.sms * BLOCKS_PER_SM)

    def close(self) -> None:
        """Gives the memory back."""
        self.device.release(self.cycles_at)

    def run(
        self, bench: Bench, blocks: int, count: int, data: int = 0, mask: int = 1, *, rounds: int = ROUNDS
    ) -> float:
        """Seconds of the fastest run of a kernel, after one that warms up; of a single cold one where ``rounds`` is 0.

        Args: blocks, count: of it; data, mask: its arguments (`gpu_kernels`).
        """
        device, together = self.device, bench.name == "grid_barrier"
        function = device.function(self.code, bench.name)
        places = ctypes.c_uint64(data), ctypes.c_uint64(self.cycles_at)
        arguments = (*places, ctypes.c_uint32(count), ctypes.c_uint32(mask))

        def work() -> None:
            device.launch_grid(function, blocks, bench.threads, arguments, together=together)

        times = []
        for _ in range(rounds + 1):
            if together:  # the counter that blocks wait for
                device.fill(data, 0, LINE)
            times.append(device.seconds(work))
        return min(times[1:] or times)

    def cycles(
        self, bench: Bench, blocks: int, count: int, data: int = 0, mask: int = 1, *, rounds: int = ROUNDS
    ) -> float:
        """Cycles per iteration of the fastest block in a kernel's last run."""
        self.run(bench, blocks, count, data, mask, rounds=rounds)
        found = self.device.download(self.cycles_at, 8 * blocks).view(np.uint64)
        least = int(found.min())
        if not least:
            raise NativeError(f"{bench.name} counted no cycles on {self.device.name}", kernel=bench.name)
        return least / count

    def clock(self) -> float:
        """Cycles per second while FMAs run [Hz], at least."""
        bench = self.benches["ffma"]
        cycles = LONG * self.cycles(bench, self.sms, LONG)
        return cycles / self.run(bench, self.sms, LONG)

    def per_cycle(self, name: str) -> float:
        """Work of one SM per cycle: a block on each."""
        bench = self.benches[name]
        return bench.work / self.cycles(bench, self.sms, COUNT)


@dataclass(frozen=True)
class Seen:
    """What kernels reached.

    Attributes:
        flop: per cycle and SM by compute unit; issue: warp instructions, shared: bytes, per cycle and SM.
        lat_shared: [cycle]; clock: [Hz]; others as `GpuArch.measured`.
    """

    flop: dict[str, float]
    issue: float
    shared: float
    lat_shared: float
    clock: float
    others: dict[str, float]


def measure_gpu(device: Device, progress: Progress = lambda _: None) -> GpuArch:
    """A GPU, measured: some seconds.

    Args: progress: is told what is measured next.
    Raises: NativeError where the driver fails; CompileRejected where the kernels cannot be assembled.
    """
    runner = Runner(device)
    try:
        progress("compute units")
        flop = {unit: runner.per_cycle(unit) for unit in COMPUTE_UNITS if unit in runner.benches}
        if "fp64_mma" in runner.benches:
            flop["fp64"] = max(flop["fp64"], runner.per_cycle("fp64_mma"))
        clock = runner.clock()
        progress("issue and shared memory")
        issue, shared = runner.per_cycle("issue"), runner.per_cycle("read_shared")
        chain = runner.benches["chase_shared"]
        lat_shared = runner.cycles(chain, 1, COUNT) / chain.work
        progress("memory and L2 cache")
        others = _memory(runner)
        progress("launches and barriers")
        others |= _overheads(runner)
    finally:
        runner.close()
    return described(device, Seen(flop, issue, shared, lat_shared, clock, others), time.strftime("%Y-%m-%d"))


def _memory(runner: Runner) -> dict[str, float]:
    device, bench = runner.device, runner.benches["read_global"]
    l2 = device.attribute(ATTRIBUTES["l2_bytes"])
    size, blocks = 1 << (BEYOND * l2 - 1).bit_length(), BLOCKS_PER_SM * runner.sms
    found = {}
    data = device.allocate(size)
    try:
        device.fill(data, 0, size)
        for name, part in (("l2_read", 1 << (l2 // 4).bit_length() - 1), ("dram_read", size)):
            count = max(1, math.ceil(BEYOND * size / (bench.work * blocks)))
            took = runner.run(bench, blocks, count, data, part // gpu_kernels.VECTOR - 1)
            found[name] = bench.work * blocks * count / took
        chain = runner.benches["chase_global"]
        for name, hops, room in (("dram_latency", CHASED, size), ("l2_latency", CHASED_L2, CHASED_L2 * LINE)):
            device.upload(data, ring(data, hops, room))
            cold = name == "dram_latency"
            if cold:  # what was written last is in the L2 cache: something else takes its place
                other = device.allocate(size)
                device.fill(other, 0, size)
                device.release(other)
            rounds = 0 if cold else ROUNDS
            found[name] = runner.cycles(chain, 1, hops // gpu_kernels.HOPS, data, rounds=rounds) / chain.work
    finally:
        device.release(data)
    return found


def ring(address: int, hops: int, room: int, seed: int = 0) -> np.ndarray:
    """Addresses in memory that lead from one line to another, in random order, through ``hops`` of them and back to the
    first.

    Args: address: where the array will lie; room: bytes over which the lines are spread.
    """
    words = np.zeros(room // 8, np.uint64)
    places = np.arange(hops, dtype=np.int64) * (room // hops // LINE * LINE // 8)
    order = np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(hops - 1)])
    words[places[order]] = address + 8 * places[np.roll(order, -1)].astype(np.uint64)
    return words


def _overheads(runner: Runner) -> dict[str, float]:
    """Seconds of a launch and of a grid barrier, as slopes."""
    device, bench, barrier = runner.device, runner.benches["nothing"], runner.benches["grid_barrier"]
    function = device.function(runner.code, bench.name)
    arguments = (ctypes.c_uint64(0), ctypes.c_uint64(runner.cycles_at), ctypes.c_uint32(1), ctypes.c_uint32(1))

    def launches(count: int) -> float:
        def work() -> None:
            for _ in range(count):
                device.launch_grid(function, 1, bench.threads, arguments)

        work()
        return min(device.seconds(work) for _ in range(ROUNDS))

    counter = device.allocate(LINE)
    try:
        few, many = (runner.run(barrier, runner.sms, count, counter) for count in BARRIERS)
    finally:
        device.release(counter)
    short, long = map(launches, LAUNCHES)
    found = {
        "launch_seconds": (long - short) / (LAUNCHES[1] - LAUNCHES[0]),
        "grid_barrier_seconds": (many - few) / (BARRIERS[1] - BARRIERS[0]),
    }
    return {name: value for name, value in found.items() if value > 0}


def ceiling(rate: float) -> int:
    """The power of two at or above what was reached.

    >>> ceiling(250.3), ceiling(2520.0), ceiling(129.0)
    (256, 4096, 128)
    """
    return 1 << max(0, math.ceil(math.log2(rate / (1 + NEAR))))


def described(device: Device, seen: Seen, date: str) -> GpuArch:
    """The architecture of a device with what was measured, and the source of every number."""
    name = device.name
    by = f"by jcuts arch measure, {date}, {name}"
    has = {key: device.attribute(number) for key, number in ATTRIBUTES.items()}
    capability = has.pop("major"), has.pop("minor")
    limits = nearest_limits(capability)
    numbers: dict[str, Any] = {key: value for key, value in has.items() if not key.endswith(("_khz", "_bits"))}
    sources = {key: f"read {by}: device attribute {ATTRIBUTES[key]}" for key in numbers}
    clock = max(float(1000 * has["clock_khz"]), seen.clock)
    said = f"device attribute {ATTRIBUTES['clock_khz']} says {has['clock_khz']} kHz"
    sources["clock"] = f"measured {by}: the higher of {seen.clock:.4g} Hz while FMAs ran, and what {said}"
    flop = {unit: float(ceiling(rate)) for unit, rate in seen.flop.items()}
    more = "the power of two at or above"
    sources |= {
        f"flop_per_clock_sm.{u}": f"measured {by}: {more} {rate:.4g} that a kernel reached"
        for u, rate in seen.flop.items()
    }
    named = 2 * 1000 * has["memory_clock_khz"] * has["memory_bus_bits"] / 8
    read, l2_read = seen.others["dram_read"], seen.others["l2_read"]
    sources["bw_global"] = f"measured {by}: {read:.4g} byte/s were read" + (
        "; its memory clock and bus width give more" if named > read else ""
    )
    l2_bytes = ceiling(l2_read / clock)
    sources["bw_l2"] = f"measured {by}: {more} {l2_read / clock:.4g} byte/cycle that were read, times the clock"
    banks = ceiling(seen.shared / BANK_BYTES)
    sources["shared_banks"] = (
        f"measured {by}: {seen.shared:.4g} byte/cycle/SM were read, in words of {BANK_BYTES} bytes"
    )
    sources["lat_shared"] = f"measured {by}: {seen.lat_shared:.3g} cycles per load of a chain"
    sources["issue_per_clock"] = f"measured {by}: {seen.issue:.3g} FMAs and integer instructions per cycle"
    sources["perf_peak"] = f"measured {by}: FLOP per cycle of its FMA units, times SMs and clock"
    sources["compute_capability"] = f"read {by}: device attributes {ATTRIBUTES['major']} and {ATTRIBUTES['minor']}"
    sources["transaction_bytes"] = f"read {by}: a warp's words, 4 bytes for each of {has['warp_size']} threads"
    sources["registers_per_thread"] = "CUDA C++ Programming Guide, technical specifications per compute capability"
    sources["shared_bank_bytes"] = sources["registers_per_thread"]
    sources |= {f"measured.{key}": f"measured {by}: {SAID[key]}" for key in seen.others}
    numbers |= {
        "name": name.removeprefix("NVIDIA "),
        "perf_peak": flop["ffma"] * has["num_sm"] * clock,
        "bw_global": max(read, named),
        "transaction_bytes": BANK_BYTES * has["warp_size"],
        "lat_shared": float(round(seen.lat_shared)),
        "clock": clock,
        "compute_capability": 10 * capability[0] + capability[1],
        "registers_per_thread": limits.registers_per_thread,
        "shared_banks": banks,
        "shared_bank_bytes": BANK_BYTES,
        "issue_per_clock": max(1, round(seen.issue)),
        "bw_l2": l2_bytes * clock,
        "flop_per_clock_sm": flop,
        "measured": seen.others,
    }
    return GpuArch(**numbers, sources=sources)


SAID = {
    "dram_read": "all SMs side by side, of eight times the L2 cache",
    "l2_read": "all SMs side by side, of a quarter of the L2 cache, past the L1 caches",
    "dram_latency": "a chain of loads over lines that are in no cache",
    "l2_latency": "a chain of loads over lines in the L2 cache",
    "launch_seconds": f"slope over {LAUNCHES[0]} and {LAUNCHES[1]} empty kernels on a stream",
    "grid_barrier_seconds": f"slope over {BARRIERS[0]} and {BARRIERS[1]} barriers of a block per SM",
}
"""How the numbers of `GpuArch.measured` are taken."""
