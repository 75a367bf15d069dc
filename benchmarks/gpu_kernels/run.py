"""GPU tests and memory-bound micro-benchmarks against plain jax.jit, as one command for any machine with an NVIDIA GPU.

    python benchmarks/gpu_kernels/run.py run --out results           # tests (-m gpu), then benchmarks; results/*.json
    python benchmarks/gpu_kernels/run.py build --kernels kernels     # compile every benchmark kernel; needs no GPU
    python benchmarks/gpu_kernels/run.py run --out results --kernels kernels    # uses them where numba-cuda is missing

Times are per execution inside one jitted chain of executions on rotated inputs (more than the L2 cache holds), each
waiting for the one before, medians over repeated chains; XLA's code and jcuts' kernels take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ROTATED = 256 << 20  # bytes that the rotated inputs cover at least
MOST_SETS = 24
ROUNDS = 9
CANDIDATES = 6
CEILING = 4.19e12
"""Bytes per second of a large copy on an H200, measured: what bounds are counted with."""


def program_of(case: Any) -> Any:
    """The unscheduled program of a case (None if the planner makes several kernels of it)."""
    import jax

    from jcuts.fusion import greedy
    from jcuts.fusion.match_attention import fuse_attention
    from jcuts.fusion.match_attention_backward import fuse_attention_backward
    from jcuts.lower.tensor_graph import MOST_SWITCHED, build_graph
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace.inline import inline

    closed = simplify(inline(jax.make_jaxpr(case.function)(*small_arguments(case))))
    graph = build_graph(closed.jaxpr, joined=MOST_SWITCHED)
    grouping = greedy.group(graph)
    subsets = fuse_attention_backward(graph, fuse_attention(graph, grouping.subsets))
    if len(subsets) != 1 or grouping.left_out:
        return None, f"{len(subsets)} kernels, left out: {list(map(str, grouping.left_out.values()))}"
    return subsets[0][1], ""


def small_arguments(case: Any) -> list[Any]:
    """Shapes and dtypes of a case's arguments."""
    import jax
    import jax.numpy as jnp

    return [jax.ShapeDtypeStruct(s, jnp.int32 if k.startswith("int32") else jnp.dtype(k)) for s, k in case.shapes]


def scheduled(
    case: Any, sms: int, count: int = CANDIDATES, capability: tuple[int, int] = (9, 0)
) -> tuple[list[Any], str]:
    """The candidate programs of a case."""
    from jcuts.schedule.gpu import candidates as gpu_candidates

    program, why = program_of(case)
    if program is None:
        return [], why
    found = gpu_candidates.candidates(program, gpu_candidates.GpuMachine(sms, capability=capability), count)
    return [p for p, _ in found], "" if found else "no kernel form"


# -- building -------------------------------------------------------------------------------------------------------
def wanted(case: Any, only: str) -> bool:
    """Whether a case's name contains one of the parts of ``only`` (all do where it is empty)."""
    return not only or any(part in case.name for part in only.split(","))


def build(folder: Path, sms: int, capability: tuple[int, int], only: str, count: int) -> int:
    """Compiles every candidate of every case into ``folder``."""
    from benchmarks.gpu_kernels.cases import cases
    from jcuts.base.errors import CompileRejected
    from jcuts.codegen.cuda.compile import compile_program
    from jcuts.codegen.cuda.toolchain.target import CudaTarget
    from jcuts.tune.kernel_file import write_kernel

    folder.mkdir(parents=True, exist_ok=True)
    start, built, refused = time.perf_counter(), 0, 0
    for case in (c for c in cases() if wanted(c, only)):
        programs, why = scheduled(case, sms, count, capability)
        if why:
            print(f"{case.name}: {why}")
        for program in programs:
            try:
                write_kernel(folder / f"{program.digest}.kernel", compile_program(program, CudaTarget(capability)))
                built += 1
            except CompileRejected as error:
                refused += 1
                print(f"{case.name}: {str(error)[:200]}")
    print(f"{built} kernels built, {refused} refused, {time.perf_counter() - start:.1f} s")
    return 0 if built else 1


