"""CPU baselines: `jax.jit`, XLA's best options, OpenVINO and ONNX Runtime, and jcuts beside them, in turns.

    python benchmarks/networks/cpu_baseline.py --out DIR [ROW ...]   rows as NAME:BATCH[:DTYPE][:args]; all by default

Every program lives in a process of its own that waits on a pipe; one at a time runs.  A turn of the machine counts
where a loop of known work took as long before and after it as in the row's quietest moment, and other processes used
little of the processor; else it is taken again.  A row that has its file in the folder is not measured again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.cpu_processes import OTHERS, Worker, await_quiet, calibrate, cores  # noqa: E402
from benchmarks.networks.interleaved_timing import quantiles, quartiles  # noqa: E402
from benchmarks.networks.row_driver import write  # noqa: E402

PEERS = ("plain", "best", "openvino_latency", "openvino_throughput", "onnxruntime", "jcuts")
XLA = ("plain", "best")
DEVIATION = 0.10
"""A turn beside which known work took this share longer than in the row's quietest moment is taken again."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Relative L2 error from JAX's float32 results above which a program is not a peer."""
PACKAGES = ("jax", "jaxlib", "openvino", "onnxruntime", "onnx", "jax2onnx", "keras", "numpy")


# -- rows -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """What is measured: workload, batch, type of numbers, calling form of the JAX programs."""

    name: str
    batch: int
    dtype: str
    form: str

    @classmethod
    def parse(cls, text: str) -> Row:
        """A row from ``NAME:BATCH[:DTYPE][:args]``; training steps take their weights."""
        name, batch, *more = text.split(":")
        form = "args" if "args" in more or name.endswith("_training") else "closed"
        return cls(name, int(batch), "bfloat16" if "bfloat16" in more else "float32", form)

    def __str__(self) -> str:
        return f"{self.name}:{self.batch}:{self.dtype}:{self.form}"

    @property
    def file(self) -> str:
        """Name of the row's file."""
        return f"{self}".replace(":", "_") + ".json"


def all_rows() -> list[Row]:
    """Every workload at its smallest batch in every type of numbers, and the small training steps in float32."""
    from benchmarks.networks.workloads import SMALL_TRAINING, WORKLOADS

    found = [Row.parse(f"{s.name}:{s.batches[0]}:{d}") for d in ("float32", "bfloat16") for s in WORKLOADS.values()]
    return found + [Row.parse(f"{s.name}:{s.batches[0]}") for s in SMALL_TRAINING.values()]


# -- timing ---------------------------------------------------------------------------------------------------------
def quiet(turn: dict[str, Any], least: float) -> bool:
    """Whether a turn was taken on a quiet machine. Args: least: the row's shortest calibration [s]."""
    return max(turn["calibration"]) <= least * (1 + DEVIATION) and turn["others"] <= OTHERS


def summary(turns: Sequence[dict[str, Any]], least: float) -> dict[str, Any]:
    """Back to back: median and quartiles over turns; waited: p50, p90, p99 over calls.  Of quiet turns, if any."""
    good = [t for t in turns if quiet(t, least)]
    kept = good or list(turns)
    stream, waited = [t["stream"] for t in kept], [w for t in kept for w in t["waited"]]
    return {
        "back_to_back": dict(zip(("median", "q1", "q3"), quartiles(stream), strict=True)),
        "waited": dict(zip(("p50", "p90", "p99"), quantiles(waited, 0.5, 0.9, 0.99), strict=True)),
        "turns": len(kept),
        "turns_taken": len(turns),
        "quiet": bool(good),
        "others": max(t["others"] for t in kept),
        "memory": kept[-1]["memory"],
    }


def interleave(
    start: Any, names: Sequence[str], options: argparse.Namespace, together: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]], float]:
    """Drives peers in turns of changing order until each has its quiet ones: (facts, turns, shortest calibration).

    Args: start: starts a peer's process, and gives it with its facts; together: processes stay alive between turns.
    """
    facts: dict[str, dict[str, Any]] = {}
    workers: dict[str, Worker] = {}
    turns: dict[str, list[dict[str, Any]]] = {}
    least = min(calibrate() for _ in range(5))
    alive = list(names)
    deadline = time.monotonic() + (0.0 if options.beside_load else options.patience)
    for number in range(options.rounds * 3):
        for name in alive if number % 2 == 0 else reversed(alive):
            good = [t for t in turns.get(name, ()) if quiet(t, least)]
            if len(good) >= options.rounds or (facts.get(name, {}).keys() & {"skipped", "failed"}):
                continue
            if name not in workers:
                workers[name], found = start(name)
                facts.setdefault(name, found)
                if found.keys() & {"skipped", "failed"}:
                    facts[name] = found
                    workers.pop(name).end()
                    continue
            if together and len(workers) < sum(not f.keys() & {"skipped", "failed"} for f in facts.values()):
                continue
            await_quiet(deadline)
            taken = workers[name].turn(options.seconds, options.limit)
            if "failed" in taken:
                facts[name] = {"failed": taken["failed"]}
                workers.pop(name).end()
                continue
            least = min(least, *taken["calibration"])
            turns.setdefault(name, []).append(taken)
            if not together:
                workers.pop(name).end()
        done = [sum(quiet(t, least) for t in ts) >= options.rounds for ts in turns.values()]
        if all(done) or (number + 1 >= options.rounds and options.beside_load):
            break
    for worker in workers.values():
        worker.end()
    return facts, turns, least


