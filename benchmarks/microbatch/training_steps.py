"""Whole training steps on a GPU: AlexNet, ResNet-18, ResNet-50, DenseNet-40 under WR, WD, single calls and plain XLA.

Items of `gpu_tables.py`; every program is compiled and run by `step_processes.py`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.microbatch import step_processes
from benchmarks.microbatch.conv_chains import text
from benchmarks.microbatch.fill_database import chained, fill_network
from benchmarks.microbatch.table_run import BATCHES, MODES, Run, description, precisions_of

MOST_PROGRAMS = ("plain", "WR", "single", "no limit", "WR at WD's largest", "WD")
MORE = ("small", "large")
STEPS = {
    (name, precision): (*MOST_PROGRAMS, *(("float64",) if (name, precision) == ("ResNet-18", "float32") else ()), *MORE)
    for name in BATCHES
    for precision in ("float32", "tf32")
}
"""Programs, the most important first."""
USUAL = ("AlexNet", "ResNet-18")


def bases(run: Run, names: Sequence[str], found: dict[str, Any]) -> list[dict[str, Any]]:
    """What is known of all programs before anything is timed, without those that an earlier run has found."""
    made = []
    done = {
        (key, row.get("what"))
        for key, rows in found.items()
        for row in rows.values()
        if isinstance(row, dict) and "seconds" in row
    }
    for name in names:
        for precision in precisions_of(run, "float32"):
            for what in STEPS[name, precision]:
                if run.options.programs and what not in run.options.programs:
                    continue
                if (f"{name}, batch {4 if run.dry else BATCHES[name]}, {MODES[precision]}", what) in done:
                    continue
                made.append(
                    {
                        "id": f"{name}-{precision}-{len(made)}",
                        "what": what,
                        "network": name,
                        "batch": 4 if run.dry else BATCHES[name],
                        "precision": precision,
                        "dry": run.dry,
                        "float64": what == "float64",
                    }
                )
    return made


def specs_of(run: Run, network: Any, mine: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The programs of a network, which is timed, in one precision."""
    from jcuts.microbatch.analysis import analyse

    small, middle, large = run.limits
    uses = tuple(dataclasses.replace(use, precision=mine[0]["precision"]) for use in network.uses)
    network = dataclasses.replace(network, uses=uses)
    total = analyse(network, run.by_cudnn, run.device, limit=middle).total
    peak = max(row.division.workspace for row in analyse(network, run.by_cudnn, run.device, total=total).rows)
    known: dict[str, dict[str, Any]] = {
        "plain": {"name": "plain jax.jit", "plain": True},
        "WR": {"name": f"WR {text(middle)}", "limit": middle},
        "single": {"name": f"single calls, {text(middle)}", "limit": middle, "single": True},
        "no limit": {"name": "single calls, no limit", "limit": step_processes.NO_LIMIT, "single": True},
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
    names = run.options.networks or USUAL
    file, whole = run.out / "steps.json", {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["steps"] if file.exists() else {}
    found = {key: row for key, row in found.items() if "stopped" not in row}
    started = bases(run, names, found)
    with step_processes.Race(started, Path(run.folder.name), run.out) as race:
        networks_ = {}
        for name in names:
            network, why = fill_network(run, name, spare=50.0)
            if why:
                found[name] = {"stopped": why}
                continue
            networks_[name] = network
        for name, network in networks_.items():
            for precision in precisions_of(run, "float32"):
                mine = [base for base in started if (base["network"], base["precision"]) == (name, precision)]
                race.compile(specs_of(run, network, mine) if mine else [])
        finished(run, "steps", race, found)
        if "chains" in run.options.items:
            for name, network in networks_.items():
                chained(run, name, network, whole)
    return found


def finished(run: Run, item: str, race: step_processes.Race, found: dict[str, Any]) -> Any:
    """Runs what is compiled or compiling, and compares its gradients with those that are there."""
    for spec, answer in race.run(end=time.monotonic() + max(8.0, run.left)):
        row = found.setdefault(f"{spec['network']}, batch {spec['batch']}, {MODES[spec['precision']]}", {})
        row[spec["name"]] = {"what": spec["what"], **answer}
        shown = {k: answer[k] for k in ("seconds", "seconds queued", "peak bytes", "error") if k in answer}
        run.say(f"{spec['network']} {spec['precision']} {spec['name']}: {shown}")
        mine = [o for o in run.ran if (o["network"], o["precision"]) == (spec["network"], spec["precision"])]
        for one, other in [*((spec, o) for o in mine), *((o, spec) for o in mine)]:
            if other.get("plain") or other.get("float64"):
                off = step_processes.distances(race.folder, one, other)
                name = f"{one['name']}, gradients from {other['name']}"
                row.setdefault("gradients", {})[name] = off
        run.ran.append(spec)
        run.save(item, found)
    return found


def mixed(run: Run) -> Any:
    """Networks with XLA's own convolutions as candidates, against plain jax.jit."""
    from jcuts.microbatch import batch_division_dp
    from jcuts.xla.cudnn.match import LIBRARY

    found: dict[str, Any] = {}
    names = run.options.networks or ("AlexNet",)
    specs = []
    for name in names:
        base = {"network": name, "batch": 4 if run.dry else BATCHES[name], "dry": run.dry}
        for precision in precisions_of(run, "float32"):
            for what, more in {
                "plain": {"plain": True, "name": "plain jax.jit"},
                "mixed": {"mixed": True, "limit": run.limits[1], "name": f"mixed {text(run.limits[1])}"},
                "mixed at XLA's": {"mixed": True},
            }.items():
                specs.append(
                    {
                        **base,
                        **more,
                        "precision": precision,
                        "what": what,
                        "id": f"mixed-{name}-{precision}-{what.replace(' ', '-')}",
                    }
                )
    with step_processes.Race(specs, Path(run.folder.name), run.out) as race:
        for name in names:
            network, why = fill_network(run, name, library=True, spare=25.0)
            mine = [spec for spec in specs if spec["network"] == name]
            if why:
                found[name] = {"stopped": why}
                race.compile([spec for spec in mine if spec.get("plain")])
                continue
            rows = found.setdefault(f"{name}: XLA's own", [])
            largest: dict[str, int] = {}
            for use in {use.convolution.key: use for use in network.uses}.values():
                table = run.database.table(run.device, use.convolution)
                own = dataclasses.replace(table, micros=tuple(m for m in table.micros if m.algorithm == LIBRARY))
                for precision in precisions_of(run, "float32"):
                    one = batch_division_dp.undivided(own, use.batch, precision=precision)
                    rows.append([str(use.convolution), precision, description(one)])
                    largest[precision] = max(largest.get(precision, 0), one.workspace if one else 0)
            for spec in mine:
                if spec["what"] == "mixed at XLA's":
                    limit = max(largest[spec["precision"]], run.limits[1])
                    spec |= {"limit": limit, "name": f"mixed at XLA's largest workspace of {text(limit)}"}
            run.save("mixed", found)
            race.compile(mine)
        return finished(run, "mixed", race, found)