def kernel_of(program: Any, folder: Path | None) -> Any:
    """The compiled kernel of a program: from the folder, else compiled here."""
    from jcuts.tune.kernel_file import read_kernel

    if folder is not None and (path := folder / f"{program.digest}.kernel").exists():
        return read_kernel(path)
    from jcuts.codegen.cuda.compile import compile_program
    from jcuts.xla import devices as xla_devices

    return compile_program(program, xla_devices.target())


# -- measuring ------------------------------------------------------------------------------------------------------
def chain(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """``count`` executions of a function on inputs of their own, each waiting for the one before."""
    from jax import lax

    def run(sets: Sequence[Sequence[Any]]) -> Any:
        results = []
        ready: Any = ()
        for operands in sets[:count]:
            operands, ready = lax.optimization_barrier((tuple(operands), ready))
            ready = function(*operands)
            results.append(ready)
        return results

    return run


def timed(programs: dict[str, Any], sets: Any, count: int, floor: Any) -> dict[str, dict[str, float]]:
    """Medians and quartiles [s] per execution of compiled chains, interleaved; ``floor`` is a chain of nothing."""
    import jax
    import numpy as np

    spent: dict[str, list[float]] = {name: [] for name in programs}
    for compiled in programs.values():
        jax.block_until_ready(compiled(sets))
    repeats = 8
    for _ in range(ROUNDS):
        for name, compiled in programs.items():
            jax.block_until_ready(floor)
            start = time.perf_counter()
            out = None
            for _ in range(repeats):
                out = compiled(sets)
            jax.block_until_ready(out)
            spent[name].append((time.perf_counter() - start) / repeats / count)
            del out
    return {
        name: {
            "median": float(np.median(x)),
            "low": float(np.quantile(x, 0.25)),
            "high": float(np.quantile(x, 0.75)),
            "least": float(np.min(x)),
        }
        for name, x in spent.items()
    }


def error_of(results: Sequence[Any], reference: Sequence[Any]) -> float:
    """Largest error over the root mean square of the float64 reference; inf where a NaN or infinity differs."""
    import numpy as np

    worst = 0.0
    for got, want in zip(results, reference, strict=True):
        a, b = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
        scale = float(np.sqrt(np.mean(b * b))) or 1.0
        difference = np.abs(a - b)
        if not np.isfinite(difference).all():
            return float("inf")
        worst = max(worst, float(difference.max(initial=0.0)) / scale)
    return worst


def bench(
    case: Any,
    folder: Path | None,
    sms: int,
    most: int,
    capability: tuple[int, int],
    programs: Sequence[Any] | None = None,
    graphs: bool = False,
) -> dict[str, Any]:
    """One case: every candidate (or the programs given) against XLA, checked against float64 first.

    Args: graphs: XLA may also put everything into CUDA graphs; the faster program counts.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jcuts.xla.cpu_ffi_call import call_kernel

    moved = case.moved()
    row: dict[str, Any] = {"case": case.name, "bytes": moved, "candidates": {}, "rejected": {}}
    if programs is None:
        programs, why = scheduled(case, sms, most, capability)
        if why:
            return {**row, "skipped": why}
    sets_wanted = int(min(MOST_SETS, max(4, -(-ROTATED // max(moved, 1)))))
    heavy = sum(int(np.prod(s)) * 4 for s, _ in case.shapes)
    sets = [tuple(jax.device_put(x) for x in case.arguments(0))]
    for seed in range(1, sets_wanted if heavy < (2 << 30) else 4):
        if case.read is not None:  # the same tables, other rows
            sets.append(
                tuple(
                    old if share < 1 else jax.device_put(new)
                    for old, new, share in zip(sets[0], case.arguments(seed), case.read, strict=True)
                )
            )
        else:  # values matter little for time: shifted copies of random data
            sets.append(tuple(jax.block_until_ready(jnp.roll(x, seed)) for x in sets[0]))
    count = len(sets)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in sets[0]]
        reference = [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function)(*wide))]
    plain, wide_case = jax.jit(case.function), any(x.dtype == jnp.float64 for x in sets[0])
    row["xla_error"] = error_of(jax.tree.leaves(plain(*sets[0])), reference)
    compiled = {"xla": jax.jit(chain(case.function, count)).lower(sets).compile()}
    if graphs:
        from jcuts.jit.end_to_end_benchmark import OPTIONS

        compiled["xla graphs"] = jax.jit(chain(case.function, count)).lower(sets).compile(OPTIONS["cuda"]["graphs"])
    schedules = {}
    for number, program in enumerate(programs):
        label = f"{number}"
        schedules[label] = {
            "params": dict(program.params),
            "unroll": [[a.name, a.extent, a.unroll] for a in program.phases[0].axes],
            "terms": [[r.name, r.extent, r.unroll] for r in program.phases[0].reds],
        }
        try:
            kernel = kernel_of(program, folder)
            call = lambda *xs, k=kernel: call_kernel(k, *operands_of(k, xs))  # noqa: E731
            got = jax.jit(call)(*sets[0])
            wrong = error_of(jax.tree.leaves(got), reference)
            limit = 4 * row["xla_error"] + (1e-2 if "bfloat16" in case.name else 1e-13 if wide_case else 1e-5)
            if not wrong <= limit:
                row["rejected"][label] = f"error {wrong:.3g}, XLA's is {row['xla_error']:.3g}: {schedules[label]}"
                continue
            row["candidates"][label] = {**schedules[label], "error": wrong}
            compiled[label] = jax.jit(chain(call, count)).lower(sets).compile()
        except Exception as error:
            row["rejected"][label] = f"{type(error).__name__}: {str(error)[:300]}: {schedules[label]}"
    times = timed(compiled, sets, count, sets[0][0])
    row["xla"] = times.pop("xla")
    if graphs:
        row["xla_plain"], row["xla_graphs"] = row["xla"], times.pop("xla graphs")
        row["xla"] = min(row["xla_plain"], row["xla_graphs"], key=lambda spent: spent["median"])
    for label, spent in times.items():
        row["candidates"][label].update(spent)
    if times:
        best = min(times, key=lambda k: times[k]["median"])
        row["best"] = best
        row["speedup"] = row["xla"]["median"] / times[best]["median"]
        row["gb_per_s"] = moved / times[best]["median"] / 1e9
        row["over_bound"] = times[best]["median"] / (moved / CEILING)
        row["xla_over_bound"] = row["xla"]["median"] / (moved / CEILING)
    return row


def operands_of(kernel: Any, xs: Sequence[Any]) -> list[Any]:
    """The kernel's operands among the function's arguments: in order of first use, matched by type."""
    left, found = list(xs), []
    for shape, dtype in kernel.inputs:
        k = next(i for i, x in enumerate(left) if (tuple(x.shape), x.dtype.name) == (tuple(shape), dtype))
        found.append(left.pop(k))
    return found


def environment() -> dict[str, Any]:
    """Versions, device, and whether kernels can be compiled here."""
    import importlib.metadata as metadata

    import jax

    names = (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "numba",
        "llvmlite",
        "numba-cuda",
        "numpy",
        "cuda-bindings",
        "nvidia-nvvm",
        "nvidia-cuda-nvcc",
        "pytest",
        "hypothesis",
        "rich",
        "flatbuffers",
    )
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    try:
        from jcuts.codegen.cuda import compile as compiler
        from jcuts.codegen.cuda.toolchain import ptxas
        from jcuts.xla import cuda_launcher
        from jcuts.xla import devices as xla_devices

        device = jax.devices("cuda")[0]
        found.update(
            device=str(device.device_kind),
            platform=device.platform,
            gpu=str(xla_devices.this()),
            compiler=compiler.available() or "yes",
            ptxas=ptxas.assembler(),
            launcher=cuda_launcher.available() or "yes",
        )
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    return found


def run_tests(out: Path, limit: float, which: str) -> dict[str, Any]:
    """``pytest -m gpu`` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "-q",
        "--maxfail=12",
        "--durations=5",
        "-p",
        "no:cacheprovider",
        *(["-k", which] if which else []),
    ]
    start = time.perf_counter()
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False, env=environment
        )
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text, code = (
            "\n".join(x.decode() if isinstance(x, bytes) else str(x) for x in (error.stdout, error.stderr)),
            124,
        )
    (out / "tests.log").write_text(text)
    return {"code": code, "seconds": time.perf_counter() - start, "tail": text[-3000:]}


