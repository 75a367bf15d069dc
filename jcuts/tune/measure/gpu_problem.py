"""Measures one tuning problem on a GPU: all kernels by CUDA events, the best few against XLA in chains.  Imports JAX.

Candidates may run here before they were verified: a lost context ends the process, and the candidate announced last is
blamed.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax
import jax.export
import numpy as np

from jcuts.base import fingerprint
from jcuts.base.errors import NativeError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.tune.choice import LIBRARY, SCREENED
from jcuts.tune.measure import cuda_driver, gpu_launch, gpu_timing
from jcuts.tune.measure.statistics import HOPELESS, Samples
from jcuts.tune.problem import Problem
from jcuts.tune.verify.inputs import dtype_of
from jcuts.xla.cpu_ffi_call import call_kernel

BEHIND = 1.5
"""Where the quick screening finds every kernel this many times slower than XLA, none is timed any further."""

SMALL_BYTES = 64 << 20
"""Chains with operands of at most this many bytes run once, side by side, before any is timed."""

LARGE_BYTES = 16 << 20
"""Operands of so many bytes are large to chains of calls that compile."""
FEWEST = 2
"""Executions that are enough with large operands."""

Announce = Callable[[str], None]
Function = Callable[..., Any]

_lowered: dict[str, Any] = {}  # XLA's chains that compile ahead, by the problem's file
_compiling: dict[Future[Any], str] = {}
spent: list[tuple[float, str]] = []  # what it took [s], and the problem's name
_slow: set[str] = set()  # of these, such as `compiles_in_calls`
_ran: set[str] = set()  # of these, such as have run
_by_groups: dict[str, bool] = {}
_GROUPS = re.compile(r"feature_group_count = ([2-9]|[0-9]{2,})")
_ahead: dict[str, Any] = {}  # compiled ones
_kernel_chains: dict[tuple[str, str], Future[Any]] = {}  # of kernels, by the problem's file and the label


def compile_ahead(
    problems: Mapping[str, tuple[Problem, Function]],
    announce: Announce,
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    *,
    alone: bool = False,
) -> int:
    """Compiles the chains of XLA's side, some at once.  One that fails is left to `measure`, where it fails again.

    It comes back when what is left keeps the threads busy no more: `run_ahead` waits for the rest.

    Args: problems: file of each -> it and XLA's function; announce: is told of every step; options: file -> options of
        the compiler; alone: whether the host has nothing else to do.
    Returns: how many are compiled, or will be.
    """
    made = 0
    for path, (problem, function) in problems.items():
        announce("")
        _ahead.pop(path, None)  # what was compiled for it before was with parts apart, perhaps
        specs = [jax.ShapeDtypeStruct(i.shape, dtype_of(i.dtype)) for i in problem.inputs]
        try:
            shape = gpu_timing.layout(function, specs, executions(problem))
            _lowered[path] = gpu_timing.lowered(function, shape, specs, dict(options.get(path, {})))
        except Exception as error:
            print(f"{problem.name} is not lowered ahead: {error}", file=sys.stderr)
        else:
            if compiles_in_calls(problem):
                _slow.add(path)
            _compiling[_threads(_compile_threads(alone)).submit(_compiled, path, problem.name)] = path
            made += 1
    while len(_compiling) > _compile_threads(alone):
        _take(announce)
    return made


def run_ahead(announce: Announce) -> int:
    """Waits for what compiles ahead, and runs every chain once that is small, or whose library compiles in its calls.

    That takes the host seconds for a chain of convolutions by groups: those that leave room for others beside them have
    run as soon as they were compiled.

    Returns: how many ran.
    """
    wait_ahead(announce)
    todo = {path: _bytes(program) for path, program in _lowered.items() if path in _ahead and path not in _ran}
    small = [path for path, size in todo.items() if size <= SMALL_BYTES]
    large = [path for path in todo if path in _slow and path not in small]
    waves = [small] if small else []
    room = 0
    for path in large:
        need = _needs(_ahead[path], _lowered[path])
        if need > room:
            waves.append([])
            room = gpu_timing.MOST_BYTES
        waves[-1].append(path)
        room -= need
    for wave in waves:
        pool = _threads(_compile_threads(True))
        for run in as_completed([pool.submit(_run_once, _ahead[path], _lowered[path]) for path in wave]):
            announce("")
            if (error := run.exception()) is not None:
                print(f"a program did not run ahead: {error}", file=sys.stderr)
    made = sum(map(len, waves)) + len(_ran)
    _lowered.clear()
    _slow.clear()
    _ran.clear()
    return made


def wait_ahead(announce: Announce) -> None:
    """Waits for what compiles ahead."""
    while _compiling:
        _take(announce)
    left = {future for future in _kernel_chains.values() if not future.done()}
    while left:
        announce("")
        left = wait(left, return_when=FIRST_COMPLETED).not_done


def kernels_ahead(path: str, problem: Problem, library: Function, kernels: Mapping[str, CompiledKernel]) -> int:
    """Compiles the chains of a problem's kernels, side by side with what others compile; nothing runs.

    Args: path: the problem's file; library: XLA's side of it.
    Returns: how many will be compiled.
    """
    specs = [jax.ShapeDtypeStruct(i.shape, dtype_of(i.dtype)) for i in problem.inputs]
    made = 0
    try:
        shape = gpu_timing.layout(library, specs, executions(problem))
        for label, kernel in kernels.items():
            program = gpu_timing.lowered(functools.partial(call_kernel, kernel), shape, specs, {})
            _kernel_chains[path, label] = _threads(_compile_threads(True)).submit(program.compile)
            made += 1
    except Exception as error:  # `measure` meets it again
        print(f"kernels of {problem.name} are not lowered ahead: {error}", file=sys.stderr)
    return made


def _chains_of(
    path: str, bench: gpu_timing.ChainBenchmark, entries: Mapping[str, tuple[Function, dict[str, Any]]]
) -> dict[str, Any]:
    """Compiled chains of a problem: those that were compiled ahead, and the others now."""
    found = {label: _kernel_chains[path, label] for label in entries if (path, label) in _kernel_chains}
    ready = {label: future.result() for label, future in found.items() if future.exception() is None}
    ready |= bench.compiled({label: entry for label, entry in entries.items() if label not in ready})
    return {label: ready[label] for label in entries}


def _compiled(path: str, name: str) -> Any:
    start = time.perf_counter()
    try:
        program = _lowered[path].compile()
    finally:
        spent.append((time.perf_counter() - start, name))
    if path in _slow:
        start = time.perf_counter()
        try:
            if _needs(program, _lowered[path]) * _compile_threads(True) <= gpu_timing.MOST_BYTES:
                _run_once(program, _lowered[path])
                _ran.add(path)
                spent.append((time.perf_counter() - start, f"{name}'s first run"))
        except Exception as error:
            print(f"{name} did not run ahead: {error}", file=sys.stderr)
    return program


def slowest(count: int = 6) -> str:
    """What the threads took in all since the last call, and for whom most: for the log."""
    total, most = sum(seconds for seconds, _ in spent), sorted(spent, reverse=True)[:count]
    cores = sum(os.times()[:4])  # since the process began: its threads and its children
    text = f"{total:.1f} s of threads, {cores:.0f} s of cores, most for "
    text += ", ".join(f"{name} {seconds:.2f}" for seconds, name in most)
    spent.clear()
    return text


def _take(announce: Announce) -> None:
    """Waits until one more chain is compiled."""
    announce("")
    for future in wait(_compiling, return_when=FIRST_COMPLETED).done:
        path = _compiling.pop(future)
        if future.exception() is None:
            _ahead[path] = future.result()


def _compile_threads(alone: bool) -> int:
    """Threads that compile ahead: XLA times its algorithms meanwhile, and a host that is too busy spoils that.

    Half of their time and more they wait for each other.  With more of them programs are ready no sooner: 110 took an
    H200's process 47 s with 6 threads, then 12, and 49 s with 10, then 16.
    """
    return max(2, fingerprint.usable_cores() * (6 if alone else 3) // 8)


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="jcuts-ahead")


def executions(problem: Problem) -> int:
    """Most executions in a chain of a problem: few where XLA's library compiles anew for each.

    Large operands are not in the cache when an execution begins, and a clock is fine enough for what they take.
    """
    if not compiles_in_calls(problem):
        return gpu_timing.CHAIN
    size = sum(math.prod(i.shape) * dtype_of(i.dtype).itemsize for i in problem.inputs)
    return gpu_timing.LEAST if size < LARGE_BYTES else FEWEST


def compiles_in_calls(problem: Problem) -> bool:
    """Whether cuDNN may compile a kernel when a call first runs: for convolutions by groups, a third of a second."""
    if problem.digest not in _by_groups:
        text = jax.export.deserialize(bytearray(problem.library)).mlir_module() if problem.library else ""
        _by_groups[problem.digest] = _GROUPS.search(text) is not None
    return _by_groups[problem.digest]


def _bytes(program: Any) -> int:
    """What the operands of a lowered program take."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(program.args_info))


