"""What the pruning study on a GPU shows: every measured schedule ranked by the estimate alone.

    python benchmarks/pruning/gpu_ranking.py benchmarks/results/pruning/pruning_gpu_*.json

Per operation: what the best of the top 1 % of the analytic ranking loses against the best of all (at most 2 % where
it `keeps` it), what the tuner's own choice of candidates loses, rank correlation, and how many kernels were faster
than the bound allows.  Needs no GPU: schedules are made again from their records, and scored by today's model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.pruning import gpu_space as space  # noqa: E402
from benchmarks.pruning.gpu_operations import OPERATIONS  # noqa: E402
from jcuts.estimate.kernel_pul import pul_ratios  # noqa: E402
from jcuts.estimate.time_model import KernelTime  # noqa: E402
from jcuts.kernel_ir.program import Program  # noqa: E402
from jcuts.schedule.gpu.kernel_time import kernel_time  # noqa: E402
from jcuts.schedule.gpu.machine import GpuMachine  # noqa: E402

SHARE = 0.01
"""Of the ranking that is kept."""
LOSS = 0.02
"""What the kept part of the ranking may lose."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The operations of a file; schedules may name their loops by number among the ``shapes`` of their operation."""
    rows = [row for row in json.loads(path.read_text())["rows"] if row["schedules"]]
    for row in rows:
        for entry in row["schedules"]:
            if isinstance(entry["phases"], int):
                entry["phases"] = row["shapes"][entry["phases"]]
    return rows


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; ties get their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        ends = np.cumsum(count)
        return ((ends - count + ends - 1) / 2)[place]

    x, y = ranks(a), ranks(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else 0.0


def random_loss(times: Sequence[float], first: int) -> float:
    """Expected loss of the best of so many random schedules."""
    ordered = sorted(times)
    all_draws, expected = math.comb(len(ordered), first), 0.0
    for place, seconds in enumerate(ordered):  # it is the fastest drawn, the others are slower
        expected += math.comb(len(ordered) - place - 1, first - 1) / all_draws * seconds
    return expected / ordered[0] - 1.0


def top_loss(values: Sequence[float], times: Sequence[float], digests: Sequence[str], first: int) -> float:
    """Loss of the best of the first by ascending values."""
    order = sorted(range(len(times)), key=lambda k: (values[k], digests[k]))
    return min(times[k] for k in order[:first]) / min(times) - 1.0


def models_of(row: dict[str, Any], machine: GpuMachine) -> list[KernelTime]:
    """The time model of every recorded schedule of an operation."""
    program = OPERATIONS[row["operation"]].program
    return [kernel_time(_made(program, entry), machine) for entry in row["schedules"]]


def judged(row: dict[str, Any], gpu: str) -> dict[str, Any]:
    """The figures of one operation. Args: gpu: whose rates the model has."""
    machine, program = GpuMachine.named(gpu), OPERATIONS[row["operation"]].program
    models = models_of(row, machine)
    times = [entry["us"][1] for entry in row["schedules"]]
    digests = [entry["digest"] for entry in row["schedules"]]
    best, count = min(times), len(times)
    values = [model.seconds for model in models]
    order = sorted(range(count), key=lambda k: (values[k], digests[k]))
    top = max(1, round(SHARE * count))
    kept = [e["us"][1] for e in row["schedules"] if e["digest"] in row["kept"]]
    measured = dict(zip(digests, times, strict=True))
    today = [measured.get(digest) for digest in space.proposed(program)]
    now = [t for t in today if t is not None]
    resident = row["l2"] / row["sets"]
    limits = [1e6 * model.bound(machine.arch, resident) for model in models]
    pul = [-pul_ratios(model, machine.arch).pul for model in models]
    by_time = sorted(times)
    loss = top_loss(values, times, digests, top)
    return {
        "operation": row["operation"],
        "measured": count,
        "best_us": best,
        "median_us": by_time[count // 2],
        "worst_us": by_time[-1],
        "top": top,
        "loss_first": times[order[0]] / best - 1,
        "loss_top": loss,
        "keeps": loss <= LOSS,
        "loss_top_8": min(times[k] for k in order[:8]) / best - 1,
        "loss_top_pul": top_loss(pul, times, digests, top),
        "loss_top_random": random_loss(times, top),
        "best_is_ranked": order.index(times.index(best)) + 1,
        "kept": len(kept),
        "loss_kept": min(kept, default=math.nan) / best - 1,
        "now": len(today),
        "untimed": len(today) - len(now),
        "loss_now": min(now, default=math.nan) / best - 1,
        "spearman": spearman(values, times),
        "spearman_pul": spearman(pul, times),
        "measured_over_predicted": float(np.median([t / (1e6 * v) for t, v in zip(times, values, strict=True)])),
        "bound_us": min(limits),
        "violations": sum(e["us"][0] < limit for e, limit in zip(row["schedules"], limits, strict=True)),
        "tightest": max(limit / e["us"][0] for e, limit in zip(row["schedules"], limits, strict=True)),
        "noise": row["noise"],
        "best": row["schedules"][times.index(best)]["params"],
        "first": row["schedules"][order[0]]["params"],
    }


def _made(program: Program, entry: dict[str, Any]) -> Program:
    made = space.rebuilt(program, entry)
    if made is None:
        raise SystemExit(f"{program.name}: {entry['params']} cannot be made again")
    return made


def show(found: dict[str, Any]) -> None:
    """One line of an operation."""
    print(
        f"{found['operation']:34} {found['measured']:4} best {found['best_us']:8.2f} median {found['median_us']:8.2f}  "
        f"top {found['top']}: {found['loss_top']:6.1%}{' ' if found['keeps'] else '!'} first "
        f"{found['loss_first']:6.1%} 8: {found['loss_top_8']:6.1%} PUL {found['loss_top_pul']:6.1%} random "
        f"{found['loss_top_random']:6.1%} measured/predicted "
        f"{found['measured_over_predicted']:.2f}  best is {found['best_is_ranked']:3}.  "
        f"tuner's {found['kept']:2}: {found['loss_kept']:6.1%}  now {found['now']} ({found['untimed']} untimed): "
        f"{found['loss_now']:6.1%}  rho {found['spearman']:5.2f} PUL {found['spearman_pul']:5.2f}  "
        f"violations {found['violations']} (tightest {found['tightest']:.2f})",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--gpu", default="H200", help="name of the GPU's data file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="JSON of the figures")
    options = parser.parse_args(arguments)
    rows = [row for path in options.files for row in rows_of(path)]
    found = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for one in pool.map(judged, rows, [options.gpu] * len(rows)):
            found.append(one)
            show(one)
    safe, violations = sum(f["keeps"] for f in found), sum(f["violations"] for f in found)
    kernels, enough = sum(f["measured"] for f in found), sum(f["measured"] >= 500 for f in found)
    print(
        f"{len(found)} operations ({enough} of 500 and more), {kernels} kernels: {safe} keep the best or within 2 %; "
        f"{violations} violations of the bound"
    )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(violations > 0)


if __name__ == "__main__":
    raise SystemExit(main())
