"""Markdown tables of `baseline.py`: plain XLA, best flags, waited, memory, first call; and what each flag gave."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = (
    "row",
    "statistics",
    "plain ms",
    "quartiles",
    "best flags ms",
    "plain / best",
    "flags",
    "waited p50 / p90 / p99 ms",
    "best waited p50 / p99 ms",
    "peak GiB",
    "first call s",
)


def load(folder: Path) -> list[dict[str, Any]]:
    """All measured rows of a folder."""
    found = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))]
    return [r for r in found if r.get("record") == "baseline" and "programs" in r]


def line(cells: Sequence[object]) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def ms(seconds: float) -> str:
    """Milliseconds, three digits."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def waited(program: dict[str, Any], *names: str) -> str:
    """Quantiles of calls that are waited for."""
    return " / ".join(ms(program["waited"][n]) for n in names)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table of baselines; without helpful flags, the best program is the plain one."""
    plain = row["programs"]["plain"]
    best = row["programs"].get("best", plain)
    stream, fast = plain["back_to_back"], best["back_to_back"]
    return [
        row["row"],
        row["statistics"],
        ms(stream["median"]),
        f"{ms(stream['q1'])} to {ms(stream['q3'])}",
        ms(fast["median"]),
        f"{stream['median'] / fast['median']:.2f}",
        ", ".join((row.get("flags") or {}).get("chosen", ())) or "none",
        waited(plain, "p50", "p90", "p99"),
        waited(best, "p50", "p99"),
        f"{plain['memory_bytes']['peak'] / 2**30:.2f}",
        f"{plain['first_call_seconds']['total']:.1f}",
    ]


def baselines(rows: Sequence[dict[str, Any]]) -> str:
    """The table of baselines."""
    return "\n".join([line(HEAD), line(["---"] * len(HEAD)), *(line(cells(r)) for r in rows)])


def effect(gave: float | str | None) -> str:
    """Speed-up of a flag set alone over plain, or in a word why there is none."""
    if isinstance(gave, float):
        return f"{1 / gave:.2f}"
    return (gave or "").split(":")[0].split(" for")[0]


def flags(rows: Sequence[dict[str, Any]]) -> str:
    """What each flag set alone gives: plain time over time with it, per workload."""
    found = {r["workload"]: r["flags"]["over_plain"] for r in rows if r.get("flags")}
    names = list(dict.fromkeys(n for gave in found.values() for n in gave))
    head = ["workload", *names]
    body = [[workload, *(effect(gave.get(n)) for n in names)] for workload, gave in found.items()]
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, body)])


def refusals(rows: Sequence[dict[str, Any]]) -> str:
    """Flag sets that were refused, or failed to compile or run, each message once."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for name, gave in ((row.get("flags") or {}).get("over_plain") or {}).items():
            if isinstance(gave, str) and gave.startswith(("refused", "failed", "wrong")):
                found.setdefault((name, gave.splitlines()[0]), set()).add(row["workload"])
    return "\n".join(f"- {name} ({len(where)} workloads): {text}" for (name, text), where in sorted(found.items()))


def hosts(rows: Sequence[dict[str, Any]]) -> str:
    """Devices, versions and dates of the rows."""
    found = {f"{r['device']['kind']}, jax {r['versions']['jax']}, {r['date'][:10]}" for r in rows}
    return "\n".join(sorted(found))


def gain(rows: Sequence[dict[str, Any]]) -> float:
    """Geometric mean of plain over best flags."""
    found = []
    for row in rows:
        plain = row["programs"]["plain"]
        best = row["programs"].get("best", plain)
        found.append(plain["back_to_back"]["median"] / best["back_to_back"]["median"])
    return statistics.geometric_mean(found)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where baseline.py wrote its rows")
    rows = load(parser.parse_args(argv).folder)
    if not rows:
        print("no rows", file=sys.stderr)
        return 1
    parts = [hosts(rows), baselines(rows), f"Geometric mean of plain over best flags: {gain(rows):.3f}", flags(rows)]
    print("\n\n".join([*parts, refusals(rows)]).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
