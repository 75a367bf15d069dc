"""Whole training steps on a GPU: AlexNet, ResNet-18, ResNet-50, DenseNet-40 under WR, WD, single calls and plain XLA.

Items of `gpu_microbatch_tables.py`; every program is compiled and run by `microbatch_steps.py`.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import microbatch_steps
from benchmarks.microbatch_chains import text
from benchmarks.microbatch_run import BATCHES, MODES, Run, chained, description, fill_network

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


def bases(run: Run, names: Sequence[str], found: dict[str, Any]) -> list[dict[str, Any]]:
    """What is known of all programs before anything is timed, without those that an earlier run has found."""
    made = []
    done = {(key, row.get("what")) for key, rows in found.items() for row in rows.values()
            if isinstance(row, dict) and "seconds" in row}  # fmt: skip
    for name in names:
        for precision in run.options.precisions:
            for what in STEPS[name, precision]:
                if run.options.programs and what not in run.options.programs:
                    continue
                if (f"{name}, batch {4 if run.dry else BATCHES[name]}, {MODES[precision]}", what) in done:
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
    file, whole = run.out / "steps.json", {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["steps"] if file.exists() else {}
    found = {key: row for key, row in found.items() if "stopped" not in row}
    started = bases(run, names, found)
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
        row[spec["name"]] = {"what": spec["what"], **answer}
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
