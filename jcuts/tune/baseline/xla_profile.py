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

from jcuts.base.errors import summary
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.trace.precision import asked
from jcuts.tune.baseline import autotune_cache, xplane
from jcuts.tune.baseline.hlo_attribution import SCOPE, equation_seconds

_log = logging.getLogger("jcuts.tune")
PICOSECONDS = 10**12
STEPS = 3
"""Runs under the profiler; of each instruction the shortest counts, as something else may have used the GPU."""
NO_GRAPHS: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""}
"""Kernels inside CUDA graphs are recorded without the instruction that they belong to."""
MODULE = "jit_jcuts_profile"
"""Name of the HLO module that is profiled."""
LEAST_ATTRIBUTED = 90
"""Percentage of the kernels' time that must belong to equations."""
PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
"""Primitives of which one variant has the one where another has the other."""
DATA_MOVEMENT = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "dynamic_update_slice",
        "iota",
        "pad",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)
"""Primitives that only move data: variants differ in them (a concatenation in place reads slices), XLA fuses them."""
PERCENT = 100
PATIENCE = 60
"""Longest wait for a profile [s]."""


def kind(eqn: Any) -> str:
    """Operation, types and extents that XLA's time of an equation depends on, whatever its layouts; '' for loops.

    Extents of each operand, and operands, are sorted; of products their number of elements counts alone, so that a
    convolution and the same product with its operands turned have one kind.
    """
    name = jaxapi.primitive_name(eqn)
    if jaxapi.inner_jaxprs(eqn):
        return ""
    read, written = (_arrays(eqn.invars), _arrays(eqn.outvars))
    if name in PRODUCTS:
        sizes = [sorted((math.prod(a.shape), a.dtype.name) for a in avals) for avals in (read, written)]
        return f"product {sizes} {bool(asked(eqn.params.get('precision')))}"
    return f"{name} {sorted(map(_extents, read))} {sorted(map(_extents, written))}"


def _arrays(atoms: Sequence[Any]) -> list[Any]:
    """Types of arrays; scalars, and what is no array, say nothing."""
    return [atom.aval for atom in atoms if getattr(atom.aval, "shape", ())]


def _extents(aval: Any) -> list[Any]:
    return [aval.dtype.name, math.prod(aval.shape), *sorted(n for n in aval.shape if n > 1)]


def equation_times(seconds: Mapping[str, float], text: str) -> dict[int, float]:
    """Seconds that plain XLA's program spends on every equation of a flat jaxpr, by its number.

    Args: seconds: of every HLO instruction; text: its optimised module, with name scopes.
    Raises: RuntimeError: nothing was recorded, or too little of it belongs to equations.
    """
    if not seconds:
        raise RuntimeError("the profiler recorded no kernel")
    times = equation_seconds(text, seconds)
    known, total = math.fsum(times.values()), math.fsum(seconds.values())
    if PERCENT * known < LEAST_ATTRIBUTED * total:
        raise RuntimeError(f"only {known / total:.0%} of the kernels' time belong to equations")
    return times


def lowered_in_scopes(closed: jaxapi.Closed, leaves: Sequence[Any]) -> Any:
    """A flat jaxpr's program (`jax.stages.Lowered`) whose HLO instructions carry their equations' numbers.

    Args: closed: without effects; leaves: concrete arguments, which a call does not use up.
    """

    def jcuts_profile(*args: Any) -> Any:
        return jaxapi.eval_in_scopes(closed, SCOPE, *args)

    options = {**autotune_cache.known_options(NO_GRAPHS), **autotune_cache.options()}
    return jax.jit(jcuts_profile, compiler_options=options or None).lower(*leaves)


def instruction_profile(compiled: Any, leaves: Sequence[Any]) -> tuple[dict[str, float], str]:
    """Device time of every HLO instruction of a program [s], and its optimised module, with name scopes.

    Args: compiled: a program of `lowered_in_scopes`; leaves: its arguments.
    Raises: RuntimeError: another profile is being taken; JAX's own errors.  Nothing recorded is no error.
    """
    return instruction_seconds(lambda: compiled(*leaves), MODULE), compiled.as_text() or ""


