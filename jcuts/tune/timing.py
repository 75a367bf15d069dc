"""Times kernels and XLA programs of one problem against each other, by one method, in one process.  Imports JAX.

Short programs (below `LOOP_BELOW`) run n times inside one jitted loop: a jitted call costs microseconds of dispatch,
which a subset inside a larger program never pays.  Operands and results pass through an optimisation barrier in every
iteration, so that nothing is hoisted out of the loop or dropped.  Long programs are called one by one.  Both kinds of
candidate (our kernels as custom calls, XLA's own code) take the same path.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jcuts.base.errors import NativeError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.tune.launch import Fenced, Launcher, xla_float_mode
from jcuts.tune.noise import Samples, interleave
from jcuts.tune.values import dtype_of
from jcuts.xla import call, native, register

LOOP_BELOW = 2e-3
"""Programs shorter than this [s] are timed inside a loop."""
SAMPLE_SECONDS = 1e-3
"""Length of one looped sample [s]: a thousand times the clock's resolution."""
_MOST_INNER = 2000
_PROBE = 8


def as_function(kernel: CompiledKernel) -> Callable[..., Any]:
    """The traceable custom call of a kernel; nothing is written to the user's object cache.

    Raises:
        NativeError: there is no usable native library.
    """
    register.ensure_registered()
    register.add_kernel(kernel, persist=False)
    return lambda *operands: call.call_kernel(kernel, *operands)


def looped(function: Callable[..., Any], outputs: Sequence[tuple[tuple[int, ...], str]]) -> Callable[..., Any]:
    """``run(n, *operands)``: n executions of ``function``, one after the other."""

    def run(n: Any, *operands: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            inside, _ = carry
            new = tuple(jax.tree.leaves(function(*inside)))
            return lax.optimization_barrier((inside, new))

        blank = tuple(jnp.zeros(shape, dtype_of(dtype)) for shape, dtype in outputs)
        return lax.fori_loop(0, n, body, (tuple(operands), blank))[1]

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


def screen(launchers: dict[str, Launcher], inputs: Sequence[np.ndarray], *, seconds: float) -> dict[str, Samples]:
    """Quick times of kernels without XLA: on the native library's own threads, as many as XLA's pool has.

    Without a native library: all tiles on this thread.  Good enough to drop the slow ones, not to choose a winner.
    """
    if not launchers:
        return {}
    share = seconds / len(launchers)
    found: dict[str, Samples] = {}
    try:
        lib = native.load()
    except NativeError:
        lib = None
    for name, launcher in launchers.items():
        if lib is None:
            run = launcher.timed(inputs)
            run()
            found[name] = interleave({name: run}, seconds=share, least=3)[name]
            continue
        found[name] = Samples(tuple(_bench(lib, launcher, inputs, share)))
    return found


def _bench(lib: Any, launcher: Launcher, inputs: Sequence[np.ndarray], seconds: float) -> list[float]:
    kernel = launcher.kernel
    threads = max(1, min(kernel.tiles, call.pool_threads()))
    slot = -(-kernel.scratch_bytes // call.ALIGNMENT) * call.ALIGNMENT
    buffers = [Fenced(x.shape, x.dtype, x) for x in inputs]
    buffers += [Fenced(shape, dtype_of(dtype)) for shape, dtype in kernel.outputs]
    scratch = Fenced((slot * threads,), np.dtype(np.uint8))
    table = (ctypes.c_void_p * len(buffers))(*(b.address for b in buffers))

    def go(repeats: int) -> list[float]:
        times = (ctypes.c_double * repeats)()
        with xla_float_mode():
            failed = lib.jcuts_bench(
                launcher.address, table, kernel.tiles, scratch.address, kernel.scratch_bytes, threads, repeats, times
            )
        if failed:
            raise NativeError(f"jcuts_bench refused kernel {kernel.digest}", kernel=kernel.digest)
        return list(times)

    once = min(go(2))
    return go(max(3, min(200, int(seconds / max(once, 1e-7)))))


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
        seconds: wall time for the samples, compilation not counted.
        first: label whose time decides between calling and looping (the library).
        announce: is told which label runs next, so that a crash can be blamed on it.
    Returns: the method (``loop`` or ``call``) and the samples of every label.
    """
    on_device = [[jax.device_put(x) for x in operands] for operands in input_sets]
    used = on_device[0]
    plain: dict[str, Any] = {}

    def prepare(label: str) -> float:
        announce(label)
        function, options = entries[label]
        plain[label] = jax.jit(function, compiler_options=options or None).lower(*used).compile()
        jax.block_until_ready(plain[label](*used))
        return min(_clocked(lambda: jax.block_until_ready(plain[label](*used))) for _ in range(3))

    once = prepare(first)
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
        return "call", interleave(runs, seconds=seconds)
    runs: dict[str, Callable[[], object]] = {}
    inner: dict[str, int] = {}
    for label, (function, options) in entries.items():
        announce(label)
        program = jax.jit(looped(function, outputs), compiler_options=options or None)
        runs[label], inner[label] = _sample_of(program.lower(np.int32(0), *used).compile(), used)
    announce("")
    return "loop", interleave(runs, seconds=seconds, inner=inner)


def _sample_of(compiled: Any, used: Sequence[Any]) -> tuple[Callable[[], object], int]:
    """A callable that takes about `SAMPLE_SECONDS`, and how many executions it makes."""

    def go(n: Any) -> object:
        return jax.block_until_ready(compiled(n, *used))

    go(np.int32(2))
    spent = min(_clocked(lambda: go(np.int32(_PROBE))) for _ in range(2))
    count = max(1, min(_MOST_INNER, math.ceil(SAMPLE_SECONDS * _PROBE / max(spent, 1e-7))))
    n = jax.device_put(np.int32(count))
    return lambda: go(n), count


def dispatch_overhead() -> float:
    """Median time of calling an empty jitted function [s]: what ``call`` times contain and ``loop`` times do not."""
    empty = jax.jit(lambda x: x)
    x = jax.device_put(np.float32(0))
    jax.block_until_ready(empty(x))
    run = {"empty": lambda: jax.block_until_ready(empty(x))}
    return interleave(run, seconds=0.02, least=20)["empty"].median


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
