"""Are the micro-batch solvers right, and how fast are they?  No device needed.

    python benchmarks/microbatch/solvers.py                       # everything, about two minutes
    python benchmarks/microbatch/solvers.py --only wr wd          # parts: wr wd times split database
    python benchmarks/microbatch/solvers.py --json out.json

wr: dynamic programming against all compositions.  wd: the knapsack on desirable sets, on all configurations, and HiGHS
on all configurations, under both constraints.  times: seconds to solve networks of ResNet-50's and ResNet-152's size,
beside cvxpy and the times that the paper prints.  split: the uneven batch split against enumeration, and on published
times.  database: writers at the same time, kill -9, foreign devices and files.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.microbatch.modelled_device import Modelled, training_step  # noqa: E402
from jcuts.base.errors import CacheError  # noqa: E402
from jcuts.microbatch import batch_division_dp, deepbench, liveness_knapsack, multiple_choice_knapsack  # noqa: E402
from jcuts.microbatch.best_batch import best_batch_size  # noqa: E402
from jcuts.microbatch.database import SCHEMA, Database, Device  # noqa: E402
from jcuts.microbatch.errors import ForeignDeviceError, NoDivisionError, NoSplitError  # noqa: E402
from jcuts.microbatch.network import Clique, cliques  # noqa: E402
from jcuts.microbatch.pareto import desirable_or_none  # noqa: E402
from jcuts.microbatch.timings import Division, policy_sizes  # noqa: E402
from tests.microbatch import reference  # noqa: E402
from tests.microbatch.cases import UNIT, random_limit, random_sets, random_table  # noqa: E402
from tests.microbatch.test_best_batch import random_times  # noqa: E402

PAPER_S = {"ResNet-50": 5.46e-3, "ResNet-152": 716e-3}
"""Solve times that the paper prints (GLPK; 562 variables, and its most complicated case)."""
MIB = 1 << 20


def run_wr(cases: int) -> dict[str, Any]:
    """Random tables with B <= 12: the least time over all 2^(B-1) compositions."""
    wrong = impossible = compared = 0
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        batch = int(rng.integers(1, 13))
        table = random_table(rng, batch, missing=rng.choice((0.0, 0.2, 0.6)))
        limit = random_limit(rng, table)
        expected = reference.wr(table, batch, limit)
        compared += len(reference.compositions(batch))
        try:
            found = batch_division_dp.divide(table, batch, limit)
        except NoDivisionError:
            impossible += 1
            wrong += expected is not None
            continue
        wrong += found.ticks != expected or found.workspace > limit or found.batch != batch
    return {"cases": cases, "compositions": compared, "without a division": impossible, "wrong": wrong}


def run_wd(networks: int) -> dict[str, Any]:
    """Random networks: own solver on sets = on all configurations = HiGHS on all configurations."""
    counts = dict.fromkeys(("solved", "infeasible", "configurations", "in desirable sets", "wrong"), 0)
    for seed in range(networks):
        rng = np.random.default_rng(seed)
        batch = int(rng.integers(2, 6))
        tables = [random_table(rng, batch, algorithms=2) for _ in range(int(rng.integers(1, 6)))]
        every = [reference.configurations(table, batch) for table in tables]
        sets = [desirable_or_none(table, batch) for table in tables]
        if not all(every):
            counts["wrong"] += any(bool(a) != bool(b) for a, b in zip(every, sets, strict=True))
            counts["infeasible"] += 1
            continue
        total = UNIT * int(rng.integers(0, 500 * len(tables)))
        lives = [(b, b + int(rng.integers(0, 3))) for b in rng.integers(0, len(tables), len(tables)).tolist()]
        alive = bool(seed % 2)
        limits = cliques(lives, (), total) if alive else [Clique(tuple(range(len(tables))), total)]
        expected = reference.highs(*_arrays(every), limits)
        best = None if expected is None else reference.value(expected, _arrays(every)[0])
        for choices in (sets, every):
            costs, weights = _arrays(choices)
            found = (
                liveness_knapsack.solve_clique_knapsack(costs, weights, limits)
                if alive
                else multiple_choice_knapsack.choose(costs, weights, total)
            )
            counts["wrong"] += (None if found is None else found.cost) != best
            counts["wrong"] += found is not None and not (found.proven and reference.fits(found.items, weights, limits))
        counts["solved" if best is not None else "infeasible"] += 1
        counts["configurations"] += sum(map(len, every))
        counts["in desirable sets"] += sum(map(len, sets))
    return {"networks": networks, **counts}


def run_times(instances: int, rounds: int) -> dict[str, Any]:
    """Seconds to solve; ours is the best of some rounds per instance (other processes disturb), then over instances.

    Processor time is what the solver itself needs on a machine that others use at the same time.
    """
    found = {}
    for name, (kernels, variables) in {"ResNet-50": (159, 562), "ResNet-152": (465, 5000)}.items():
        for kind in ("uncorrelated", "weak", "strong"):
            problems = [
                _problem(random_sets(np.random.default_rng(seed), kernels, variables, kind), seed)
                for seed in range(instances)
            ]
            slow = 3 if variables < 1000 else 1
            found[f"{name} size, random, {kind}"] = _time(name, problems, rounds, slow)
    for name, batch, policy in (
        ("ResNet-50", 32, "powerOfTwo"),
        ("ResNet-50", 32, "all"),
        ("ResNet-152", 128, "powerOfTwo"),
        ("ResNet-152", 128, "all"),
    ):
        begin = time.perf_counter()
        sets, count = _modelled_sets(name, batch, policy)
        took = time.perf_counter() - begin
        arrays = _arrays(sets)
        problems = [(*arrays, count * size * MIB) for size in (2, 4, 8, 16, 32)]
        entry = _time(name, problems, rounds, 1)
        found[f"{name}, batch {batch}, made-up times, {policy}"] = entry | {"sets_s": took}
    found["80 branches that overlap, liveness"] = _time_branches(5, rounds)
    return found


def _time_branches(instances: int, rounds: int) -> dict[str, Any]:
    """Blocks of four branches side by side, workspaces live for one step or two: 20 blocks, as an Inception network."""
    own, other, agree, variables = [], [], 0, []
    for seed in range(instances):
        rng = np.random.default_rng(seed)
        costs, weights, lives = [], [], []
        for block in range(20):
            for _ in range(4):
                for depth in range(int(rng.integers(1, 4))):
                    weight = np.sort(rng.choice(1 << 14, int(rng.integers(2, 10)), replace=False)) * UNIT
                    weight[0] = 0
                    weights.append(weight)
                    costs.append(np.sort(rng.integers(10**7, 10**9, len(weight)))[::-1])
                    lives.append((3 * block + depth, 3 * block + depth + int(rng.integers(0, 2))))
        limits = cliques(lives, (), 96 * MIB)
        taken = _rounds(lambda: liveness_knapsack.solve_clique_knapsack(costs, weights, limits), rounds)  # noqa: B023
        own.append(min(wall for wall, _ in taken))
        chosen = liveness_knapsack.solve_clique_knapsack(costs, weights, limits)
        variables.append(sum(map(len, costs)))
        if seed:
            continue
        begin = time.perf_counter()
        picks = reference.highs(costs, weights, limits)
        other.append(time.perf_counter() - begin)
        agree += chosen is not None and picks is not None and chosen.cost == reference.value(picks, costs)
    return {
        "variables": statistics.median(variables),
        "instances": instances,
        "own_median_ms": statistics.median(own) * 1e3,
        "own_worst_ms": max(own) * 1e3,
        "cvxpy_ms": [seconds * 1e3 for seconds in other],
        "cvxpy_agrees": f"{agree} of {len(other)}",
    }


def run_split(cases: int) -> dict[str, Any]:
    """Against enumeration; then published times of four GPUs."""
    found: dict[str, Any] = {}
    for shape in ("convex", "scattered", "stepped"):
        wrong = impossible = fewer = 0
        for seed in range(cases):
            rng = np.random.default_rng(seed)
            batch = int(rng.integers(1, 17))
            times = [random_times(rng, batch, shape) for _ in range(int(rng.integers(1, 5)))]
            expected = reference.best_batch(batch, times)
            try:
                split = best_batch_size(batch, times)
            except NoSplitError:
                impossible += 1
                wrong += expected is not None
                continue
            wrong += expected is None or abs(split.seconds - expected) > 1e-12 or sum(split.sizes) != batch
            fewer += split.used < len(times)
        found[shape] = {"cases": cases, "without a split": impossible, "devices left out": fewer, "wrong": wrong}
    gpus = ("P100", "V100", "T4", "1080Ti")
    for batch in (32, 64, 96, 128):
        for interpolate in (False, True):
            try:
                split = best_batch_size(batch, [deepbench.times(g) for g in gpus], interpolate=interpolate, multiple=4)
            except NoSplitError:
                continue
            found[f"DeepBench, {batch} samples{', interpolated' if interpolate else ''}"] = {
                **dict(zip(split.names, split.sizes, strict=True)),
                "ms": split.seconds * 1e3,
                "over even": split.even / split.seconds if split.even else None,
                "over best single": split.alone / split.seconds if split.alone else None,
                "interpolated": split.interpolated,
            }
    return found


WRITER = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.microbatch.modelled_device import Modelled, convolution, alexnet
from jcuts.microbatch.database import Database
measure, database = Modelled(), Database({path!r})
kernel = convolution(alexnet()[1], "forward")
for batch in range({first}, {first} + {count}):
    database.record(measure.device, kernel, batch, measure(kernel, batch))
    print(batch, flush=True)
"""


