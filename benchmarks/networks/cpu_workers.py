"""Worker processes of the CPU baselines: plain XLA, XLA with options, OpenVINO, ONNX Runtime, jcuts; one per process.

`cpu_baseline.py` starts them and lets one at a time run: a worker builds its program, then answers lines of JSON from
a pipe ("turn": time calls back to back and waited for).  Only the worker `jcuts` imports jcuts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.networks.cpu_runtimes import Side, Skipped, lacking, onnxruntime, openvino

PEERS = ("plain", "best", "openvino_latency", "openvino_throughput", "onnxruntime", "jcuts")


# -- programs of JAX ------------------------------------------------------------------------------------------------
def program_of(job: dict[str, Any]) -> Any:
    """The workload's program."""
    from benchmarks.networks.workloads import CPU_WORKLOADS

    return CPU_WORKLOADS[job["name"]].build(job["batch"], dtype=job["dtype"], tiny=job["dry"])


def form_of(job: dict[str, Any]) -> Any:
    """The workload's calling form."""
    return program_of(job).form(closed=job["form"] == "closed")


def jax_side(form: Any, call: Callable[..., Any]) -> Side:
    """Calls of a compiled function; results take the places of carried arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    end = form.first + form.carried
    carried = jax.tree.map(jnp.copy, form.arguments[form.first : end])
    arguments = (*form.arguments[: form.first], *carried, *form.arguments[end:])

    def step() -> Any:
        nonlocal arguments
        result = call(*arguments)
        arguments = form.following(arguments, result)
        return result

    def stream(count: int) -> None:
        for _ in range(count):
            result = step()
        jax.block_until_ready(result)

    return Side(lambda: [np.asarray(x) for x in jax.tree.leaves(jax.block_until_ready(step()))], stream)


def xla(job: dict[str, Any]) -> Side:
    """`jax.jit`, with the job's compiler options."""
    import jax

    form = form_of(job)
    start = time.perf_counter()
    jitted = jax.jit(form.function, donate_argnums=form.donated)
    compiled = jitted.lower(*form.arguments).compile(compiler_options=job.get("options") or None)
    side = jax_side(form, compiled)
    memory = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias", "generated_code")
    side.facts = {
        "compile_seconds": time.perf_counter() - start,
        "memory_analysis": {n: int(getattr(memory, f"{n}_size_in_bytes", 0)) for n in names},
    }
    assert "jcuts" not in sys.modules
    return side


def jcuts_side(job: dict[str, Any]) -> Side:
    """`jcuts.optimize`, tuned at the first call, or by what an earlier process found (``tune``)."""
    import jcuts

    form = form_of(job)
    os.environ.setdefault("JCUTS_FIRST_CALL_SECONDS", "inf")  # the tuned program is timed
    function = jcuts.optimize(form.function, donate_argnums=form.donated or None, tune=job["tune"])
    side = jax_side(form, function)
    side.facts["after_first"] = lambda: decision(function, form)
    return side


def decision(function: Any, form: Any) -> dict[str, Any]:
    """The program that jcuts chose and its share of the work in kernels."""
    found = function.decision(*form.arguments)
    report = function.explain(*form.arguments)
    return {
        "chosen": None if found is None else found.chosen,
        "reason": None if found is None else found.reason,
        "share_flop": report.share("flop"),
        "share_bytes": report.share("bytes"),
        "kernels": report.kernels,
        "stages": report.seconds,
    }


