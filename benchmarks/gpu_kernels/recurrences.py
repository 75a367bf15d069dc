"""Loops on a GPU: `jax.jit` with and without flags, jcuts, cuDNN's recurrences through torch; schedules of one kernel.

    python benchmarks/gpu_kernels/recurrences.py --out FILE.json [--schedules] [NAME ...]

Each loop runs in a process of its own, tuned within ``JCUTS_TUNE_SECONDS`` (30 unless it is set) into an empty
database. `back to back` is the time of one of `CALLS` calls in a row, `waited` that of single ones, medians with
quartiles of programs that take turns; `torch` (cuDNN, the same sizes, TF32 allowed) in a process of its own where torch
is installed.
Errors are the largest of any result, over its largest entry, against float64. `profile` has a call's kernels with their
times, as the profiler saw them.  ``--schedules`` times every schedule of the persistent kernel besides, as samples for
`benchmarks/refit.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.cpu_kernels import loops  # noqa: E402
from benchmarks.gpu_kernels import unseen_cells  # noqa: E402
from benchmarks.networks.baseline import environment  # noqa: E402
from benchmarks.networks.device_profile import profiled  # noqa: E402

CALLS = 10
"""In a row."""
SECONDS = 1.5
"""Of timing per loop and kind."""
SECONDS_ALONE = 0.3
"""Of timing per schedule."""
LEAST = 7
"""Samples of each program at least."""
FLAGS: dict[str, dict[str, Any]] = {
    "jax.jit, graphs": {"xla_gpu_graph_min_graph_size": 1},
    "jax.jit, graphs without triton": {"xla_gpu_graph_min_graph_size": 1, "xla_gpu_enable_triton_gemm": False},
}
Sizes = tuple[str, int, int, int, int, str]
CELLS: dict[str, Sizes] = {
    "GRU, 800 units, b1, 200 steps": ("GRU", 800, 800, 1, 200, "float32"),
    "GRU, 800 units, b16, 200 steps": ("GRU", 800, 800, 16, 200, "float32"),
    "GRU, 768 units, b16, 1024 steps, bfloat16": ("GRU", 768, 768, 16, 1024, "bfloat16"),
    "LSTM, 768 units, b16, 1024 steps, bfloat16": ("LSTM", 768, 768, 16, 1024, "bfloat16"),
    "LSTM, 1024 units, b1, 100 steps": ("LSTM", 1024, 1024, 1, 100, "float32"),
    "LSTM, 256 units, b16, 100 steps": ("LSTM", 256, 256, 16, 100, "float32"),
}
"""Cell, inputs, units, batch, steps, type."""
GRADIENT = ", gradients"
"""Behind the name of a cell: gradients of a sum of squares by all arguments, forward pass included."""
BOTH_WAYS = ", 2 layers, both directions"
"""Behind the name of a cell: a layer of both directions, and another one on what they gave side by side."""
BIDIRECTIONAL = ("GRU, 800 units, b1, 200 steps", "LSTM, 768 units, b16, 1024 steps, bfloat16")
WITH_GRADIENTS = (
    "GRU, 800 units, b16, 200 steps",
    "GRU, 768 units, b16, 1024 steps, bfloat16",
    "LSTM, 768 units, b16, 1024 steps, bfloat16",
)
OTHERS: dict[str, Callable[[], loops.Case]] = {
    "Kalman filter, 16 states, 1000 steps": lambda: loops.kalman(16, 1000),
    "MLP in a scan, width 256, b1, 200 steps": lambda: loops.perceptrons(256, 1, 200),
    "scalar loop, 10000 steps": lambda: loops.scalar(10000),
    **unseen_cells.CELLS,
}


def case(name: str) -> loops.Case:
    """A loop and its arguments."""
    if name in OTHERS:
        return OTHERS[name]()
    if name.endswith(GRADIENT):
        function, arguments = case(name.removesuffix(GRADIENT))

        def loss(*values: Any) -> Any:
            return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(function(*values)))

        return jax.grad(loss, argnums=tuple(range(len(arguments)))), arguments
    cell, _, units, batch, steps, dtype = CELLS[name.removesuffix(BOTH_WAYS)]
    build = loops.gru if cell == "GRU" else loops.lstm
    if name.endswith(BOTH_WAYS):
        function, arguments = bidirectional(build, units, batch, steps)
    else:
        function, arguments = build(units, batch, steps)
    return function, tuple(np.asarray(jnp.asarray(a, dtype)) for a in arguments)


def bidirectional(build: Callable[[int, int, int], loops.Case], units: int, batch: int, steps: int) -> loops.Case:
    """Two layers of both directions; the second one reads both halves of the first one's results."""
    cell, (x, *_) = build(units, batch, steps)
    states = [build(units, batch, steps)[1][1:] for _ in range(4)]
    count = len(states[0])
    wide = [loops.normal(2 * units, s[-3].shape[1], scale=(2 * units) ** -0.5) for s in states[2:]]
    states[2:] = [(*s[:-3], w, *s[-2:]) for s, w in zip(states[2:], wide, strict=True)]

    def run(x: Any, *given: Any) -> Any:
        for layer in range(2):
            ahead, back = (given[(2 * layer + way) * count :][:count] for way in range(2))
            mine, theirs = cell(x, *ahead)[1], cell(x[::-1], *back)[1]
            x = jnp.concatenate([mine, theirs[::-1]], -1)
        return x

    return run, (x, *(a for s in states for a in s))


