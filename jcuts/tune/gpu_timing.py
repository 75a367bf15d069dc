"""Times CUDA kernels and XLA programs of one problem against each other, by one method.  Imports JAX.

A program is timed as a jitted chain of executions on inputs of their own, together larger than the L2 cache, each
waiting for the one before, inside CUDA graphs as far as XLA makes them: what a subset costs inside a larger function.
Both kinds of candidate take the same path.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import lax

from jcuts.tune.noise import Samples, race

CHAIN = 16
LAUNCHES = 4  # chains per sample
COLD_BYTES = 192 << 20  # of rotated operands: three times the largest L2 cache there is
MOST_BYTES = 8 << 30
OPTIONS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}


def chained(function: Callable[..., Any]) -> Callable[..., Any]:
    """One execution per set of operands, in order; gives the last results."""

    def run(sets: Sequence[Sequence[Any]]) -> Any:
        ready: Any = ()
        for operands in sets:
            operands, ready = lax.optimization_barrier((tuple(operands), ready))
            ready = function(*operands)
        return ready

    return run


def compare(
    entries: dict[str, tuple[Callable[..., Any], dict[str, Any]]], inputs: Sequence[np.ndarray], *, seconds: float,
    announce: Callable[[str], None],
) -> tuple[str, dict[str, Samples]]:  # fmt: skip
    """Interleaved times of traceable functions on the default device.

    Args: entries: label -> (function of the operands, XLA compiler options); inputs: one set of operands; seconds: most
        wall time for the samples of one; announce: is told which label runs next.
    Returns: the method, and samples [s per execution] of every label.
    """
    one = max(1, sum(x.nbytes for x in inputs))
    distinct = max(1, min(CHAIN, COLD_BYTES // one + 1, MOST_BYTES // one))
    copies = [tuple(jax.device_put(x) for x in inputs) for _ in range(distinct)]
    sets = [copies[k % distinct] for k in range(CHAIN)]
    lowered = {
        label: jax.jit(chained(function), compiler_options={**OPTIONS, **options}).lower(sets)
        for label, (function, options) in entries.items()
    }
    # Compiling takes longer than measuring; it runs none of the kernels.
    with ThreadPoolExecutor(len(lowered)) as pool:
        compiled = dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))
    runs: dict[str, Callable[[], object]] = {}
    for label, program in compiled.items():
        announce(label)
        runs[label] = _sample(program, sets)
        runs[label]()
    announce("")
    return "chain", race(runs, seconds=seconds, inner=dict.fromkeys(runs, CHAIN * LAUNCHES))


def _sample(compiled: Any, sets: Any) -> Callable[[], object]:
    def run() -> object:
        out = None
        for _ in range(LAUNCHES):
            out = compiled(sets)
        return jax.block_until_ready(out)

    return run


@functools.cache
def overhead() -> float:
    """Median time of calling an empty jitted function [s]."""
    empty = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.float32(0))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(empty(x))
        times.append(time.perf_counter() - start)
    return float(np.median(times))
