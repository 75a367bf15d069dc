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
from jcuts.xla import cuda

CHAIN = 16  # most executions in a chain
LEAST = 4
SHARED = 4  # an operand of less than the largest one's size over this is the same in all executions
LAUNCHES = 4  # whole chains per sample
COLD_BYTES = 192 << 20  # of rotated operands: three times the largest L2 cache there is
MOST_BYTES = 8 << 30
OPTIONS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}


def chained(function: Callable[..., Any], rotated: Sequence[int]) -> Callable[..., Any]:
    """One execution per set of operands, in order.

    Every result goes through the barrier before the next execution, and all of them to `cuda.keep`: XLA drops whatever
    nothing depends on, and merges executions on equal operands.  They are no results of the program: a call that
    returns many arrays takes longer than small kernels do, and its graph is updated to their addresses every time.

    Args: rotated: positions of the operands that differ from set to set; the others come as ``shared``.
    Returns: a function of (sets, shared), which gives a number that means nothing.
    """

    def run(sets: Sequence[Sequence[Any]], shared: Sequence[Any]) -> Any:
        results = []
        before: Any = ()
        for own in sets:
            operands = list(shared)
            for position, x in zip(rotated, own, strict=True):
                operands.insert(position, x)
            operands, before = lax.optimization_barrier((tuple(operands), before))
            results.append(before)
            before = function(*operands)
        return cuda.keep(jax.tree.leaves([*results, before]))

    return run


def _sets(function: Callable[..., Any], inputs: Sequence[np.ndarray]) -> tuple[list[int], list[Any], tuple[Any, ...]]:
    """Which operands differ between executions, their copies for every execution, and the others.

    Only large operands are copied: the fewer arguments a program has, the sooner it is launched.
    """
    largest = max((x.nbytes for x in inputs), default=0)
    rotated = [k for k, x in enumerate(inputs) if SHARED * x.nbytes >= largest]
    one = max(1, sum(inputs[k].nbytes for k in rotated))
    made = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(function, *inputs)))
    count = max(1, min(CHAIN, max(LEAST, COLD_BYTES // one + 1), MOST_BYTES // (one + made)))
    first = tuple(jax.device_put(inputs[k]) for k in rotated)
    sets = [first, *(tuple(x.copy() for x in first) for _ in range(count - 1))]
    return rotated, sets, tuple(jax.device_put(x) for k, x in enumerate(inputs) if k not in rotated)


def compare(
    entries: dict[str, tuple[Callable[..., Any], dict[str, Any]]], inputs: Sequence[np.ndarray], *, seconds: float,
    announce: Callable[[str], None],
) -> tuple[str, dict[str, Samples], float]:  # fmt: skip
    """Interleaved times of traceable functions on the default device.

    Args: entries: label -> (function of the operands, XLA compiler options); inputs: one set of operands; seconds: most
        wall time for the samples of one; announce: is told which label runs next.
    Returns: the method, samples [s per execution] of every label, and what compiling took [s].
    """
    rotated, sets, shared = _sets(next(iter(entries.values()))[0], inputs)
    start = time.perf_counter()
    launches = -(-CHAIN * LAUNCHES // len(sets))
    lowered = {
        label: jax.jit(chained(function, rotated), compiler_options={**OPTIONS, **options}).lower(sets, shared)
        for label, (function, options) in entries.items()
    }
    # Compiling takes longer than measuring; it runs none of the kernels.
    with ThreadPoolExecutor(len(lowered)) as pool:
        compiled = dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))
    spent = time.perf_counter() - start
    runs: dict[str, Callable[[], object]] = {}
    for label, program in compiled.items():
        announce(label)
        runs[label] = _sample(program, (sets, shared), launches)
        runs[label]()
    announce("")
    return "chain", race(runs, seconds=seconds, inner=dict.fromkeys(runs, len(sets) * launches)), spent


def _sample(compiled: Any, operands: tuple[Any, ...], launches: int) -> Callable[[], object]:
    def run() -> object:
        out = None
        for _ in range(launches):
            out = compiled(*operands)
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
