"""Random programs on a GPU: what `runner` does on the CPU, with kernels for the GPU.

`on_gpu` replaces the three places where `runner` means the CPU: which kernels are chosen, how each is run between
fences, and where the float64 reference runs (here: always on the CPU, so that neither TF32 nor the approximations of
XLA's GPU code touch it).  ``interpreted=True`` needs no GPU: kernels are compiled for one, their PTX runs in the
tests' PTX machine, and XLA's part runs on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.random_programs import plans, runner
from jcuts.base import knobs
from jcuts.base.errors import AccuracyRejected, CompileRejected, NativeError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.fusion.partition_space import SpaceOptions
from jcuts.kernel_ir.program import Program
from jcuts.pipeline import computation
from jcuts.pipeline import passes as pipeline_passes
from jcuts.tune.measure import cuda_driver, gpu_launch
from jcuts.tune.verify.inputs import flushed, make_inputs
from jcuts.xla import cuda_launcher
from jcuts.xla import devices as xla_devices
from jcuts.xla.kernel_cache import kernel_for

CANDIDATES = 64
PRETENDED = xla_devices.Gpu("pretended H200", (9, 0), 132)
"""The GPU that kernels are compiled for where they are interpreted."""

refused: Counter[str] = Counter()
"""Schedules that the compiler turned down, by reason: another one was taken, or the subset was left to XLA."""
_programs: dict[str, Program] = {}
_gradual = ThreadPoolExecutor(1)
"""XLA's CPU threads take denormal numbers for zeros, and so do threads that they start; a GPU does not."""
_gradual.submit(int).result()


class ContextLost(Exception):
    """An error of the driver after which this process cannot use the GPU any more."""


def alive() -> bool:
    """Whether JAX can still compute on its device."""
    try:
        return float(jax.block_until_ready(jax.numpy.ones(8) + 1).sum()) == 16.0
    except Exception:  # whatever the runtime raises
        return False


# -- which kernels run ------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def every_kernel(seed: int) -> Iterator[tuple[list[computation.Computation], Any]]:
    """Every subset that has a form on the GPU runs a kernel with a random one of its schedules."""
    rng = np.random.default_rng([seed, 4])
    planned: list[computation.Computation] = []

    def choose(top: computation.Computation) -> None:
        planned.append(top)
        everywhere = top.walk()
        for level in everywhere:
            plans.other_cover(level, rng, SpaceOptions())
        computation.add_candidates((s for level in everywhere for s in level.subsets), "cuda")
        chosen: dict[str, Program | None] = {}
        for level in everywhere:
            level.leave_to_xla(lambda subset: "" if subset.ranked else "no kernel form on cuda")
            for subset in level.subsets:
                if subset.identity not in chosen:
                    chosen[subset.identity] = _schedule([p for p, _ in subset.ranked], rng)
                subset.chosen, subset.origin = chosen[subset.identity], "estimated"
            level.leave_to_xla(lambda subset: "" if subset.chosen is not None else "every schedule was refused")

    watch = plans.Watch()
    logger = logging.getLogger("jcuts")
    logger.addHandler(watch)
    try:
        with (
            plans.choosing(choose),
            knobs.scope(max_candidates=CANDIDATES, top_percent=100.0),
        ):
            yield planned, watch
    finally:
        logger.removeHandler(watch)
        pipeline_passes.forget()


def _schedule(ranked: Sequence[Program], rng: np.random.Generator) -> Program | None:
    """A random schedule that compiles; what the emitter refuses for a resource is not the tuner's candidate either."""
    places = [0] if rng.random() < 0.4 else []
    for place in [*places, *(int(k) for k in rng.permutation(len(ranked)))]:
        try:
            kernel = kernel_for(ranked[place])
        except CompileRejected as error:
            reason = "local memory" if "stack" in error.values else str(error.values.get("resource", ""))
            if not reason:
                raise
            refused[reason] += 1
            continue
        _programs[kernel.digest] = ranked[place]
        return ranked[place]
    return None


# -- each kernel between fences ---------------------------------------------------------------------------------------
def fenced(planned: Sequence[computation.Computation]) -> None:
    """Runs every kernel twice on fenced memory with different poison: equal bits, nothing written outside a result.

    Raises: AccuracyRejected; ContextLost where the kernel killed the context.
    """
    for kernel, subset in _kernels(planned):
        inputs = make_inputs(runner._problem(subset.closed, subset.identity), "normal", 5)
        launcher = gpu_launch.GpuLauncher(kernel, cuda_driver.device())
        try:
            one, other = launcher.run(inputs, 0xAB), launcher.run(inputs, 0xFF)
        except NativeError as error:
            raise ContextLost(error.message) from error
        for k, (a, b) in enumerate(zip(one, other, strict=True)):
            if a.tobytes() != b.tobytes():
                raise AccuracyRejected(f"result {k} differs from run to run, or is not written in full")


