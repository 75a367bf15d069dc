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
from jcuts.arch.load import load_gpu  # noqa: E402
from jcuts.base.errors import Refusal  # noqa: E402
from jcuts.estimate.gpu_kernel import least_seconds  # noqa: E402
from jcuts.kernel_ir.program import Program  # noqa: E402
from jcuts.lower.patterns.attention import match  # noqa: E402
from jcuts.lower.patterns.few_channel_conv import as_few_channel_conv  # noqa: E402
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, B, K, as_gemm  # noqa: E402
from jcuts.lower.patterns.inverted_residual import InvertedResidual, match_inverted_residual  # noqa: E402
from jcuts.schedule.gpu import launch_stats  # noqa: E402
from jcuts.schedule.gpu.conv.few_channels_tile import conv_geometry  # noqa: E402

COUNTED = ("product", "patch", "block", "attention")
"""Forms whose cycles are counted."""
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


def multiplied(program: Program) -> float:
    """Products that matrix units have to compute; 0 for operations that need none."""
    if program.template == "attention" and not isinstance(known := match(program), Refusal):
        return float(known.batches * known.rows * known.keys * (known.key.length + known.value.length))
    if program.template == "block" and isinstance(found := match_inverted_residual(program), InvertedResidual):
        return found.multiply_adds - float(
            found.expanded_channels * found.window.image[0] * math.prod(found.window.outputs) * len(found.window.taps)
        )
    made = as_gemm(program) if program.template in ("contraction", "convolution") else None
    if made is not None:
        extents = made.phases[0].ranges()
        return math.prod(float(extents.get(name, 1)) for name in (B, ROWS, COLUMNS, K))
    patched = as_few_channel_conv(program) if program.template == "convolution" else None
    if patched is not None:
        shape = conv_geometry(patched)
        return float(shape.images * shape.rows * shape.outputs * shape.columns * len(shape.terms))
    return 0.0


def bound(row: dict[str, Any], program: Program, unit: str, arch: Any) -> float:
    """No kernel of the operation can be faster [s]: bytes that must move, products at the peak of the units."""
    moved = sum(b.bytes for b in (*program.inputs, *program.outputs))  # these operations use all of them
    least = least_seconds(moved, arch, resident=row["l2"] / row["sets"])
    return max(least, 2 * multiplied(program) / arch.peak(unit) if unit != "ffma" else 0.0)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; ties get their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        ends = np.cumsum(count)
        return ((ends - count + ends - 1) / 2)[place]

    x, y = ranks(a), ranks(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else 0.0


def estimates(row: dict[str, Any], program: Program, arch: Any) -> list[float]:
    """The analytic estimate of every schedule of a row: counted cycles, else PUL's time; infinite for what has none."""
    found: list[float] = []
    counts = any(value in COUNTED for entry in row["schedules"] for name, value in entry["params"] if name == "cuda")
    for entry in row["schedules"]:
        made = space.rebuilt(program, entry)
        if made is None:
            raise SystemExit(f"{row['operation']}: {entry['params']} cannot be made again")
        count = space.counted(made)
        if count is None and counts:
            found.append(math.inf)  # another form beside those on matrix units
        elif count is None:
            found.append(launch_stats.score_of(made, [tuple(x) for x in entry["launches"]], arch).seconds)
        else:
            found.append(count)
    return found


def judged(row: dict[str, Any], arch: Any) -> dict[str, Any]:
    """The figures of one operation."""
    program = OPERATIONS[row["operation"]].program
    times = [entry["us"][1] for entry in row["schedules"]]
    least = min(entry["us"][0] for entry in row["schedules"])
    best, count = min(times), len(times)
    values = estimates(row, program, arch)
    order = sorted(range(count), key=lambda k: (values[k], row["schedules"][k]["digest"]))
    top = max(1, round(SHARE * count))
    kept = [e["us"][1] for e in row["schedules"] if e["digest"] in row["kept"]]
    measured = {e["digest"]: e["us"][1] for e in row["schedules"]}
    today = [measured.get(digest) for digest in space.proposed(program)]
    now = [t for t in today if t is not None]
    unit = next((u for e in row["schedules"] if (u := launch_stats.unit_of(_made(program, e))) != "ffma"), "ffma")
    limit = bound(row, program, unit, arch) * 1e6
    by_time = sorted(times)
    loss = min(times[k] for k in order[:top]) / best - 1
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
        "best_is_ranked": order.index(times.index(best)) + 1,
        "kept": len(kept),
        "loss_kept": min(kept, default=math.nan) / best - 1,
        "now": len(today),
        "untimed": len(today) - len(now),
        "loss_now": min(now, default=math.nan) / best - 1,
        "spearman": spearman(values, times),
        "bound_us": limit,
        "violations": sum(e["us"][0] < limit for e in row["schedules"]),
        "tightest": limit / least,
        "noise": row["noise"],
        "best": row["schedules"][times.index(best)]["params"],
        "first": row["schedules"][order[0]]["params"],
    }


def _made(program: Program, entry: dict[str, Any]) -> Program:
    made = space.rebuilt(program, entry)
    assert made is not None
    return made


def show(found: dict[str, Any]) -> None:
    """One line of an operation."""
    print(
        f"{found['operation']:34} {found['measured']:4} best {found['best_us']:8.2f} median {found['median_us']:8.2f}  "
        f"top {found['top']}: {found['loss_top']:6.1%}{' ' if found['keeps'] else '!'} first "
        f"{found['loss_first']:6.1%} 8: {found['loss_top_8']:6.1%}  best is {found['best_is_ranked']:3}.  "
        f"tuner's {found['kept']:2}: {found['loss_kept']:6.1%}  now {found['now']} ({found['untimed']} untimed): "
        f"{found['loss_now']:6.1%}  rho {found['spearman']:5.2f}  "
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
    arch = load_gpu(options.gpu)
    rows = [row for path in options.files for row in rows_of(path)]
    found = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for one in pool.map(judged, rows, [arch] * len(rows)):
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