def timed(calls: dict[str, Callable[[], Any]], each: int, seconds: float = SECONDS) -> dict[str, dict[str, float]]:
    """Seconds of a call of programs that take turns, ``each`` calls in a row: quartiles."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, found.values())) < LEAST:
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(each):
                result = call()
            jax.block_until_ready(result)
            found[name].append((time.perf_counter() - start) / each)
    quartiles = {name: np.quantile(times, (0.25, 0.5, 0.75)) for name, times in found.items()}
    return {name: dict(zip(("q1", "median", "q3"), map(float, q), strict=True)) for name, q in quartiles.items()}


def measure(name: str, *, schedules: bool) -> dict[str, Any]:
    """One loop, in this process."""
    import jcuts

    function, arguments = case(name)
    arguments = tuple(map(jnp.asarray, arguments))
    plain = jax.jit(function)
    programs: dict[str, Callable[..., Any]] = {"jax.jit": plain}
    for label, options in FLAGS.items():
        programs[label] = jax.jit(function, compiler_options=options)
    ours = jcuts.optimize(function)
    start = time.perf_counter()
    jax.block_until_ready(ours(*arguments))
    first, decision = time.perf_counter() - start, ours.decision(*arguments)
    programs["jcuts"] = ours
    for program in programs.values():
        jax.block_until_ready(program(*arguments))
    calls = {label: (lambda program=program: program(*arguments)) for label, program in programs.items()}
    return {
        "first_call_seconds": first,
        "chosen": decision and decision.chosen,
        "reason": decision and decision.reason,
        "back_to_back": timed(calls, CALLS),
        "waited": timed(calls, 1),
        "profile": {label: profile(calls[label]) for label in ("jax.jit", "jcuts")},
        "errors_to_float64": loops.errors(function, arguments, {"jax.jit": plain, "jcuts": ours}),
        "schedules": every_schedule(function, arguments) if schedules else [],
        **environment(),
    }


def profile(call: Callable[[], Any]) -> dict[str, Any]:
    """Kernels of a call and their time, the largest by name; nothing without a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        return profiled(call, Path(folder) / "profile")


