"""Child process that checks and times every cuDNN algorithm of one convolution at one batch size.

Driver API only; XLA's own convolution is another request (`convolve_xla`), which imports JAX.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jcuts.base.errors import NativeError, WorkerFailed
from jcuts.microbatch.convolution import MATHS, Convolution
from jcuts.microbatch.timings import Division, MicroConfig, sliced
from jcuts.tune.cudnn.devices import MeasuringDevice, bench, noise
from jcuts.tune.resource_errors import is_memory
from jcuts.tune.verify.inputs import dtype_of
from jcuts.tune.verify.tolerances import CONVOLUTION_L2, CONVOLUTION_RUN_FACTOR, VENDOR_CONVOLUTION_L2
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.plan import Plan, buffer_bytes

TIMING = 2
"""Changes with how times are taken, and with what counts as right: times of another version are not used."""
COLD_BYTES = 192 << 20
"""Operands that are rotated through cover this: more than any L2 cache."""
MOST_SETS = 16
SHARE = 0.6
"""Share of the free memory that measuring may take."""
RUN_BYTES = 8 << 10
RUNS = 256
"""Of a larger result so many runs of neighbours are compared with the first algorithm's: drawn at random, with the
first and the last one among them."""
ROUNDS = (3, 15)
"""Least and most samples of one algorithm; in between its share of the time decides."""
HOPELESS = 2.0
"""Slower by this than what needs no more workspace: a single sample is exact enough."""
LAUNCH_SECONDS = 1e-4
"""More than launching one call costs: shorter times of calls that are not in graphs may be the processor's."""
EXACT = ("float64", "float32")
"""Arithmetic that comes first: the others are compared with it."""
_NO_ROOM = ("ALLOC_FAILED", "ALLOCATION_FAILED")
"""In cuDNN's errors: memory that it wanted for itself."""

Announce = Callable[[str], None]


class WorkspaceTooLarge(ValueError):
    """An algorithm's workspace exceeds the limit."""


class OutOfDeviceMemory(ValueError):
    """Not enough free device memory for an algorithm. Attributes: needed: bytes of workspace."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


def measure_cudnn_algorithms(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Times every algorithm and math for ``batch`` samples of ``convolution`` within ``limit`` bytes of workspace.

    Request: convolution (JSON), batch, limit (None: what fits), seconds (of measuring, in all), skip (labels that
    crashed an earlier process), unwanted (labels that are not asked for), accuracy (of `settings.ACCURACIES`), graphs
    (whether calls are captured).  With ``slices``, (algorithm, math, numbers of slices, limit) each, only these are
    timed: with the first number of slices that fits.
    Answer: ``micros`` (algorithm, math, seconds, workspace); ``left_out`` (label, why); ``lacking``: the least
    workspace for which there was no memory now [B], or None.
    """
    convolution, batch = Convolution.from_json(request["convolution"]), int(request["batch"])
    skip = set(request.get("skip", ()))
    pairs = [
        (algorithm, math_name)
        for math_name in sorted(MATHS[convolution.dtype], key=lambda m: (MATHS[convolution.dtype][m] not in EXACT, m))
        for algorithm in cudnn_call.algorithms(convolution.kind)
    ]
    unwanted = set(request.get("unwanted", ()))
    pairs = [pair for pair in pairs if " ".join(pair) not in unwanted]
    series = [([pair], request.get("limit")) for pair in pairs]
    if "slices" in request:
        series = [([(sliced(a, n), m) for n in numbers], limit) for a, m, numbers, limit in request["slices"]]
    share = float(request["seconds"]) / max(1, len(series))
    micros: list[dict[str, Any]] = []
    timed: set[tuple[str, str]] = set()
    left_out: list[tuple[str, str]] = []
    lacking: list[int] = []
    with bench() as device:
        arena = _Arena(device, convolution, batch, request.get("accuracy", "exact"), bool(request.get("graphs", False)))
        if "slices" in request:
            arena.settle([pair for pair in pairs if " ".join(pair) not in skip], announce)
        for one, limit in series:
            for algorithm, math_name in one:
                label = f"{algorithm} {math_name}"
                if label in skip:
                    left_out.append((label, "it crashed the measuring process"))
                    break
                if (algorithm, math_name) in timed:
                    break
                announce(label)
                try:
                    micros.append(arena.measure(algorithm, math_name, limit, share))
                    timed.add((algorithm, math_name))
                except WorkspaceTooLarge as error:
                    left_out.append((label, str(error)))
                    continue
                except OutOfDeviceMemory as error:
                    lacking.append(error.needed)
                    left_out.append((label, str(error)))
                except ValueError as error:
                    left_out.append((label, str(error)))
                except NativeError as error:
                    _survives(device, label, error)
                    left_out.append((label, error.message))
                break
        announce("")
    return {"micros": micros, "left_out": left_out, "lacking": min(lacking, default=None)}


