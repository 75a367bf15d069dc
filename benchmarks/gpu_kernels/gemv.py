"""Split-K GEMV: dense layers at batch 1, schedules of the family against XLA and against the other kernel families.

    python benchmarks/gpu_kernels/gemv.py --out results --most 24 --budget 400

Every schedule is timed alone, as a CUDA graph of launches on rotated operands that do not fit in the L2 cache; the
best of each family are then timed as jitted chains, in turns with XLA under several sets of its flags.  Results are
judged by float64 first.  The times "alone" are the samples that `benchmarks/refit.py` fits the family's cost model to.
Needs a GPU; compiles in parallel first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.cases import Case  # noqa: E402
from benchmarks.gpu_kernels.paired_timing import in_turn, options_of  # noqa: E402
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

SECONDS = 0.1
"""Of samples of one program."""
LAYERS = (
    (2048, 1000),
    (1280, 1000),
    (25088, 4096),
    (4096, 4096),
    (4096, 1000),
    (768, 3072),
    (3072, 768),
    (1024, 1024),
    (4096, 11008),
    (11008, 4096),
)
"""(K, N): heads of ResNet50 and MobileNetV2, VGG16, BERT-base and -large, LLaMA-7B."""
OTHERS = 4
"""Schedules of other families."""
FLAGS: dict[str, dict[str, Any]] = {
    "xla": {},
    "xla graphs": {"xla_gpu_graph_min_graph_size": 1},
    "xla without triton": {"xla_gpu_graph_min_graph_size": 1, "xla_gpu_enable_triton_gemm": False},
    "xla autotuned": {
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_autotune_level": 4,
        "xla_gpu_exhaustive_tiling_search": True,
    },
}


def dense(is_k_major: bool, x: Any, w: Any, b: Any) -> Any:
    """A dense layer. Args: is_k_major: W[n, k], else W[k, n]."""
    return jnp.maximum(lax.dot_general(x, w, (((1,), (1 if is_k_major else 0,)), ((), ()))) + b, 0)


def layers() -> list[Case]:
    """All layers, in both layouts and two types."""
    found = []
    for dtype in ("float32", "bfloat16"):
        for terms, columns in LAYERS:
            for is_k_major in (False, True):
                shapes = ((1, terms), (columns, terms) if is_k_major else (terms, columns), (columns,))
                name = f"gemv {terms}x{columns} {'k-major' if is_k_major else 'row-major'} {dtype}"
                found.append(Case(name, partial(dense, is_k_major), tuple((s, dtype) for s in shapes)))
    return found


def gemm_of(case: Case) -> tuple[Any, Any]:
    """The unscheduled program of a layer, and the same as a GEMM (`lower.patterns.gemm.as_gemm`)."""
    from benchmarks.gpu_kernels.run import program_of
    from jcuts.lower.patterns.gemm import as_gemm

    program, why = program_of(case)
    made = None if program is None else as_gemm(program)
    assert program is not None and made is not None, why
    return program, made


def schedules(case: Case, most: int) -> list[Any]:
    """Programs of a layer: so many of the family, spread over its whole space, and the best of the other families."""
    from jcuts.schedule.gpu.enumeration import enumerate_schedules
    from jcuts.schedule.gpu.families import family_of
    from jcuts.schedule.gpu.gemv import schedules as gemv
    from jcuts.schedule.gpu.machine import GpuMachine

    machine = GpuMachine.named("H200")
    program, made = gemm_of(case)
    space = sorted(gemv.schedule_space(made, machine), key=lambda item: -item[1])
    step = max(1, len(space) // most)
    found = [p for p, _ in space[: most // 2]] + [p for p, _ in space[:: 2 * step]]
    others = [p for p, _ in enumerate_schedules(program, machine) if family_of(p).name != "gemv"]
    return list(
        {
            p.digest: p
            for p in (*found, *(p for p, _ in gemv.gemv_schedules(made, machine)), *others[:OTHERS], *others[-OTHERS:])
        }.values()
    )


def measured(
    case: Case,
    programs: Sequence[Any],
    folder: Path,
    mine: Sequence[str] = ("gemv",),
    flags: Sequence[str] = tuple(FLAGS),
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """One layer: every program alone, the best ones and XLA in chains.

    Args: mine: the families that the layer is measured for; flags: XLA's sets; seconds: of samples of one program.
    """
    from benchmarks.gpu_kernels import run
    from jcuts.schedule.gpu.families import family_of
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.tune.measure.cuda_driver import device
    from jcuts.tune.measure.gpu_launch import GpuLauncher, median, screen
    from jcuts.tune.measure.gpu_timing import ChainBenchmark
    from jcuts.xla.cpu_ffi_call import call_kernel

    arguments = case.arguments(0)
    bench = ChainBenchmark(case.function, arguments)
    row: dict[str, Any] = {"case": case.name, "bytes": case.moved(), "programs": {}, "rejected": {}}
    launchers, kernels = {}, {}
    for program in programs:
        path = folder / f"{program.digest}.kernel"
        if path.exists():
            kernels[program.digest] = read_kernel(path)
            launchers[program.digest] = GpuLauncher(kernels[program.digest], device())
            phase = program.phases[0]
            row["programs"][program.digest] = {
                "family": family_of(program).name,
                "params": {k: v for k, v in program.params if k != "cuda"},
                "unroll": [a.unroll for a in phase.axes] + [r.unroll for r in phase.reds],
            }
    order = run.operands_of(next(iter(kernels.values())), arguments)
    places = [next(i for i, a in enumerate(arguments) if a is o) for o in order]
    there = [[addresses[i] for i in places] for addresses in bench.addresses()]
    for what, sets in (("alone", there), ("warm", there[:1])) if seconds >= SECONDS else (("alone", there),):
        for name, samples in screen(launchers, [arguments[i] for i in places], there=sets).items():
            row["programs"][name][what] = median(samples)
    ranked = sorted(
        (n for n, p in row["programs"].items() if p.get("alone")), key=lambda n: row["programs"][n]["alone"]
    )
    chosen = [n for family in mine for n in [n for n in ranked if row["programs"][n]["family"] == family][:4]]
    chosen += [n for n in ranked if row["programs"][n]["family"] not in mine][:2]
    with jax.enable_x64(True):
        wide = np.asarray(case.function(*(jnp.asarray(np.asarray(a, np.float64)) for a in arguments)))
    scale = float(np.sqrt(np.mean(wide * wide)))
    entries: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {n: (case.function, FLAGS[n]) for n in flags}
    own: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        name: (lambda *xs, k=kernels[name]: call_kernel(k, *(xs[i] for i in places)), FLAGS["xla graphs"])
        for name in chosen
    }
    try:
        chains = bench.compiled(own)
    except Exception:  # then one by one: each says what is wrong with it
        chains = {}
    for name, entry in (entries | own).items():
        try:
            row["programs"].setdefault(name, {"family": "xla", "params": entry[1]})
            got = np.asarray(jax.tree.leaves(jax.jit(entry[0])(*arguments))[0], np.float64)
            row["programs"][name]["error"] = float(np.abs(got.reshape(wide.shape) - wide).max()) / scale
            bench.add(name, chains.get(name) or bench.compiled({name: entry})[name])  # XLA tunes itself: one by one
        except Exception as error:
            row["rejected"][name] = f"{type(error).__name__}: {str(error)[:200]}"
    for name, samples in bench.race(seconds).items():
        values = np.asarray(samples.seconds)
        quartiles = np.percentile(values, (25, 75))
        row["programs"][name] |= {"median": float(np.median(values)), "quartiles": [float(q) for q in quartiles]}
    return row


def show(row: dict[str, Any], mine: Sequence[str] = ("gemv",)) -> None:
    """A table of one layer. Args: mine: the families that it is measured for."""
    timed = {n: p for n, p in row["programs"].items() if "median" in p}
    xla = min(p["median"] for p in timed.values() if p["family"] == "xla")
    best = min((p for p in timed.values() if p["family"] in mine), key=lambda p: p["median"])
    took, rate = best["median"], row["bytes"] / best["median"] / 1e12
    shown = f"XLA {xla * 1e6:.2f} {best['family']} {took * 1e6:.2f} us {xla / took:.2f}x {rate:.2f} TB/s"
    print(f"{row['case']:40} {shown}")
    for _, p in sorted(timed.items(), key=lambda item: item[1]["median"]):
        alone = p.get("alone") or float("nan")
        shown = f"{p.get('error', 0):.1e} {p['family']} {p.get('unroll', '')} {p['params']}"
        print(f"    {p['median'] * 1e6:8.2f} {alone * 1e6:8.2f} {shown}")
    for name, why in row["rejected"].items():
        print(f"    {name} rejected: {why}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run

    options = options_of(__doc__, "gpu_gemv", most=24, schedules="schedules per layer", budget=400.0).parse_args(
        arguments
    )
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    work = [(case, schedules(case, options.most)) for case in layers() if run.wanted(case, options.only)]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    if options.build:
        return 0
    jobs = [(case.name, partial(measured, case, programs, folder)) for case, programs in work]
    in_turn(jobs, show, options.out / "gpu_gemv.json", options.budget, start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
