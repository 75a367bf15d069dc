"""Micro-batching on a GPU in figures: training steps, DeepBench in three precisions, networks under WR and WD.

    python benchmarks/gpu_microbatch_tables.py --out results --items steps --budget 200
    python benchmarks/gpu_microbatch_tables.py --out results --items deepbench --budget 150
    python benchmarks/gpu_microbatch_tables.py --out results --items chains --networks ResNet-50 --budget 100
    python benchmarks/gpu_microbatch_tables.py --out /tmp/x --dry-run      # no GPU: the tests' cuDNN, tiny shapes

  steps      AlexNet and ResNet-18 (--networks: any of the four) forward and backward, every program in a process of its
             own: time, peak memory and gradients of plain jax.jit, of single calls, of WR, of WD at WR's total
  mixed      AlexNet once more with XLA's own convolutions as candidates, against plain jax.jit
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
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import microbatch_chains, microbatch_steps  # noqa: E402
from benchmarks.gpu_microbatch import prepare  # noqa: E402
from benchmarks.microbatch_models import gradients, inputs_of  # noqa: E402
from benchmarks.microbatch_networks import training_step  # noqa: E402

MIB = 1 << 20
BATCHES = {"ResNet-18": 128, "AlexNet": 256, "ResNet-50": 64, "DenseNet-40": 256}
MODES = {"float32": "float32 HIGHEST", "tf32": "TF32"}
FAR = 4.0
"""An algorithm that takes this many times as long as the fastest of a size is not measured for smaller ones."""
ITEMS = ("steps", "deepbench", "networks", "mixed", "chains")


class Run:
    """What the items share: time left, the database, what is written."""

    def __init__(self, options: argparse.Namespace) -> None:
        from jcuts.microbatch.database import Database
        from jcuts.tune.convolutions import database_path, this_device

        self.options, self.start, self.out = options, time.monotonic(), options.out
        self.dry: bool = options.dry_run
        self.platform = "cpu" if self.dry else "cuda"
        self.limits = (8 << 10, 64 << 10, 512 << 10) if self.dry else (8 * MIB, 64 * MIB, 512 * MIB)
        self.database, self.device = Database(database_path()), this_device(self.platform)
        self.kernels: dict[str, Any] = {}
        self.left_out: list[Any] = []
        if options.start:
            self.take(json.loads(options.start.read_text(encoding="utf-8")))
        for entry in self.database.entries():
            if entry.device == self.device and entry.convolution.key not in self.kernels:
                self.note(entry.convolution)

    @property
    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self.options.budget - (time.monotonic() - self.start)

    def save(self, name: str, found: Any) -> None:
        """Writes one item as it is."""
        head = {"device": str(self.device), "dry_run": self.dry, "seconds": round(time.monotonic() - self.start, 1)}
        partial = self.out / f"{name}.json.new"
        indent = None if name == "tables" else 1
        partial.write_text(json.dumps({**head, name: found}, indent=indent, default=str) + "\n", encoding="utf-8")
        partial.replace(self.out / f"{name}.json")

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def save_tables(self) -> None:
        """Writes every time of this run, and those of earlier runs with the same --out."""
        self.save("tables", list(self.kernels.values()))

    def take(self, data: dict[str, Any]) -> None:
        """Times of an earlier run on the same device and libraries."""
        from jcuts.microbatch.convolution import Convolution
        from jcuts.microbatch.table import Micro

        if data["device"] != str(self.device):
            self.say(f"times of {data['device']} are not used on {self.device}")
            return
        for row in data["tables"]:
            convolution = Convolution.from_json(row["convolution"])
            for size, micros in row["sizes"].items():
                made = [Micro(int(size), *micro) for micro in micros]
                self.database.record(self.device, convolution, int(size), made)
            self.note(convolution)

    def fill(
        self, measurer: Any, convolution: Any, batch: int, limits: Sequence[int], precisions: Sequence[str]
    ) -> Any:
        """The table of a convolution with every size that can matter."""
        from jcuts.microbatch import wr
        from jcuts.microbatch.refine import sizes_between
        from jcuts.tune.convolutions import measured, measured_in_slices

        size, measurer.unwanted = batch, frozenset()
        while size:
            table = measured(convolution, size, self.database, measurer, policy="undivided", library=False)
            best = [wr.undivided(table, size, precision=p) for p in precisions]
            if all(one is None or one.workspace <= min(limits) for one in best) and any(best):
                break
            lacking = self.database.remarks(self.device, convolution, size)
            measurer.unwanted = frozenset() if lacking else slow(table, size, precisions)
            size = size // 2 // convolution.unit * convolution.unit
        for limit in limits if size < batch else ():
            for precision in precisions:
                for size in sizes_between(table, batch, limit, precision=precision)[:1]:
                    table = measured(convolution, size, self.database, measurer, policy="undivided", library=False)
        measurer.unwanted = frozenset()
        most = 3 if len(limits) == 1 else 1
        table = measured_in_slices(convolution, batch, limits, precisions, self.database, measurer, most=most)
        self.note(convolution)
        return table

    def note(self, convolution: Any) -> None:
        """Keeps a convolution's times for ``tables.json``."""
        sizes: dict[int, list[Any]] = {}
        for m in self.database.table(self.device, convolution).micros:
            sizes.setdefault(m.batch, []).append([m.algorithm, m.math, m.seconds, m.workspace])
        self.kernels[convolution.key] = {"convolution": convolution.to_json(), "sizes": sizes}

    def measurer(self) -> Any:
        """One measuring process."""
        from jcuts.tune.convolutions import Measurer

        # Whoever looks for larger workspaces than the largest limit looks for a bound, not for a division.
        return Measurer(self.device, self.platform, asked=max(self.limits), seconds=self.options.seconds)


