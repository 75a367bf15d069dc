"""Launches of phases through the driver, cooperative or with programmatic dependent launch, and their times."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.gpu_kernels.persistent.compile import Unit
from benchmarks.gpu_kernels.persistent.network import MOST, Network
from jcuts.base.errors import NativeError
from jcuts.tune.measure.cuda_driver import Driver, Events, Graph, Pointer

AHEAD = 1
"""Weights of coming phases are copied while a phase computes (of a kernel per phase: before it waits)."""
TILES = 2
"""Consumers wait for counters of the tiles that they read, instead of the grid barrier."""
TRACE = 4
"""The first block writes down its clock at every phase."""
_COOPERATIVE = 2
_PROGRAMMATIC = 6
_SHARED_BYTES = 8
_CARVEOUT = 9
_MULTIPROCESSORS = 16
_CLOCK = 13
_REGISTERS = 4
_LOCAL_BYTES = 3
FLUSHED = 512 << 20
"""Bytes that are overwritten before a cold launch: several times the L2 cache."""
DELAY = 400_000
"""Nanoseconds that the device waits before what is timed, so that the host has launched all of it."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute with an integer value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


class Program:
    """A compiled unit on the device. Raises NativeError where the driver does not take it."""

    def __init__(self, driver: Driver, unit: Unit, cubin: bytes) -> None:
        self.driver, self.unit = driver, unit
        self.module = Pointer()
        driver.call("cuModuleLoadData", ctypes.byref(self.module), ctypes.c_char_p(cubin))
        names = [f"phase_{k}" for k in range(len(unit.bodies()))] if unit.form == "chain" else ["persistent"]
        self.functions = [self._function(name) for name in names]
        self.blocks = driver.attribute(_MULTIPROCESSORS) * unit.blocks
        self.trace = driver.allocate(8 * (MOST + 1))

    def _function(self, name: str) -> ctypes.c_void_p:
        driver, function = self.driver, Pointer()
        driver.call("cuModuleGetFunction", ctypes.byref(function), self.module, ctypes.c_char_p(name.encode()))
        shared = ctypes.c_int(self.unit.shared_bytes)
        driver.call("cuFuncSetAttribute", function, ctypes.c_int(_SHARED_BYTES), shared)
        driver.call("cuFuncSetAttribute", function, ctypes.c_int(_CARVEOUT), ctypes.c_int(100))
        return function

    def resources(self) -> dict[str, int]:
        """Registers, local memory and resident blocks of the persistent kernel, as the driver says."""
        found, driver, value = {}, self.driver, ctypes.c_int()
        for name, number in (("registers", _REGISTERS), ("local_bytes", _LOCAL_BYTES)):
            driver.call("cuFuncGetAttribute", ctypes.byref(value), ctypes.c_int(number), self.functions[0])
            found[name] = value.value
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        threads, shared = ctypes.c_int(self.unit.threads + 32), ctypes.c_size_t(self.unit.shared_bytes)
        driver.call(name, ctypes.byref(value), self.functions[0], threads, shared)
        return found | {"resident_blocks": value.value, "shared_bytes": self.unit.shared_bytes}

    def _launch(self, function: Any, blocks: int, attribute: int, arguments: Sequence[Any]) -> None:
        attributes = (Attribute * 1)(Attribute(attribute, 0, 1))
        one = self.unit.threads + 32
        config = Config(
            (ctypes.c_uint * 3)(blocks, 1, 1),
            (ctypes.c_uint * 3)(one, 1, 1),
            self.unit.shared_bytes,
            self.driver.stream,
            attributes,
            int(attribute != 0),
        )
        table = (Pointer * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        self.driver.call("cuLaunchKernelEx", ctypes.byref(config), function, table, None)

    def persistent(self, network: Network, entries: np.ndarray, flags: int) -> Callable[[], None]:
        """One cooperative launch over a list of phases."""
        arguments = (
            ctypes.c_uint64(network.list_address(entries) if len(entries) else network.input),
            ctypes.c_int(len(entries)),
            ctypes.c_int(flags),
            ctypes.c_uint64(network.sync),
            ctypes.c_uint64(self.trace),
        )
        return lambda: self._launch(self.functions[0], self.blocks, _COOPERATIVE, arguments)

    def chain(self, network: Network, entries: np.ndarray, flags: int, dependent: bool) -> Callable[[], None]:
        """A launch per phase. Args: dependent: with programmatic dependent launch."""
        records = [ctypes.create_string_buffer(entry.tobytes(), entry.nbytes) for entry in entries]
        number, sync = ctypes.c_int(flags), ctypes.c_uint64(network.sync)

        def run() -> None:
            for entry, record in zip(entries, records, strict=True):
                function, tiles = self.functions[int(entry["body"])], int(entry["tiles"])
                self._launch(function, tiles, _PROGRAMMATIC if dependent else 0, (record, number, sync))

        return run

    def clocks(self, phases: int) -> np.ndarray:
        """Cycles of each phase in the last launch that was traced."""
        return np.diff(self.driver.download(self.trace, 8 * (phases + 1)).view(np.uint64).astype(np.int64))


class Clock:
    """Times of what is launched, in microseconds of the device. Args: program: any; its ``delay`` is used."""

    def __init__(self, driver: Driver, program: Program) -> None:
        self.driver = driver
        self.events = Events(driver)
        self.delay = Pointer()
        driver.call("cuModuleGetFunction", ctypes.byref(self.delay), program.module, ctypes.c_char_p(b"delay"))
        self.flushed = driver.allocate(FLUSHED)
        self.direct = 0
        """Programs that the driver did not take into a graph."""

    def cycles_per_microsecond(self) -> float:
        """The highest clock of the multiprocessors."""
        return max(self.driver.attribute(_CLOCK), 1) / 1e3

    @contextmanager
    def _graph(self, work: Callable[[], None], times: int) -> Iterator[Callable[[], None]]:
        """Several runs as a graph, or, where the driver refuses, as launches."""

        def several() -> None:
            for _ in range(times):
                work()

        graph = None
        try:
            graph = self.driver.graph(several)
        except NativeError:
            self.direct += 1
        replay = several if graph is None else lambda: self._replay(graph)
        try:
            replay()
            self.driver.synchronize()
            yield replay
        finally:
            if graph is not None:
                graph.close()

    def _replay(self, graph: Graph) -> None:
        self.driver.call("cuGraphLaunch", graph.handle, Pointer(self.driver.stream))

    def _time(self, run: Callable[[], None], samples: int, cold: bool = False) -> float:
        found = []
        for _ in range(samples):
            self.driver.launch(self.delay, self.driver.stream, ctypes.c_uint64(DELAY))
            if cold:
                self.driver.fill(self.flushed, 1, FLUSHED)
            found.append(self.events.seconds(run) * 1e6)
        return statistics.median(found)

    def once(self, work: Callable[[], None]) -> None:
        """Runs it as it is timed, in a graph, and waits."""
        with self._graph(work, 1):
            pass

    def back_to_back(self, work: Callable[[], None], samples: int = 9) -> float:
        """Of one launch (or chain) among many: slope over 3 and 13 in a graph; everything is in the L2 cache."""
        with self._graph(work, 3) as few, self._graph(work, 13) as many:
            return (self._time(many, samples) - self._time(few, samples)) / 10

    def alone(self, work: Callable[[], None], cold: bool, samples: int = 9) -> float:
        """Of one launch (or chain), as events see it. Args: cold: after the L2 cache was overwritten."""
        with self._graph(work, 1) as run:
            return self._time(run, samples, cold)

    def slope(self, few: Callable[[], None], many: Callable[[], None], more: int, samples: int = 7) -> float:
        """Of one phase: the difference of two launches over how many phases more the longer has."""
        with self._graph(few, 4) as first, self._graph(many, 4) as second:
            return (self._time(second, samples) - self._time(first, samples)) / 4 / more

    def traced(self, program: Program, work: Callable[[], None], phases: int, cold: bool) -> list[float]:
        """Of every phase of one launch, by the first block's clock; medians. Args: cold: as of `alone`."""
        found = []
        for _ in range(9):
            self._time(work, 1, cold)
            found.append(program.clocks(phases))
        return [float(x) / self.cycles_per_microsecond() for x in np.median(np.stack(found), 0)]