def _kernels(planned: Sequence[computation.Computation]) -> Iterator[tuple[CompiledKernel, Any]]:
    for top in planned:
        for subset in (s for level in top.walk() for s in level.subsets):
            if subset.chosen is not None:
                yield kernel_for(subset.chosen), subset


def _interpreted_only(planned: Sequence[computation.Computation]) -> None:
    """The PTX machine has its own fences and finds what is never written."""


# -- without a GPU ----------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=256)
def _ptx(digest: str) -> str:
    from jcuts.codegen.cuda.compile import ptx_of

    return ptx_of(_programs[digest], xla_devices.target())


def interpret(
    kernel: CompiledKernel,
    *operands: Any,
    place: tuple[int, int] | None = None,
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Any, ...]:
    """What `cuda.call_kernel` does, by the PTX machine; code of libdevice is evaluated as a data-flow graph.

    Results have memory of their own: ``aliases`` changes no value.
    """
    assert place is None  # no update in place is taken over (`_pretended`)
    from jcuts.kernel_ir.interpret import interpret as evaluate
    from tests.ptx import machine as ptx_machine

    def run(*values: Any) -> list[np.ndarray]:
        arrays = [np.ascontiguousarray(v).view(d).reshape(s) for v, (s, d) in zip(values, given, strict=True)]
        # In float64 the reference runs as XLA's CPU code does: denormal numbers are zeros.
        arrays = [flushed(a) if a.dtype == np.float64 else a for a in arrays]
        found = map(np.ascontiguousarray, _gradual.submit(machine, arrays).result())
        return [x.view(words.dtype).reshape(words.shape) for x, words in zip(found, returned, strict=True)]

    def machine(arrays: list[np.ndarray]) -> list[np.ndarray]:
        try:
            with np.errstate(all="ignore"):
                return ptx_machine.run_kernel(_ptx(kernel.digest), kernel, arrays, flushes=True)
        except ptx_machine.Fault as fault:
            if str(fault) != "library code":
                raise
            refused["not interpreted: library code"] += 1
            return [np.asarray(x) for x in evaluate(_programs[kernel.digest], arrays)]

    given = [(x.shape, x.dtype) for x in operands]
    results = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in kernel.outputs]
    returned = [jax.eval_shape(_words, x) for x in results]
    found = jax.pure_callback(run, returned, *map(_words, operands))
    return tuple(
        jax.lax.bitcast_convert_type(x, r.dtype) if r.dtype.itemsize == 8 else x
        for x, r in zip(found, results, strict=True)
    )


def _words(x: Any) -> Any:
    """Numbers of 64 bits as two words each: a callback on a thread of XLA's would take them for numbers of 32 bits."""
    return jax.lax.bitcast_convert_type(x, np.uint32) if x.dtype.itemsize == 8 else x


@contextlib.contextmanager
def _pretended() -> Iterator[None]:
    plan = pipeline_passes.optimize_jaxpr

    def for_cuda(closed: Any, settings: Any, *, platform: str, **more: Any) -> Any:
        return plan(closed, settings, platform="cuda", **more)

    with (
        mock.patch.object(xla_devices, "this", lambda: PRETENDED),
        mock.patch.object(pipeline_passes, "unusable", lambda platform: ""),
        mock.patch.object(pipeline_passes, "optimize_jaxpr", for_cuda),
        mock.patch.object(cuda_launcher, "call_kernel", interpret),
        mock.patch.object(pipeline_passes.inplace_update, "find_inplace_update", lambda level, subset: None),
    ):
        yield


# -- all of it --------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def on_gpu(interpreted: bool = False) -> Iterator[None]:
    """`runner.run` inside it runs programs on the GPU (or, ``interpreted``, without one)."""
    host = jax.local_devices(backend="cpu")[0]
    reference = runner._reference

    def on_host(closed: Any, *, noisy: bool) -> Callable[..., Any]:
        exact = reference(closed, noisy=noisy)

        def run(*values: Any) -> Any:
            with jax.default_device(host):
                return exact(*values)

        return run

    with contextlib.ExitStack() as stack:
        if interpreted:
            stack.enter_context(_pretended())
        stack.enter_context(mock.patch.object(runner, "every_kernel", every_kernel))
        stack.enter_context(mock.patch.object(runner, "fenced", _interpreted_only if interpreted else fenced))
        stack.enter_context(mock.patch.object(runner, "_reference", on_host))
        stack.enter_context(jax.default_matmul_precision("highest"))  # else XLA's own products are TF32
        yield
