"""Records what jcuts plans and generates for every entry of the corpus: one file per target."""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.equivalence.normal_form import digest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "numba", "llvmlite", "numpy", "keras", "numba-cuda", "nvidia-nvvm")
XLA = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
"""Devices for meshes; XLA's own code only makes weights here, and is never recorded."""


def record(options: argparse.Namespace) -> int:
    """Records every target that is asked for."""
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="equivalence-") as scratch:
        _environment(Path(scratch))
        from benchmarks.equivalence import planning, seams  # imports jax, which reads the environment

        names = [n for n in planning.entries() if any(part in n for part in options.only.split(","))]
        for target in options.parts.split(","):
            why = seams.why_not(target)
            if why:
                raise SystemExit(f"{target}: {why}")
            _record(target, names, options, Path(scratch) / f"programs_{target}")
    return 0


def _environment(scratch: Path) -> None:
    """The same for every process, whatever the user's: no GPU, four devices for meshes, a cache of its own."""
    for name in [name for name in os.environ if name.startswith(("JCUTS_", "XLA_")) and name != "JCUTS_NATIVE"]:
        del os.environ[name]
    os.environ.update(
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=XLA,
        KERAS_BACKEND="jax",
        JCUTS_CACHE_DIR=str(scratch / "cache"),
        JCUTS_TUNE_SECONDS="inf",
        TF_CPP_MIN_LOG_LEVEL="3",
        PYTHONPATH=str(ROOT),
    )


def _record(target: str, names: Sequence[str], options: argparse.Namespace, folder: Path) -> None:
    from benchmarks.equivalence import planning

    folder.mkdir()
    kept = options.out / f"text_{target}"
    if options.keep_text:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
    start = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = _gathered(pool, planning.plan_entry, [(name, target, str(folder)) for name in names], f"{target} plans")
        planned = time.perf_counter()
        slowest = sorted(made, key=lambda m: -m["seconds"])[:5]
        made.sort(key=lambda m: names.index(m["entry"]))
        found = _merged(target, made)
        keys = dict.fromkeys(key for function in found["functions"].values() for key in function.get("code", ()))
        keys |= dict.fromkeys(_others(made, {found["ways"][key] for key in keys}))
        tasks = [(key, target, str(folder), str(kept) if options.keep_text else "") for key in keys]
        codes = _gathered(pool, planning.make_code, tasks, f"{target} code")
    found["code"] = {key: texts for key, texts, _ in sorted(codes)}
    found["counts"] = counts(found)
    path = options.out / f"{target}.json.gz"
    with open(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        file.write(json.dumps(found, sort_keys=True, separators=(",", ":")).encode())
    done = time.perf_counter()
    longest = ", ".join(f"{m['entry']} {m['seconds']:.0f} s" for m in slowest)
    print(json.dumps({"target": target, **found["counts"]}, indent=1))
    spent = sum(m["seconds"] for m in made), sum(seconds for _, _, seconds in codes)
    print(
        f"{target}: plans {planned - start:.0f} s ({spent[0]:.0f} s of processors), code {done - planned:.0f} s "
        f"({spent[1]:.0f}), {path.stat().st_size / 1e6:.1f} MB; "
        f"slowest plans: {longest}",
        flush=True,
    )


def _others(made: Sequence[dict[str, Any]], known: set[str]) -> list[str]:
    """Programs of kinds of schedules that no function's code shows: of each kind those of the first two entries."""
    found: dict[str, list[str]] = {}
    for one in made:
        for way, key in one["first"].items():
            if way not in known and key not in found.get(way, ()):
                found.setdefault(way, []).append(key)
    return [key for keys in found.values() for key in keys[:2]]


def _gathered(pool: ProcessPoolExecutor, work: Any, tasks: Sequence[Any], what: str) -> list[Any]:
    """Results of all tasks, in the order in which they are done; the first error ends the process."""
    waiting = {pool.submit(work, task): task for task in tasks}
    found, told = [], time.perf_counter()
    for future in as_completed(waiting):
        try:
            found.append(future.result())
        except Exception:
            pool.shutdown(wait=False, cancel_futures=True)
            traceback.print_exc()
            raise SystemExit(f"{what}: {waiting[future][0]} failed") from None
        if time.perf_counter() - told > 20:
            told = time.perf_counter()
            print(f"{what}: {len(found)} of {len(tasks)}", flush=True)
    return found


def _merged(target: str, made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"header": header(target)}
    for table in ("functions", "programs", "kinds", "ways", "ranked"):
        found[table] = {}
        for one in made:
            for key, value in one[table].items():
                if found[table].setdefault(key, value) != value:
                    raise SystemExit(
                        f"{target}: {table} {key} of {one['entry']} is not what it was elsewhere:\n"
                        f"  {value}\n  {found[table][key]}"
                    )
    return found


def header(target: str) -> dict[str, Any]:
    """What records depend on, beside jcuts."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    import llvmlite.binding as llvm

    cpu = {
        "name": llvm.get_host_cpu_name(),
        "features": digest(llvm.get_host_cpu_features().flatten()),
        "cores": len(os.sched_getaffinity(0)),
    }
    return {"format": 1, "target": target, "python": platform.python_version(), "versions": versions, "cpu": cpu}


def _regions(function: dict[str, Any]) -> Iterator[list[Any]]:
    for plan in function.get("plans", {}).values():
        yield from (region for level in plan.get("levels", ()) for region in level["regions"])


def counts(found: dict[str, Any]) -> dict[str, Any]:
    """How much a record has."""
    functions, kinds = found["functions"], found["kinds"]
    plans = [plan for f in functions.values() for plan in f.get("plans", {}).values()]
    ranked = [c for candidates in found["ranked"].values() for c, _ in candidates]
    ranked += [c for f in functions.values() for c, _ in f.get("schedules", ())]
    made = {key: code for key, code in found["code"].items() if "refused" not in code}
    return {
        "functions": len(functions),
        "refused functions": sum("refused" in f for f in functions.values()),
        "functions with code": sum(any(key in made for key in f.get("code", ())) for f in functions.values()),
        "plans": len(plans),
        "regions": sum(1 for f in functions.values() for _ in _regions(f)),
        "regions tried": sum(len(p.get("asked", ())) for p in plans),
        "distinct regions": len({region[2] for f in functions.values() for region in _regions(f)}),
        "programs with candidates": len(found["ranked"]),
        "candidates": len(ranked),
        "distinct candidates": len(set(ranked)),
        "programs with code": len(made),
        "code texts": sum(len(code) for code in made.values()),
        "code refused": len(found["code"]) - len(made),
        "code by template": dict(sorted(Counter(kinds[key] for key in made).items())),
        "kinds of schedules with code": len({found["ways"][key] for key in made}),
        "kinds of schedules": len({found["ways"][key] for key in set(ranked)}),
        "candidates by template": dict(sorted(Counter(kinds[key] for key in set(ranked)).items())),
    }
