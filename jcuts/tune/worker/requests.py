"""Request handlers of the measuring process: compile, make references, check, measure.

A request is a JSON object (see `tune.worker`); arrays and kernels travel as files in the parent's private folder.  JAX
is imported only by requests that need XLA.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jcuts.base.errors import AccuracyRejected, CandidateRejected, CompileRejected
from jcuts.base.stopwatch import timed
from jcuts.codegen.artifact import CompiledKernel
from jcuts.tune.baseline import autotune_cache, conv_relu_bound
from jcuts.tune.choice import LIBRARY, SCREENED
from jcuts.tune.kernel_file import read_kernel, write_kernel
from jcuts.tune.measure import regime
from jcuts.tune.measure.cpu_launch import Launcher
from jcuts.tune.measure.statistics import HOPELESS, Samples
from jcuts.tune.problem import Candidate, Output, Problem, decode_bytes
from jcuts.tune.verify import sampling as verify_sampling
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.float_rules import Accuracy
from jcuts.tune.verify.inputs import dtype_of, timing_inputs
from jcuts.tune.worker import problem_files, runners

MOST_ACCEPTED = 4
"""Problems whose accepted results a process remembers."""
Announce = Callable[[str], None]


# Candidate kinds -----------------------------------------------------------------------------------------------------


def _compile_program(candidate: Candidate) -> CompiledKernel:
    from jcuts.codegen.cpu.compile import compile_program
    from jcuts.codegen.cpu.target import host_target, kernel_digest
    from jcuts.kernel_ir.program import Program

    program = Program.from_json(json.loads(candidate.payload))
    return _from_cache_or_compile(kernel_digest(program, host_target()), lambda: compile_program(program))


def _from_cache_or_compile(digest: str, compile_: Callable[[], CompiledKernel]) -> CompiledKernel:
    """A kernel from the object cache, or compiled and put there at once: it outlives a session that is cut short."""
    from jcuts.xla import object_cache

    kernel = object_cache.fetch(digest)
    if kernel is None:
        kernel = compile_()
        object_cache.store(kernel)
    return kernel


def _load_object(candidate: Candidate) -> CompiledKernel:
    data = json.loads(candidate.payload)
    code = decode_bytes(data["object_code"])
    if not code:
        raise CompileRejected(f"candidate {candidate.label} has no object code", label=candidate.label)
    return CompiledKernel(
        candidate.digest[:32],
        data["symbol"],
        code,
        data["tiles"],
        data["scratch_bytes"],
        tuple((tuple(shape), dtype) for shape, dtype in data["inputs"]),
        tuple((tuple(shape), dtype) for shape, dtype in data["outputs"]),
    )


def _compile_cuda(payload: str, capability: tuple[int, int]) -> CompiledKernel:
    from jcuts.codegen.cuda.compile import compile_program, kernel_digest
    from jcuts.codegen.cuda.toolchain.target import CudaTarget
    from jcuts.kernel_ir.program import Program

    program, target = Program.from_json(json.loads(payload)), CudaTarget(capability)
    return _from_cache_or_compile(kernel_digest(program, target), lambda: compile_program(program, target))


KERNEL_KINDS: dict[str, Callable[[Candidate], CompiledKernel]] = {
    "program": _compile_program,
    "object": _load_object,
}


# Requests ------------------------------------------------------------------------------------------------------------


def hello(_: dict[str, Any], __: Announce) -> dict[str, Any]:
    """Answers that this process is up."""
    return {"pid": os.getpid()}


def compile_(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Compiles one candidate into the file ``out``."""
    problem = problem_files.problem_of(request)
    candidate = problem.candidate(request["label"])
    start = time.perf_counter()
    on_gpu = problem.device and candidate.kind == "program"
    kernel = _compile_cuda(candidate.payload, problem.capability) if on_gpu else KERNEL_KINDS[candidate.kind](candidate)
    wanted = (
        tuple((i.shape, i.dtype) for i in problem.inputs),
        tuple((o.shape, o.dtype) for o in problem.outputs),
    )
    if (kernel.inputs, kernel.outputs) != wanted:
        raise CompileRejected(
            f"candidate {candidate.label} computes {kernel.inputs} -> {kernel.outputs}, "
            f"the subset {wanted[0]} -> {wanted[1]}",
            label=candidate.label,
            found=[kernel.inputs, kernel.outputs],
        )
    write_kernel(Path(request["out"]), kernel)
    return {"kernel": kernel.digest, "bytes": len(kernel.object_code), "seconds": time.perf_counter() - start}


