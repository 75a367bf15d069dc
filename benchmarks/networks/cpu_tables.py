"""Markdown tables of the CPU baselines (`cpu_baseline.py`): peers, jcuts, memory, first calls, options, gaps.

python benchmarks/networks/cpu_tables.py DIR
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = {
    "plain": "jax.jit",
    "best": "XLA, best options",
    "openvino_latency": "OpenVINO, latency",
    "openvino_throughput": "OpenVINO, throughput",
    "onnxruntime": "ONNX Runtime",
    "jcuts": "jcuts",
}
PEERS = tuple(n for n in NAMES if n != "jcuts")

Row = dict[str, Any]


def load(folder: Path) -> list[Row]:
    """All rows of a folder."""
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))]


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def ms(seconds: float) -> str:
    """Milliseconds, three digits or more.

    >>> ms(0.00234567), ms(0.1234), ms(1.2345)
    ('2.35', '123', '1234')
    """
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def measured(row: Row) -> dict[str, dict[str, Any]]:
    """Peers, and jcuts, that ran and agree with JAX."""
    return {n: p for n, p in row["peers"].items() if "back_to_back" in p and n not in row["not_a_peer"]}


def stream(peer: dict[str, Any]) -> float:
    """Median of seconds per call back to back."""
    return peer["back_to_back"]["median"]


def best_peer(row: Row) -> str:
    """The peer that is fastest back to back."""
    found = measured(row)
    return min((n for n in PEERS if n in found), key=lambda n: stream(found[n]))


def label(row: Row) -> str:
    """'MobileNetV2 b1 bfloat16'; a star where the machine was never quiet."""
    words = [row["workload"], f"b{row['batch']}"]
    words += [row["dtype"]] * (row["dtype"] != "float32") + ["args"] * (row["form"] == "args")
    noisy = any(not p["quiet"] for p in measured(row).values())
    return " ".join(words) + "*" * noisy


def times(rows: Sequence[Row]) -> str:
    """Back to back: medians with quartiles, jcuts' gain over plain XLA, XLA's best and the best peer."""
    head = ["row", *NAMES.values(), "over jax.jit", "over XLA's best", "over the best peer", "best peer", "program"]
    body = []
    for row in rows:
        found = measured(row)
        cells = [label(row)]
        for name in NAMES:
            if name not in found:
                cells.append("wrong" if name in row["not_a_peer"] else "")
                continue
            spread = found[name]["back_to_back"]
            cells.append(f"{ms(spread['median'])} ({ms(spread['q1'])} to {ms(spread['q3'])})")
        best = best_peer(row)
        xla = min(stream(found[n]) for n in ("plain", "best") if n in found)
        ours = found.get("jcuts")
        others = (stream(found["plain"]), xla, stream(found[best]))
        cells += [f"{t / stream(ours):.2f}" if ours else "" for t in others]
        body.append([*cells, NAMES[best], str((ours or {}).get("chosen") or "")])
    return table(head, body)


def waited(rows: Sequence[Row]) -> str:
    """Every call waited for: p50, p90, p99; the fastest peer's p50 over jcuts'."""
    body = []
    for row in rows:
        found = measured(row)
        cells = [label(row)]
        for name in NAMES:
            quantiles = [ms(found[name]["waited"][q]) for q in ("p50", "p90", "p99")] if name in found else []
            cells.append(" / ".join(quantiles))
        best = min(found[n]["waited"]["p50"] for n in PEERS if n in found)
        body.append([*cells, f"{best / found['jcuts']['waited']['p50']:.2f}" if "jcuts" in found else ""])
    return table(["row", *NAMES.values(), "over the best peer"], body)


def costs(rows: Sequence[Row]) -> str:
    """Peak of resident memory while running [MiB] and seconds of the first call; jcuts' with an empty database."""
    body = []
    for row in rows:
        found = measured(row)
        cells = []
        for name in NAMES:
            if name not in found:
                cells.append("")
                continue
            p = found[name]
            first = f"{p['first_call_seconds']:.1f}"
            if name == "jcuts":
                cold = row["jcuts_cold"].get("first_call_seconds")
                first = f"{f'{cold:.0f}' if cold else 'out of time'}, then {first}"
            cells.append(f"{p['memory']['peak'] / 2**20:.0f}; {first}")
        body.append([label(row), *cells])
    return table(["row", *NAMES.values()], body)