def instruction_seconds(call: Callable[[], Any], module: str, steps: int = STEPS) -> dict[str, float]:
    """Device time of every HLO instruction in one execution of a program, the shortest of some [s].

    Args: module: name of the program's HLO module: something else may run on the device.
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
            for name, seconds in _recorded(place, module).items():
                found[name].append(seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {name: min(times) for name, times in found.items() if len(times) == steps}


def _recorded(folder: Path, module: str) -> dict[str, float]:
    """Device time by HLO instruction of what was recorded of a module in a folder [s].

    Raises: RuntimeError: a file that cannot be read.
    """
    found: dict[str, float] = defaultdict(float)
    try:
        for path in folder.rglob("*.xplane.pb"):
            for event in xplane.events(path, is_gpu, is_stream):
                if "hlo_op" in event.stats and event.stats.get("hlo_module", module).startswith(module):
                    found[event.stats["hlo_op"]] += event.picoseconds / PICOSECONDS
    except (ValueError, OSError) as error:
        raise RuntimeError(f"a profile cannot be read: {summary(error)}") from error
    return found


def is_gpu(plane: str) -> bool:
    """Whether a profile's plane of this name has a GPU's kernels."""
    return plane.startswith("/device:GPU")


def is_stream(line: str) -> bool:
    """Whether a line of this name has the kernels of a stream, which others sum up."""
    return line.startswith("Stream")


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
        return cls({key: math.fsum(mine) / len(mine) for key, mine in found.items() if key})

    def seconds(self, eqns: Sequence[Any]) -> float | None:
        """Time of a region [s]; None where it has an operation that the program does not have, or a loop."""
        total = 0.0
        for eqn in eqns:
            known, name = self._seconds.get(kind(eqn)), jaxapi.primitive_name(eqn)
            if (known is None and name not in DATA_MOVEMENT) or (not known and name in PRODUCTS):
                return None  # a product without a time is part of another's call
            total += known or 0.0
        return total or None


class RegionProfiler:
    """Takes the profile of a program on another thread, and tells regions' times by it.

    Args: closed: the program; leaves: the call's concrete arguments.
    """

    def __init__(self, closed: jaxapi.Closed, leaves: Sequence[Any]) -> None:
        self._closed, self._leaves = closed, leaves
        self._flat: jaxapi.Closed | None = None
        self._lowered: Any = None
        self._compiled: Any = None
        self._times: OperationTimes | None = None
        self._done = threading.Event()
        self.total: float | None = None
        """Seconds of all kernels in one execution; None as long as nothing is known."""

    def lower(self) -> None:
        """Traces the program that is profiled, on the thread that plans; without it there is no profile."""
        try:
            self._flat = inline(self._closed)
            self._lowered = lowered_in_scopes(self._flat, self._leaves)
        except Exception as error:
            _log.info("plain XLA is not profiled: %s", summary(error))

    def compile(self) -> None:
        """Compiles it, on the GPU. Raises: JAX's own errors, as where it does not fit into the memory."""
        if self._lowered is not None:
            self._compiled = self._lowered.compile()

    def run(self) -> None:
        """Takes the profile. Raises: as `equation_times` and `instruction_profile`; then nothing is known."""
        try:
            start = time.perf_counter()
            if self._compiled is None or self._flat is None:
                raise RuntimeError("the program was not compiled")
            times = equation_times(*instruction_profile(self._compiled, self._leaves))
            self._times = OperationTimes.of(self._flat, times)
            self.total = math.fsum(times.values())
            _log.info("profile of plain XLA: %.6f s of kernels in %.2f s", self.total, time.perf_counter() - start)
        finally:
            self._lowered = self._compiled = None  # its memory
            self._done.set()

    @property
    def is_known(self) -> bool:
        """Whether there is a profile; waits for it."""
        if not self._done.wait(PATIENCE):
            self._done.set()  # nobody waits again
        return self._times is not None

    def close(self) -> None:
        """Nobody need wait any more."""
        self._done.set()

    def seconds(self, eqns: Sequence[Any]) -> float | None:
        """XLA's time of a region [s], None where it is not known; waits for the profile."""
        times = self._times if self.is_known else None
        return None if times is None else times.seconds(eqns)
