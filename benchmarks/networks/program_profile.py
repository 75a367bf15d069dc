"""A profile of a row's programs by kernel: time inside the program, beside the time and the bound of the tuner.

    python benchmarks/networks/jcuts_rows.py --out DIR --profile ROW       on a GPU: the profile goes into the file
    python benchmarks/networks/program_profile.py DIR/jcuts_<row>.json     prints it

A kernel of jcuts is found by its symbol, which holds the digest of the kernel; the region that it belongs to has the
time measured alone (`tune.measure.gpu_timing`: operands from memory, one execution after another) and the roofline
bound.  What XLA runs has its name alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import device_profile, markdown_table  # noqa: E402

_SYMBOL = re.compile(r"jcuts_([0-9a-f]{12})_\d+")
STEPS = 10
MOST = 2000
"""Kernels by name that a profile keeps."""


def regions(report: Any, digests: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The regions of a report that kernels run, by the first twelve digits of the kernel's digest.

    Args: report: a `FunctionReport`; digests: of scheduled programs -> of their compiled kernels.
    """
    by_program = {program[:8]: kernel[:12] for program, kernel in digests.items()}
    found: dict[str, dict[str, Any]] = {}
    for subset in report.subsets:
        kernel = by_program.get(subset.chosen.rpartition("/")[2])
        if kernel is None:
            continue
        same = found.setdefault(kernel, {"region": f"{subset.name} {subset.chosen}", "count": 0})
        same["count"] += subset.count
        same |= {
            "operations": subset.operations,
            "seconds": subset.seconds,
            "xla_seconds": subset.xla_seconds,
            "bound_seconds": subset.bound_seconds,
            "bytes": subset.bytes,
            "flop": subset.flop,
            "params": {name: str(value) for name, value in subset.params.items()},
        }
    return found


def compiled_digests() -> dict[str, str]:
    """Digests of the scheduled programs that this process has kernels of, and of these kernels."""
    from jcuts.xla import kernel_cache

    return {program: kernel.digest for program, kernel in kernel_cache.compiled().items()}


def profile(calls: Mapping[str, Callable[[], Any]], report: Any, folder: Path) -> dict[str, Any]:
    """Profiles programs on the device.

    Args: calls: label -> one step; report: of jcuts' program; folder: for traces.
    """
    seen = {name: device_profile.profiled(call, folder, STEPS, MOST) for name, call in calls.items()}
    return {"programs": seen, "regions": regions(report, compiled_digests())}


def joined(largest: Sequence[Sequence[Any]], known: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of a profile, those of one region together, the longest first.

    Args: largest: name, launches per step, seconds per step, as `device_profile.profiled` gives them; known: `regions`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, launches, seconds in largest:
        symbol = _SYMBOL.search(name)
        region = known.get(symbol[1]) if symbol else None
        key = symbol[1] if symbol else name
        row = rows.setdefault(key, {"name": name, "launches": 0.0, "seconds": 0.0, "region": region})
        row["launches"] += launches
        row["seconds"] += seconds
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def table(record: Mapping[str, Any], program: str, most: int) -> str:
    """A program's kernels as a Markdown table. Args: record: a row's file; program: its label; most: rows."""
    data = record["profile"]
    seen = data["programs"][program]
    rows = joined(seen["largest"], data["regions"])
    lines = [_line(row) for row in rows[:most]]
    ours = [row for row in rows if row["region"] is not None]
    alone = sum(row["region"]["count"] * (row["region"]["seconds"] or 0.0) for row in ours)
    bound = sum(row["region"]["count"] * row["region"]["bound_seconds"] for row in ours)
    head = (
        f"{program}: {1e3 * seen['busy_seconds']:.3f} ms of kernels, {seen['per_step']:.0f} launches; "
        f"regions of jcuts {1e3 * sum(row['seconds'] for row in ours):.3f} ms, alone {1e3 * alone:.3f} ms, "
        f"bound {1e3 * bound:.3f} ms"
    )
    columns = ["kernel", "launches", "in the program us", "alone us", "XLA us", "bound us"]
    return head + "\n\n" + markdown_table.table(columns, lines)


def _line(row: Mapping[str, Any]) -> list[str]:
    cells = [row["name"][:60], f"{row['launches']:.0f}", f"{1e6 * row['seconds']:.1f}", "", "", ""]
    region = row["region"]
    if region is not None:
        count = region["count"]
        times = (region["seconds"], region["xla_seconds"], region["bound_seconds"])
        cells[0] = f"{region['region']} x {count}"
        cells[3:] = [f"{1e6 * count * t:.1f}" if t else "" for t in times]
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="files of `jcuts_rows.py --profile`")
    parser.add_argument("--most", type=int, default=60, help="kernels per program")
    options = parser.parse_args(argv)
    for path in options.files:
        record = json.loads(path.read_text())
        for program in record["profile"]["programs"]:
            print(f"## {path.stem}\n\n{table(record, program, options.most)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