def run_database(writers: int, records: int, kills: int) -> dict[str, Any]:
    """Writers at the same time, kill -9 at random moments, and what is refused."""
    from benchmarks.microbatch.modelled_device import alexnet, convolution

    kernel, device = convolution(alexnet()[1], "forward"), Modelled().device
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.db"
        begin = time.perf_counter()
        running = [_writer(path, 1 + k * records, records) for k in range(writers)]
        failed = sum(process.wait(timeout=300) != 0 for process in running)
        took = time.perf_counter() - begin
        table = Database(path).table(device, kernel)
        found["writers"] = {
            "processes": writers,
            "records": writers * records,
            "failed": failed,
            "lost": writers * records - len(table.sizes),
            "records/s": writers * records / took,
        }

        path, reported = Path(folder) / "killed.db", 0
        lost = torn = damaged = 0
        random.seed(0)
        for _ in range(kills):
            process = _writer(path, reported + 1, 1_000_000)
            process.stdout.readline()
            time.sleep(random.uniform(0.0, 0.3))
            os.kill(process.pid, signal.SIGKILL)
            lines = process.communicate()[0].split()
            reported = max([reported + 1, *(int(line) for line in lines[:-1])])
            database = Database(path)
            try:
                table = database.table(device, kernel)
            except CacheError:
                damaged += 1
                continue
            per_size = collections.Counter(micro.batch for micro in table.micros)
            lost += len(set(range(1, reported + 1)) - set(per_size))
            torn += sum(count != len(Modelled()(kernel, size)) for size, count in per_size.items())
            reported = max(table.sizes)
        found["kill -9"] = {"kills": kills, "records": reported, "lost": lost, "torn": torn, "damaged": damaged}
        found["refused"] = _refusals(path, kernel)
    return found


