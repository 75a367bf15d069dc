"""What the measuring process does for one convolution at one batch size: every algorithm of cuDNN, checked and timed.

Driver API only; XLA's own convolution is another request (`convolve_xla`), which imports JAX.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from jcuts.base.errors import NativeError, WorkerFailed
from jcuts.microbatch.convolution import MATHS, Convolution
from jcuts.microbatch.table import Division, Micro
from jcuts.tune.shortage import is_memory
from jcuts.tune.values import dtype_of
from jcuts.xla import cudnn
from jcuts.xla.cudnn_plan import HOST, Plan, buffer_bytes

COLD_BYTES = 192 << 20
"""Operands that are rotated through cover this: more than any L2 cache."""
MOST_SETS = 16
SHARE = 0.6
"""Share of the free memory that measuring may take."""
CHECKED_BYTES = 8 << 20
"""Of every result, what is compared with the first algorithm's."""
ROUNDS = (3, 15)
"""Least and most samples of one algorithm; in between its share of the time decides."""
HOPELESS = 2.0
"""Slower by this than what needs no more workspace: a single sample is exact enough."""
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "tf32": 1e-3, "float16": 5e-2}
"""Distance from the first algorithm's result, in L2 norm, from which an algorithm is out.  In float32 it must be more
exact than TF32, which is off by 3e-4; Winograd's algorithm with 5x5 windows is not (1e-3 to 5e-3 on an H200)."""

EXACT = ("float64", "float32")
"""Arithmetic that comes first: the others are compared with it."""

Announce = Callable[[str], None]


class Bench(Protocol):
    """A device as this file needs it."""

    number: int
    stream: int

    def free_bytes(self) -> int: ...
    def allocate(self, size: int) -> int: ...
    def release(self, address: int) -> None: ...
    def random(self, address: int, size: int, dtype: str) -> None: ...
    def read(self, address: int, size: int) -> np.ndarray: ...
    def clear(self, address: int, size: int) -> None: ...
    def seconds(self, work: Callable[[], None]) -> float: ...
    def close(self) -> None: ...