def search(job: dict[str, Any]) -> dict[str, Any]:
    """Each set of compiler options alone, in turns with plain `jax.jit`, then those that help together."""
    from benchmarks.networks.cpu_compiler_flags import CPU_FLAG_SETS, DRY_CPU_SETS

    sets = DRY_CPU_SETS if job["dry"] else CPU_FLAG_SETS
    base = xla(job)
    base.call()
    deadline = time.monotonic() + job["flag_budget"]

    def tried(options: dict[str, object]) -> dict[str, Any]:
        try:
            other = xla({**job, "options": options})
            other.call()
        except Exception as error:  # what the compiler says is the result
            return {"options": options, "refused": f"{type(error).__name__}: {error}"[:300]}
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(5):
            for k in (0, 1) if turn % 2 else (1, 0):
                times[k].append(one_stream((base, other)[k], job["seconds"] / 4)[0])
        ratios = sorted(b / a for a, b in zip(*times, strict=True))
        return {"options": options, "over_plain": ratios[2], "least": ratios[0], "most": ratios[-1]}

    alone: dict[str, Any] = {}
    for name, options in sets.items():
        late = time.monotonic() > deadline
        alone[name] = {"options": options, "skipped": "no time left"} if late else tried(options)
    helpful = sorted((r["over_plain"], n) for n, r in alone.items() if r.get("over_plain", 1.0) < job["keep"])
    chosen = [n for _, n in helpful[:1]]
    options = dict(sets[chosen[0]]) if chosen else {}
    together: dict[str, Any] = {}
    for _, name in helpful[1:]:
        together = {**sets[name], **options, **together}
    result = {"alone": alone, "chosen": chosen, "options": options}
    if together and time.monotonic() < deadline:
        record = tried(together)
        result["together"] = record
        if record.get("over_plain", 1.0) < helpful[0][0]:
            result |= {"chosen": [n for _, n in helpful], "options": together}
    return result


# -- conversion -----------------------------------------------------------------------------------------------------
def convert(job: dict[str, Any]) -> dict[str, Any]:
    """Writes inputs, JAX's results in float32 and the ONNX model, for runtimes that do not import JAX."""
    import jax
    import numpy as np

    from benchmarks.networks import onnx_deepspeech, onnx_export

    program = program_of({**job, "dtype": "float32"})
    form = program.form(closed=not job["training"])
    leaves, tree = jax.tree.flatten(form.arguments)
    carried = len(jax.tree.leaves(form.arguments[: form.carried]))

    def flat(*leaves: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(form.function(*jax.tree.unflatten(tree, leaves))))

    start = time.perf_counter()
    with jax.default_matmul_precision("highest"):
        open_form = program.form(closed=False)  # constants of some gigabytes would be copied by the compiler
        results = jax.tree.leaves(jax.jit(open_form.function)(*open_form.arguments))
        results = [np.asarray(x) for x in results]
    folder = Path(job["folder"])
    np.savez(folder / "inputs.npz", *[np.asarray(x) for x in leaves])
    np.savez(folder / "results.npz", *results)
    if job["dtype"] != "float32":  # other weights: they are drawn or rounded in that type
        own = program_of(job).form(closed=False)
        results = jax.tree.leaves(jax.jit(own.function)(*own.arguments))
        results = [np.asarray(x, np.float32 if x.dtype == jax.numpy.bfloat16 else None) for x in results]
        np.savez(folder / "results_jax.npz", *results)
    found = {"carried": carried, "reference_seconds": time.perf_counter() - start}
    missing = lacking(onnx_export.NEEDS)
    if missing:
        return found | {"skipped": missing}
    start = time.perf_counter()
    try:
        if job["name"] == "DeepSpeech2":
            found |= onnx_deepspeech.build(program.weights, leaves[0], folder / "model.onnx")
        else:
            found |= onnx_export.export(flat, leaves, folder / "model.onnx")
    except Exception as error:  # what the converter says is the result
        text = " ".join(str(error).split())
        return found | {"skipped": f"no converter: jax2onnx: {type(error).__name__}: {text}"[:400]}
    return found | {"convert_seconds": time.perf_counter() - start}


# -- serving --------------------------------------------------------------------------------------------------------
def build(job: dict[str, Any]) -> Side:
    """The program of a peer."""
    peer = job["peer"]
    if peer in ("plain", "best"):
        return xla(job)
    if peer == "jcuts":
        return jcuts_side(job)
    missing = lacking((peer.partition("_")[0],))
    if missing:
        raise Skipped(missing)
    if job["conversion"].get("skipped"):
        raise Skipped(job["conversion"]["skipped"])
    return onnxruntime(job) if peer == "onnxruntime" else openvino(job)


