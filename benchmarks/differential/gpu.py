"""Differential test on a GPU: random programs through jcuts' CUDA kernels against `jax.jit` and a float64 reference.

    python benchmarks/differential/gpu.py --programs 1000 --jobs 16 --out results     # with a GPU
    python benchmarks/differential/gpu.py --programs 500 --transform grad --out results
    python benchmarks/differential/gpu.py --programs 20 --interpreted --out results   # without: PTX machine
    python benchmarks/differential/gpu.py --one 1234 [--transform grad] [--interpreted]

As `differential/cpu.py` does it on a CPU: random covers, a random schedule for every kernel, several sets of inputs,
the tuner's acceptance rule.  Every kernel also runs alone on fenced, poisoned memory, twice, and must give equal bits.
Products and convolutions that stay with XLA run at the highest precision (TF32 would be XLA's error, not jcuts'); the
float64 reference runs on the CPU.  Each of the ``--jobs`` processes compiles its kernels on a core of its own and runs
them on the one GPU.  Results: ``OUT/differential_gpu.json``, and one line per program beside it
(``differential_gpu*.jsonl``); a second run with the same folder goes on where the first was stopped (``--budget``
stops it after so many seconds).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
INTERPRETED = "DIFFERENTIAL_INTERPRETED"
"""Environment variable that a run hands to its processes: whether kernels are interpreted."""
DEADLINE = "DIFFERENTIAL_DEADLINE"
"""Environment variable that a run hands to its processes: when they end."""
QUICK = " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_gpu_force_compilation_parallelism=1"
"""XLA compiles faster: its speed is not at issue."""
CLEAR = 25  # programs after which compiled code is dropped
SLICE = 10

from benchmarks.random_programs import shards  # noqa: E402


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=50_000_000, help="seed of the first program")
    parser.add_argument("--slices", action="store_true", help=f"also a {SLICE}th as many under grad, and under vmap")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--budget", type=float, default=0.0, help="stop after so many seconds")
    parser.add_argument("--interpreted", action="store_true", help="no GPU: kernels run in the PTX machine")
    parser.add_argument("--retry", action="store_true", help="run failed programs again")
    parser.add_argument("--one", type=int, help="run one seed and print its program and verdict")
    parser.add_argument("--transform", default="plain", choices=("plain", "grad", "vmap"))
    parser.add_argument("--items", type=Path, help=argparse.SUPPRESS)  # a process' list of programs
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)  # a process' file of results
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)  # a seed without jcuts, to see whether XLA dies
    return parser.parse_args()


def main() -> int:
    """Runs and sums up; exit status 1 where a program failed."""
    options = _arguments()
    if options.interpreted:
        os.environ[INTERPRETED] = "1"
    if not os.environ.get(INTERPRETED) and "xla_gpu_autotune_level" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + QUICK
    if options.alone is not None:
        from benchmarks.random_programs import on_gpu, runner

        with on_gpu.on_gpu(_interpreted()):
            runner.alone(options.alone, options.transform)
        return 0
    if options.items is not None:
        _work([(int(s), str(t)) for s, t in json.loads(options.items.read_text())], options.resume)
        return 0
    if options.one is not None:
        return _one(options.one, options.transform)
    return _all(options)


def _interpreted() -> bool:
    return bool(os.environ.get(INTERPRETED))


def _all(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JCUTS_CACHE_DIR", str((options.out / "cache").resolve()))
    deadline = time.time() + (options.budget or math.inf)
    os.environ[DEADLINE] = str(deadline)
    start = time.perf_counter()
    progress = options.out / "differential_gpu.jsonl"
    first = options.seed
    items = [(seed, options.transform) for seed in range(first, first + options.programs)]
    if options.slices:
        part = range(first, first + max(1, options.programs // SLICE))
        items += [(seed, transform) for transform in ("grad", "vmap") for seed in part]
    rows = [r for path in shards.files_of(progress) for r in shards.rows_of(path)]
    left = shards.pending(items, rows, options.retry)
    unfinished = shards.run_shards(left, progress, max(1, min(options.jobs, len(left))), deadline)
    rows = [r for path in shards.files_of(progress) for r in shards.rows_of(path)]
    found = summary(rows)
    found["unfinished"] = unfinished  # stuck, or cut off by the budget while they ran
    found["wall_seconds"] = round(time.perf_counter() - start, 1)
    (options.out / "differential_gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "primitives"}, indent=1))
    return int(bool(found["mismatches"] or found["errors"] or unfinished or not found["programs"]))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over the rows of all processes."""
    from benchmarks.differential.cpu import summary as counts

    latest = shards.latest(rows)
    failed = [r for r in latest if r["status"] in ("mismatch", "error")]
    refused: Counter[str] = Counter()
    for row in rows:
        refused.update(row.get("refused", {}))
    return {
        **counts(rows),
        "device": sorted({r["device"] for r in rows}),
        "refused_schedules": dict(refused),
        "fenced_twice_equal_bits": sum(r["kernels"] for r in latest if r["status"] == "ok" and not r["interpreted"]),
        "failed": [[r["seed"], r["transform"], r["status"], r["reason"][:600]] for r in failed],
    }