def _survives(device: MeasuringDevice, label: str, error: NativeError) -> None:
    """Ends this process, which blames the algorithm, where nothing works on the device any more."""
    try:
        device.seconds(lambda: None)
    except NativeError as second:
        print(f"{label}: {error.message}; then {second.message}", file=sys.stderr, flush=True)
        os._exit(70)


class _Arena:
    """Operands, results and workspace buffers, shared by all algorithms."""

    def __init__(
        self, device: MeasuringDevice, convolution: Convolution, batch: int, accuracy: str, graphs: bool = False
    ) -> None:
        self.device, self.convolution, self.batch = device, convolution, batch
        self.tolerance, self.graphs = VENDOR_CONVOLUTION_L2 if accuracy == "vendor" else CONVOLUTION_L2, graphs
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
            device.random(a, self.sizes[0], convolution.dtype, 0)
            device.random(b, self.sizes[1], convolution.dtype, 1)
        self.room = room - count * one
        self.ever = int(SHARE * device.total_bytes()) - count * one
        self.space = (0, 0)  # address, bytes
        self.runs = _runs(self.sizes[2])
        self.expected: np.ndarray | None = None
        self.known: list[tuple[float, int]] = []  # seconds, workspace

    def settle(self, pairs: Sequence[tuple[str, str]], announce: Announce) -> None:
        """Takes the first algorithm that runs as the one that others are compared with, untimed.

        Raises: ValueError: none runs.
        """
        for algorithm, math_name in pairs:
            announce(f"{algorithm} {math_name}")
            try:
                plan = self._plan(algorithm, math_name)
            except NativeError:
                continue
            try:
                self._provide(plan.needed, None)
                self._once(plan, math_name)
                return
            except (NativeError, ValueError) as error:
                if isinstance(error, NativeError):
                    _survives(self.device, algorithm, error)
            finally:
                plan.close()
        raise ValueError("no algorithm runs whose result others could be compared with")

    def _plan(self, algorithm: str, math_name: str) -> Plan:
        probe = Division((MicroConfig(self.batch, algorithm, math_name, 1.0, 0),))
        return Plan(self.convolution, probe, self.device.number)

    def _once(self, plan: Plan, math_name: str) -> None:
        a, b, out = self.sets[0]
        self.device.clear(out, self.sizes[2])
        plan.run(self.device.stream, a, b, out, self.space[0])
        self._check(self._read(out), math_name)

    def measure(self, algorithm: str, math_name: str, limit: int | None, share: float) -> dict[str, Any]:
        """One of an answer's ``micros``.  Raises: NativeError, NoRoom, ValueError: it is out, and why."""
        plan = self._plan(algorithm, math_name)
        try:
            self._provide(plan.needed, limit)
            self._once(plan, math_name)

            def once() -> None:
                for a, b, out in self.sets:
                    plan.run(self.device.stream, a, b, out, self.space[0])

            seconds, captured = self._time(once, share, plan.needed)
            self.known.append((seconds, plan.needed))
            name = algorithm if captured or not self.graphs else algorithm + cudnn_call.LAUNCHED
            return {"algorithm": name, "math": math_name, "seconds": seconds, "workspace": plan.needed}
        except NativeError as error:
            if is_memory(error) or any(name in error.message for name in _NO_ROOM):
                raise OutOfDeviceMemory(error.message, plan.needed) from error
            raise
        finally:
            plan.close()

    def _provide(self, needed: int, limit: int | None) -> None:
        most = self.room if limit is None else min(limit, self.room)
        if needed > most:
            text = f"needs {needed} B of workspace, {most} B are allowed"
            if needed <= (self.ever if limit is None else min(limit, self.ever)):
                raise OutOfDeviceMemory(text, needed)
            raise WorkspaceTooLarge(text)
        if needed > self.space[1]:
            if self.space[1]:
                self.device.release(self.space[0])
            self.space = (0, 0)
            self.space = (self.device.allocate(needed), needed)

    def _read(self, out: int) -> np.ndarray:
        return np.concatenate([self.device.read(out, start, size) for start, size in self.runs])

    def _check(self, found: np.ndarray, math_name: str) -> None:
        values = found.view(dtype_of(self.convolution.dtype)).astype(np.float64)
        if not np.isfinite(values).all():
            raise ValueError("its result is not finite")
        if self.expected is None:
            self.expected = values
            return
        apart, scale = values - self.expected, math.sqrt(float(np.mean(self.expected**2))) or 1.0
        off = math.sqrt(float(np.mean(apart**2))) / scale
        exact = MATHS[self.convolution.dtype][math_name]
        allowed = max(self.tolerance[exact], 5e-2 if self.convolution.dtype in ("float16", "bfloat16") else 0.0)
        if off > allowed:
            raise ValueError(f"its result is off by {off:.2g} of the first algorithm's, allowed {allowed:g}")
        begin = 0
        for start, size in self.runs:
            end = begin + size // dtype_of(self.convolution.dtype).itemsize
            off = math.sqrt(float(np.mean(apart[begin:end] ** 2))) / scale
            if off > CONVOLUTION_RUN_FACTOR * allowed:
                raise ValueError(f"its result is off by {off:.2g} of the first algorithm's from byte {start} on")
            begin = end

    def _time(self, once: Callable[[], None], share: float, space: int) -> tuple[float, bool]:
        """Seconds of one call, and whether it was captured."""
        count = len(self.sets)
        first = self.device.seconds(once)
        if first > count * LAUNCH_SECONDS and self._is_hopeless(first / count, space):
            first = min(first, self.device.seconds(once))
            if self._is_hopeless(first / count, space):
                return first / count, True
        chain = self.device.chain(once, first, graphs=self.graphs)
        try:
            chain.seconds()
            per = count * chain.repeats
            start, samples = time.perf_counter(), [chain.seconds() / per]
            while len(samples) < ROUNDS[1] and not self._is_hopeless(samples[0], space):
                if len(samples) >= ROUNDS[0] and time.perf_counter() - start > share:
                    break
                samples.append(chain.seconds() / per)
            return float(np.median(samples)), chain.captured
        finally:
            chain.close()

    def _is_hopeless(self, seconds: float, space: int) -> bool:
        return any(HOPELESS * known < seconds and other <= space for known, other in self.known)


