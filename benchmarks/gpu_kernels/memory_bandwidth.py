"""Which schedules of memory-bound operations come near the memory's bandwidth: many of each, XLA, and plain copies.

    python benchmarks/gpu_kernels/memory_bandwidth.py --out results --budget 120 --most 24
    python benchmarks/gpu_kernels/memory_bandwidth.py --out results --build --only "depthwise 3x3/1"  # only compiles

Every schedule is timed by CUDA events in graphs of 16 launches on rotated inputs, larger than the L2 cache; the best
three and XLA's code as jitted chains, which XLA puts into CUDA graphs.  "Bound": bytes that must move over the rate of
a large copy.  "Copy" is what XLA takes for ``x + 1`` that moves as many bytes, measured the same way.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LEAST_BYTES = 20_000_000
FAMILIES = (
    "copy",
    "depthwise 3x3/1",
    "depthwise 3x3/2",
    "depthwise input",
    "depthwise filter",
    "average pool",
    "max pool",
    "batch statistics",
    "sum and squares",
    "column sum",
    "row sum",
    "full sum",
    "layer norm",
    "softmax",
    "transpose",
    "26 tables",
    "embedding",
)
ALIKE = 2
"""Schedules that have the same register tile and early loads, or not."""


def measured_cases(only: str) -> list[Any]:
    """Copies first, then the cases of all families that move enough."""
    import jax.numpy as jnp

    from benchmarks.gpu_kernels.cases import Case, cases
    from benchmarks.gpu_kernels.run import wanted

    found = []
    for megabytes in (28, 58, 116, 231, 462):
        rows = megabytes * 1_000_000 // 8 // 4096
        found.append(Case(f"copy {megabytes} MB float32", lambda x: x + 1, (((rows, 4096), "float32"),)))
    found.append(Case("read 116 MB float32", lambda x: x.sum(1), (((116_000_000 // 4 // 4096, 4096), "float32"),)))
    found.append(
        Case("copy 116 MB bfloat16", lambda x: jnp.maximum(x, 0), (((116_000_000 // 4 // 4096, 4096), "bfloat16"),))
    )
    large = [c for c in cases() if c.name.startswith(FAMILIES) and c.moved() >= LEAST_BYTES]
    found += sorted(large, key=lambda c: "bfloat16" not in c.name)
    return [c for c in found if wanted(c, only)]


def schedules(case: Any, most: int) -> list[Any]:
    """Programs of one case, for an H100 or H200: as ranked, but few that are alike."""
    from benchmarks.gpu_kernels.run import program_of
    from jcuts.schedule.gpu import candidates as gpu_candidates

    program, _ = program_of(case)
    if program is None:
        return []
    ranked = [p for p, _ in gpu_candidates.candidates(program, gpu_candidates.GpuMachine.named("H200"), 1 << 20)]
    walks = [p for p in ranked if "walk" in dict(p.params)]
    chosen = [p for p in ranked if "walk" not in dict(p.params)][: max(4, most // (5 if walks else 2))]
    seen: collections.Counter[Any] = collections.Counter()
    kinds = [[p for p in walks if dict(p.params)["ahead"] == ahead] for ahead in (1, 2, 0)]
    for made in (p for some in itertools.zip_longest(*kinds) for p in some if p is not None):
        phase = made.phases[0]
        key = (*(a.unroll for a in phase.axes), *(r.unroll for r in phase.reds), dict(made.params)["ahead"])
        alike = (*key, dict(made.params)["threads"])
        seen[key] += 1
        seen[alike] += 1
        if seen[key] <= ALIKE and (dict(made.params)["cuda"] == "point" or seen[alike] == 1) and len(chosen) < most:
            chosen.append(made)
    return chosen


def arguments(case: Any) -> list[np.ndarray]:
    """Random operands: a long random row, over and over; indices, random ones."""
    rng = np.random.default_rng(1)
    row = rng.standard_normal((1 << 20) + 7, dtype=np.float32)
    found = []
    for shape, kind in case.shapes:
        _, _, bound = kind.partition("<")
        found.append(
            rng.integers(0, int(bound), shape, np.int32) if bound else np.resize(row, shape).astype(_dtype(kind))
        )
    return found


def _dtype(kind: str) -> np.dtype:
    import jax.numpy as jnp

    return np.dtype(jnp.dtype(kind.partition(" <")[0]))


def ordered(case: Any, program: Any) -> Any:
    """The case with its arguments in the order of the program's operands: matched by type."""
    left = list(range(len(case.shapes)))
    order: list[int] = []
    for buffer in program.inputs:
        wanted = (tuple(buffer.shape), buffer.dtype)
        order.append(next(k for k in left if (tuple(case.shapes[k][0]), str(_dtype(case.shapes[k][1]))) == wanted))
        left.remove(order[-1])
    if left:
        raise ValueError(f"{case.name}: arguments {left} are no operands")
    function = case.function
    places = [order.index(k) for k in range(len(order))]
    shapes = tuple(case.shapes[k] for k in order)
    read = None if case.read is None else tuple(case.read[k] for k in order)
    return replace(case, function=lambda *xs: function(*(xs[k] for k in places)), shapes=shapes, read=read)


