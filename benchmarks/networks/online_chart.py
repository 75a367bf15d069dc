"""Draws steps per second of a training loop that is tuned while it runs (`online_tuning.py`), as SVG.

python benchmarks/networks/online_chart.py online_tuning.json docs/figures/online_tuning.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.line_chart import Panel, line_chart  # noqa: E402


def chart(found: dict[str, Any]) -> str:
    """A panel of steps per second by window, and one of the share of the run that tuning took by then [%]."""
    rows = found["rows"]
    named = [("jax.jit", rows["jit"][:1]), ('tune="auto"', rows["auto"])]
    named += [(f"online, {row['share']:.0%} at most", [row]) for row in rows["online"]]
    named += [("second process", rows["warm"][:1])]
    speeds = [(name, [w["steps_per_second"] for w in row["windows"]]) for name, of in named for row in of]
    shares = [
        (name, [100 * w["share"] for w in row["windows"] if "share" in w])
        for name, of in named
        for row in of
        if any("share" in w for w in row["windows"])
    ]
    device = rows["jit"][0]["device"]
    panels = [Panel("steps per second, by window of 2 s", speeds), Panel("share of the run, %", shares)]
    return line_chart(f"A training loop tuned while it runs ({device})", [panels])


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("svg", type=Path)
    options = parser.parse_args(argv)
    options.svg.write_text(chart(json.loads(options.json.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