def _runs(size: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of what is compared of a result: all of a small one, runs of neighbours of a large one."""
    count = -(-size // RUN_BYTES)
    if count <= RUNS:
        return [(0, size)]
    drawn = np.random.default_rng(size).choice(np.arange(1, count - 1), RUNS - 2, replace=False)
    # The last one ends with the result: with a batch's last sample.
    starts = [*sorted(RUN_BYTES * int(k) for k in (0, *drawn)), size - RUN_BYTES]
    return [(start, RUN_BYTES) for start in starts]


# -- XLA's own --------------------------------------------------------------------------------------------------------
def convolve_xla(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Times XLA's own convolution of ``batch`` samples, in every precision that a program can ask for.

    Request: convolution (JSON), batch, seconds.  Answer: ``micros`` as of `convolve`; workspace is the convolution's
    where the optimised program tells it, else all that the program takes beside operands and result (``temporary``).
    """
    import jax

    from jcuts.xla.cudnn.match import LIBRARY, library_function, library_maths, scratch_bytes

    convolution, batch = Convolution.from_json(request["convolution"]), int(request["batch"])
    micros = []
    for math_name, precision in library_maths(convolution.dtype).items():
        function, avals = library_function(convolution, batch, precision)
        announce(f"{LIBRARY} {math_name}")
        inputs = [_normal(aval, seed) for seed, aval in enumerate(avals)]
        compiled = jax.jit(function).lower(*inputs).compile()
        analysis = compiled.memory_analysis()
        temporary = int(analysis.temp_size_in_bytes) if analysis is not None else 0
        scratch = scratch_bytes(compiled.as_text() or "")
        space = temporary if scratch is None else scratch
        seconds = _library_seconds(compiled, function, inputs, float(request["seconds"]), announce)
        micros.append(
            {"algorithm": LIBRARY, "math": math_name, "seconds": seconds, "workspace": space, "temporary": temporary}
        )
    announce("")
    return {"micros": micros}


def _normal(aval: Any, seed: int) -> np.ndarray:
    block = noise(aval.dtype.name, aval.size * aval.dtype.itemsize, seed).view(aval.dtype)
    return np.resize(block, aval.shape)


def _library_seconds(
    compiled: Any, function: Callable[..., Any], inputs: list[np.ndarray], seconds: float, announce: Announce
) -> float:
    import jax

    if jax.default_backend() != "cpu":
        from jcuts.tune.measure import gpu_timing

        _, samples, _ = gpu_timing.compare({"xla": (function, {})}, inputs, seconds=seconds, announce=announce)
        return samples["xla"].median
    times = []
    for _ in range(ROUNDS[0] + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
