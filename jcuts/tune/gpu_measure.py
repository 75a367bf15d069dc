"""Times one problem on a GPU: kernels by CUDA events, the best few against XLA in chains.  Imports JAX.

Candidates may run here before anyone has looked whether they are right: a lost context ends the process, and the
candidate announced last is to blame.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jcuts.base import fingerprint
from jcuts.base.errors import NativeError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.tune import driver, gpu, gpu_timing
from jcuts.tune.choice import LIBRARY, SCREENED
from jcuts.tune.noise import HOPELESS, Samples
from jcuts.tune.problem import Problem
from jcuts.tune.values import dtype_of
from jcuts.xla.call import call_kernel

BEHIND = 1.5
"""Where the quick screening finds every kernel this many times slower than XLA, none is timed any further."""

SMALL_BYTES = 64 << 20
"""Chains with operands of at most this many bytes run once, side by side, before any is timed."""

Announce = Callable[[str], None]
Function = Callable[..., Any]

_ahead: dict[str, Any] = {}  # XLA's chains, by the problem's file


def compile_ahead(problems: Mapping[str, tuple[Problem, Function]], announce: Announce) -> int:
    """Compiles the chains of XLA's side, some at once.  One that fails is left to `measure`, where it fails again.

    Then every small one runs once: some libraries compile on the host when a call is executed first, seconds for a
    chain, and do that side by side here.

    Args: problems: file of each -> it and XLA's function; announce: is told of every step.
    Returns: how many were compiled.
    """
    lowered = {}
    for path, (problem, function) in problems.items():
        announce("")
        specs = [jax.ShapeDtypeStruct(i.shape, dtype_of(i.dtype)) for i in problem.inputs]
        try:
            lowered[path] = gpu_timing.lowered(function, gpu_timing.layout(function, specs), specs, {})
        except Exception as error:
            print(f"{problem.name} is not lowered ahead: {error}", file=sys.stderr)
    # XLA times its algorithms meanwhile, one after the other: a host that is too busy spoils that.
    with ThreadPoolExecutor(max(2, fingerprint.usable_cores() // 4)) as pool:
        made = {pool.submit(one.compile): path for path, one in lowered.items()}
        for future in as_completed(made):
            announce("")
            if future.exception() is None:
                _ahead[made[future]] = future.result()
        small = [path for path in made.values() if path in _ahead and _bytes(lowered[path]) <= SMALL_BYTES]
        for run in as_completed([pool.submit(_run_once, _ahead[path], lowered[path]) for path in small]):
            announce("")
            if (error := run.exception()) is not None:
                print(f"a program did not run ahead: {error}", file=sys.stderr)
    return len(made)


def _bytes(program: Any) -> int:
    """What the operands of a lowered program take."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(program.args_info))


def _run_once(compiled: Any, program: Any) -> None:
    args, _ = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), program.args_info)
    jax.block_until_ready(compiled(*args))


def measure(
    path: str, library: Function, inputs: Sequence[np.ndarray], kernels: Mapping[str, CompiledKernel],
    others: Mapping[str, tuple[Function, dict[str, Any]]], *, seconds: float, finalists: int, mixed: bool,
    announce: Announce,
) -> tuple[dict[str, tuple[str, Samples]], dict[str, float]]:  # fmt: skip
    """Times of all candidates of a problem.

    Args:
        path: the problem's file; library: XLA's side, jitted; inputs: one set of operands.
        kernels: label -> kernel; others: label -> (function, XLA compiler options).
        seconds: most wall time for the samples of one; finalists: kernels that are timed in chains.
        mixed: whether kernels that are far behind XLA are of no interest.
    Returns: label -> (method, samples [s per execution]), and what the parts of this took [s].
    """
    found: dict[str, tuple[str, Samples]] = {}
    parts: dict[str, float] = {}
    last = time.perf_counter()

    def done(part: str) -> None:
        nonlocal last
        parts[part], last = time.perf_counter() - last, time.perf_counter()

    with _to_the_death():
        jax.block_until_ready(jax.device_put(np.float32(0)))  # the primary context is XLA's before it is ours
        announce("")
        bench = gpu_timing.Bench(library, inputs)
        done("operands")
        bench.add(LIBRARY, _ahead.pop(path, None) or bench.compiled({LIBRARY: (library, {})})[LIBRARY])
        done("xla")
        chosen = list(kernels)
        if chosen:
            device = driver.device()
            made = {label: gpu.GpuLauncher(kernel, device) for label, kernel in kernels.items()}
            quick = gpu.screen(made, inputs, announce=announce, there=bench.addresses())
            announce("")
            best = {label: min(samples.seconds) for label, samples in quick.items()}
            ranked = sorted(best, key=lambda label: best[label])
            limit = HOPELESS * best[ranked[0]]
            if mixed:
                limit = min(limit, BEHIND * bench.quick(LIBRARY))
            chosen = [label for label in ranked[:finalists] if best[label] <= limit]
            found = {label: (SCREENED, quick[label]) for label in quick if label not in chosen}
        done("screening")
        entries = {label: (functools.partial(call_kernel, kernels[label]), {}) for label in chosen} | dict(others)
        for label, program in bench.compiled(entries).items():
            announce(label)
            bench.add(label, program)
        done("chains")
        announce("")
        found |= {label: ("chain", samples) for label, samples in bench.race(seconds).items()}
        done("race")
    return found, parts


@contextmanager
def _to_the_death() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        ours = isinstance(error, NativeError) and (gpu.lost(error) or driver.is_lost(error))
        if ours or gpu.tells_of_loss(str(error)):
            print(error, file=sys.stderr, flush=True)
            os._exit(70)
        raise