def _refusals(path: Path, kernel: Any) -> dict[str, bool]:
    import sqlite3

    database, right = Database(path), {}
    own = Modelled().device
    for name, device in {
        "other GPU": Device("another", own.driver, own.library),
        "other driver": Device(own.name, "1", own.library),
        "other library": Device(own.name, own.driver, "other"),
    }.items():
        try:
            database.table(device, kernel)
            right[name] = False
        except ForeignDeviceError as error:
            right[name] = str(own) in str(error)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    before = path.read_bytes()
    try:
        Database(path).record(own, kernel, 1, Modelled()(kernel, 1))
        right["newer schema"] = False
    except CacheError:
        right["newer schema"] = path.read_bytes() == before
    return right


def _writer(path: Path, first: int, count: int) -> Any:
    code = WRITER.format(root=str(ROOT), path=str(path), first=first, count=count)
    # Pipes of this size hold what a writer reports until somebody reads it.
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, pipesize=1 << 20)


def _arrays(sets: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return (
        [np.array([division.ticks for division in choices], np.int64) for choices in sets],
        [np.array([division.workspace for division in choices], np.int64) for choices in sets],
    )


def _problem(sets: tuple[list[np.ndarray], list[np.ndarray]], seed: int) -> tuple[Any, Any, int]:
    costs, weights = sets
    least, most = sum(int(w[0]) for w in weights), sum(int(w[-1]) for w in weights)
    share = np.random.default_rng(seed).uniform(0.05, 0.95)
    return costs, weights, least + int((most - least) * share) // UNIT * UNIT


def _modelled_sets(name: str, batch: int, policy: str) -> tuple[list[tuple[Division, ...]], int]:
    """Desirable sets of a training step on the made-up device; equal kernels share one."""
    network, measure, known = training_step(name, batch), Modelled(), {}
    limit = 512 * MIB
    for use in network.uses:
        if use.convolution not in known:
            table = measure.table(use.convolution, policy_sizes(policy, batch))
            known[use.convolution] = desirable_or_none(table, batch, limit)
    return [known[use.convolution] for use in network.uses], len(network.uses)


def _time(name: str, problems: list[tuple[Any, Any, int]], rounds: int, slow: int) -> dict[str, Any]:
    """Own times over all problems; cvxpy's over the first ``slow`` ones, whose optima must agree."""
    own, busy, states, solutions = [], [], [], []
    for costs, weights, limit in problems:
        taken = _rounds(lambda: multiple_choice_knapsack.choose(costs, weights, limit), rounds)  # noqa: B023
        chosen = multiple_choice_knapsack.choose(costs, weights, limit)
        own.append(min(wall for wall, _ in taken))
        busy.append(min(processor for _, processor in taken))
        states.append(chosen.states if chosen else 0)
        solutions.append(chosen)
    other, agree = [], 0
    for (costs, weights, limit), chosen in zip(problems[:slow], solutions, strict=False):
        begin = time.perf_counter()
        picks = reference.highs(costs, weights, [Clique(tuple(range(len(costs))), limit)])
        other.append(time.perf_counter() - begin)
        value = None if picks is None else reference.value(picks, costs)
        # HiGHS works within tolerances: it may not be cheaper, and not dearer by more than a millionth.
        agree += (chosen is None) == (value is None) and (
            chosen is None or value is None or chosen.cost <= value <= chosen.cost * (1 + 1e-6)
        )
    return {
        "variables": sum(map(len, problems[0][0])),
        "instances": len(problems),
        "own_median_ms": statistics.median(own) * 1e3,
        "own_worst_ms": max(own) * 1e3,
        "own_worst_processor_ms": max(busy) * 1e3,
        "states": max(states),
        "proven": all(chosen is None or chosen.proven for chosen in solutions),
        "cvxpy_ms": [seconds * 1e3 for seconds in other],
        "cvxpy_agrees": f"{agree} of {len(other)}",
        "paper_ms": PAPER_S[name] * 1e3,
    }


def _rounds(call: Callable[[], object], most: int) -> list[tuple[float, float]]:
    """(wall, processor) seconds of some rounds; fewer of a slow call."""
    made: list[tuple[float, float]] = []
    while len(made) < 3 or (len(made) < most and sum(wall for wall, _ in made) < 2.0):
        made.append(_seconds(call))
    return made


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    """(wall, processor) seconds of a call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def _lines(value: Any, indent: str = "  ") -> Iterator[str]:
    for name, entry in value.items():
        if isinstance(entry, dict):
            yield f"{indent}{name}"
            yield indent + "    " + ", ".join(f"{k} {_text(v)}" for k, v in entry.items())
        else:
            yield f"{indent}{name}: {_text(entry)}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("wr", "wd", "times", "split", "database")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "wr": lambda: run_wr(1000),
        "wd": lambda: run_wd(500),
        "times": lambda: run_times(10, 20),
        "split": lambda: run_split(300),
        "database": lambda: run_database(4, 100, 40),
    }
    results = {}
    for part in given.only:
        begin = time.perf_counter()
        results[part] = runs[part]()
        print(f"{part} ({time.perf_counter() - begin:.0f} s)")
        print("\n".join(_lines(results[part])), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