def one_stream(side: Side, seconds: float) -> tuple[float, int]:
    """(seconds per call back to back, number of calls), as many as fit."""
    start = time.perf_counter()
    side.call()
    count = max(2, min(300, round(seconds / (time.perf_counter() - start))))
    start = time.perf_counter()
    side.stream(count)
    return (time.perf_counter() - start) / count, count


def turn(side: Side, seconds: float) -> dict[str, Any]:
    """One turn: a call to warm up, a stream, then calls that are waited for."""
    used = time.process_time()
    side.call()
    stream, calls = one_stream(side, seconds)
    waited: list[float] = []
    begin = time.perf_counter()
    while len(waited) < 3 or (time.perf_counter() - begin < seconds and len(waited) < 300):
        start = time.perf_counter()
        side.stream(1)
        waited.append(time.perf_counter() - start)
    return {"stream": stream, "calls": calls, "waited": waited, "cpu": time.process_time() - used}


def agreement(results: list[Any], job: dict[str, Any], left_out: list[int]) -> dict[str, Any]:
    """How far first results are from JAX's: relative L2 error of numbers, share of equal integers.

    Programs of JAX are compared with plain `jax.jit` in the row's type, runtimes with JAX in float32.
    """
    import numpy as np

    name = "results" if job["dtype"] == "float32" or job["peer"] not in ("plain", "best", "jcuts") else "results_jax"
    with np.load(Path(job["folder"]) / f"{name}.npz") as found:
        wanted = [found[f"arr_{k}"] for k in range(len(found.files)) if k not in left_out]
    squares, total, equal, integers = 0.0, 0.0, 0, 0
    for a, b in zip(wanted, results, strict=True):
        if np.issubdtype(a.dtype, np.integer):
            equal, integers = equal + int((a == np.asarray(b).reshape(a.shape)).sum()), integers + a.size
            continue
        wide = a.astype(np.float64)
        other = np.asarray(b).astype(np.float64).reshape(a.shape)
        squares, total = squares + float(((wide - other) ** 2).sum()), total + float((wide**2).sum())
    return {"l2": (squares / total) ** 0.5 if total else squares**0.5} | (
        {"integers_equal": equal / integers} if integers else {}
    )


def memory() -> dict[str, int]:
    """Resident memory of this process [B]: now and its peak so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = {n: int(v.split()[0]) * 1024 for n, v in (x.split(":", 1) for x in lines) if n in ("VmRSS", "VmHWM")}
    return {"resident": found["VmRSS"], "peak": found["VmHWM"]}


def serve(job: dict[str, Any], answer: Callable[[Any], None]) -> None:
    """Builds, calls once, answers with the facts, then takes turns until the pipe ends."""
    start = time.perf_counter()
    side = build(job)
    built = time.perf_counter() - start
    results = side.call()
    facts = {"first_call_seconds": time.perf_counter() - start, "build_seconds": built}
    after = side.facts.pop("after_first", None)
    facts |= side.facts | (after() if after else {})
    facts["error"] = agreement(results, job, side.facts.get("results_left_out", []))
    facts["first_call_memory"] = memory()
    del results
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # from here on the peak is that of running
    answer(facts)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        answer(turn(side, command["seconds"]) | {"memory": memory()})


def main(text: str) -> int:
    """Runs the job given as JSON; answers are lines on standard output, whatever libraries print goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(text)

    def answer(data: Any) -> None:
        pipe.write(json.dumps(data) + "\n")
        pipe.flush()

    try:
        if job["peer"] == "convert":
            answer(convert(job))
        elif job["peer"] == "search":
            answer(search(job))
        else:
            serve(job, answer)
    except Skipped as reason:
        answer({"skipped": str(reason)})
    except Exception as error:  # a runtime that refuses the model says so in the row
        answer({"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]})
        raise
    return 0
