"""One sitting on a GPU: baselines of plain XLA, then `torch.compile`, then jcuts, for as many rows as time suffices.

    python benchmarks/networks/sitting.py --out DIR --seconds-total 540 [ROW ...]
    python benchmarks/networks/sitting.py --out DIR --seconds-total 540 --parts baseline
    python benchmarks/networks/sitting.py --out DIR --dry --seconds-total 600

Another sitting with the same folder goes on where this one ended.  Every part gets its share of the time; what a part
does not need, the next ones have.  PyTorch and jcuts are measured for rows that have a baseline.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import baseline, jcuts_rows, torch_compile  # noqa: E402
from benchmarks.networks.row_driver import read  # noqa: E402
from benchmarks.networks.workload_row import Row, all_rows  # noqa: E402

PARTS = {"baseline": baseline.main, "torch": torch_compile.main, "jcuts": jcuts_rows.main}
SHARES = {"baseline": 0.6, "torch": 0.2, "jcuts": 0.2}
"""Of the sitting's seconds."""


def with_baseline(rows: Sequence[Row], out: Path) -> list[Row]:
    """Rows whose baseline has been measured."""
    return [row for row in rows if "programs" in read(out / row.file)]


def run(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Runs the parts one after the other; 1 where a row failed."""
    begin, failed = time.monotonic(), 0
    shares = {part: SHARES[part] for part in options.parts}
    for number, part in enumerate(options.parts):
        left = options.seconds_total - (time.monotonic() - begin)
        rest = sum(shares[p] for p in options.parts[number:])
        todo = rows if part == "baseline" else with_baseline(rows, options.out)
        if not todo or left <= 0:
            continue
        print(f"-- {part}: {len(todo)} rows, {left * shares[part] / rest:.0f} s", flush=True)
        words = ["--out", str(options.out), "--seconds-total", str(left * shares[part] / rest)]
        words += ["--seconds", str(options.seconds), *(["--dry"] if options.dry else [])]
        words += options.baseline_options.split() if part == "baseline" else []
        failed |= PARTS[part]([*words, *map(str, todo)])
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="NAME:BATCH:FORM[:DTYPE]; without any, all")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--seconds-total", type=float, default=540.0, help="of the sitting")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per program")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="in this order")
    parser.add_argument("--baseline-options", default="", help="further options of baseline.py, as one word")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU: finds typos, not times")
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    return run([Row.parse(r) for r in options.rows] or all_rows(), options)


if __name__ == "__main__":
    sys.exit(main())