def compile_kernel(request: dict[str, Any], _: Announce) -> dict[str, Any]:
    """Compiles a program that is no candidate, for a GPU, into the object cache."""
    major, minor = request["capability"]
    return {"kernel": _compile_cuda(request["program"], (int(major), int(minor))).digest}


def reference(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Makes the inputs, XLA's results and the float64 results (with their range under rounding) of every input set."""
    from jcuts.tune.verify import reference as references

    jax = problem_files.import_jax()
    problem = problem_files.problem_of(request)
    if problem.library is None or problem.reference is None:
        raise CandidateRejected(f"problem {problem.name} came without its exports", problem=problem.digest)
    announce(LIBRARY)
    place, folder = str(request.get("autotuned", "")), Path(request["folder"])
    timed, narrow = bool(request.get("timed", True)), problem_files.has_narrow_floats(problem)
    options = autotune_cache.read_shared_results(place, timed=timed, narrow=narrow) if place else {}
    untimed = autotune_cache.without_autotuning() if place and not timed and request.get("grouped") else {}
    library, seed, parts = problem_files.library_of(request["problem"]), int(request["seed"]), dict[str, float]()
    try:
        kinds = references.make(jax, problem, library, folder, seed, options | untimed, parts)
    except jax.errors.JaxRuntimeError:  # the library cannot run the first of its kernels everywhere
        if not untimed:
            raise
        kinds = references.make(jax, problem, library, folder, seed, options, parts)
    return {"kinds": kinds, "parts": parts}


def check(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Runs one candidate on every input set, in several orders of its tiles, and applies the acceptance rule."""
    problem = problem_files.problem_of(request)
    candidate = problem.candidate(request["label"])
    announce(candidate.label)
    run = runners.xla_runner(candidate) if candidate.kind == "stablehlo" else runners.kernel_runner(request["kernel"])
    expected = problem_files.expected_outputs(request["problem"], request["folder"], tuple(request["kinds"]))
    seen = [verify_sampling.sample_positions(problem, o) for o in problem.outputs]
    got: list[list[np.ndarray]] = [[] for _ in problem.outputs]
    every: list[np.ndarray] = []
    parts: dict[str, float] = {}
    for number in range(len(request["kinds"])):
        with timed("run", parts):
            results = run(problem_files.kept_inputs(request["problem"], request["folder"], number), number)
        if len(results) != len(problem.outputs):
            raise AccuracyRejected(
                f"{candidate.label} gives {len(results)} results instead of {len(problem.outputs)}", rule="shape"
            )
        for i, result in enumerate(results):
            got[i].append(result if (where := seen[i]) is None else _check_output(i, problem.outputs[i], result, where))
        if number == 0:
            every = results
    found = _accepted_alike(request["problem"], got)
    if found is None:
        with timed("rule", parts):
            found = [
                check_output(i, spec, expected[i], got[i], problem.tolerance) for i, spec in enumerate(problem.outputs)
            ]
        _accepted.setdefault(request["problem"], []).append((got, found))
        while len(_accepted) > MOST_ACCEPTED:
            del _accepted[next(iter(_accepted))]
    with timed("everywhere", parts):
        for i, where in enumerate(seen):
            if where is not None:
                whole = problem_files.xla_result(request["problem"], request["folder"], i)
                verify_sampling.compare(i, whole, every[i], found[i], where, may_flip=problem.perturb)
    return {"accuracy": [asdict(a) for a in found], "parts": parts}


def _check_output(index: int, spec: Output, result: np.ndarray, where: np.ndarray) -> np.ndarray:
    if result.shape != spec.shape or result.dtype != dtype_of(spec.dtype):
        raise AccuracyRejected(
            f"output {index} is {result.dtype}{list(result.shape)}, XLA's is {spec.dtype}{list(spec.shape)}",
            output=index,
            rule="shape",
        )
    return result.reshape(-1)[where]


_accepted: dict[str, list[tuple[list[list[np.ndarray]], list[Accuracy]]]] = {}
"""Results that passed, by problem: most candidates differ in nothing but the order in which they do the same."""


def _accepted_alike(path: str, got: list[list[np.ndarray]]) -> list[Accuracy] | None:
    """The verdict on results that equal those of an accepted candidate bit by bit, None if there are none such."""
    for results, verdict in _accepted.get(path, []):
        pairs = ((a, b) for mine, theirs in zip(got, results, strict=True) for a, b in zip(mine, theirs, strict=True))
        if all(a.shape == b.shape and a.dtype == b.dtype and np.array_equal(_bits(a), _bits(b)) for a, b in pairs):
            return verdict
    return None


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def measure(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Times XLA and the candidates that passed: all kernels quickly, then the best few against XLA, interleaved."""
    problem_files.import_jax()
    from jcuts.base.errors import NativeError
    from jcuts.tune.measure import cpu_timing

    problem, folder = problem_files.problem_of(request), Path(request["folder"])
    if problem.device:
        return _measure_on_gpu(problem, folder, request, announce)
    input_sets = _input_sets(problem, folder, request)
    launchers: dict[str, Launcher] = {}
    for label, path in request["kernels"].items():
        announce(label)
        launchers[label] = Launcher(read_kernel(Path(path)))
    announce("")
    answers: list[dict[str, Any]] = []
    budget = float(request["seconds"])
    finalists = list(launchers)
    if len(finalists) > int(request["finalists"]) and regime.caches("cpu") != regime.COLD:
        quick = cpu_timing.screen(launchers, input_sets[0], seconds=budget, announce=announce)
        announce("")
        # By the best time: a short burst of work elsewhere on the machine must not throw out the fastest.
        best = {label: min(samples.seconds) for label, samples in quick.items()}
        ranked = sorted(best, key=lambda label: best[label])
        limit = HOPELESS * best[ranked[0]]
        finalists = [label for label in ranked[: int(request["finalists"])] if best[label] <= limit]
        answers += [_answer(label, quick[label], SCREENED) for label in quick if label not in finalists]
    entries: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        LIBRARY: (problem_files.library_of(request["problem"]), {})
    }
    direct: list[str] = []
    for label in finalists:
        try:
            entries[label] = (cpu_timing.as_function(launchers[label].kernel), {})
        except NativeError:
            direct.append(label)
    entries |= _optioned(problem, request)
    method, samples = cpu_timing.compare(
        entries,
        input_sets,
        [(o.shape, o.dtype) for o in problem.outputs],
        seconds=budget,
        first=LIBRARY,
        announce=announce,
    )
    answers += [_answer(label, s, method) for label, s in samples.items()]
    for label in direct:  # no native library: the kernels cannot be called from XLA either, the times are informative
        found = cpu_timing.screen({label: launchers[label]}, input_sets[0], seconds=budget, announce=announce)
        answers.append(_answer(label, found[label], "direct"))
    return {"measurements": answers, "overhead": cpu_timing.dispatch_overhead()}


def _answer(label: str, samples: Samples, method: str) -> dict[str, Any]:
    low, high = samples.quartiles
    return {
        "label": label,
        "seconds": samples.median,
        "low": low,
        "high": high,
        "runs": len(samples.seconds),
        "method": method,
    }


def _measure_on_gpu(problem: Problem, folder: Path, request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """The same on a GPU."""
    from jcuts.tune.measure import cuda_driver, gpu_problem, gpu_timing

    parted = [int(n) for n in request.get("apart", ())]
    found, spent = gpu_problem.measure(
        request["problem"],
        problem_files.library_of(request["problem"]),
        _input_sets(problem, folder, request)[0],
        {label: read_kernel(Path(path)) for label, path in request["kernels"].items()},
        _optioned(problem, request),
        seconds=float(request["seconds"]),
        finalists=int(request["finalists"]),
        mixed=request["mode"] == "mixed",
        announce=announce,
        most=gpu_problem.executions(problem),
        expected=request.get("expected"),
        options=autotune_cache.without_conv_relu_fusion() if parted else {},
    )
    answers = [_answer(label, samples, method) for label, (method, samples) in found.items()]
    more = (
        {"passes": conv_relu_bound.memory_pass_seconds(parted, cuda_driver.bandwidth())}
        if parted and autotune_cache.without_conv_relu_fusion()
        else {}
    )
    return {"measurements": answers, "overhead": gpu_timing.overhead(), "parts": spent, **more}


def _optioned(problem: Problem, request: dict[str, Any]) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """XLA's program with compiler options, for every candidate that is one."""
    jax = problem_files.import_jax()
    found = {}
    for label in request["stablehlo"]:
        data = json.loads(problem.candidate(label).payload)
        artifact = jax.export.deserialize(bytearray(decode_bytes(data["artifact"]) or b""))
        found[label] = (artifact.call, data["compiler_options"])
    return found


def _input_sets(problem: Problem, folder: Path, request: dict[str, Any]) -> list[list[np.ndarray]]:
    """Those of the references; one of its own where candidates are timed before there are any."""
    known = int(request["sets"])
    return [problem_files.read_inputs(problem, folder, n) for n in range(known)] or [timing_inputs(problem)]


def compile_ahead(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Compiles XLA's side of several GPU problems, as `measure` runs it; some of it still after the answer."""
    problem_files.import_jax()
    from jcuts.tune.measure import gpu_problem

    problems = {
        path: (problem_files.read_problem(path), problem_files.library_of(path)) for path in request["problems"]
    }
    options = {path: autotune_cache.without_conv_relu_fusion() for path in request.get("apart", ())}
    return {"programs": gpu_problem.compile_ahead(problems, announce, options, alone=bool(request.get("alone")))}


def kernels_ahead(request: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Compiles what `measure` will time of kernels; some of it still after the answer."""
    problem_files.import_jax()
    from jcuts.tune.measure import gpu_problem

    made = 0
    for path, kernels in request["problems"].items():
        announce("")
        read = {label: read_kernel(Path(file)) for label, file in kernels.items()}
        made += gpu_problem.kernels_ahead(path, problem_files.read_problem(path), problem_files.library_of(path), read)
    return {"programs": made, "told": "of kernels"}


def run_ahead(_: dict[str, Any], announce: Announce) -> dict[str, Any]:
    """Waits for what `compile_ahead` began, and runs it once where that saves time."""
    problem_files.import_jax()
    from jcuts.tune.measure import gpu_problem

    start = time.perf_counter()
    gpu_problem.wait_ahead(announce)
    waited, text = time.perf_counter() - start, gpu_problem.slowest()
    made = gpu_problem.run_ahead(announce)
    return {"programs": made, "told": f"waited {waited:.2f} s, then run; {text}"}


def warm(request: dict[str, Any], _: Announce) -> dict[str, Any]:
    """Loads what later requests ask for, which takes a process seconds.

    The request's ``what``: ``compiler`` (of kernels for GPUs); ``jax``; ``xla``, which takes memory of the GPU as well;
    ``tools``: what every process has.  Where the GPU is roomy, ``jax`` and ``tools`` take memory of it as well.
    """
    from jcuts.tune.measure import cuda_driver

    what = request["what"]
    if what == "compiler":
        from jcuts.codegen.cuda import compile as compiler

        compiler.available()
    elif what in ("jax", "xla"):
        jax = problem_files.import_jax()
        if what == "xla" or cuda_driver.is_roomy():
            jax.devices()
    elif cuda_driver.is_roomy():
        cuda_driver.device()
    return {}


REQUESTS: dict[str, Callable[[dict[str, Any], Announce], dict[str, Any]]] = {
    "hello": hello,
    "compile": compile_,
    "kernel": compile_kernel,
    "reference": reference,
    "check": check,
    "compile_ahead": compile_ahead,
    "kernels_ahead": kernels_ahead,
    "run_ahead": run_ahead,
    "warm": warm,
    "measure": measure,
    "convolve": runners.convolve,
    "convolve_xla": runners.convolve,
}