class HostBench:
    """Host memory, for a cuDNN that computes there."""

    number, stream = HOST, 0

    def __init__(self) -> None:
        self.kept: dict[int, np.ndarray] = {}

    def free_bytes(self) -> int:
        """Enough for tests [B]."""
        return 1 << 30

    def allocate(self, size: int) -> int:
        """Memory; its address."""
        array = np.empty(max(1, size), np.uint8)
        self.kept[array.ctypes.data] = array
        return array.ctypes.data

    def release(self, address: int) -> None:
        """Frees what `allocate` gave."""
        del self.kept[address]

    def random(self, address: int, size: int, dtype: str) -> None:
        """Normal numbers."""
        self.kept[address][:size] = np.resize(noise(dtype, size), size)

    def read(self, address: int, size: int) -> np.ndarray:
        """Its first bytes."""
        return self.kept[address][:size].copy()

    def clear(self, address: int, size: int) -> None:
        """Bytes that are no numbers."""
        self.kept[address][:size] = 0xFF

    def seconds(self, work: Callable[[], None]) -> float:
        """Wall time [s]."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def close(self) -> None:
        """Frees everything."""
        self.kept.clear()


class GpuBench:
    """The first GPU through the driver."""

    def __init__(self) -> None:
        from jcuts.tune import driver

        self.driver = driver.device()
        self.number, self.stream = self.driver.ordinal, self.driver.stream
        self.kept: list[int] = []
        self.events = driver.Events(self.driver)

    def free_bytes(self) -> int:
        """Free on the device [B]."""
        return self.driver.free_bytes()

    def allocate(self, size: int) -> int:
        """Memory; its address."""
        self.kept.append(self.driver.allocate(size))
        return self.kept[-1]

    def release(self, address: int) -> None:
        """Frees what `allocate` gave."""
        self.kept.remove(address)
        self.driver.release(address)

    def random(self, address: int, size: int, dtype: str) -> None:
        """Normal numbers: a block of them, again and again."""
        block = noise(dtype, size)
        for start in range(0, size, block.nbytes):
            self.driver.upload(address + start, block[: min(block.nbytes, size - start)])

    def read(self, address: int, size: int) -> np.ndarray:
        """Its first bytes."""
        return self.driver.download(address, size)

    def clear(self, address: int, size: int) -> None:
        """Bytes that are no numbers."""
        self.driver.fill(address, 0xFF, size)

    def seconds(self, work: Callable[[], None]) -> float:
        """Time between two events [s]."""
        return self.events.seconds(work)

    def close(self) -> None:
        """Frees everything."""
        self.events.close()
        for address in self.kept:
            self.driver.release(address)
        self.kept.clear()


def noise(dtype: str, size: int) -> np.ndarray:
    """Normal numbers as bytes, at most 16 MiB, not more than ``size`` in whole numbers."""
    item = dtype_of(dtype).itemsize
    return _block(dtype)[: max(item, min(size, 16 << 20) // item * item)]


@functools.cache
def _block(dtype: str) -> np.ndarray:
    kind = dtype_of(dtype)
    count = (16 << 20) // kind.itemsize
    return np.random.default_rng(0).standard_normal(count, np.float32).astype(kind).view(np.uint8)


@contextmanager
def bench() -> Iterator[Bench]:
    """The device to measure on, and all memory freed afterwards.  Raises: NativeError where there is none."""
    made: Bench = HostBench() if cudnn.computes_on_host() else GpuBench()
    try:
        yield made
    finally:
        made.close()


def convolve(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Times every algorithm and math for ``batch`` samples of ``convolution`` within ``limit`` bytes of workspace.

    Request: convolution (JSON), batch, limit (None: what fits), seconds (of measuring, in all), skip (labels that
    crashed an earlier process), tolerance (a factor of `TOLERANCE`).
    Answer: ``micros`` (algorithm, math, seconds, workspace) and ``left_out`` (label, why).
    """
    convolution, batch = Convolution.from_json(request["convolution"]), int(request["batch"])
    skip = set(request.get("skip", ()))
    pairs = [
        (algorithm, math)
        for math in sorted(MATHS[convolution.dtype], key=lambda m: (MATHS[convolution.dtype][m] not in EXACT, m))
        for algorithm in cudnn.algorithms(convolution.kind)
    ]
    share = float(request["seconds"]) / len(pairs)
    micros: list[dict[str, Any]] = []
    left_out: list[tuple[str, str]] = []
    with bench() as device:
        arena = _Arena(device, convolution, batch, float(request.get("tolerance", 1.0)))
        for algorithm, math in pairs:
            label = f"{algorithm} {math}"
            if label in skip:
                left_out.append((label, "it crashed the measuring process"))
                continue
            announce(label)
            try:
                seconds, space = arena.measure(algorithm, math, request.get("limit"), share)
                micros.append({"algorithm": algorithm, "math": math, "seconds": seconds, "workspace": space})
            except ValueError as error:
                left_out.append((label, str(error)))
            except NativeError as error:
                _survives(device, label, error)
                left_out.append((label, error.message))
        announce("")
    return {"micros": micros, "left_out": left_out}


def _survives(device: Bench, label: str, error: NativeError) -> None:
    """Ends this process, which blames the algorithm, where nothing works on the device any more."""
    try:
        device.seconds(lambda: None)
    except NativeError as second:
        print(f"{label}: {error.message}; then {second.message}", file=sys.stderr, flush=True)
        os._exit(70)


