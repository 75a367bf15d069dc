"""Device abstraction for measuring convolutions: memory, addresses, and timing of a chain of calls (host or CUDA)."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jcuts.base.errors import NativeError
from jcuts.tune.verify.inputs import dtype_of
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.plan import HOST

if TYPE_CHECKING:
    from jcuts.tune.measure.cuda_driver import Graph

CHAIN_SECONDS = 3e-4
"""Least length of a timed chain: beside it the cost of starting a graph is nothing."""
MOST_REPEATS = 16


class Chain(Protocol):
    """Calls that are timed together.

    Attributes: captured: as a CUDA graph, which the processor launches once; repeats: passes over the calls.
    """

    captured: bool
    repeats: int

    def seconds(self) -> float: ...
    def close(self) -> None: ...


class MeasuringDevice(Protocol):
    """Interface of a device for `tune.cudnn.worker`."""

    number: int
    stream: int

    def free_bytes(self) -> int: ...
    def total_bytes(self) -> int: ...
    def allocate(self, size: int) -> int: ...
    def release(self, address: int) -> None: ...
    def random(self, address: int, size: int, dtype: str, seed: int) -> None: ...
    def read(self, address: int, start: int, size: int) -> np.ndarray: ...
    def clear(self, address: int, size: int) -> None: ...
    def seconds(self, work: Callable[[], None]) -> float: ...
    def chain(self, work: Callable[[], None], once: float, *, graphs: bool) -> Chain: ...
    def close(self) -> None: ...


class Launched:
    """A chain whose calls are launched one by one."""

    captured = False

    def __init__(self, bench: MeasuringDevice, work: Callable[[], None], repeats: int) -> None:
        self.bench, self.work, self.repeats = bench, work, repeats

    def seconds(self) -> float:
        """Time of the chain [s]."""
        return self.bench.seconds(lambda: _often(self.work, self.repeats))

    def close(self) -> None:
        """Nothing to free."""


class Captured:
    """A chain as one CUDA graph."""

    captured = True

    def __init__(self, graph: Graph, repeats: int) -> None:
        self.graph, self.repeats = graph, repeats

    def seconds(self) -> float:
        """Time of the chain [s]."""
        return self.graph.seconds()

    def close(self) -> None:
        """Frees the graph."""
        self.graph.close()


def _often(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()


class HostBench:
    """Host memory, for the test cuDNN that computes there."""

    number, stream = HOST, 0

    def __init__(self) -> None:
        self.kept: dict[int, np.ndarray] = {}

    def free_bytes(self) -> int:
        """Enough for tests [B]."""
        return 1 << 30

    def total_bytes(self) -> int:
        """As much as is free [B]."""
        return 1 << 30

    def allocate(self, size: int) -> int:
        """Memory, aligned as a device's is; its address."""
        array = np.empty(max(1, size) + 256, np.uint8)
        start = -array.ctypes.data % 256
        array = array[start : start + max(1, size)]
        self.kept[array.ctypes.data] = array
        return array.ctypes.data

    def release(self, address: int) -> None:
        """Frees what `allocate` gave."""
        del self.kept[address]

    def random(self, address: int, size: int, dtype: str, seed: int) -> None:
        """Normal numbers."""
        self.kept[address][:size] = np.resize(noise(dtype, size, seed), size)

    def read(self, address: int, start: int, size: int) -> np.ndarray:
        """Some of its bytes."""
        return self.kept[address][start : start + size].copy()

    def clear(self, address: int, size: int) -> None:
        """Bytes that are no numbers."""
        self.kept[address][:size] = 0xFF

    def seconds(self, work: Callable[[], None]) -> float:
        """Wall time [s]."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def chain(self, work: Callable[[], None], once: float, *, graphs: bool) -> Chain:
        """One pass: there is no launch to hide."""
        return Launched(self, work, 1)

    def close(self) -> None:
        """Frees everything."""
        self.kept.clear()


class GpuBench:
    """The first GPU, through the CUDA driver API."""

    def __init__(self) -> None:
        from jcuts.tune.measure import cuda_driver

        self.driver = cuda_driver.device()
        self.number, self.stream = self.driver.ordinal, self.driver.stream
        self.kept: list[int] = []
        self.events = cuda_driver.Events(self.driver)

    def free_bytes(self) -> int:
        """Free on the device [B]."""
        return self.driver.free_bytes()

    def total_bytes(self) -> int:
        """Memory of the device [B]."""
        return self.driver.total_bytes()

    def allocate(self, size: int) -> int:
        """Memory; its address."""
        self.kept.append(self.driver.allocate(size))
        return self.kept[-1]

    def release(self, address: int) -> None:
        """Frees what `allocate` gave."""
        self.kept.remove(address)
        self.driver.release(address)

    def random(self, address: int, size: int, dtype: str, seed: int) -> None:
        """Normal numbers: a block of them, again and again."""
        block = noise(dtype, size, seed)
        first = min(block.nbytes, size)
        self.driver.upload(address, block[:first])
        for start in range(first, size, block.nbytes):
            self.driver.copy(address + start, address, min(block.nbytes, size - start))

    def read(self, address: int, start: int, size: int) -> np.ndarray:
        """Some of its bytes."""
        return self.driver.download(address + start, size)

    def clear(self, address: int, size: int) -> None:
        """Bytes that are no numbers."""
        self.driver.fill(address, 0xFF, size)

    def seconds(self, work: Callable[[], None]) -> float:
        """Time between two events [s]."""
        return self.events.seconds(work)

    def chain(self, work: Callable[[], None], once: float, *, graphs: bool) -> Chain:
        """The calls as a graph; launched one by one where they cannot be captured, or where graphs are not wanted.

        Args: work: calls that have run before (code is not loaded while capturing); once: seconds of one pass.
        Raises: NativeError: the device is lost.
        """
        repeats = max(1, min(MOST_REPEATS, math.ceil(CHAIN_SECONDS / max(once, 1e-7))))
        if graphs:
            try:
                return Captured(self.driver.graph(lambda: _often(work, repeats)), repeats)
            except NativeError:
                self.events.seconds(lambda: None)
        return Launched(self, work, repeats)

    def close(self) -> None:
        """Frees everything."""
        self.events.close()
        for address in self.kept:
            self.driver.release(address)
        self.kept.clear()


def noise(dtype: str, size: int, seed: int) -> np.ndarray:
    """Normal numbers as bytes, at most 16 MiB, not more than ``size`` in whole numbers.

    Operands of different seeds have nothing in common: equal ones would add up squares, more than float16 holds.
    """
    item = dtype_of(dtype).itemsize
    return _block(dtype, seed)[: max(item, min(size, 16 << 20) // item * item)]


@functools.cache
def _block(dtype: str, seed: int) -> np.ndarray:
    kind = dtype_of(dtype)
    count = (16 << 20) // kind.itemsize
    return np.random.default_rng(seed).standard_normal(count, np.float32).astype(kind).view(np.uint8)


@contextmanager
def bench() -> Iterator[MeasuringDevice]:
    """The device to measure on, and all memory freed afterwards.  Raises: NativeError where there is none."""
    made: MeasuringDevice = HostBench() if cudnn_call.computes_on_host() else GpuBench()
    try:
        yield made
    finally:
        made.close()
