"""Geometric means of speed-ups over recorded rows: of joined baselines, and of results of `on_gpu.py` and `run.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.networks.joined_rows import AGREEMENT, Joined
from benchmarks.networks.markdown_table import table

MEANS = (
    "rows of",
    "rows",
    "best XLA over jax.jit",
    "jcuts: rows",
    "of these plain XLA",
    "over jax.jit",
    "over best XLA",
    "over best of XLA, torch",
)
MEANS_NOTE = f"""\
*Best XLA over jax.jit* is of one process; jcuts' times are over the faster `jax.jit` of both processes, over the best
XLA and over the best of XLA and torch. Rows where jcuts runs an XLA program count, too (*of these plain XLA*).
*Agreeing* are rows whose plain `jax.jit` takes the same within {AGREEMENT:.0%} in both processes."""


def mean(values: Sequence[float]) -> str:
    """Geometric mean; '' of nothing."""
    return f"{statistics.geometric_mean(values):.2f}" if values else ""


def groups_of(j: Joined) -> list[str]:
    """Names of the geometric means that a row counts in."""
    b = j.baseline
    kind, dtype = b["kind"], b["dtype"]
    names = ["all", kind, f"{b['group']}, {kind}", f"{kind}, {dtype}", f"{kind}, {dtype}, {b['form']}"]
    if j.beside:
        names += [f"all, of {'the same sitting' if j.is_one_sitting else 'other sittings'}"]
        names += ["all, agreeing"] if j.agrees else []
    return names


def geomeans(rows: Sequence[Joined]) -> str:
    """Geometric means by kind of workload, type of numbers and calling form; rows where jcuts runs XLA count, too."""
    groups: dict[str, list[Joined]] = {}
    for j in rows:
        for name in groups_of(j) if j.baseline["statistics"] == "trained" else ():
            groups.setdefault(name, []).append(j)
    body = []
    for name, found in sorted(groups.items()):
        ours = [(j, j.ours) for j in found if j.ours]
        body.append(
            [
                name,
                len(found),
                mean([j.best.plain / j.best.seconds for j in found]),
                len(ours),
                sum(j.chosen.startswith("xla") for j, _ in ours),
                mean([j.fastest_plain / t for j, t in ours]),
                mean([j.best.seconds / t for j, t in ours]),
                mean([j.fastest_other / t for j, t in ours]),
            ]
        )
    return table(MEANS, body)


def of_results(files: Sequence[Path]) -> str:
    """Geometric means of results of `on_gpu.py` and `run.py` against the baselines of their own runs.

    Of a network in several files the last counts.
    """
    groups: dict[str, list[tuple[float, float, float, bool]]] = {}
    rows = {r["network"]: r for f in files for r in json.loads(f.read_text(encoding="utf-8")) if "network" in r}
    for r in rows.values():
        if r.get("part", "speed") != "speed" or not {"plain", "flags", "jcuts"} <= r.get("times", {}).keys():
            continue
        plain, flagged, ours = (r["times"][side]["stream"][0] for side in ("plain", "flags", "jcuts"))
        torch = r.get("torch", {}).get("stream")
        best = min(plain, flagged, *(torch[:1] if torch else ()))
        _, _, form, *dtype = r["network"].split(":")
        fallback = str((r.get("decision") or {}).get("chosen", "")).startswith("xla")
        for name in ("all", f"{dtype[0] if dtype else 'float32'}, {form}"):
            groups.setdefault(name, []).append((plain / ours, flagged / ours, best / ours, fallback))
    body = [
        [name, len(found), sum(f for *_, f in found), *(mean([x[k] for x in found]) for k in (0, 1, 2))]
        for name, found in sorted(groups.items())
    ]
    return table(["rows of", "rows", "plain XLA", "over jax.jit", "over flags", "over the best of the others"], body)