class _Arena:
    """Operands, results and workspace that all algorithms share."""

    def __init__(self, device: Bench, convolution: Convolution, batch: int, tolerance: float) -> None:
        self.device, self.convolution, self.batch, self.tolerance = device, convolution, batch, tolerance
        self.sizes = buffer_bytes(convolution, batch)
        room = int(SHARE * device.free_bytes())
        one = sum(self.sizes)
        if one > room:
            raise ValueError(f"{one} B of operands do not fit into {room} B")
        enough = 1 if 2 * one >= COLD_BYTES else min(MOST_SETS, -(-COLD_BYTES // one))
        count = max(1, min(enough, room // (2 * one)))
        try:
            self.sets = [tuple(device.allocate(size) for size in self.sizes) for _ in range(count)]
        except NativeError as error:
            if is_memory(error):
                raise WorkerFailed(error.message, **{**error.values, "reason": "memory"}) from error
            raise
        for a, b, _ in self.sets:
            device.random(a, self.sizes[0], convolution.dtype)
            device.random(b, self.sizes[1], convolution.dtype)
        self.room = room - count * one
        self.space = (0, 0)  # address, bytes
        self.expected: np.ndarray | None = None
        self.known: list[tuple[float, int]] = []  # seconds, workspace

    def measure(self, algorithm: str, math: str, limit: int | None, share: float) -> tuple[float, int]:
        """Seconds and workspace [B].  Raises: NativeError, ValueError: it is out, and why."""
        probe = Division((Micro(self.batch, algorithm, math, 1.0, 0),))
        plan = Plan(self.convolution, probe, self.device.number)
        try:
            most = self.room if limit is None else min(limit, self.room)
            if plan.needed > most:
                raise ValueError(f"needs {plan.needed} B of workspace, {most} B are allowed")
            if plan.needed > self.space[1]:
                if self.space[1]:
                    self.device.release(self.space[0])
                self.space = (0, 0)
                self.space = (self.device.allocate(plan.needed), plan.needed)
            a, b, out = self.sets[0]
            self.device.clear(out, self.sizes[2])
            plan.run(self.device.stream, a, b, out, self.space[0])
            self._check(self.device.read(out, min(self.sizes[2], CHECKED_BYTES)), math)

            def once() -> None:
                for a, b, out in self.sets:
                    plan.run(self.device.stream, a, b, out, self.space[0])

            seconds = self._time(once, share, plan.needed) / len(self.sets)
            self.known.append((seconds, plan.needed))
            return seconds, plan.needed
        finally:
            plan.close()

    def _check(self, found: np.ndarray, math: str) -> None:
        values = found.view(dtype_of(self.convolution.dtype)).astype(np.float64)
        if not np.isfinite(values).all():
            raise ValueError("its result is not finite")
        if self.expected is None:
            self.expected = values
            return
        off = float(np.linalg.norm(values - self.expected)) / (float(np.linalg.norm(self.expected)) or 1.0)
        exact = MATHS[self.convolution.dtype][math]
        allowed = max(TOLERANCE[exact], 5e-2 if self.convolution.dtype in ("float16", "bfloat16") else 0.0)
        allowed *= self.tolerance
        if off > allowed:
            raise ValueError(f"its result is off by {off:.2g} of the first algorithm's, allowed {allowed:g}")

    def _time(self, once: Callable[[], None], share: float, space: int) -> float:
        self.device.seconds(once)
        start, samples = time.perf_counter(), [self.device.seconds(once)]
        mine = samples[0] / len(self.sets)
        if any(HOPELESS * seconds < mine and other <= space for seconds, other in self.known):
            return samples[0]
        for k in itertools.count(2):
            samples.append(self.device.seconds(once))
            if k >= ROUNDS[1] or (k >= ROUNDS[0] and time.perf_counter() - start > share):
                return float(np.median(samples))
        raise AssertionError("unreachable")


# -- XLA's own --------------------------------------------------------------------------------------------------------
def convolve_xla(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Times XLA's own convolution of ``batch`` samples, in every precision that a program can ask for.

    Request: convolution (JSON), batch, seconds.  Answer: ``micros`` as of `convolve`; workspace is all that the
    compiled program takes beside operands and result.
    """
    import jax

    from jcuts.xla.convolutions import LIBRARY, library_function, library_maths

    convolution, batch = Convolution.from_json(request["convolution"]), int(request["batch"])
    micros = []
    for math, precision in library_maths(convolution.dtype).items():
        function, avals = library_function(convolution, batch, precision)
        announce(f"{LIBRARY} {math}")
        inputs = [_normal(aval) for aval in avals]
        compiled = jax.jit(function).lower(*inputs).compile()
        analysis = compiled.memory_analysis()
        space = int(analysis.temp_size_in_bytes) if analysis is not None else 0
        seconds = _library_seconds(compiled, function, inputs, float(request["seconds"]), announce)
        micros.append({"algorithm": LIBRARY, "math": math, "seconds": seconds, "workspace": space})
    announce("")
    return {"micros": micros}


def _normal(aval: Any) -> np.ndarray:
    block = noise(aval.dtype.name, aval.size * aval.dtype.itemsize).view(aval.dtype)
    return np.resize(block, aval.shape)


def _library_seconds(
    compiled: Any, function: Callable[..., Any], inputs: list[np.ndarray], seconds: float, announce: Announce
) -> float:
    import jax

    if jax.default_backend() != "cpu":
        from jcuts.tune import gpu_timing

        _, samples, _ = gpu_timing.compare({"xla": (function, {})}, inputs, seconds=seconds, announce=announce)
        return samples["xla"].median
    times = []
    for _ in range(ROUNDS[0] + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
