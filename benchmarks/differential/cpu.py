"""Differential test: random programs through jcuts' kernels against `jax.jit`.

    python benchmarks/differential/cpu.py --programs 2000 --slices --jobs 16 --resume progress.jsonl --json result.json
    python benchmarks/differential/cpu.py --programs 200 --grad --resume progress.jsonl
    python benchmarks/differential/cpu.py --merge one.jsonl other.jsonl --programs 0 --json result.json
    python benchmarks/differential/cpu.py --one 1234           # look into one program

Every program runs with random schedules of all its kernels on several sets of inputs; the acceptance rule is the
tuner's (`jcuts.tune.verify.acceptance`).  Progress is a file with one JSON object per program, next to it one per
process (``progress.shard3.jsonl``); a second run with the same file skips what is in any of them.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if "JCUTS_CACHE_DIR" not in os.environ:
    os.environ["JCUTS_CACHE_DIR"] = tempfile.mkdtemp(prefix="jcuts-differential-")
    atexit.register(shutil.rmtree, os.environ["JCUTS_CACHE_DIR"], ignore_errors=True)

from benchmarks.random_programs import shards

SLICE = 10
"""With ``--slices`` one program in so many, as many again, runs under grad, and one under vmap."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="processes; needs --resume")
    parser.add_argument("--resume", type=Path, help="progress file, appended to")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="other progress files for the summary")
    parser.add_argument("--json", type=Path, help="summary")
    parser.add_argument("--grad", action="store_true", help="value and gradient of smooth programs")
    parser.add_argument("--vmap", action="store_true", help="programs under vmap")
    parser.add_argument("--slices", action="store_true", help=f"also a {SLICE}th as many under grad, and under vmap")
    parser.add_argument("--one", type=int, help="run one seed and print its program and verdict")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)  # a seed without jcuts, to see whether XLA dies
    parser.add_argument("--transform", help=argparse.SUPPRESS)
    parser.add_argument("--retry", action="store_true", help="run failed seeds of the progress file again")
    parser.add_argument("--items", type=Path, help=argparse.SUPPRESS)  # a shard's list of programs
    options = parser.parse_args()
    if options.jobs > 1 and not options.resume:
        parser.error("--jobs needs --resume: every process appends to a file beside it")
    return options


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over progress rows."""
    from jcuts.base.fingerprint import versions

    rows = shards.latest(rows)
    ran = [r for r in rows if r["status"] != "unsuitable"]
    equations = {e for r in ran for e in r["equations"]}
    return {
        "programs": len(ran),
        "by_transform": dict(Counter(r["transform"] for r in ran)),
        "distinct_equations_in_kernels": len(equations),
        "kernels": sum(r["kernels"] for r in ran),
        "kernels_by_form": dict(Counter(form for r in ran for form in r.get("forms", ())).most_common()),
        "kernels_of_several_tiles": sum(r["most_tiles"] > 1 for r in ran),
        "primitives": dict(Counter(p for r in ran for p in r["primitives"]).most_common()),
        "mismatches": [[r["seed"], r["transform"]] for r in ran if r["status"] == "mismatch"],
        "errors": [[r["seed"], r["transform"]] for r in ran if r["status"] == "error"],
        "accepted": dict(Counter(r["accepted"] for r in ran if r["status"] == "ok")),
        **_nans([r for r in ran if r["status"] == "ok" and r.get("nan_unlike_xla")]),
        "unsuitable": len(rows) - len(ran),
        "seconds": round(sum(r["seconds"] for r in rows), 1),
        "versions": versions(),
        "commits": sorted({r["commit"] for r in rows}),
        "machine": platform.machine(),
    }


def _nans(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Programs whose NaNs are not where `jax.jit` has them, by who says that the kernels are right."""
    found: dict[str, list[Any]] = {
        "nan_kept_that_xla_loses": [],  # NumPy, on XLA's own operands
        "nan_as_in_other_runs_of_xla": [],  # XLA without its simplifier, or operation by operation
        "nan_as_in_float64_only": [],  # XLA overflowed, or divided by what rounded to zero, on the way
        "nan_in_one_order_of_sums": [],  # partial sums overflow there, says simulated rounding
    }
    for r in rows:
        which = (
            "nan_kept_that_xla_loses"
            if r["xla_lost"]
            else "nan_as_in_other_runs_of_xla"
            if not r["nan_unlike_any"]
            else "nan_as_in_float64_only"
            if not r["nan_unlike_float64"]
            else ""
        )
        if which:
            found[which].append([r["seed"], r["transform"], r["nan_unlike_xla"], r["xla_lost"]])
        if r["nan_unlike_float64"]:
            found["nan_in_one_order_of_sums"].append(
                [r["seed"], r["transform"], r["nan_unlike_float64"], r["accepted"]]
            )
    return found


