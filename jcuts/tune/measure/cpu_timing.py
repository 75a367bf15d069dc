"""Times kernels and XLA programs of one problem against each other on a CPU, by one method, in one process.  Imports
JAX.

Short programs (below `LOOP_BELOW`) run n times inside one jitted loop: a jitted call costs microseconds of dispatch,
which a subset inside a larger program never pays.  Operands and results pass through an optimisation barrier in every
iteration, so that nothing is hoisted out of the loop or dropped.  Long programs are called one by one.  Both kinds of
candidate (our kernels as custom calls, XLA's own code) take the same path.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jcuts.base import knobs
from jcuts.base.errors import NativeError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.tune import device_slices
from jcuts.tune.measure.cpu_launch import Fenced, Launcher, xla_float_mode
from jcuts.tune.measure.regime import COLD
from jcuts.tune.measure.statistics import Samples, interleave, race
from jcuts.tune.verify.inputs import dtype_of
from jcuts.xla import cpu_ffi_call, cpu_launcher, native_library

LOOP_BELOW = 2e-3
"""Programs shorter than this [s] are timed inside a loop."""
SAME_CODE = 3.0
"""An execution in a loop that takes this many times a call is another program's: a call does more."""
ROUNDS = 5
"""As often is a loop found slower before it is taken for other code."""
SAMPLE_SECONDS = 1e-3
"""Length of one looped sample [s]: a thousand times the clock's resolution."""
_MOST_INNER = 2000
COLD_SAMPLES = 60
"""Most samples with cold caches: evicting them takes longer than most kernels."""
_PROBE = 8
SCREEN_ROUNDS = 6
SCREEN_SECONDS = 3e-3
"""One kernel's share of one round of screening [s].  The least of all runs counts, and what disturbs runs lasts some
milliseconds: many short rounds see more of the undisturbed machine than few long ones."""
HOPELESS = 4.0
"""Who takes this many times the best after half of the rounds is not run again."""


def as_function(kernel: CompiledKernel) -> Callable[..., Any]:
    """The traceable custom call of a kernel; nothing is written to the user's object cache.

    Raises:
        NativeError: there is no usable native library.
    """
    cpu_launcher.ensure_registered()
    cpu_launcher.add_kernel(kernel, persist=False)
    return lambda *operands: cpu_ffi_call.call_kernel(kernel, *operands)


def looped(function: Callable[..., Any]) -> Callable[..., Any]:
    """``run(n, blank, *operands)``: n executions of ``function``, one after the other; ``blank`` are results for n = 0.

    Every array of the loop comes from outside and the counter runs down to zero: XLA compiles nothing but the function
    itself, one addition and one comparison.
    """

    def run(n: Any, blank: Any, *operands: Any) -> Any:
        def body(state: Any) -> Any:
            left, _, inside = state
            new = tuple(jax.tree.leaves(function(*inside)))
            inside, new = lax.optimization_barrier((inside, new))
            return left - 1, new, inside

        return lax.while_loop(lambda state: state[0] > 0, body, (n, blank, tuple(operands)))[1]

    return run


def cache_bytes() -> int:
    """Size of the last-level cache [B]; 32 MiB where the system does not say."""
    for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        try:
            size = os.sysconf(name)
        except (ValueError, OSError):
            continue
        if size > 0:
            return int(size)
    return 32 * 2**20


def screen(
    launchers: dict[str, Launcher], inputs: Sequence[np.ndarray], *, seconds: float, announce: Callable[[str], None]
) -> dict[str, Samples]:
    """Quick times of kernels without XLA: on the native library's own threads, as many as XLA's pool has.

    Without a native library: all tiles on this thread.  Good enough to drop the slow ones, not to choose a winner.

    Args:
        launchers: kernels of one problem: the same operands and results.
        inputs: operands.
        seconds: most wall time to spend on all of them; a few runs of each are made whatever they cost.
        announce: is told which kernel runs next.
    """
    if not launchers:
        return {}
    share = min(SCREEN_SECONDS, seconds / len(launchers) / SCREEN_ROUNDS)
    bench = _bench(launchers, inputs)
    times: dict[str, tuple[float, ...]] = dict.fromkeys(launchers, ())
    live = list(launchers)
    with device_slices.measuring():
        for number in range(SCREEN_ROUNDS):
            for label in live:
                device_slices.pause()
                announce(label)
                times[label] += tuple(bench(label, share))
            if 2 * (number + 1) < SCREEN_ROUNDS:
                continue
            best = min(min(times[label]) for label in live)
            live = [label for label in live if min(times[label]) <= HOPELESS * best]
    return {label: Samples(found) for label, found in times.items()}


