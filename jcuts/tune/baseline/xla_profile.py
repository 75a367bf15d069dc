"""In-situ profile of plain XLA's program (`jax.profiler`, CUPTI activity records): XLA's time of every operation.

One compilation and a few runs of the whole program replace the compilation of XLA's code for every region, which is
what tuning waits for most: XLA times dozens of kernels for each matmul and convolution.  What it has timed for plain
``jax.jit``'s own program it need not time again here.  A region's time is the sum of its operations', each the mean of
those of its kind in the program, in the fusions that they have there (`tune.baseline.hlo_attribution`): variants of a
function rewrite some operations and keep the others.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.baseline import autotune_cache
from jcuts.tune.baseline.hlo_attribution import SCOPE, equation_seconds

_log = logging.getLogger("jcuts.tune")
STEPS = 3
"""Runs under the profiler; of each instruction the shortest counts, as something else may have used the GPU."""
NO_GRAPHS: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""}
"""Kernels inside CUDA graphs are recorded without the instruction that they belong to."""
PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
"""Primitives of which one variant has the one where another has the other."""
LAYOUT = frozenset(
    {"transpose", "reshape", "squeeze", "broadcast_in_dim", "rev", "copy", "convert_element_type", "iota", "pad"}
)
"""Primitives that only move data: variants differ in them, and XLA may fuse them anywhere."""
PATIENCE = 60.0
"""Longest wait for a profile [s]."""


def kind(eqn: Any) -> str:
    """Operation and extents that XLA's time of an equation depends on, whatever its layouts.

    Extents of each operand, and operands, are sorted; of products their number of elements counts alone, so that a
    convolution and the same product with its operands turned have one kind.
    """
    name = jaxapi.primitive_name(eqn)
    read, written = (_shapes(eqn.invars), _shapes(eqn.outvars))
    if name in PRODUCTS:
        return f"product {sorted(map(math.prod, read))} {list(map(math.prod, written))}"
    return f"{name} {sorted(map(_extents, read))} {sorted(map(_extents, written))}"


def _shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    """Shapes of arrays; those of scalars, and of what is no array, say nothing."""
    return [shape for atom in atoms if (shape := getattr(atom.aval, "shape", ()))]


def _extents(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape), *sorted(n for n in shape if n > 1)]


def equation_times(closed: jaxapi.Closed, leaves: Sequence[Any]) -> dict[int, float]:
    """Seconds that plain XLA's program spends on every equation of a flat jaxpr, by its number.

    Args: closed: without effects; leaves: concrete arguments, which are not used up.
    Raises: RuntimeError: nothing was recorded, or another profile is being taken; JAX's own errors where the program
        does not fit into the memory.
    """

    def scoped(*args: Any) -> Any:
        return jaxapi.eval_in_scopes(closed, SCOPE, *args)

    options = {**autotune_cache.known_options(NO_GRAPHS), **autotune_cache.options()}
    compiled = jax.jit(scoped, compiler_options=options or None).lower(*leaves).compile()
    seconds = instruction_seconds(lambda: compiled(*leaves))
    if not seconds:
        raise RuntimeError("the profiler recorded no kernel")
    return equation_seconds(compiled.as_text() or "", seconds)


def instruction_seconds(call: Callable[[], Any], steps: int = STEPS) -> dict[str, float]:
    """Device time of every HLO instruction in one execution of a program, the shortest of some [s].

    Raises: RuntimeError: another profile is being taken.
    """
    jax.block_until_ready(call())
    folder = Path(tempfile.mkdtemp(prefix="jcuts-profile-"))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    try:
        found: dict[str, list[float]] = defaultdict(list)
        for step in range(steps):
            place = folder / str(step)
            jax.profiler.start_trace(str(place), profiler_options=options)
            try:
                jax.block_until_ready(call())
            finally:
                jax.profiler.stop_trace()
            for name, seconds in _recorded(place).items():
                found[name].append(seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {name: min(times) for name, times in found.items() if len(times) == steps}


def _recorded(folder: Path) -> dict[str, float]:
    """Device time by HLO instruction of what was recorded in a folder [s]."""
    found: dict[str, float] = defaultdict(float)
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for event in (event for line in plane.lines if line.name.startswith("Stream") for event in line.events):
                name = next((value for key, value in event.stats if key == "hlo_op"), None)
                if name is not None:
                    found[str(name)] += event.duration_ns * 1e-9
    return found


class OperationTimes:
    """XLA's time by kind of operation. Args: seconds: mean of all of a kind [s]."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    @classmethod
    def of(cls, closed: jaxapi.Closed, times: Mapping[int, float]) -> OperationTimes:
        """Those of a program. Args: times: of its equations, by number [s]."""
        found: dict[str, list[float]] = defaultdict(list)
        for number, eqn in enumerate(closed.jaxpr.eqns):
            found[kind(eqn)].append(times.get(number, 0.0))
        return cls({key: math.fsum(mine) / len(mine) for key, mine in found.items()})

    def seconds(self, eqns: Sequence[Any]) -> float | None:
        """Time of a region [s]; None where it has an operation that the program does not have."""
        total = 0.0
        for eqn in eqns:
            known = self._seconds.get(kind(eqn))
            if known is None and jaxapi.primitive_name(eqn) not in LAYOUT:
                return None
            total += known or 0.0
        return total or None


class RegionProfiler:
    """Takes the profile of a program on another thread, and tells regions' times by it.

    Args: closed: the program; leaves: the call's concrete arguments.
    """

    def __init__(self, closed: jaxapi.Closed, leaves: Sequence[Any]) -> None:
        self._closed, self._leaves = closed, leaves
        self._times: OperationTimes | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Takes the profile. Raises: as `equation_times`; then nothing is known."""
        try:
            start = time.perf_counter()
            flat = inline(self._closed)
            times = equation_times(flat, self._leaves)
            self._times = OperationTimes.of(flat, times)
            total = math.fsum(times.values())
            _log.info("profile of plain XLA: %.3f ms of kernels in %.2f s", total * 1e3, time.perf_counter() - start)
        finally:
            self._done.set()

    def close(self) -> None:
        """Nobody need wait any more."""
        self._done.set()

    def seconds(self, eqns: Sequence[Any]) -> float | None:
        """XLA's time of a region [s], None where it is not known; waits for the profile."""
        if not self._done.wait(PATIENCE):
            self._done.set()  # nobody waits again
        return None if self._times is None else self._times.seconds(eqns)
