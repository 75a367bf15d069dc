"""Micro-batching on a GPU in figures: training steps, DeepBench in three precisions, networks under WR and WD.

    python benchmarks/microbatch/gpu_tables.py --out results --items steps --budget 200
    python benchmarks/microbatch/gpu_tables.py --out results --items deepbench --budget 150
    python benchmarks/microbatch/gpu_tables.py --out results --items chains --networks ResNet-50 --budget 100
    python benchmarks/microbatch/gpu_tables.py --out /tmp/x --dry-run      # no GPU: the tests' cuDNN, tiny shapes

  steps      AlexNet and ResNet-18 (--networks: any of the four) forward and backward, every program in a process of its
             own: time, peak memory and gradients of plain jax.jit, of single calls, of WR, of WD at WR's total
  mixed      AlexNet once more with XLA's own convolutions as candidates, against plain jax.jit, which has no limit
  deepbench  94 forward convolutions at 4 times their batch within 64 MiB: float32 HIGHEST, TF32, half
  chains     the convolutions of the same four as one program each: single calls, WR, WD, measured as wholes
  networks   AlexNet, ResNet-18, ResNet-50, DenseNet-40: sums of measured times, WR at three limits, WD at equal totals

Needs jax[cuda13] and jcuts' native libraries (`make native`).  Every time goes into the database below --out and into
``tables.json``; a run that is cut goes on with the same --out, elsewhere with ``--start tables.json``.  Sizes are B,
B/2, B/4, ... until the fastest algorithm of a size fits the smallest limit: smaller ones take longer and need no less.
Algorithms that take four times as long as the fastest of a size are not measured for smaller ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.microbatch import conv_chains, step_processes  # noqa: E402
from benchmarks.microbatch.conv_chains import text  # noqa: E402
from benchmarks.microbatch.fill_database import chained, fill_network  # noqa: E402
from benchmarks.microbatch.on_gpu import prepare  # noqa: E402
from benchmarks.microbatch.table_run import (  # noqa: E402
    BATCHES,
    MODES,
    MOST,
    Run,
    description,
    in_mode,
    precisions_of,
)
from benchmarks.microbatch.training_steps import mixed, steps  # noqa: E402

ITEMS = ("steps", "deepbench", "networks", "mixed", "chains")


def deepbench(run: Run) -> Any:
    """The 94 layers at 4 times their batch: best single calls, with and without the limit, and the best division."""
    from jcuts.base.errors import JcutsError
    from jcuts.microbatch.deepbench import layers

    limit = run.limits[1]
    modes = {"float32": {"float32": "float32 HIGHEST", "tf32": "TF32"}, "float16": {"float32": "half"}}
    found: dict[str, Any] = {"limit": limit, "modes": {}}
    with run.measurer() as measurer:
        for dtype in run.options.dtypes:
            rows: dict[str, list[Any]] = {mode: [] for mode in modes[dtype].values()}
            # Every third first: what a short budget leaves out is spread over the applications.
            for layer in sorted(layers("forward", dtype), key=lambda layer: (layer.index % 3, layer.index)):
                if run.options.layers and layer.index not in run.options.layers:
                    continue
                if run.left < 10:
                    found["stopped"] = f"{dtype}: the budget was spent"
                    break
                c, batch = reduced(run, layer)
                head = {"index": layer.index, "application": layer.application, "kernel": str(c), "batch": batch}
                try:
                    table = run.fill(measurer, c, batch, (limit,), tuple(modes[dtype]))
                    for precision, mode in modes[dtype].items():
                        rows[mode].append({**head, **compared(table, batch, limit, precision)})
                except JcutsError as error:
                    for mode in modes[dtype].values():
                        rows[mode].append({**head, "error": error.message[:300]})
                for mode, mine in rows.items():
                    found["modes"][mode] = {"summary": summary(mine), "layers": mine}
                run.save("deepbench", found)
            run.say(f"deepbench {dtype}: " + json.dumps({mode: summary(mine) for mode, mine in rows.items()}))
            run.save_tables()
        run.left_out += measurer.left_out
    return found


def compared(table: Any, batch: int, limit: int, precision: str) -> dict[str, Any]:
    """Of one layer: what the limit costs (unlimited), what dividing gives back (gain)."""
    from jcuts.microbatch import batch_division_dp

    one, free = (batch_division_dp.undivided(table, batch, m, precision=precision) for m in (limit, None))
    best = batch_division_dp.divide(table, batch, limit, precision=precision) if one is not None else None
    row = {"single": description(one), "divided": description(best), "no limit": description(free)}
    if one is not None and best is not None and free is not None:
        pieces = batch_division_dp.divide(conv_chains.whole(table), batch, limit, precision=precision)
        row |= {"gain of pieces only": one.ticks / pieces.ticks}
        row |= {"gain": one.ticks / best.ticks, "lost": one.ticks / free.ticks, "left": best.ticks / free.ticks}
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Distribution of the gain over the best single call within the limit, and of what the limit cost that call."""
    gains = sorted(row["gain"] for row in rows if "gain" in row)
    if not gains:
        return {"layers": len(rows)}
    lost = [row["lost"] for row in rows if "lost" in row]
    hit = [row for row in rows if row.get("lost", 1.0) > 1.05]

    def mean(values: Sequence[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0

    return {
        "layers": len(rows),
        "compared": len(gains),
        "largest": gains[-1],
        "mean": sum(gains) / len(gains),
        "mean of pieces only": sum(row["gain of pieces only"] for row in rows if "gain" in row) / len(gains),
        "geometric mean": mean(gains),
        "above 1.05": sum(g > 1.05 for g in gains),
        "quartiles": [gains[len(gains) * k // 4] for k in (1, 2, 3)],
        "layers that the limit costs over 5%": len(hit),
        "their mean gain": mean([row["gain"] for row in hit]),
        "a single call costs them": mean([row["lost"] for row in hit]),
        "a division costs them": mean([row["left"] for row in hit]),
        "a single call costs all": mean(lost),
        "seconds": {k: sum(row[k][1] for row in rows if "gain" in row) for k in ("single", "divided", "no limit")},
    }


def networks(run: Run) -> Any:
    """Four networks: sums of measured times and of workspaces."""
    found: dict[str, Any] = {}
    for name in run.options.networks or tuple(BATCHES):
        for dtype in types_of(run):
            network, why = fill_network(run, name, dtype=dtype)
            if why:
                found[f"{name} {dtype}"] = {"stopped": why}
                continue
            for precision in precisions_of(run, dtype):
                key = f"{name}, batch {network.uses[0].batch}, {MODES[precision]}"
                found[key] = compared_network(run, in_mode(network, precision))
                run.say(f"{key}: {json.dumps(found[key])}")
            run.save("networks", found)
    return found


def chains(run: Run) -> Any:
    """The convolutions of four networks as programs: WR, WD, single calls."""
    found: dict[str, Any] = {}
    for name in run.options.networks or tuple(BATCHES):
        for dtype in types_of(run):
            network, why = fill_network(run, name, dtype=dtype, spare=min(40.0, 8 + 0.3 * run.options.budget))
            if why:
                found[f"{name} {dtype}"] = {"stopped": why}
                run.save("chains", found)
                timed = tuple(use for use in network.uses if use.convolution.key not in run.lacking)
                if len(timed) < MOST * len(network.uses):
                    continue
                network = dataclasses.replace(network, uses=timed)
            chained(run, name, network, found)
    return found


def types_of(run: Run) -> list[str]:
    """Types of networks whose precisions were asked for."""
    return [dtype for dtype in ("float32", "float16") if precisions_of(run, dtype)]


def compared_network(run: Run, network: Any) -> dict[str, Any]:
    """WR at the limits, and WD at the total that WR takes there, at half of it, and at all that WR might take."""
    from jcuts.base.errors import JcutsError
    from jcuts.microbatch.analysis import analyse

    row: dict[str, Any] = {"kernels": len(network.uses)}
    for limit in run.limits:
        a = analyse(network, run.database, run.device, limit=limit)
        entry = {
            "WR seconds": a.seconds,
            "single calls": a.undivided,
            "sum": a.total,
            "largest": a.peak,
            "in pieces": sum(len(r.division.parts) > 1 for r in a.rows),
        }
        row["no limit"] = {
            "seconds": sum(r.unlimited.seconds for r in a.rows if r.unlimited),
            "sum": a.unlimited_total,
            "largest": max((r.unlimited.workspace for r in a.rows if r.unlimited), default=0),
        }
        wholes = {f"{len(network.uses)} times the limit": limit * len(network.uses)}  # as the paper compares them
        for name, total in {"1 of that sum": a.total, "0.5 of that sum": a.total // 2, **wholes}.items():
            try:
                wd = analyse(network, run.database, run.device, total=total)
                peak = max(r.division.workspace for r in wd.rows)
                again = analyse(network, run.database, run.device, limit=peak)
                entry[f"WD at {name}"] = {
                    "seconds": wd.seconds,
                    "sum": wd.total,
                    "largest": peak,
                    "proven": wd.proven,
                    "WR at its largest": again.seconds,
                }
            except JcutsError as error:
                entry[f"WD at {name}"] = error.message[:200]
        row[text(limit)] = entry
    return row


def reduced(run: Run, layer: Any) -> tuple[Any, int]:
    """A layer and its batch; in a dry run one that a plain loop can compute."""
    if not run.dry:
        return layer.convolution, 4 * layer.batch
    c = layer.convolution
    return dataclasses.replace(
        c,
        channels=min(3, c.channels),
        outputs=min(3, c.outputs),
        spatial=(5, 5),
        strides=(1, 1),
        window=(min(2, c.window[0]), min(2, c.window[1])),
        padding=((0, 0), (0, 0)),
    ), 8


def share_algorithms(out: Path) -> None:
    """Whoever times algorithms of XLA for an item leaves them to the other processes, where JAX keeps them, too."""
    folder = out.resolve() / step_processes.PROGRAMS / "xla_gpu_per_fusion_autotune_cache_dir"
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_per_fusion_autotune_cache_dir={folder}".strip()


def main() -> int:
    """Runs the items that were asked for, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=list(ITEMS))
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all; what is left undone is said")
    parser.add_argument("--seconds", type=float, default=0.08, help="of timing per convolution and batch size")
    parser.add_argument("--slices", type=int, default=3, help="algorithms of a convolution tried in slices, at most")
    parser.add_argument("--start", type=Path, nargs="+", default=[], help="tables of earlier runs on the same device")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16"], help="of DeepBench")
    parser.add_argument("--layers", nargs="+", type=int, help="rows of DeepBench; all of them by default")
    parser.add_argument("--networks", nargs="+", choices=list(BATCHES), help="of steps, chains and networks")
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=list(MODES),
        default=["float32", "tf32"],
        help="of steps, chains, networks, mixed; half: of chains and networks",
    )
    parser.add_argument("--programs", nargs="+", help="of steps: WR, single, plain, ...; all of them by default")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the tests' cuDNN, tiny shapes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever is ended ends what it started
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.out, options.dry_run)
    share_algorithms(options.out)
    run = Run(options)
    run.say(str(run.device))
    work = {"steps": steps, "deepbench": deepbench, "networks": networks, "mixed": mixed, "chains": chains}
    failed = False
    # Steps run the chains of their networks while they compile.
    for item in [i for i in options.items if i != "chains" or "steps" not in options.items]:
        if run.left < 10:
            run.say(f"{item}: the budget was spent")
            continue
        try:
            run.save(item, work[item](run))
        except Exception:  # the other items are still worth having
            failed = True
            run.say(f"{item} failed: {traceback.format_exc()}")
            (run.out / f"{item}_error.txt").write_text(traceback.format_exc())
        run.save_tables()
    run.save("left_out", run.left_out[:400])
    run.say(f"written to {run.out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
