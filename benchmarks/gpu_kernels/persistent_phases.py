"""What a phase of real work costs in one persistent kernel, against the same bodies as kernels of one CUDA graph.

    python benchmarks/gpu_kernels/persistent_phases.py --out phases.json
    python benchmarks/gpu_kernels/persistent_phases.py --dry-run          # compiles, runs the references; needs no GPU

Twenty-one phases of batch-1 networks (NHWC, float32, products in TF32): one cooperative launch in which phases are
separated by a grid barrier, or tiles by counters; and a kernel per phase, with and without programmatic dependent
launch.  Every result is compared with float64.  docs/measurements/persistent_phases.md says what the figures mean.
Needs a GPU of compute capability 9.0 and NVRTC (``pip install jcuts[cuda13]``).  Every program runs in a process of its
own with a time limit; waits in kernels give up after two seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.persistent import compile as compiler  # noqa: E402
from benchmarks.gpu_kernels.persistent import network, phases  # noqa: E402

PACKAGES = ("numpy", "jax", "numba-cuda", "cuda-bindings", "nvidia-cuda-nvrtc")
LEAST_SECONDS = 5.0
"""A program is not started with less time than this."""
MOST_SECONDS = 40.0
"""After which a program's process is ended."""


def versions() -> dict[str, str]:
    """Of what makes and runs the kernels."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def compile_units(workers: int) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What became of all programs, and the cubins of those that compiled."""
    rows = compiler.compile_all(compiler.UNITS, workers)
    cubins = {}
    for row in rows:
        cubin = row.pop("cubin", b"")
        if "failed" not in row:
            cubins[row["unit"]] = cubin
        most = max((r["registers"] for r in row.get("kernels", {}).values()), default=0)
        said = row.get("failed") or (f"spills: {row['spilled']}" if "spilled" in row else "no spills")
        print(f"{row['unit']:45} {row.get('seconds', 0):5.1f} s, {most} registers, {said}", flush=True)
    return rows, cubins


def reference_rows() -> list[dict[str, Any]]:
    """Sizes of all phases, and the range of their float64 results."""
    results = network.reference_chain()
    found = []
    for number, phase in enumerate(phases.SEQUENCE):
        weights, _ = network.constants(number)
        result = results[phase.name]
        if result.shape != phase.shape() or not np.isfinite(result).all():
            raise ValueError(f"{phase.name}: the reference gives {result.shape}, or no numbers")
        found.append(
            {
                "phase": phase.name,
                "kind": phase.kind,
                "tiles": phase.geometry(False).tiles,
                "fine_tiles": phase.geometry(True).tiles,
                "weight_bytes": 0 if weights is None else weights.nbytes,
                "result_bytes": result.nbytes,
                "root_mean_square": float(np.sqrt(np.mean(result.astype(np.float64) ** 2))),
            }
        )
    return found


def run_unit(unit: compiler.Unit, cubin: bytes, limit: float) -> dict[str, Any]:
    """What a process of its own finds out about a unit; what it wrote before it died otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        code, part = Path(folder, "unit.cubin"), Path(folder, "part.json")
        code.write_bytes(cubin)
        command = [sys.executable, str(Path(__file__).resolve()), "--unit", unit.name, "--cubin", str(code)]
        start, said = time.perf_counter(), ""
        try:
            done = subprocess.run(
                [*command, "--out", str(part)], capture_output=True, text=True, timeout=limit, check=False
            )
            said = "" if done.returncode == 0 else f"status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
        except subprocess.TimeoutExpired:
            said = f"no end within {limit:.0f} s"
        try:
            row = json.loads(part.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            row = {}
    row["wall_seconds"] = round(time.perf_counter() - start, 2)
    return row | ({"failed": said} if said else {})


def child(name: str, cubin: Path, out: Path) -> int:
    """Measures one unit in this process."""
    from benchmarks.gpu_kernels.persistent.measure import measure

    unit = next(u for u in compiler.UNITS if u.name == name)
    row: dict[str, Any] = {}

    def save() -> None:
        new = out.with_suffix(".new")
        new.write_text(json.dumps(row), encoding="utf-8")
        new.replace(out)

    measure(unit, cubin.read_bytes(), row, save)
    return 0


def columns_of(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Microseconds by phase, for every way in which phases were timed."""
    names = [phase.name for phase in phases.SEQUENCE]
    found: dict[str, dict[str, float]] = {}
    for unit, row in results["units"].items():
        for section, what in row.items():
            if section.startswith(("phases, ", "without, ")):
                found[f"{unit}: {section}"] = what
            elif section.startswith("trace, "):
                found |= {f"{unit}: {section}, {k}": dict(zip(names, v, strict=True)) for k, v in what.items()}
    return found


def show(results: dict[str, Any]) -> None:
    """The figures as tables: sequences, then phases."""
    for unit, row in results["units"].items():
        print(f"\n{unit}: {row.get('failed', '')} {row.get('resources', '')} {row.get('failed_sections') or ''}")
        for section, found in row.items():
            if isinstance(found, dict) and "back_to_back" in found:
                print(f"    {section:56}" + "".join(f" {k} {v:8.2f}" for k, v in found.items()))
            elif isinstance(found, dict) and "more_per_phase" in found:
                print(f"    {section:56} more per phase with distinct code: {found['more_per_phase']}")
    columns = columns_of(results)
    print("\nmicroseconds a phase; columns:")
    for number, name in enumerate(columns):
        print(f"    {number:2} {name}")
    for phase in phases.BODIES if columns else ():
        values = (found.get(phase.name, float("nan")) for found in columns.values())
        print(f"{phase.name:28}" + "".join(f"{value:6.2f}" for value in values))
    if columns:
        sums = [sum(v for k, v in found.items() if k != phases.NOTHING.name) for found in columns.values()]
        print(f"{'sum of the sequence':28}" + "".join(f"{value:6.1f}" for value in sums))


def main(given: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("persistent_phases.json"))
    parser.add_argument("--dry-run", action="store_true", help="compiles and runs the references; needs no GPU")
    parser.add_argument("--budget", type=float, default=85.0, help="seconds")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    parser.add_argument("--cubin", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.unit:
        return child(options.unit, options.cubin, options.out)
    start = time.perf_counter()
    results: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(), "versions": versions()}
    results["programs"], cubins = compile_units(options.workers)
    results["compile_seconds"] = round(time.perf_counter() - start, 2)
    results["units"] = {}

    def save() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")

    try:
        results["phases"] = reference_rows()
    except Exception as error:
        results["phases_failed"] = f"{type(error).__name__}: {error}"
        print(results["phases_failed"])
    save()
    for unit in () if options.dry_run else compiler.UNITS:
        left = options.budget - (time.perf_counter() - start)
        if unit.name not in cubins or left < LEAST_SECONDS:
            results["units"][unit.name] = {"failed": "not compiled" if unit.name not in cubins else "out of time"}
            continue
        results["units"][unit.name] = run_unit(unit, cubins[unit.name], min(left, MOST_SECONDS))
        results["seconds"] = round(time.perf_counter() - start, 2)
        save()
    show(results)
    save()
    failed = [row["unit"] for row in results["programs"] if "failed" in row or "spilled" in row or "log" in row]
    failed += [name for name, row in results["units"].items() if row.get("failed") or row.get("failed_sections")]
    print(f"{time.perf_counter() - start:.0f} s; failed: {failed or 'nothing'}")
    return int(bool(failed) or "phases_failed" in results)


if __name__ == "__main__":
    sys.exit(main())