def every_schedule(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Every schedule of the function's loops as one kernel, alone: parameters, microseconds, predicted ones."""
    from jcuts.base.errors import CompileRejected, Refusal
    from jcuts.schedule.gpu.kernel_time import kernel_time
    from jcuts.schedule.gpu.recurrence.schedules import recurrence_schedules
    from jcuts.xla import devices
    from jcuts.xla.kernel_cache import kernel_for

    found, machine = [], devices.machine()
    for program in programs_of(function, arguments):
        if isinstance(program, Refusal):
            found.append({"refused": str(program)})
            continue
        rng = np.random.default_rng(0)
        operands = [jnp.asarray(0.1 * rng.standard_normal(b.shape), b.dtype) for b in program.inputs]
        for made, _ in recurrence_schedules(program, machine):
            found.append({"params": dict(made.params), "predicted_us": 1e6 * kernel_time(made, machine).seconds})
            try:
                found[-1]["us"] = 1e6 * alone(kernel_for(made), operands)
            except CompileRejected as error:
                found[-1]["rejected"] = str(error)
    return found


def programs_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    """A function's loops as programs without a schedule, or why one has none, as a GPU's rewrites leave them."""
    from jcuts.lower.recurrence.program import lower_scans
    from jcuts.rewrite.backward.registry import backward_rewrites
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace import jaxapi
    from jcuts.trace.inline import inline

    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *arguments)))
    for rewrite in backward_rewrites("cuda", divides=False):
        closed = rewrite.apply(closed)
    return lower_scans(closed)


def alone(kernel: Any, operands: list[Any]) -> float:
    """Seconds of a kernel, of calls in a row."""
    from jcuts.xla.cpu_ffi_call import call_kernel

    run = jax.jit(lambda *xs: call_kernel(kernel, *xs))
    jax.block_until_ready(run(*operands))
    return timed({"": lambda: run(*operands)}, CALLS, SECONDS_ALONE)[""]["median"]


def torch_times(name: str) -> dict[str, Any]:
    """cuDNN's recurrence of the same sizes, by torch, in this process."""
    import torch

    both = name.endswith(BOTH_WAYS)
    cell, inputs, units, batch, steps, dtype = CELLS[name.removesuffix(GRADIENT).removesuffix(BOTH_WAYS)]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    kind = getattr(torch, dtype)
    layer = getattr(torch.nn, cell)(inputs, units, num_layers=1 + both, bidirectional=both).to("cuda", kind)
    backward = name.endswith(GRADIENT)
    x = torch.randn(steps, batch, inputs, device="cuda", dtype=kind, requires_grad=backward)
    samples = []
    with torch.set_grad_enabled(backward):
        for _ in range(LEAST + 2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                result, _ = layer(x)
                if backward:
                    result.float().square().sum().backward()
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) / CALLS)
    return {
        "median": float(np.median(samples[2:])),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def in_process(words: Sequence[str], settings: Mapping[str, str], last: int = 1) -> dict[str, Any]:
    """What a script prints in a process of its own with an empty database; {'error': its last lines} if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**settings, "JCUTS_CACHE_DIR": folder}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-last:] or done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*CELLS, *OTHERS, *(n + GRADIENT for n in WITH_GRADIENTS), *(n + BOTH_WAYS for n in BIDIRECTIONAL)]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {'; '.join(every)}; all, if none is given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--schedules", action="store_true", help="every schedule of the persistent kernel, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        made = torch_times(options.child) if options.torch else measure(options.child, schedules=options.schedules)
        print(json.dumps(made))
        return
    rows: dict[str, Any] = {}
    settings = {"JCUTS_TUNE_SECONDS": "30", **os.environ}
    for name in options.names or every:
        child = [__file__, "--child", name]
        rows[name] = in_process([*child, *(["--schedules"] * options.schedules)], settings)
        if name not in OTHERS:
            rows[name]["torch"] = in_process([*child, "--torch"], settings)
        times = rows[name].get("back_to_back", {})
        text = ", ".join(f"{label} {1e3 * t['median']:.3f}" for label, t in times.items())
        print(f"{name}: {text} ms; {rows[name].get('chosen')}; torch {rows[name].get('torch')}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