def run(out: Path, folder: Path | None, only: str, budget: float, tests: bool, which: str, most: int) -> int:
    """Everything; results go to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JCUTS_CACHE_DIR", str(out / "cache"))
    start = time.perf_counter()
    result: dict[str, Any] = {"tests": None, "cases": []}
    if tests:
        result["tests"] = run_tests(out, budget / 2, which)
        print(result["tests"]["tail"][-1500:])
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    result["environment"] = environment()
    print(json.dumps(result["environment"], indent=1))
    from benchmarks.gpu_kernels.cases import cases

    sms, capability = 132, (9, 0)
    try:
        from jcuts.xla import devices as xla_devices

        sms, capability = xla_devices.this().sms, xla_devices.this().capability
    except Exception as error:
        print(f"no GPU: {error}")
    print(f"{'case':52} {'XLA us':>9} {'jcuts us':>9} {'x':>5} {'GB/s':>6} {'/bound':>7} {'err':>8}")
    for case in cases():
        if not wanted(case, only):
            continue
        if time.perf_counter() - start > budget:
            result["cases"].append({"case": case.name, "skipped": "out of time"})
            continue
        try:
            row = bench(case, folder, sms, most, capability)
        except Exception as error:
            row = {
                "case": case.name,
                "failed": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(limit=-4),
            }
        result["cases"].append(row)
        show(row)
        (out / "gpu_run.json").write_text(json.dumps(result, indent=1))
    (out / "gpu_run.json").write_text(json.dumps(result, indent=1))
    print(f"{time.perf_counter() - start:.0f} s")
    return 0


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    if "best" not in row:
        what = row.get("skipped") or row.get("failed") or f"all rejected: {list(row.get('rejected', {}).values())[:2]}"
        print(f"{row['case']:52} {str(what)[:300]}")
        return
    best = row["candidates"][row["best"]]
    print(
        f"{row['case']:52} {row['xla']['median'] * 1e6:9.2f} {best['median'] * 1e6:9.2f} {row['speedup']:5.2f} "
        f"{row['gb_per_s']:6.0f} {row['over_bound']:7.2f} {best['error']:8.1e}"
        + f"  {best['params']} {[u[2] for u in best['unroll']]}"
        + (
            f"  rejected {len(row['rejected'])}: {next(iter(row['rejected'].values()))[:120]}"
            if row["rejected"]
            else ""
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "build"))
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--kernels", type=Path, default=None, help="folder of kernels compiled before")
    parser.add_argument("--only", default="", help="only cases whose name contains one of these, separated by commas")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help="kernels per case")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds")
    parser.add_argument("--tests", default="", help="only tests that match this expression (pytest -k)")
    parser.add_argument("--sms", type=int, default=132)
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--no-tests", action="store_true")
    options = parser.parse_args(arguments)
    if options.what == "build":
        major, _, minor = options.capability.partition(".")
        folder = options.kernels or Path("gpu_kernels")
        return build(folder, options.sms, (int(major), int(minor)), options.only, options.candidates)
    return run(
        options.out,
        options.kernels,
        options.only,
        options.budget,
        not options.no_tests,
        options.tests,
        options.candidates,
    )


if __name__ == "__main__":
    sys.exit(main())
