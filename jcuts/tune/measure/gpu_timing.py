"""Times CUDA kernels and XLA programs of one problem against each other in chains of dependent executions.  Imports
JAX.

A program is timed as a jitted chain of executions on inputs of their own, together larger than the L2 cache, each
waiting for the one before, inside CUDA graphs as far as XLA makes them: what a subset costs inside a larger function.
The time is the device's (`tune.measure.cuda_event_timer`): the host's launch time of small kernels hides behind a delay
kernel. Both kinds of candidate take the same path.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jcuts.tune.measure.cuda_event_timer import stopwatch
from jcuts.tune.measure.statistics import Samples, interleave, race
from jcuts.xla import cuda_launcher

CHAIN = 8  # most executions in a chain
LEAST = 4
SHARED = 4  # an operand of less than the largest one's size over this is the same in all executions
LAUNCHES = 4
"""Most whole chains per sample."""
SAMPLE = 1e-3
"""Seconds that a sample takes at least, where fewer chains do."""
COLD_BYTES = 192 << 20  # of rotated operands: three times the largest L2 cache there is
MOST_BYTES = 8 << 30
OPTIONS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}


def executions_in_sequence(function: Callable[..., Any], rotated: Sequence[int]) -> Callable[..., Any]:
    """One execution per set of operands, in order.

    The device's time from before the first execution to after the last can be taken (`stopwatch`).
    Every result goes through the barrier before the next execution, and all of them to `cuda.keep`: XLA drops whatever
    nothing depends on, and merges executions on equal operands.  They are no results of the program: a call that
    returns many arrays takes longer than small kernels do, and its graph is updated to their addresses every time.

    Args: rotated: positions of the operands that differ from set to set; the others come as ``shared``.
    Returns: a function of (sets, shared), which gives a number that means nothing.
    """

    def run(sets: Sequence[Sequence[Any]], shared: Sequence[Any]) -> Any:
        results: list[Any] = []
        before: Any = ()
        for own in sets:
            operands = list(shared)
            for position, x in zip(rotated, own, strict=True):
                operands.insert(position, x)
            if operands and not results:
                smallest = min(range(len(operands)), key=lambda k: operands[k].size)
                operands[smallest] = cuda_launcher.begin(operands[smallest])
            operands, before = lax.optimization_barrier((tuple(operands), before))
            results.append(before)
            before = function(*operands)
        return cuda_launcher.keep(jax.tree.leaves([*results, before]))

    return run


@dataclass(frozen=True)
class Layout:
    """Chain layout: which operands differ between the executions, and the number of executions."""

    rotated: tuple[int, ...]
    count: int


def layout(function: Callable[..., Any], operands: Sequence[Any], most: int = CHAIN) -> Layout:
    """The chain of a function of operands of these shapes and dtypes.

    Only large operands are copied: the fewer arguments a program has, the sooner it is launched.

    Args: most: executions in a chain.
    """
    sizes = [math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in operands]
    rotated = tuple(k for k, size in enumerate(sizes) if SHARED * size >= max(sizes))
    one = max(1, sum(sizes[k] for k in rotated))
    made = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(function, *operands)))
    return Layout(rotated, max(1, min(most, max(LEAST, COLD_BYTES // one + 1), MOST_BYTES // (one + made))))


def lowered(function: Callable[..., Any], shape: Layout, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """The chain as a `jax.stages.Lowered`. Args: operands: arrays, or their shapes and dtypes."""
    own = tuple(operands[k] for k in shape.rotated)
    shared = tuple(x for k, x in enumerate(operands) if k not in shape.rotated)
    program = jax.jit(executions_in_sequence(function, shape.rotated), compiler_options={**OPTIONS, **options})
    return program.lower([own] * shape.count, shared)


class ChainBenchmark:
    """Chains of one problem's executions on the default device, each with operands of its own.

    Args: function: any of the problem's (all have its operands and results); inputs: one set of operands; most:
        executions in a chain.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[np.ndarray], most: int = CHAIN) -> None:
        self.inputs, self.layout = inputs, layout(function, inputs, most)
        first = tuple(jax.device_put(inputs[k]) for k in self.layout.rotated)
        self.sets = [first, *(tuple(x.copy() for x in first) for _ in range(self.layout.count - 1))]
        self.shared = tuple(jax.device_put(x) for k, x in enumerate(inputs) if k not in self.layout.rotated)
        self.watch = stopwatch() if inputs else None  # no operand, no mark before the first execution
        self.launches = 0  # of a chain in a sample: known once one has run
        self.programs: dict[str, Any] = {}  # no closures over this: the operands go with the last name of it
        self.compile_seconds = 0.0

    def addresses(self) -> list[list[int]]:
        """Where the operands of every execution lie."""
        jax.block_until_ready((self.sets, self.shared))
        found = []
        for own in self.sets:
            operands = list(self.shared)
            for position, x in zip(self.layout.rotated, own, strict=True):
                operands.insert(position, x)
            found.append([x.unsafe_buffer_pointer() for x in operands])
        return found

    def compiled(self, entries: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]) -> dict[str, Any]:
        """Compiles chains, all at once. Args: entries: label -> (function of the operands, XLA compiler options)."""
        if not entries:
            return {}
        start = time.perf_counter()
        made = {
            label: lowered(function, self.layout, self.inputs, options)
            for label, (function, options) in entries.items()
        }
        # Compiling takes longer than measuring; it runs none of the kernels.
        with ThreadPoolExecutor(len(made)) as pool:
            found = dict(zip(made, pool.map(lambda one: one.compile(), made.values()), strict=True))
        self.compile_seconds += time.perf_counter() - start
        return found

    def add(self, label: str, program: Any) -> None:
        """Takes a compiled chain into the race, and runs it once."""
        self.programs[label] = program
        if not self.launches:
            self.launches = 1
            self._run(program)
            start = time.perf_counter()
            self._run(program)
            enough = math.ceil(SAMPLE / (time.perf_counter() - start))
            self.launches = 1 if self.watch else min(enough, -(-CHAIN * LAUNCHES // self.layout.count))
        self._run(program)

    def _run(self, program: Any) -> object:
        out = None
        for _ in range(self.launches):
            out = program(self.sets, self.shared)
        return jax.block_until_ready(out)

    def _timed(self, label: str) -> Callable[[], object]:
        run = functools.partial(self._run, self.programs[label])
        return functools.partial(self.watch.seconds, run) if self.watch else run

    def quick(self, label: str, times: int = 3) -> float:
        """The shortest time of an execution in a few runs [s]."""
        runs = {label: self._timed(label)}
        found = interleave(runs, seconds=0.0, least=times, most=times, told=self.watch is not None)[label]
        return min(found.seconds) / (self.layout.count * self.launches)

    def race(self, seconds: float) -> dict[str, Samples]:
        """Samples of all [s per execution], taking turns. Args: seconds: most wall time for the samples of one."""
        runs = {label: self._timed(label) for label in self.programs}
        inner = dict.fromkeys(runs, self.layout.count * self.launches)
        return race(runs, seconds=seconds, inner=inner, told=self.watch is not None)


def compare(
    entries: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]],
    inputs: Sequence[np.ndarray],
    *,
    seconds: float,
    announce: Callable[[str], None],
) -> tuple[str, dict[str, Samples], float]:
    """Interleaved times of traceable functions.

    Args: entries: label -> (function of the operands, XLA compiler options); inputs: one set of operands; seconds: most
        wall time for the samples of one; announce: is told which label runs next.
    Returns: the method, samples [s per execution] of every label, and what compiling took [s].
    """
    bench = ChainBenchmark(next(iter(entries.values()))[0], inputs)
    for label, program in bench.compiled(entries).items():
        announce(label)
        bench.add(label, program)
    announce("")
    return "chain", bench.race(seconds), bench.compile_seconds


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