def _work(items: list[shards.Item], resume: Path) -> None:
    """Runs programs in this process and appends their rows to the file."""
    import jax

    from benchmarks.differential.cpu import _commit
    from benchmarks.random_programs import on_gpu, runner

    interpreted, commit = _interpreted(), _commit()
    deadline = float(os.environ.get(DEADLINE, "inf"))
    marker = shards.marker_of(resume)  # names a seed that kills the process
    device = "PTX machine" if interpreted else jax.devices()[0].device_kind
    with shards.appending(resume) as out, on_gpu.on_gpu(interpreted):
        for number, (seed, transform) in enumerate(items):
            if time.time() > deadline:
                break
            start = time.perf_counter()
            on_gpu.refused.clear()
            if marker.exists() and marker.read_text() == f"{seed} {transform}":
                verdict = _who_died(seed, transform)
            else:
                marker.write_text(f"{seed} {transform}")
                verdict = runner.run(seed, transform)
                if verdict.status == "error" and not on_gpu.alive():
                    print(f"seed {seed} {transform}: {verdict.reason[:400]}", flush=True)
                    os._exit(70)  # the context is gone; the next process looks who is to blame
            row = {
                **asdict(verdict),
                "seconds": round(time.perf_counter() - start, 2),
                "commit": commit,
                "device": device,
                "interpreted": interpreted,
                "refused": dict(on_gpu.refused),
            }
            out.write(json.dumps(row) + "\n")
            out.flush()
            if verdict.status in ("error", "mismatch"):
                print(f"{verdict.status} seed {seed} {transform}: {verdict.reason[:400]}", flush=True)
            if number % CLEAR == CLEAR - 1:
                jax.clear_caches()
    marker.unlink(missing_ok=True)


def _who_died(seed: int, transform: str) -> Any:
    """Whose crash was it?  XLA alone, without any kernel, may fail on the program."""
    from benchmarks.random_programs.runner import Verdict

    command = [sys.executable, __file__, "--alone", str(seed), "--transform", transform]
    try:
        alone = subprocess.run(command, capture_output=True, timeout=shards.ALONE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(seed, transform, "unsuitable", f"XLA alone takes more than {shards.ALONE_SECONDS:g} s")
    if alone.returncode:
        return Verdict(seed, transform, "unsuitable", f"XLA alone ends with status {alone.returncode} on this program")
    return Verdict(seed, transform, "error", "the process or its GPU context died while running this program")


def _one(seed: int, transform: str) -> int:
    from benchmarks.random_programs import on_gpu, runner
    from jcuts.kernel_ir.printer import program_text

    keep: dict[str, Any] = {}
    with on_gpu.on_gpu(_interpreted()):
        verdict = runner.run(seed, transform, keep=keep)
    if "closed" in keep:
        print(keep["closed"].jaxpr)
    for subset in (s for top in keep.get("planned", []) for level in top.walk() for s in level.subsets):
        print(subset.closed.jaxpr)
        print(program_text(subset.chosen) if subset.chosen is not None else "left to XLA")
    print({k: v for k, v in asdict(verdict).items() if k != "equations"})
    if "error" in keep:
        raise keep["error"]
    return int(verdict.status in ("error", "mismatch"))


if __name__ == "__main__":
    raise SystemExit(main())