def bench(case: Any, programs: Sequence[Any], folder: Path, seconds: float) -> dict[str, Any]:
    """One case: times of all schedules, of XLA, and how far the best one is from XLA's result."""
    import jax

    from benchmarks.gpu_kernels.run import CEILING, error_of
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.tune.measure import gpu_problem
    from jcuts.xla.cpu_ffi_call import call_kernel

    files = {str(k): folder / f"{p.digest}.kernel" for k, p in enumerate(programs)}
    kernels = {label: read_kernel(path) for label, path in files.items() if path.exists()}
    if not kernels:
        return {"case": case.name, "failed": "no kernels"}
    operands = arguments(case)
    said: list[str] = []
    library = jax.jit(case.function)
    found, _ = gpu_problem.measure(
        case.name, library, operands, kernels, {}, seconds=seconds, finalists=3, mixed=False, announce=said.append
    )
    moved = case.moved()
    least = moved / CEILING
    row: dict[str, Any] = {"case": case.name, "bytes": moved, "bound": least, "candidates": []}
    for label, (method, samples) in found.items():
        entry = {"method": method, "median": samples.median, "least": min(samples.seconds)}
        if label in kernels:
            program = programs[int(label)]
            axes = program.phases[0].axes
            entry |= {
                "params": dict(program.params),
                "axes": [[a.name, a.extent, a.unroll] for a in axes],
                "terms": [[r.name, r.extent, r.unroll] for r in program.phases[0].reds],
                "rank": int(label),
                "registers": [x.resources.registers for x in launches(kernels[label])],
            }
            row["candidates"].append(entry)
        else:
            row["xla"] = entry
    row["candidates"].sort(key=lambda c: (c["method"] != "chain", c["median"]))
    best = row["candidates"][0]
    there = [jax.device_put(x) for x in operands]
    kernel = kernels[str(best["rank"])]
    got, want = jax.jit(lambda *xs: call_kernel(kernel, *xs))(*there), library(*there)
    row["difference"] = error_of(jax.tree.leaves(got), jax.tree.leaves(want))
    row |= {
        "best": best["median"],
        "over_bound": best["median"] / least,
        "speedup": row["xla"]["median"] / best["median"],
    }
    return row


def launches(kernel: Any) -> Sequence[Any]:
    """The launches of a compiled kernel."""
    from jcuts.codegen.cuda.toolchain.image import Image

    return Image.unpack(kernel.object_code).launches


def show(row: dict[str, Any], copies: Callable[[float], float]) -> None:
    """The case in one line, then its schedules."""
    if "failed" in row:
        print(row["case"], row["failed"])
        return
    copy = copies(row["bytes"])
    xla = row["xla"]["median"]
    print(
        f"{row['case']:56} bound {row['bound'] * 1e6:6.1f} copy {copy * 1e6:6.1f} XLA {xla * 1e6:7.1f} "
        f"best {row['best'] * 1e6:6.1f}: {row['speedup']:.2f}x, {row['over_bound']:.2f} of the bound, "
        f"{row['best'] / copy:.2f} of a copy; differs {row['difference']:.1e}"
    )
    for c in row["candidates"]:
        params = {k: v for k, v in c["params"].items() if k != "cuda"}
        tile = [u for _, _, u in c["axes"]] + ([u for _, _, u in c["terms"]] if params.get("walk") else [])
        times = f"{c['method']:8} {c['median'] * 1e6:7.2f} {c['least'] * 1e6:7.2f}"
        print(f"    {times} r{c['registers']} #{c['rank']} {tile} {params}")


def copies_of(rows: Sequence[dict[str, Any]]) -> Callable[[float], float]:
    """Seconds of a copy that moves so many bytes, between those that were measured."""
    known = sorted((r["bytes"], r["xla"]["median"]) for r in rows if r["case"].startswith("copy") and "xla" in r)
    if not known:
        return lambda moved: float("nan")
    sizes, times = zip(*known, strict=True)
    return lambda moved: float(np.interp(moved, sizes, times))


def main(given: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels.wgmma_tiles import build

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_bandwidth"))
    parser.add_argument("--kernels", type=Path, help="folder for compiled kernels (a folder of --out)")
    parser.add_argument("--only", default="", help="only cases whose name contains one of these")
    parser.add_argument("--most", type=int, default=24, help="schedules per case")
    parser.add_argument("--seconds", type=float, default=0.3, help="of samples per program in the final race")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--build", action="store_true", help="only compile; needs no GPU")
    options = parser.parse_args(given)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    folder = options.kernels or options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    work = [(case, schedules(case, options.most)) for case in measured_cases(options.only)]
    work = [(ordered(case, programs[0]), programs) for case, programs in work if programs]
    print(f"{sum(len(p) for _, p in work)} schedules of {len(work)} cases, {time.perf_counter() - start:.0f} s")
    every = [p for _, programs in work for p in programs]
    builder = Thread(target=build, args=(every, folder, options.workers, start))
    builder.start()
    if options.build:
        builder.join()
        return 0
    import jax

    from jcuts.tune.measure import gpu_problem

    known = {
        case.name: (
            SimpleNamespace(
                name=case.name,
                digest=case.name,
                library=None,
                inputs=[SimpleNamespace(shape=s, dtype=str(_dtype(k))) for s, k in case.shapes],
            ),
            jax.jit(case.function),
        )
        for case, _ in work
    }
    gpu_problem.compile_ahead(known, lambda _: None)  # type: ignore[arg-type]
    gpu_problem.run_ahead(lambda _: None)
    print(f"XLA's programs are compiled, {time.perf_counter() - start:.0f} s", flush=True)
    builder.join()
    rows: list[dict[str, Any]] = []
    for case, programs in work:
        if time.perf_counter() - start > options.budget:
            rows.append({"case": case.name, "failed": "out of time"})
            continue
        try:
            rows.append(bench(case, programs, folder, options.seconds))
        except Exception as error:
            rows.append({"case": case.name, "failed": f"{type(error).__name__}: {str(error)[:300]}"})
        show(rows[-1], copies_of(rows))
        print(f"    {time.perf_counter() - start:.0f} s", flush=True)
        (options.out / "gpu_bandwidth.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
