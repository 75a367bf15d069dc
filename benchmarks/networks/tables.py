"""Tables of what `run.py` has measured, as text or markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WIDE = {"complex (fusion)": "complex, fused", "simple (fusion)": "simple, fused"}


def load(places: Iterable[Path]) -> list[Row]:
    """Rows of folders of items and of files that hold lists of them."""
    found: list[Row] = []
    for place in places:
        for path in sorted(place.glob("*.json")) if place.is_dir() else [place]:
            data = json.loads(path.read_text())
            found += [row for row in (data if isinstance(data, list) else [data]) if "network" in row]
    return found


def report(rows: Sequence[Row], markdown: bool = False) -> str:
    """All tables that there are rows for."""
    tables = []
    for title, make in (
        ("Speed", speed),
        ("Modes", modes),
        ("Time by kind of kernel", kinds),
        ("Blocks", blocks),
        ("Code generation", codegen),
        ("Planning", planning),
    ):
        head, body, notes = make(rows)
        if body:
            tables.append("\n".join([f"{'## ' if markdown else ''}{title}", "", *layout(head, body, markdown), *notes]))
    return "\n\n".join(tables)


def layout(head: Sequence[str], body: Sequence[Sequence[str]], markdown: bool) -> list[str]:
    """Lines of a table."""
    if markdown:
        return [f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *body)] + [""]
    widths = [max(len(r[k]) for r in (head, *body)) for k in range(len(head))]
    return [
        "  ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in (head, *body)
    ]


def named(row: Row) -> str:
    """'ResNet50 b64 args bfloat16'."""
    name, batch, form, *dtype = row["network"].split(":")
    return " ".join([name, f"b{batch}", *([form] if form != "closed" else []), *dtype])


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def ms(seconds: float | None) -> str:
    """Milliseconds, '' for None."""
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def stream(row: Row, side: str) -> float | None:
    """Median time of calls back to back [s]."""
    found = row["torch"] if side == "torch" else row.get("times", {}).get(side)
    return found["stream"][0] if found and "stream" in found else None


def speed(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """Whole programs; geometric means over rows of one type of numbers and one calling form."""
    head = [
        "network",
        "jax.jit",
        "options",
        "torch",
        "jcuts",
        "over jax.jit",
        "over best",
        "roofline",
        "kernels",
        "L2 error, XLA's",
        "FLOP",
        "operations",
        "program",
    ]
    body, gains = [], {}
    for row in rows:
        if row.get("part", "speed") not in ("speed", "blocks") or "times" not in row:
            continue
        plain, flags, ours = (stream(row, side) for side in ("plain", "flags", "jcuts"))
        torch = stream(row, "torch") if "torch" in row else None
        if not (plain and flags and ours):
            continue
        best = min(x for x in (plain, flags, torch) if x)
        kind = (" ".join(row["network"].split(":")[2:]), row.get("part", "speed"))
        gains.setdefault(kind, []).append((plain / ours, best / ours))
        kernels = [row.get("device_kernels", {}).get(side, {}).get("per_step") for side in ("flags", "jcuts")]
        errors = [row.get("errors", {}).get(side, {}).get("l2", float("nan")) for side in ("jcuts", "flags")]
        line, share = row.get("counts", {}).get("roofline", {}), row.get("shares", {})
        body.append(
            [
                named(row),
                ms(plain),
                ms(flags),
                ms(torch),
                ms(ours),
                f"{plain / ours:.2f}",
                f"{best / ours:.2f}",
                f"{ms(line.get('bound'))} ({ms(line.get('layers'))})" if line else "",
                " -> ".join(f"{k:.0f}" for k in kernels) if all(kernels) else "",
                f"{errors[0]:.1e}, {errors[1]:.1e}",
                *(f"{share[k]:.0%}" if share else "" for k in ("flop", "operations")),
                row["decision"]["chosen"],
            ]
        )
    notes = []
    for (kind, part), found in gains.items():
        plain, best = (geomean([pair[k] for pair in found]) for k in (0, 1))
        notes.append(
            f"Geometric means, {part}, {kind}, {len(found)} rows: {plain:.2f} over jax.jit, {best:.2f} over "
            "the best of the others."
        )
    return head, body, notes


def sums(by_kind: dict[str, dict[str, float]], what: str, kinds: Sequence[str] = ()) -> float:
    """Seconds of all kinds, or of some."""
    return sum(row[what] for kind, row in by_kind.items() if not kinds or kind in kinds)


def modes(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """A row per network and mode.

    *Vendor* over *kernels*: XLA's code for each subset compiled alone, over the best kernel for each, in sums over the
    subsets for which both were measured; its second figure counts products and convolutions alone.
    """
    head = [
        "network, mode",
        "kernels",
        "whole",
        "with options",
        "XLA",
        "XLA with options",
        "vendor",
        "vendor / kernels",
        "vendor / chosen",
        "FLOP",
        "operations",
        "first call s",
    ]
    body = []
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.get("part") != "modes":
            continue
        for mode, made in row.get("modes", {}).items():
            table = made["by_kind"]
            heavy = ("complex", "complex (fusion)")
            vendor, ours = sums(table, "vendor"), sums(table, "ours_alone")
            chosen = sums(table, "jcuts") + sums(table, "xla")
            some = sums(table, "ours_alone", heavy)
            if ours:
                ratios.setdefault(mode, []).append(vendor / ours)
            share = made["shares"]["best_kernels"] if mode == "mixed" else made["shares"]
            body.append(
                [
                    f"{named(row)}, {mode}",
                    f"{made['kernels']:.0f}",
                    *(ms(stream(row, side)) for side in (mode, f"{mode} options", "xla", "xla options")),
                    ms(vendor),
                    (f"{vendor / ours:.2f}" if ours else "")
                    + (f" ({sums(table, 'vendor', heavy) / some:.2f})" if some else ""),
                    f"{vendor / chosen:.2f}" if chosen else "",
                    f"{share['flop']:.0%}",
                    f"{share['operations']:.0%}",
                    f"{made['first_call_seconds']:.0f}",
                ]
            )
    notes = [
        f"Geometric mean of vendor / kernels, {mode}: {geomean(found):.2f} ({len(found)} rows)."
        for mode, found in ratios.items()
    ]
    return head, body, notes


def kinds(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """Time on the GPU by kind of kernel: as the profiler saw whole programs, else sums of the measured subsets."""
    names = ("complex", "complex (fusion)", "simple", "simple (fusion)")
    head = ["network, program", *(WIDE.get(n, n) for n in names), "sum", "kernels"]
    body = []
    for row in rows:
        if row.get("part") != "modes":
            continue
        profiles = {n: p for n, p in row.get("profiles", {}).items() if p.get("busy_seconds")}
        for name, seen in profiles.items():
            found = seen["by_kind"]
            body.append(
                [
                    f"{named(row)}, {name}",
                    *(ms(found.get(n, 0.0)) for n in names),
                    ms(sum(found.values())),
                    f"{seen['per_step']:.0f}",
                ]
            )
        for mode, made in row.get("modes", {}).items() if not profiles else ():
            found = {n: made["by_kind"][n]["jcuts"] + made["by_kind"][n]["xla"] for n in names}
            body.append(
                [
                    f"{named(row)}, {mode}: subsets",
                    *map(ms, found.values()),
                    ms(sum(found.values())),
                    f"{made['kernels']:.0f}",
                ]
            )
    return head, body, []


def blocks(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """What became of each operation of the unusual blocks."""
    head = ["block", "n", "operations", "runs on", "us", "XLA us"]
    body = []
    for row in rows:
        if row.get("part") != "blocks":
            continue
        for s in row.get("subsets", ()):
            times = [f"{s[k] * 1e6:.1f}" if s.get(k) else "" for k in ("seconds", "xla_seconds")]
            text = ", ".join(f"{n} {op}" if n > 1 else op for op, n in s["operations"].items())
            body.append([named(row), str(s["count"]), text, s["chosen"].partition("/")[0], *times])
    return head, body, []


def fit(points: Sequence[tuple[Sequence[float], float]]) -> tuple[list[float], float]:
    """Least squares: (coefficients, share of the variance that they explain) of y over several x and a constant.

    >>> [round(c, 6) for c in fit([((1.0,), 3.0), ((2.0,), 5.0), ((3.0,), 7.0)])[0]]
    [2.0, 1.0]
    """
    import numpy as np

    x = np.array([[*a, 1.0] for a, _ in points])
    y = np.array([b for _, b in points])
    found, *_ = np.linalg.lstsq(x, y, rcond=None)
    spread = float(((y - y.mean()) ** 2).sum())
    return [float(c) for c in found], 1.0 - float(((y - x @ found) ** 2).sum()) / spread if spread else 1.0


def codegen(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """Seconds of first calls, cold and warm, against distinct subsets and the batch.

    A star: tuned in part before; *again*: the first decision was noisy, so that the warm start compared programs again.
    """
    head = ["network", "subsets", "kernels", "cold s", "warm s", "jax.jit s"]
    body, points = [], []
    for row in rows:
        if row.get("part") not in ("speed", "blocks") or "first_call_seconds" not in row:
            continue
        cold, distinct, warm = row["first_call_seconds"], len(row["subsets"]), row.get("warm", {})
        if row.get("cold", True) and row["part"] == "speed":
            points.append(((float(distinct), math.log2(int(row["network"].split(":")[1]))), cold))
        again = " (again)" if warm.get("measured_again") else ""
        body.append(
            [
                named(row),
                str(distinct),
                str(row["kernels"]),
                f"{cold:.0f}" + "*" * (not row.get("cold", True)),
                f"{warm['seconds']:.1f}{again}" if "seconds" in warm else "",
                f"{warm['plain_seconds']:.1f}" if "plain_seconds" in warm else "",
            ]
        )
    return head, body, fitted("cold seconds", points)


def fitted(what: str, points: Sequence[tuple[Sequence[float], float]]) -> list[str]:
    """The fit over subsets and log2(batch) as a sentence, where there are enough points."""
    if len(points) < 4:
        return []
    (slope, growth, base), share = fit(points)
    return [
        f"{what} = {base:.1f} + {slope:.2f} per distinct subset + {growth:.1f} log2(batch); {len(points)} points, "
        f"{share:.0%} of the variance."
    ]


def planning(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """Python's share, for a pretended GPU."""
    head = ["network", "problems", "candidates", "cold s", "warm s", "of it", "trace s"]
    body, points = [], []
    for row in rows:
        if row.get("part") != "planning" or "warm_seconds" not in row:
            continue
        cold, warm = (row.get(f"{k}_cpu_seconds", row[f"{k}_seconds"]) for k in ("cold", "warm"))
        points.append(((float(row["problems"]), math.log2(int(row["network"].split(":")[1]))), cold))
        stages = ", ".join(f"{k} {v:.2f}" for k, v in row["stages"].items() if v >= 0.05)
        body.append(
            [
                named(row),
                str(row["problems"]),
                str(row["candidates"]),
                f"{cold:.1f}",
                f"{warm:.2f}",
                stages,
                f"{row['trace_seconds']:.1f}",
            ]
        )
    return head, body, fitted("seconds of planning", points)
