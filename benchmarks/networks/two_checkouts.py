"""Speed and warm starts of two checkouts of jcuts on one machine: the same functions, in processes that take turns.

    python benchmarks/networks/two_checkouts.py --before ../old --after . MobileNetV2:1 ResNet50:1
    python benchmarks/networks/two_checkouts.py --before ../old --after . --share-database MobileNetV2:1

Every process runs one workload of one checkout (``NAME[:BATCH][:bfloat16][:args]``, from this file's own checkout, so
both sides trace the same function), times jcuts and plain `jax.jit` interleaved, and counts what it tuned and compared.
The first round of a checkout is cold, the others find its tuning database.  With ``--share-database`` the checkout
``--after`` begins with a copy of the database that ``--before`` filled, so its rounds must tune nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("before", "after")
COMPARED = "whole programs compared"
"""What a checkout logs when it times whole programs."""


class Counts(logging.Handler):
    """How many problems were tuned, and how often whole programs were compared."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.steps = 0
        self.compared = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a line of jcuts' log."""
        self.compared += COMPARED in record.getMessage()

    def update(self, stage: str, done: int, total: int, name: str) -> None:
        """What a tuning session tells of its progress."""
        self.steps += 1


def measure(spec: str, seconds: float) -> dict[str, Any]:
    """One workload in this process, with the jcuts that ``PYTHONPATH`` names."""
    import jax

    import jcuts
    from jcuts.tune import session

    workloads = _workloads()
    parts = spec.split(":")
    batch = next((int(p) for p in parts[1:] if p.isdigit()), 1)
    dtype = "bfloat16" if "bfloat16" in parts else "float32"
    fn, args = workloads.by_name(parts[0], batch, closed="args" not in parts, dtype=dtype)
    counts = Counts()
    logging.getLogger("jcuts").setLevel(logging.INFO)
    logging.getLogger("jcuts").addHandler(counts)
    session.set_progress(counts)
    os.environ.setdefault("JCUTS_FIRST_CALL_SECONDS", "inf")  # the tuned program is timed
    ours, plain = jcuts.optimize(fn), jax.jit(fn)
    start = time.perf_counter()
    jax.block_until_ready(ours(*args))
    first = time.perf_counter() - start
    jax.block_until_ready(plain(*args))
    decision, report = ours.decision(*args), ours.explain(*args)
    assert decision is not None  # it has just been called
    times = _timed({"jcuts": lambda: ours(*args), "plain": lambda: plain(*args)}, seconds)
    return {
        "jcuts_at": str(Path(jcuts.__file__).parent),
        "first_call_seconds": first,
        "tuning_steps": counts.steps,
        "whole_program_comparisons": counts.compared,
        "chosen": decision.chosen,
        "kernels": sorted({s.chosen for s in report.subsets}),
        "seconds": times,
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
    }


def _workloads() -> Any:
    """This checkout's workloads: ``benchmarks`` may be the other's package."""
    path = Path(__file__).with_name("workloads") / "__init__.py"
    spec = importlib.util.spec_from_file_location("workloads", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module  # its files import each other
    spec.loader.exec_module(module)
    return module


def _timed(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median time of a call [s], calls back to back in short runs that take turns."""
    import jax

    found: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        repeats[name] = max(1, int(0.05 / (time.perf_counter() - start)))
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(found["plain"]) < 5:
        for name, call in calls.items():
            start, last = time.perf_counter(), None
            for _ in range(repeats[name]):
                last = call()
            jax.block_until_ready(last)
            found[name].append((time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(samples) for name, samples in found.items()}


def run(spec: str, checkout: Path, cache: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own. Raises: RuntimeError with the end of its output."""
    command = [*options.prefix.split(), sys.executable, str(Path(__file__).resolve()), "--one", spec]
    more = os.environ.get("PYTHONPATH", "")
    environment = {
        "JCUTS_TUNE_SECONDS": "inf",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), more))),
        "JCUTS_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [*command, "--seconds", str(options.seconds)], env=environment, cwd=cache, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{spec} in {checkout}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(spec: str, options: argparse.Namespace, caches: Path) -> dict[str, Any]:
    """All rounds of one workload, and what they come to."""
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    folders = {side: caches / f"{side}_{spec.replace(':', '_')}" for side in SIDES}
    folders["before"].mkdir(parents=True)
    for number in range(options.rounds + 1):
        for side in SIDES:
            if not folders[side].exists():
                if options.share_database:
                    shutil.copytree(folders["before"], folders[side])
                folders[side].mkdir(exist_ok=True)
            rounds[side].append(run(spec, checkouts[side], folders[side], options))
            print(f"{spec} {side} {number}: {_line(rounds[side][-1])}", file=sys.stderr)
    return {"workload": spec, "rounds": rounds, **summary(rounds)}


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of the warm rounds [s], their ratios, and what warm rounds tuned and compared."""
    warm = {side: rounds[side][1:] or rounds[side] for side in SIDES}
    medians = {
        side: {name: statistics.median(r["seconds"][name] for r in warm[side]) for name in ("jcuts", "plain")}
        for side in SIDES
    }
    return {
        "seconds": medians,
        "after_over_before": {name: medians["after"][name] / medians["before"][name] for name in ("jcuts", "plain")},
        "spread": {
            side: max(r["seconds"]["jcuts"] for r in warm[side]) / min(r["seconds"]["jcuts"] for r in warm[side]) - 1
            for side in SIDES
        },
        "warm_tuning_steps": {side: sum(r["tuning_steps"] for r in warm[side]) for side in SIDES},
        "warm_comparisons": {side: sum(r["whole_program_comparisons"] for r in warm[side]) for side in SIDES},
        "first_of_after": {name: rounds["after"][0][name] for name in ("tuning_steps", "first_call_seconds")},
    }


def _line(found: dict[str, Any]) -> str:
    ours, plain = (1e3 * found["seconds"][name] for name in ("jcuts", "plain"))
    return (
        f"{ours:.3f} ms, plain {plain:.3f} ms, first call {found['first_call_seconds']:.1f} s, "
        f"{found['tuning_steps']} tuning steps, {found['whole_program_comparisons']} comparisons, {found['chosen']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["MobileNetV2:1"])
    parser.add_argument("--before", type=Path, help="a checkout of jcuts with its native libraries built")
    parser.add_argument("--after", type=Path, default=ROOT)
    parser.add_argument("--rounds", type=int, default=3, help="warm rounds of either checkout")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing per process")
    parser.add_argument("--share-database", action="store_true", help="--after begins with the database of --before")
    parser.add_argument("--prefix", default="", help="put before every command, as 'taskset -c 0,1'")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(options.one, options.seconds)))
        return 0
    if options.before is None:
        parser.error("--before names the checkout to compare with")
    rows = []
    with tempfile.TemporaryDirectory() as caches:
        for spec in options.workloads:
            rows.append(compare(spec, options, Path(caches)))
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        ratio, spread = row["after_over_before"], row["spread"]
        print(
            f"{row['workload']}: after takes {ratio['jcuts']:.3f} of before (plain {ratio['plain']:.3f}; spread "
            f"{spread['before']:.1%}, {spread['after']:.1%}); warm tuning steps {row['warm_tuning_steps']}, "
            f"comparisons {row['warm_comparisons']}; first call of after {row['first_of_after']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
