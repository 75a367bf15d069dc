"""Split a batch over unequal devices so that the last one finishes earliest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jcuts.base.csv_file import read_csv
from jcuts.base.errors import UsageError
from jcuts.cli.microbatch import open_database, parse_bytes
from jcuts.cli.printing import console, duration, table
from jcuts.microbatch import deepbench
from jcuts.microbatch.analysis import network_times
from jcuts.microbatch.best_batch import DeviceTimes, Split, best_batch_size
from jcuts.microbatch.timings import POLICIES

HELP = "split a batch over unequal devices"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``jcuts best-batch``."""
    parser.add_argument("--batch", type=int, required=True, metavar="B", help="samples in all")
    parser.add_argument(
        "--devices", nargs="+", required=True, metavar="NAME", help="one name per device, repeated for equal ones"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--db", type=Path, metavar="DB", help="benchmark database: kernels of a network, each divided")
    source.add_argument("--times", type=Path, metavar="CSV", help="columns device, batch, seconds")
    parser.add_argument("--network", metavar="NAME", help="network in --db, or part of its name")
    parser.add_argument("--limit", metavar="BYTES", help="workspace per kernel with --db, e.g. 64MiB")
    parser.add_argument(
        "--policy", choices=POLICIES, default="all", help="micro-batch sizes to use with --db; default: %(default)s"
    )
    parser.add_argument("--multiple", type=int, default=1, metavar="N", help="sizes are multiples of N; default: 1")
    parser.add_argument(
        "--interpolate", action="store_true", help="interpolate times between measured sizes, and mark them"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``jcuts best-batch``; without --db and --times it uses published times of two DeepSpeech layers."""
    for name in ("network", "limit"):
        if getattr(arguments, name) is not None and arguments.db is None:
            raise UsageError(f"--{name} goes with --db")
    where, times = _times(arguments)
    split = best_batch_size(arguments.batch, times, multiple=arguments.multiple, interpolate=arguments.interpolate)
    if arguments.json:
        print(json.dumps({"times": where, **split.__dict__}, indent=1))
        return 0
    out = console()
    rows = [
        (
            name,
            str(size) if size else "left out",
            duration(seconds) if size else "",
            "interpolated" if name in split.interpolated and size else "",
        )
        for name, size, seconds in zip(split.names, split.sizes, split.each, strict=True)
    ]
    out.print(
        table(
            f"{arguments.batch} samples over {len(times)} devices",
            ("device", "samples", "time", ""),
            rows,
            right=(1, 2),
        )
    )
    out.print(_summary(split), markup=False)
    out.print(f"times: {where}", markup=False)
    return 0


def _summary(split: Split) -> str:
    text = f"time {duration(split.seconds)} on {split.used} devices"
    if split.even is not None:
        text += f"; even split {duration(split.even)} ({split.even / split.seconds:.2f}x)"
    if split.alone is not None:
        text += f"; best single device {duration(split.alone)} ({split.alone / split.seconds:.2f}x)"
    return text


def _times(arguments: argparse.Namespace) -> tuple[str, list[DeviceTimes]]:
    """(where the times come from, one entry per device)."""
    names: Sequence[str] = arguments.devices
    if arguments.db is not None:
        database = open_database(arguments.db)
        network = database.network(arguments.network)
        limit = parse_bytes("--limit", arguments.limit)
        known = {
            name: network_times(
                network, database, database.device(name), arguments.batch, limit=limit, policy=arguments.policy
            )
            for name in dict.fromkeys(names)
        }
        return f"{arguments.db}: kernels of {network.name}", [known[name] for name in names]
    if arguments.times is not None:
        found = _read(arguments.times)
        missing = [name for name in names if name not in found]
        if missing:
            raise UsageError(f"{arguments.times}: no times of {missing}; it has: {', '.join(found)}", missing=missing)
        return str(arguments.times), [DeviceTimes(name, found[name]) for name in names]
    where = "DeepBench, a training step of two DeepSpeech convolutions in float32, measured at batch 4, 8, 16 and 32"
    return where, [deepbench.times(name) for name in names]


def _read(path: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for number, row in enumerate(read_csv(path), 1):
        try:
            found.setdefault(row["device"], {})[int(row["batch"])] = float(row["seconds"])
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"{path}, row {number}: needs device, batch and seconds: {error!r}", path=str(path), row=number
            ) from None
    return found