def slow(table: Any, size: int, precisions: Sequence[str]) -> frozenset[str]:
    """Algorithms that are far from the fastest of a size at every precision, or do not run: not measured for less."""
    from jcuts.microbatch.convolution import MATHS
    from jcuts.xla import cudnn

    kept: set[str] = set()
    for precision in precisions:
        mine = [m for m in table.candidates(size, precision=precision) if m.batch == size]
        best = min((m.seconds for m in mine), default=0.0)
        kept |= {f"{m.algorithm.removesuffix(cudnn.LAUNCHED)} {m.math}" for m in mine if m.seconds <= FAR * best}
    every = {f"{a} {m}" for a in cudnn.algorithms(table.convolution.kind) for m in MATHS[table.convolution.dtype]}
    return frozenset(every - kept)


def kernels_of(run: Run, name: str) -> Any:
    """The network, and its distinct convolutions."""
    network = training_step(name, BATCHES[name])
    if run.dry:
        network = traced(name, 4)
    return network, list({use.convolution.key: use for use in network.uses}.values())


def traced(name: str, batch: int, *, tiny: bool = True) -> Any:
    """The convolutions of a step, from its jaxpr."""
    import jax

    from jcuts import divide
    from jcuts.trace.inline import inline
    from jcuts.trace.simplify import simplify

    arguments = inputs_of(name, batch, tiny=tiny)
    step = gradients(name, "highest", tiny=tiny)
    return divide.network_of(simplify(inline(jax.make_jaxpr(step)(*arguments))), name)


def fill_network(run: Run, name: str, *, library: bool = False, spare: float = 20.0) -> tuple[Any, str]:
    """A network with all its times, or why not."""
    from jcuts.tune.convolutions import measured

    network, uses = kernels_of(run, name)
    with run.measurer() as measurer:
        for done, use in enumerate(uses):
            if run.left < spare:
                run.save_tables()
                return network, f"the budget was spent after {done} of {len(uses)} kernels"
            run.fill(measurer, use.convolution, use.batch, run.limits, tuple(MODES))
            if library:
                measured(use.convolution, use.batch, run.database, measurer, policy="undivided")
        run.left_out += measurer.left_out
    run.save_tables()
    run.say(f"{name}: {len(uses)} distinct kernels are timed")
    return network, ""


