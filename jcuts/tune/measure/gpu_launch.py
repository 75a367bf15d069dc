"""Launches and times CUDA kernels in the measuring process: driver API only, on poisoned device memory with guard
zones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jcuts.base.errors import AccuracyRejected, NativeError, WorkerFailed
from jcuts.codegen.artifact import CompiledKernel
from jcuts.tune.measure.statistics import HOPELESS, Samples
from jcuts.tune.verify.inputs import dtype_of
from jcuts.xla import cuda_launcher

FENCE = 4096
"""Bytes before and after every buffer that no kernel may touch; also keeps buffers 256-byte aligned."""
_FENCE_BYTE = 0xC3
CHAIN = 16
"""Executions in one timed graph, on inputs of their own."""
COLD = 3.0
"""The rotated inputs cover this many times the L2 cache, memory permitting."""
FAR = 4.0
"""A kernel that takes so many times as long as the fastest is timed once (some take a hundred times as long)."""
LONG = 0.05
"""A graph that runs so many seconds needs no warm run, and no more executions; nor does a launch of a kernel."""
PLAIN = 1e-3
"""Seconds of a launch from which on what the host adds to it is next to nothing."""
SHARE = 0.5
"""Share of the free memory that measuring may take."""
_LOST = ("ILLEGAL", "LAUNCH_TIMEOUT", "LAUNCH_FAILED", "MISALIGNED", "HARDWARE", "UNKNOWN")


class LaunchGraph(Protocol):
    """Interface of `cuda_driver.Graph` that screening needs."""

    def seconds(self) -> float: ...
    def close(self) -> None: ...


class Device(Protocol):
    """Interface of `cuda_driver.Driver` that launching needs."""

    ordinal: int
    stream: int

    @property
    def l2_bytes(self) -> int: ...

    def allocate(self, size: int) -> int: ...
    def release(self, address: int) -> None: ...
    def fill(self, address: int, value: int, size: int) -> None: ...
    def upload(self, address: int, values: np.ndarray) -> None: ...
    def copy(self, to: int, source: int, size: int) -> None: ...
    def download(self, address: int, size: int) -> np.ndarray: ...
    def synchronize(self) -> None: ...
    def free_bytes(self) -> int: ...
    def seconds(self, work: Callable[[], None]) -> float: ...
    def graph(self, work: Callable[[], None]) -> LaunchGraph: ...


class DeviceBuffer:
    """Device memory between two guard zones."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        self.start = device.allocate(size + 2 * FENCE)
        self.address = self.start + FENCE
        device.fill(self.start, _FENCE_BYTE, FENCE)
        device.fill(self.address + size, _FENCE_BYTE, FENCE)

    def upload(self, values: np.ndarray) -> None:
        """Host to device; repeated until the buffer is full."""
        self.device.upload(self.address, values)
        done = values.nbytes
        while 0 < done < self.size:
            more = min(done, self.size - done)
            self.device.copy(self.address + done, self.address, more)
            done += more

    def holds(self, values: np.ndarray) -> bool:
        """Whether it is full of these values, bit by bit."""
        wanted = np.ascontiguousarray(values).reshape(-1)
        word = np.dtype(f"u{math.gcd(wanted.nbytes, self.size, 8) or 1}")  # the widest that both are made of
        wanted, found = wanted.view(np.uint8).view(word), self.device.download(self.address, self.size).view(word)
        starts = range(0, found.size, wanted.size or 1)
        return all(np.array_equal(found[s : s + wanted.size], wanted[: found.size - s]) for s in starts)

    def intact(self) -> bool:
        """Whether both fences are as they were made."""
        ends = (self.device.download(self.start, FENCE), self.device.download(self.address + self.size, FENCE))
        return all(bool((end == _FENCE_BYTE).all()) for end in ends)

    def free(self) -> None:
        """Gives the memory back."""
        self.device.release(self.start)


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype_of(dtype).itemsize