def options(rows: Sequence[Row]) -> str:
    """XLA's options: plain time over time with each set alone, and the chosen combination."""
    rows = [r for r in rows if r["flags"].get("alone")]
    names = list(dict.fromkeys(n for r in rows for n in r["flags"]["alone"]))
    body = []
    for row in rows:
        alone = row["flags"]["alone"]
        body.append([label(row), *(effect(alone.get(n)) for n in names), ", ".join(row["flags"]["chosen"]) or "none"])
    return table(["row", *names, "chosen"], body) if rows else ""


def effect(record: dict[str, Any] | None) -> str:
    """Speed-up by a set of options, or why there is none."""
    if record is None:
        return ""
    if "over_plain" in record:
        return f"{1 / record['over_plain']:.2f}"
    return next(word for word in ("refused", "skipped") if word in record)


def missing(rows: Sequence[Row]) -> str:
    """Peers that a row does not have, each reason once; programs whose results are not JAX's."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, p in row["peers"].items():
            reason = p.get("skipped") or p.get("failed")
            if name in row["not_a_peer"]:
                reason = f"relative L2 error {row['not_a_peer'][name]['l2']:.1e}"
            if reason:
                found.setdefault((NAMES[name], reason), []).append(label(row))
    return "\n".join(f"- {name} ({', '.join(where)}): {reason}" for (name, reason), where in sorted(found.items()))


def means(rows: Sequence[Row]) -> str:
    """Geometric means of jcuts' gain over the best peer, by type of numbers."""
    lines = []
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        pairs = [(r, measured(r)) for r in rows if r["dtype"] == dtype]
        pairs = [(r, m) for r, m in pairs if "jcuts" in m and "plain" in m]
        if not pairs:
            continue
        plain = statistics.geometric_mean([stream(m["plain"]) / stream(m["jcuts"]) for _, m in pairs])
        peer = statistics.geometric_mean([stream(m[best_peer(r)]) / stream(m["jcuts"]) for r, m in pairs])
        lines.append(
            f"Geometric means, {dtype}, {len(pairs)} rows: {plain:.2f} over jax.jit, {peer:.2f} over the best peer."
        )
    return "\n".join(lines)


def hosts(rows: Sequence[Row]) -> str:
    """Processors, versions and dates."""
    lines = []
    for row in rows:
        h, v = row["host"], ", ".join(f"{n} {v}" for n, v in row["versions"].items() if v)
        lines.append(f"{h['model name']} (family {h['cpu family']}, model {h['model']}), {h['cores']} cores; {v}")
    dates = sorted(r["date"][:10] for r in rows)
    return "\n".join([*sorted(set(lines)), f"{dates[0]} to {dates[-1]}"])


def report(rows: Sequence[Row]) -> str:
    """All tables."""
    parts = [
        ("Back to back, ms: median (quartiles)", times(rows)),
        ("", means(rows)),
        ("Waited for, ms: p50 / p90 / p99", waited(rows)),
        ("Peak of resident memory while running, MiB; seconds of the first call", costs(rows)),
        ("XLA's options: jax.jit over each set alone", options(rows)),
        ("Not measured", missing(rows)),
        ("Hosts", hosts(rows)),
    ]
    return "\n\n".join(f"{f'### {title}' if title else ''}\n\n{text}".strip() for title, text in parts if text)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where cpu_baseline.py wrote its rows")
    rows = load(parser.parse_args(argv).folder)
    if not rows:
        print("no rows", file=sys.stderr)
        return 1
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