# -- steps ----------------------------------------------------------------------------------------------------------
MOST_PROGRAMS = ("WR", "single", "no limit", "plain", "WD", "WR at WD's largest")
STEPS = {
    ("AlexNet", "float32"): MOST_PROGRAMS,
    ("AlexNet", "tf32"): MOST_PROGRAMS,
    ("ResNet-18", "float32"): (*MOST_PROGRAMS, "small", "large", "float64", "launched"),
    ("ResNet-18", "tf32"): MOST_PROGRAMS[:4],
    ("ResNet-50", "float32"): MOST_PROGRAMS,
    ("ResNet-50", "tf32"): MOST_PROGRAMS[:4],
    ("DenseNet-40", "float32"): MOST_PROGRAMS,
    ("DenseNet-40", "tf32"): MOST_PROGRAMS[:4],
}  # fmt: skip
"""Programs, the most important first."""
SECOND = tuple((name, "tf32") for name in BATCHES)
"""Their plain programs, for which XLA times algorithms on the device, come when everything else has run."""


def bases(run: Run, names: Sequence[str]) -> list[dict[str, Any]]:
    """What is known of all programs before anything is timed."""
    made = []
    for name in names:
        for precision in run.options.precisions:
            for what in STEPS[name, precision]:
                if run.options.programs and what not in run.options.programs:
                    continue
                made.append({
                    "id": f"{name}-{precision}-{len(made)}", "what": what, "network": name,
                    "batch": 4 if run.dry else BATCHES[name], "precision": precision, "dry": run.dry,
                    "float64": what == "float64",
                })  # fmt: skip
    return made