class GpuLauncher:
    """A CUDA kernel on one device."""

    def __init__(self, kernel: CompiledKernel, device: Device) -> None:
        self.kernel, self.device = kernel, device

    def launch(self, buffers: list[int], scratch: int) -> None:
        """Puts one execution on the device's stream."""
        cuda_launcher.launch(self.kernel, self.device.ordinal, self.device.stream, buffers, scratch)

    def run(self, inputs: Sequence[np.ndarray], poison: int, *, look: bool = True) -> list[np.ndarray]:
        """Runs the kernel once on fresh buffers.

        Args:
            inputs: operands; a flat one of fewer elements than the kernel's is repeated (`values.whole`).
            poison: byte that fills results and scratch before.
            look: whether operands are looked at afterwards, as their fences always are.
        Returns: the results.
        Raises: AccuracyRejected for a write outside a result or into an operand; NativeError where the driver fails.
        """
        kernel, device = self.kernel, self.device
        operands = [DeviceBuffer(device, _bytes(shape, dtype)) for shape, dtype in kernel.inputs]
        results = [DeviceBuffer(device, _bytes(shape, dtype)) for shape, dtype in kernel.outputs]
        scratch = DeviceBuffer(device, kernel.scratch_bytes)
        every = [("operand", operands), ("result", results), ("scratch", [scratch])]
        try:
            for buffer, value in zip(operands, inputs, strict=True):
                buffer.upload(value)
            for buffer in (*results, scratch):
                device.fill(buffer.address, poison, buffer.size)
            self.launch([b.address for b in (*operands, *results)], scratch.address)
            device.synchronize()
            found = [
                device.download(b.address, b.size).view(dtype_of(dtype)).reshape(shape)
                for b, (shape, dtype) in zip(results, kernel.outputs, strict=True)
            ]
            for kind, buffers in every:
                for number, buffer in enumerate(buffers):
                    if not buffer.intact():
                        raise AccuracyRejected(
                            f"the kernel writes outside {kind} {number}", rule="bounds", buffer=kind, number=number
                        )
            for number, (buffer, value) in enumerate(zip(operands, inputs, strict=True) if look else ()):
                if not buffer.holds(value):
                    raise AccuracyRejected(
                        f"the kernel changes its operand {number}", rule="bounds", buffer="operand", number=number
                    )
            return found
        finally:
            for _, buffers in every:
                for buffer in buffers:
                    buffer.free()