def _needs(compiled: Any, program: Any) -> int:
    """Bytes that a run takes."""
    return _bytes(program) + compiled.memory_analysis().temp_size_in_bytes


def _run_once(compiled: Any, program: Any) -> None:
    args, _ = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), program.args_info)
    jax.block_until_ready(compiled(*args))


def measure(
    path: str,
    library: Function,
    inputs: Sequence[np.ndarray],
    kernels: Mapping[str, CompiledKernel],
    others: Mapping[str, tuple[Function, dict[str, Any]]],
    *,
    seconds: float,
    finalists: int,
    mixed: bool,
    announce: Announce,
    most: int = gpu_timing.CHAIN,
    expected: float | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[str, tuple[str, Samples]], dict[str, float]]:
    """Times of all candidates of a problem.

    Args:
        path: the problem's file; library: XLA's side, jitted; inputs: one set of operands.
        kernels: label -> kernel; others: label -> (function, XLA compiler options).
        seconds: most wall time for the samples of one; finalists: kernels that are timed in chains.
        mixed: whether kernels that are far behind XLA are of no interest.
        most: executions in a chain (`executions`).
        expected: XLA's time [s] where it is not to be measured.
        options: of the compiler, for XLA's side.
    Returns: label -> (method, samples [s per execution]), and what the parts of this took [s].
    """
    found: dict[str, tuple[str, Samples]] = {}
    parts: dict[str, float] = {}
    last = time.perf_counter()

    def done(part: str) -> None:
        nonlocal last
        parts[part], last = time.perf_counter() - last, time.perf_counter()

    with _eliminate():
        jax.block_until_ready(jax.device_put(np.float32(0)))  # the primary context is XLA's before it is ours
        announce("")
        bench = gpu_timing.ChainBenchmark(library, inputs, most)
        done("operands")
        if expected is None:
            bench.add(LIBRARY, _ahead.pop(path, None) or bench.compiled({LIBRARY: (library, dict(options))})[LIBRARY])
        done("xla")
        chosen = list(kernels)
        if chosen:
            device = cuda_driver.device()
            made = {label: gpu_launch.GpuLauncher(kernel, device) for label, kernel in kernels.items()}
            behind = math.inf
            if mixed:
                behind = BEHIND * (bench.quick(LIBRARY) if expected is None else expected)
            quick = gpu_launch.screen(made, inputs, announce=announce, there=bench.addresses(), limit=behind)
            announce("")
            best = {label: min(samples.seconds) for label, samples in quick.items()}
            ranked = sorted(best, key=lambda label: best[label])
            limit = min(behind, HOPELESS * best[ranked[0]])
            chosen = [label for label in ranked[:finalists] if best[label] <= limit]
            found = {label: (SCREENED, quick[label]) for label in quick if label not in chosen}
        done("screening")
        entries = {label: (functools.partial(call_kernel, kernels[label]), {}) for label in chosen} | dict(others)
        for label, program in _chains_of(path, bench, entries).items():
            announce(label)
            bench.add(label, program)
        done("chains")
        announce("")
        if bench.programs:
            found |= {label: ("chain", samples) for label, samples in bench.race(seconds).items()}
        done("race")
    return found, parts


@contextmanager
def _eliminate() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        ours = isinstance(error, NativeError) and (gpu_launch.is_context_lost(error) or cuda_driver.is_lost(error))
        if ours or gpu_launch.message_is_context_loss(str(error)):
            print(error, file=sys.stderr, flush=True)
            os._exit(70)
        raise