def _bench(launchers: dict[str, Launcher], inputs: Sequence[np.ndarray]) -> Callable[[str, float], list[float]]:
    """A callable (label, seconds) that runs one kernel and returns the times; all kernels share their buffers."""
    try:
        lib = native_library.load()
    except NativeError:
        runs = {label: launcher.timed(inputs) for label, launcher in launchers.items()}
        return lambda label, share: list(interleave({label: runs[label]}, seconds=share, least=3)[label].seconds)
    first = next(iter(launchers.values())).kernel
    buffers = [Fenced(x.shape, x.dtype, x) for x in inputs]
    buffers += [Fenced(shape, dtype_of(dtype)) for shape, dtype in first.outputs]
    table = (ctypes.c_void_p * len(buffers))(*(b.address for b in buffers))
    most = max(launcher.kernel.scratch_bytes for launcher in launchers.values())
    slot = -(-most // cpu_ffi_call.ALIGNMENT) * cpu_ffi_call.ALIGNMENT
    scratch = Fenced((slot * max(1, cpu_ffi_call.pool_threads()),), np.dtype(np.uint8))

    def bench(label: str, share: float, _: object = buffers) -> list[float]:  # keeps the buffers alive
        launcher = launchers[label]
        kernel = launcher.kernel
        threads = max(1, min(kernel.tiles, cpu_ffi_call.pool_threads()))

        def go(repeats: int) -> list[float]:
            times = (ctypes.c_double * repeats)()
            with xla_float_mode():
                failed = lib.jcuts_bench(
                    launcher.address,
                    table,
                    kernel.tiles,
                    scratch.address,
                    kernel.scratch_bytes,
                    threads,
                    repeats,
                    times,
                )
            if failed:
                raise NativeError(f"jcuts_bench refused kernel {kernel.digest}", kernel=kernel.digest)
            return list(times)

        once = min(go(1))
        return go(max(1, min(200, int(share / max(once, 1e-7)))))

    return bench


def compare(
    entries: dict[str, tuple[Callable[..., Any], dict[str, Any]]],
    input_sets: Sequence[Sequence[np.ndarray]],
    outputs: Sequence[tuple[tuple[int, ...], str]],
    *,
    seconds: float,
    first: str,
    announce: Callable[[str], None],
) -> tuple[str, dict[str, Samples]]:
    """Interleaved times of traceable functions.

    Args:
        entries: label -> (function of the operands, XLA compiler options).
        input_sets: at least one set of operands; the others are rotated in when one overflows the cache.
        outputs: shape and dtype of every result.
        seconds: most wall time for the samples of one label, compilation not counted.
        first: label whose time decides between calling and looping (the library).
        announce: is told which label runs next, so that a crash can be blamed on it.
    Returns: the method (``cold call`` where caches are evicted before every sample, else ``loop`` or ``call``; in a
        loop, what is other code there is called all the same) and the samples of every label.
    """
    on_device = [[jax.device_put(x) for x in operands] for operands in input_sets]
    used = on_device[0]
    plain: dict[str, Any] = {}

    def prepare(label: str) -> float:
        announce(label)
        function, options = entries[label]
        # What is jitted already may be compiled already.
        plain[label] = function if hasattr(function, "lower") and not options else _jitted(function, options)
        jax.block_until_ready(plain[label](*used))
        return _shortest(lambda: jax.block_until_ready(plain[label](*used)), 3)

    blank = tuple(jax.device_put(np.zeros(shape, dtype_of(dtype))) for shape, dtype in outputs)

    def inside(label: str) -> tuple[Callable[[], object], int]:
        announce(label)
        function, options = entries[label]
        program = _jitted(looped(function), options)
        return _sample_of(program.lower(np.int32(0), blank, *used).compile(), (blank, *used))

    once = prepare(first)
    if knobs.current().tune_caches == COLD:
        for label in entries:
            if label != first:
                prepare(label)
        evict = Eviction(2 * cache_bytes())
        announce("")
        cold = {label: _cold(plain[label], used, evict) for label in entries}
        return "cold call", race(cold, seconds=seconds, told=True, most=COLD_SAMPLES)
    if once >= LOOP_BELOW:
        footprint = sum(x.nbytes for x in used) + sum(
            math.prod(shape) * dtype_of(dtype).itemsize for shape, dtype in outputs
        )
        sets = on_device if footprint > cache_bytes() // 2 else on_device[:1]
        for label in entries:
            if label != first:
                prepare(label)
        runs = {label: _rotating(plain[label], sets) for label in entries}
        announce("")
        return "call", race(runs, seconds=seconds)
    samples = {label: inside(label) for label in entries}
    if _is_other_code(*samples[first], plain[first], used, once):
        for label in entries:
            least = once if label == first else prepare(label)
            if _is_other_code(*samples[label], plain[label], used, least):
                count = samples[label][1]
                samples[label] = (_calls(plain[label], used, count), count)
    announce("")
    runs = {label: samples[label][0] for label in entries}
    return "loop", race(runs, seconds=seconds, inner={label: samples[label][1] for label in entries})


def _jitted(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    return jax.jit(lambda *operands: function(*operands), compiler_options=options or None)


def _sample_of(compiled: Any, used: Sequence[Any]) -> tuple[Callable[[], object], int]:
    """A callable that takes about `SAMPLE_SECONDS`, and how many executions it makes."""

    def go(n: Any) -> object:
        return jax.block_until_ready(compiled(n, *used))

    go(np.int32(2))
    spent = _shortest(lambda: go(np.int32(_PROBE)), 2)
    count = max(1, min(_MOST_INNER, math.ceil(SAMPLE_SECONDS * _PROBE / max(spent, 1e-7))))
    n = jax.device_put(np.int32(count))
    return lambda: go(n), count


class Eviction:
    """Evicts the caches, as other work between two calls does. Args: size: of what is written [B]."""

    def __init__(self, size: int) -> None:
        self._words = np.zeros(-(-size // 8), np.int64)

    def __call__(self) -> None:
        """Reads and writes every cache line of more memory than the last-level cache holds."""
        self._words += 1


def _cold(function: Callable[..., Any], used: Sequence[Any], evict: Callable[[], object]) -> Callable[[], float]:
    """A callable that gives the time of one call with cold caches [s]."""

    def run() -> float:
        evict()
        return _clocked(lambda: jax.block_until_ready(function(*used)))

    return run


def _calls(function: Callable[..., Any], used: Sequence[Any], count: int) -> Callable[[], object]:
    def run() -> object:
        return [jax.block_until_ready(function(*used)) for _ in range(count)][-1]

    return run


def _is_other_code(
    run: Callable[[], object], count: int, function: Callable[..., Any], used: Sequence[Any], once: float
) -> bool:
    """Whether XLA compiled a function to slower code in a loop: ``count`` executions take longer than as many calls.

    XLA:CPU gives convolutions whose dimensions are in another order than Eigen's (gradients of weights) to Eigen
    outside of loops only, and computes them 20 to 40 times as slowly in loops.  What looks slower is timed in turn with
    calls, and one round in which it is not settles it: other work on the machine slows either for milliseconds.

    Args:
        run: ``count`` executions in a loop.
        function: the same, compiled outside of a loop.
        once: the least time of one call so far [s].
    """
    if _shortest(run, 1) <= SAME_CODE * count * once:
        return False
    calls = _calls(function, used, count)
    return all(_shortest(run, 1) > SAME_CODE * _shortest(calls, 1) for _ in range(ROUNDS))


@functools.cache
def dispatch_overhead() -> float:
    """Median time of calling an empty jitted function [s]: what ``call`` times contain and ``loop`` times do not."""
    empty = jax.jit(lambda x: x)
    x = jax.device_put(np.float32(0))
    jax.block_until_ready(empty(x))
    run = {"empty": lambda: jax.block_until_ready(empty(x))}
    return interleave(run, seconds=0.02, least=20)["empty"].median


def _shortest(run: Callable[[], object], runs: int) -> float:
    """The least time of several runs [s]."""
    with device_slices.measuring():
        return min(_clocked(run) for _ in range(runs))


def _clocked(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _rotating(compiled: Any, sets: Sequence[Sequence[Any]]) -> Callable[[], object]:
    position = 0

    def run() -> object:
        nonlocal position
        position = (position + 1) % len(sets)
        return jax.block_until_ready(compiled(*sets[position]))

    return run