class RotatedOperands:
    """Several sets of operands and results of one problem, together larger than the L2 cache.

    Args:
        kernel: any kernel of the problem (all have its operands and results).
        inputs: one set of operands.
        scratch: bytes that one launch needs.
        there: addresses of sets of operands that are on the device already, instead of copies of ``inputs``.
    """

    def __init__(
        self,
        device: Device,
        kernel: CompiledKernel,
        inputs: Sequence[np.ndarray],
        scratch: int,
        there: Sequence[Sequence[int]] = (),
    ) -> None:
        self.device = device
        known = len(inputs)
        sizes = [x.nbytes for x in inputs] + [_bytes(shape, dtype) for shape, dtype in kernel.outputs]
        one = sum(-(-size // 256) * 256 for size in sizes[known if there else 0 :]) or 256
        wanted = len(there) or min(CHAIN, max(2, int(COLD * device.l2_bytes // one) + 1))
        self.sets: list[list[int]] = []
        self.owned: list[int] = []
        room = SHARE * device.free_bytes()
        count = min(wanted, int(room // one))
        if count < 1:
            raise WorkerFailed(
                f"{one} bytes of operands or results do not fit into the {int(room)} free ones", reason="memory"
            )
        try:
            for position in range(count):
                addresses = list(there[position]) if there else []
                for number, size in list(enumerate(sizes))[len(addresses) :]:
                    addresses.append(device.allocate(size))
                    self.owned.append(addresses[-1])
                    if number < known and self.sets:
                        device.copy(addresses[-1], self.sets[0][number], size)
                    elif number < known:
                        device.upload(addresses[-1], inputs[number])
                self.sets.append(addresses)
            self.scratch = device.allocate(max(1, scratch))
            self.owned.append(self.scratch)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Gives the memory back."""
        for address in self.owned:
            self.device.release(address)


def screen(
    launchers: dict[str, GpuLauncher],
    inputs: Sequence[np.ndarray],
    *,
    rounds: int = 7,
    announce: Callable[[str], None] = lambda _: None,
    there: Sequence[Sequence[int]] = (),
    limit: float = math.inf,
) -> dict[str, Samples]:
    """Times of kernels by CUDA events: graphs of at most `CHAIN` executions on rotated inputs, kernels taking turns.

    A launch of its own comes first: whom it shows to be hopeless runs no graph.

    Args: announce: is told which kernel runs next; there: as of `RotatedOperands`; limit: the time [s] beyond which a
        kernel is of no interest.
    Returns: label -> samples [s per execution].
    """
    if not launchers:
        return {}
    first = next(iter(launchers.values()))
    device = first.device
    scratch = {label: launcher.kernel.scratch_bytes for label, launcher in launchers.items()}
    greediest = max(scratch, key=lambda label: scratch[label])
    announce(greediest)  # nobody else is to blame if this alone does not fit
    device.release(device.allocate(max(1, most := scratch[greediest])))
    announce("")
    rotation = RotatedOperands(device, first.kernel, inputs, most, there)
    graphs: dict[str, LaunchGraph] = {}
    try:
        alone = _launch_times(launchers, rotation, announce)
        counts = {label: max(1, min(CHAIN, math.ceil(LONG / max(t, PLAIN)))) for label, t in alone.items()}
        longest = max(PLAIN, min(FAR * min(alone.values()), HOPELESS * limit))
        times = {label: [seconds] for label, seconds in alone.items()}
        for label, launcher in launchers.items():
            if alone[label] > longest:
                continue
            announce(label)

            def work(launcher: GpuLauncher = launcher, count: int = counts[label]) -> None:
                for number in range(count):
                    launcher.launch(rotation.sets[number % len(rotation.sets)], rotation.scratch)

            graphs[label] = device.graph(work)
            cold = graphs[label].seconds()
            times[label] = [(cold if cold > LONG else graphs[label].seconds()) / counts[label]]
        best = min(seconds for (seconds,) in times.values())
        for _ in range(rounds - 1):
            for label, graph in graphs.items():
                if times[label][0] <= FAR * best:
                    announce(label)
                    times[label].append(graph.seconds() / counts[label])
    finally:
        for graph in graphs.values():
            graph.close()
        rotation.free()
    return {label: Samples(tuple(values)) for label, values in times.items()}


def _launch_times(
    launchers: Mapping[str, GpuLauncher], rotation: RotatedOperands, announce: Callable[[str], None]
) -> dict[str, float]:
    """Seconds of a single launch of every kernel, once its code is loaded (which must not happen while capturing)."""
    found = {}
    for label, launcher in launchers.items():
        announce(label)

        def once(launcher: GpuLauncher = launcher) -> None:
            launcher.launch(rotation.sets[0], rotation.scratch)

        cold = rotation.device.seconds(once)
        found[label] = cold if cold > LONG else rotation.device.seconds(once)
    return found


def median(samples: Samples) -> float:
    """Median [s]."""
    return statistics.median(samples.seconds)


def is_context_lost(error: NativeError) -> bool:
    """Whether the process must end after this error: its context is beyond repair."""
    text = error.message
    return any(name in text for name in _LOST)


def message_is_context_loss(text: str) -> bool:
    """The same of what XLA says about the driver."""
    return any(f"CUDA_ERROR_{name}" in text for name in _LOST)