def _items(options: argparse.Namespace) -> list[shards.Item]:
    if options.items:
        return [(int(seed), str(transform)) for seed, transform in json.loads(options.items.read_text())]
    first, count = options.seed, options.programs
    items = [(seed, _transform(options)) for seed in range(first, first + count)]
    if options.slices:
        part = range(first, first + max(1, count // SLICE))
        items += [(seed, transform) for transform in ("grad", "vmap") for seed in part]
    return items


def _transform(options: argparse.Namespace) -> str:
    return "grad" if options.grad else "vmap" if options.vmap else "plain"


def main() -> int:
    """Runs and sums up; exit status 1 where a program failed."""
    options = _arguments()
    if options.alone is not None:
        from benchmarks.random_programs.runner import alone

        alone(options.alone, options.transform or "plain")
        return 0
    if options.one is not None:
        return _one(options.one, _transform(options))
    rows = [r for path in shards.files_of(options.resume) for r in shards.rows_of(path)] if options.resume else []
    items = _items(options) if options.items else shards.pending(_items(options), rows, options.retry)
    if options.jobs > 1:
        shards.run_shards(items, options.resume, options.jobs)
        rows = [r for path in shards.files_of(options.resume) for r in shards.rows_of(path)]
    else:
        rows += _run(items, options.resume)
    if options.items:  # a shard: whoever started it sums up
        return 0
    for path in options.merge:
        rows += [r for file in shards.files_of(path) for r in shards.rows_of(file)]
    found = summary(rows)
    print(json.dumps(found, indent=1, default=str))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return int(bool(found["mismatches"] or found["errors"]))


def _run(items: list[shards.Item], resume: Path | None) -> list[dict[str, Any]]:
    """Runs programs in this process; returns their rows and appends them to the file."""
    import jax

    from benchmarks.random_programs.runner import run

    commit = _commit()
    rows: list[dict[str, Any]] = []
    out = shards.appending(resume) if resume else None
    marker = shards.marker_of(resume) if resume else None  # names a seed that kills the process
    for k, (seed, transform) in enumerate(items):
        start = time.perf_counter()
        if marker and marker.exists() and marker.read_text() == f"{seed} {transform}":
            verdict = _who_died(seed, transform)
        else:
            if marker:
                marker.write_text(f"{seed} {transform}")
            verdict = run(seed, transform)
        row = {**asdict(verdict), "seconds": round(time.perf_counter() - start, 2), "commit": commit}
        rows.append(row)
        if out:
            out.write(json.dumps(row) + "\n")
            out.flush()
        if verdict.status in ("error", "mismatch"):
            print(f"{verdict.status} seed {seed} {transform}: {verdict.reason[:400]}", flush=True)
        if k % 100 == 99:
            jax.clear_caches()
            found = summary(rows)
            print(
                f"{found['programs']} programs, {found['distinct_equations_in_kernels']} equations, "
                f"{len(found['mismatches'])} mismatches, {len(found['errors'])} errors, {found['seconds']} s",
                flush=True,
            )
    if marker:
        marker.unlink(missing_ok=True)
    return rows


def _who_died(seed: int, transform: str) -> Any:
    """Whose crash was it?  XLA alone, without any kernel, may crash on the program or on its float64 form."""
    from benchmarks.random_programs.runner import Verdict

    command = [sys.executable, __file__, "--alone", str(seed), "--transform", transform]
    try:
        alone = subprocess.run(command, capture_output=True, timeout=shards.ALONE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(seed, transform, "unsuitable", f"XLA alone takes more than {shards.ALONE_SECONDS:g} s")
    if alone.returncode < 0:
        return Verdict(seed, transform, "unsuitable", f"XLA alone dies of signal {-alone.returncode} on this program")
    return Verdict(seed, transform, "error", "the process died while running this program")


def _one(seed: int, transform: str) -> int:
    from benchmarks.random_programs.runner import run
    from jcuts.kernel_ir.printer import program_text

    keep: dict[str, Any] = {}
    verdict = run(seed, transform, keep=keep)
    if "closed" in keep:
        print(keep["closed"].jaxpr)
    for subset in (s for top in keep.get("planned", []) for level in top.walk() for s in level.subsets):
        print(subset.closed.jaxpr)
        if subset.chosen is not None:
            print(program_text(subset.chosen))
    print({k: v for k, v in asdict(verdict).items() if k != "equations"})
    if "error" in keep:
        raise keep["error"]
    return int(verdict.status in ("error", "mismatch"))


if __name__ == "__main__":
    raise SystemExit(main())
