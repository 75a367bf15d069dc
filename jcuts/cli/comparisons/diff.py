"""Compares two reports that ``jcuts explain --json`` wrote: gain, kernels, times of regions, and what XLA keeps."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from jcuts.cli.output_files import check_writable, write
from jcuts.cli.printing import console, table

HELP = "what differs between two reports of explain --json"
MOST_ROWS = 20
"""Regions and refusals that are shown; all are in the JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A.json", help="a report")
    parser.add_argument("b", metavar="B.json", help="the report that is compared with it")
    parser.add_argument("--json", metavar="FILE", help="write the differences as JSON; - for standard output")


def run(arguments: argparse.Namespace) -> int:
    """Prints what differs. Returns: 0."""
    from jcuts.report.compare import compare, read

    check_writable(arguments.json)
    found = compare(read(arguments.a), read(arguments.b))
    if arguments.json is not None:
        write(arguments.json, found.to_dict())
    if arguments.json != "-":
        show(found, console())
    return 0


def show(found: Any, to: Console) -> None:
    """The comparison on a terminal: verdicts first, then regions by how much their time differs."""
    for side, name, text in zip("AB", found.names, found.verdicts, strict=True):
        line = Text(f"{side} {name}", style="bold")
        line.append(f": {text}", style="not bold")
        to.print(line)
    a, b = found.gains
    if a and b:
        to.print(Text(f"B is {b / a:.2f} times A's gain", style="green" if b >= a else "red"))
    to.print(f"kernel calls {found.kernels[0]} -> {found.kernels[1]}; {found.same} regions are equal")
    if found.regions:
        to.print(_regions(found.regions))
    if found.refusals:
        cells = [(op, why, str(x), str(y)) for op, why, x, y in found.refusals[:MOST_ROWS]]
        to.print(table("left to XLA", ("operation", "reason", "A", "B"), cells, right=(2, 3)))
    for kind, rows in (("regions", found.regions), ("reasons", found.refusals)):
        if len(rows) > MOST_ROWS:
            to.print(f"{len(rows) - MOST_ROWS} more {kind} are in --json")
    if not found.regions and not found.refusals:
        to.print("nothing differs")


def _regions(pairs: Any) -> Any:
    from jcuts.microbatch.report import microseconds

    rows = [
        (
            p.operations,
            microseconds(p.seconds[0]),
            microseconds(p.seconds[1]),
            "-" if p.ratio is None else f"{p.ratio:.2f}",
            p.change or "time",
        )
        for p in pairs[:MOST_ROWS]
    ]
    return table("regions that differ", ("operations", "A us", "B us", "B/A", "change"), rows, right=(1, 2, 3))