def specs_of(run: Run, network: Any, mine: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The programs of a network, which is timed, in one precision."""
    from jcuts.microbatch.analysis import analyse

    small, middle, large = run.limits
    uses = tuple(dataclasses.replace(use, precision=mine[0]["precision"]) for use in network.uses)
    network = dataclasses.replace(network, uses=uses)
    total = analyse(network, run.database, run.device, limit=middle).total
    peak = max(row.division.workspace for row in analyse(network, run.database, run.device, total=total).rows)
    known: dict[str, dict[str, Any]] = {
        "plain": {"name": "plain jax.jit", "plain": True},
        "WR": {"name": f"WR {text(middle)}", "limit": middle},
        "single": {"name": f"single calls, {text(middle)}", "limit": middle, "single": True},
        "no limit": {"name": "single calls, no limit", "limit": microbatch_steps.NO_LIMIT, "single": True},
        "WD": {"name": f"WD at WR's total of {text(total)}", "total": total},
        "WR at WD's largest": {"name": f"WR at WD's largest workspace of {text(peak)}", "limit": peak},
        "launched": {"name": f"WR {text(middle)}, launched one by one", "limit": middle, "launched": True},
        "float64": {"name": "float64", "once": True},
        "small": {"name": f"WR {text(small)}", "limit": small},
        "large": {"name": f"WR {text(large)}", "limit": large},
    }
    return [{**base, **known[base["what"]]} for base in mine]


def steps(run: Run) -> Any:
    """Whole steps of two networks."""
    names = run.options.networks or ("AlexNet", "ResNet-18")
    found: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    started = bases(run, names)
    with tempfile.TemporaryDirectory() as folder, microbatch_steps.Race(started, Path(folder)) as race:
        later: list[dict[str, Any]] = []
        networks_ = {}
        for name in names:
            network, why = fill_network(run, name, spare=50.0)
            if why:
                found[name] = {"stopped": why}
                continue
            networks_[name] = network
            for precision in run.options.precisions:
                mine = [base for base in started if (base["network"], base["precision"]) == (name, precision)]
                specs = specs_of(run, network, mine) if mine else []
                # XLA times convolutions and AlexNet's products while it compiles: not beside our own timing.
                early = [spec for spec in specs if not spec.get("plain") and name != "AlexNet"]
                race.compile(early)
                later += [spec for spec in specs if spec not in early]
        if "chains" in run.options.items:  # these compile in no time, and the steps compile meanwhile
            for name, network in networks_.items():
                chained(run, name, network, whole)
        second = [s for s in later if s.get("plain") and (s["network"], s["precision"]) in SECOND]
        race.compile([spec for spec in later if spec not in second])
        finished(run, "steps", race, found)
        if second and run.left > 20:
            race.compile(second)
            finished(run, "steps", race, found)
    return found


def finished(run: Run, item: str, race: microbatch_steps.Race, found: dict[str, Any]) -> Any:
    """Runs what is compiled or compiling, then compares gradients."""
    now = time.monotonic()
    specs = list(race.specs.values())
    left = run.left - 0.1 * len(specs)
    for spec, answer in race.run(ready=now + max(5.0, left - 1.2 * race.waiting), end=now + max(8.0, left)):
        row = found.setdefault(f"{spec['network']}, batch {spec['batch']}, {MODES[spec['precision']]}", {})
        row[spec["name"]] = answer
        shown = {k: answer[k] for k in ("seconds", "peak bytes", "error") if k in answer}
        run.say(f"{spec['network']} {spec['precision']} {spec['name']}: {shown}")
        run.save(item, found)
    for spec in specs:
        row = found[f"{spec['network']}, batch {spec['batch']}, {MODES[spec['precision']]}"]
        for other in specs:
            same = (other["network"], other["precision"]) == (spec["network"], spec["precision"])
            reference = other.get("plain") or other.get("float64")
            if same and reference and other is not spec and spec["name"] in row:
                off = microbatch_steps.distances(race.folder, spec, other)
                row[spec["name"]][f"gradients from {other['name']}"] = off
    run.save(item, found)
    return found


def mixed(run: Run) -> Any:
    """AlexNet with XLA's own convolutions as candidates: never slower than them."""
    from jcuts.microbatch import wr
    from jcuts.xla.convolutions import LIBRARY

    name = "AlexNet"
    network, why = fill_network(run, name, library=True, spare=40.0)
    if why:
        return {"stopped": why}
    rows = []
    for use in {use.convolution.key: use for use in network.uses}.values():
        table = run.database.table(run.device, use.convolution)
        own = dataclasses.replace(table, micros=tuple(m for m in table.micros if m.algorithm == LIBRARY))
        for precision in MODES:
            one = wr.undivided(own, use.batch, precision=precision)
            rows.append([str(use.convolution), precision, description(one)])
    specs = []
    for precision in run.options.precisions:
        base = {"network": name, "batch": network.uses[0].batch, "precision": precision, "dry": run.dry}
        for what, more in {"plain jax.jit": {"plain": True}, "mixed": {"limit": run.limits[1], "mixed": True}}.items():
            specs.append({**base, **more, "name": what, "what": what, "id": f"mixed-{precision}-{len(specs)}"})
    with tempfile.TemporaryDirectory() as folder, microbatch_steps.Race(specs, Path(folder)) as race:
        race.compile(specs)
        return {**finished(run, "mixed", race, {}), "XLA's own": rows}


# -- tables ---------------------------------------------------------------------------------------------------------
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
    from jcuts.microbatch import wr

    one, free = (wr.undivided(table, batch, m, precision=precision) for m in (limit, None))
    best = wr.divide(table, batch, limit, precision=precision) if one is not None else None
    row = {"single": description(one), "divided": description(best), "no limit": description(free)}
    if one is not None and best is not None and free is not None:
        pieces = wr.divide(microbatch_chains.whole(table), batch, limit, precision=precision)
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
        "layers": len(rows), "compared": len(gains), "largest": gains[-1], "mean": sum(gains) / len(gains),
        "mean of pieces only": sum(row["gain of pieces only"] for row in rows if "gain" in row) / len(gains),
        "geometric mean": mean(gains), "above 1.05": sum(g > 1.05 for g in gains),
        "quartiles": [gains[len(gains) * k // 4] for k in (1, 2, 3)],
        "layers that the limit costs over 5%": len(hit), "their mean gain": mean([row["gain"] for row in hit]),
        "a single call costs them": mean([row["lost"] for row in hit]),
        "a division costs them": mean([row["left"] for row in hit]),
        "a single call costs all": mean(lost),
        "seconds": {k: sum(row[k][1] for row in rows if "gain" in row) for k in ("single", "divided", "no limit")},
    }  # fmt: skip


def networks(run: Run) -> Any:
    """Four networks: sums of measured times and of workspaces."""
    found: dict[str, Any] = {}
    for name in run.options.networks or tuple(BATCHES):
        network, why = fill_network(run, name)
        if why:
            found[name] = {"stopped": why}
            continue
        for precision, mode in MODES.items():
            uses = tuple(dataclasses.replace(use, precision=precision) for use in network.uses)
            key = f"{name}, batch {network.uses[0].batch}, {mode}"
            found[key] = compared_network(run, dataclasses.replace(network, uses=uses))
            run.say(f"{key}: {json.dumps(found[key])}")
        run.save("networks", found)
    return found


def chains(run: Run) -> Any:
    """The convolutions of four networks as programs: WR, WD, single calls."""
    found: dict[str, Any] = {}
    for name in run.options.networks or tuple(BATCHES):
        network, why = fill_network(run, name)
        if why:
            found[name] = {"stopped": why}
            run.save("chains", found)
            continue
        chained(run, name, network, found)
    return found


def chained(run: Run, name: str, network: Any, found: dict[str, Any]) -> None:
    """One network, whose kernels are timed, in every precision."""
    for precision in run.options.precisions:
        if run.left < 15:
            break
        uses = tuple(dataclasses.replace(use, precision=precision) for use in network.uses)
        key = f"{name}, batch {network.uses[0].batch}, {MODES[precision]}"
        found[key] = microbatch_chains.chains(run, dataclasses.replace(network, uses=uses), run.left - 10)
        run.say("\n".join(microbatch_chains.lines(key, found[key])))
        run.save("chains", found)


def compared_network(run: Run, network: Any) -> dict[str, Any]:
    """WR at the limits, and WD at the total that WR takes there and at half of it."""
    from jcuts.base.errors import JcutsError
    from jcuts.microbatch.analysis import analyse

    row: dict[str, Any] = {"kernels": len(network.uses)}
    for limit in run.limits:
        a = analyse(network, run.database, run.device, limit=limit)
        entry = {
            "WR seconds": a.seconds, "single calls": a.undivided, "sum": a.total, "largest": a.peak,
            "in pieces": sum(len(r.division.parts) > 1 for r in a.rows),
        }  # fmt: skip
        row["no limit"] = {
            "seconds": sum(r.unlimited.seconds for r in a.rows if r.unlimited), "sum": a.unlimited_total,
            "largest": max((r.unlimited.workspace for r in a.rows if r.unlimited), default=0),
        }  # fmt: skip
        for share in (1.0, 0.5):
            try:
                total = int(share * a.total)
                wd = analyse(network, run.database, run.device, total=total)
                peak = max(r.division.workspace for r in wd.rows)
                again = analyse(network, run.database, run.device, limit=peak)
                entry[f"WD at {share:g} of that sum"] = {
                    "seconds": wd.seconds, "sum": wd.total, "largest": peak, "proven": wd.proven,
                    "WR at its largest": again.seconds,
                }  # fmt: skip
            except JcutsError as error:
                entry[f"WD at {share:g} of that sum"] = error.message[:200]
        row[text(limit)] = entry
    return row


# -- what they share ------------------------------------------------------------------------------------------------
def text(size: int) -> str:
    """A number of bytes, short."""
    return f"{size / MIB:.3g} MiB" if size >= MIB else f"{size / 1024:.3g} KiB"


def description(division: Any) -> list[Any] | None:
    """A division as JSON: its parts, seconds, workspace."""
    return None if division is None else [str(division), division.seconds, division.workspace]


def reduced(run: Run, layer: Any) -> tuple[Any, int]:
    """A layer and its batch; in a dry run one that a plain loop can compute."""
    if not run.dry:
        return layer.convolution, 4 * layer.batch
    c = layer.convolution
    return dataclasses.replace(
        c, channels=min(3, c.channels), outputs=min(3, c.outputs), spatial=(5, 5), strides=(1, 1),
        window=(min(2, c.window[0]), min(2, c.window[1])), padding=((0, 0), (0, 0)),
    ), 8  # fmt: skip


def main() -> int:
    """Runs the items that were asked for, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=list(ITEMS))
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all; what is left undone is said")
    parser.add_argument("--seconds", type=float, default=0.08, help="of timing per convolution and batch size")
    parser.add_argument("--start", type=Path, help="tables.json of an earlier run on the same device")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16"], help="of DeepBench")
    parser.add_argument("--layers", nargs="+", type=int, help="rows of DeepBench; all of them by default")
    parser.add_argument("--networks", nargs="+", choices=list(BATCHES), help="of steps, chains and networks")
    parser.add_argument("--precisions", nargs="+", choices=list(MODES), default=list(MODES), help="of steps, chains")
    parser.add_argument("--programs", nargs="+", help="of steps: WR, single, plain, ...; all of them by default")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the tests' cuDNN, tiny shapes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.out, options.dry_run)
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