# -- one row --------------------------------------------------------------------------------------------------------
def measure(row: Row, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All peers of one row. Args: folder: for the exported model and jcuts' database."""
    job = {"name": row.name, "batch": row.batch, "dtype": row.dtype, "form": row.form, "dry": options.dry}
    job |= {"folder": str(folder), "cores": cores(), "training": row.name.endswith("_training")}
    job |= {"seconds": options.seconds, "flag_budget": options.flag_budget, "keep": 0.97}
    job["tune"] = "off" if options.dry else "auto"
    log = options.out / f"{row.file}.log"

    def start(name: str, limit: float = options.limit, **more: Any) -> tuple[Worker, dict[str, Any]]:
        worker = Worker({**job, "peer": name, **more}, log, folder / "cache")
        return worker, worker.answer(limit)

    def once(name: str, limit: float = options.limit, **more: Any) -> dict[str, Any]:
        worker, found = start(name, limit, **more)
        worker.end()
        return found

    def kept(name: str, make: Any) -> dict[str, Any]:
        """What an earlier run of this row found, or ``make`` finds now."""
        path = folder / f"{name}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else make()
        path.write_text(json.dumps(found), encoding="utf-8")
        return found

    conversion = job["conversion"] = kept("conversion", lambda: once("convert"))
    conversion.setdefault("carried", 0)
    conversion |= {"skipped": conversion["failed"]} if "failed" in conversion else {}
    wanted = [p for p in PEERS if p in options.peers]
    limit = options.limit + options.flag_budget
    found = kept("search", lambda: once("search", limit)) if "best" in wanted else {}
    job["options"] = {}
    best = found.get("options") or {}
    if not best and "best" in wanted:
        wanted.remove("best")
    cold: dict[str, Any] = {}
    if "jcuts" in wanted:
        cold = kept("cold", lambda: once("jcuts", options.tuning_budget))
        job["tune"] = "cached" if "failed" in cold else job["tune"]
    size = sum(f.stat().st_size for f in folder.glob("*.npz")) + sum(f.stat().st_size for f in folder.glob("model*"))
    together = size < options.together * 2**30

    def peer(name: str) -> tuple[Worker, dict[str, Any]]:
        return start(name, options=best if name == "best" else {})

    facts, turns, least = interleave(peer, wanted, options, together)
    times = {n: summary(ts, least) for n, ts in turns.items()}
    bad = {n: f["error"] for n, f in facts.items() if f.get("error", {}).get("l2", 0) > TOLERANCE[row.dtype]}
    return {
        "row": str(row),
        "workload": row.name,
        "batch": row.batch,
        "dtype": row.dtype,
        "form": row.form,
        "dry": options.dry,
        "flags": found,
        "conversion": conversion,
        "peers": {n: facts[n] | times.get(n, {}) for n in wanted},
        "not_a_peer": bad,
        "jcuts_cold": cold,
        "together": together,
        "calibration_seconds": least,
        "host": host(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def host() -> dict[str, Any]:
    """The processor, its cores, and the load on it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    found = {k.strip(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
    names = ("model name", "cpu family", "model")
    return {n: found.get(n, "") for n in names} | {"cores": cores(), "load": os.getloadavg()[0]}


def versions() -> dict[str, str]:
    """Versions of what is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def drive(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Measures rows that have no file yet."""
    options.out.mkdir(parents=True, exist_ok=True)
    for row in rows:
        target = options.out / row.file
        if target.exists():
            print(f"{row}: already measured", flush=True)
            continue
        start = time.monotonic()
        folder = options.work / target.stem if options.work else Path(tempfile.mkdtemp(prefix="cpu-baseline-"))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            data = measure(row, options, folder)
        finally:
            if not options.work:
                shutil.rmtree(folder, ignore_errors=True)
        write(target, data)
        print(f"{row}: measured, {time.monotonic() - start:.0f} s; {short(data)}", flush=True)
    return 0


def short(row: dict[str, Any]) -> str:
    """Milliseconds back to back of each peer, or why there are none."""
    cells = []
    for name, p in row["peers"].items():
        time_ = f"{p['back_to_back']['median'] * 1e3:.2f}" if "back_to_back" in p else p.get("skipped", p.get("failed"))
        cells.append(f"{name} {time_}")
    return ", ".join(cells)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="NAME:BATCH[:DTYPE][:args]; without any, all")
    parser.add_argument("--out", type=Path, help="folder of the rows, one JSON file each")
    parser.add_argument("--work", type=Path, help="folder that keeps models, options and jcuts' database per row")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each peer on a quiet machine")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a turn back to back, and again waited for")
    parser.add_argument("--flag-budget", type=float, default=120.0, help="seconds of the search for XLA's options")
    parser.add_argument(
        "--tuning-budget", type=float, default=300.0, help="seconds of jcuts' first call, tuning included"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one answer of a process")
    parser.add_argument(
        "--together", type=float, default=0.75, help="GiB of model up to which all processes stay alive"
    )
    parser.add_argument("--patience", type=float, default=120.0, help="seconds of waiting for a quiet machine, per row")
    parser.add_argument("--beside-load", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--dry", action="store_true", help="tiny sizes: finds typos, not times")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        from benchmarks.networks import cpu_workers

        return cpu_workers.main(options.worker)
    rows = [Row.parse(r) for r in options.rows] or all_rows()
    if options.list:
        print("\n".join(map(str, rows)))
        return 0
    if options.out is None:
        parser.error("--out DIR is needed")
    if options.dry:
        options.rounds, options.beside_load = 2, True
        options.seconds = min(options.seconds, 0.02)
    options.out = options.out.resolve()
    options.work = options.work and options.work.resolve()
    return drive(rows, options)


if __name__ == "__main__":
    sys.exit(main())
