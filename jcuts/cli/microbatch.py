"""Divide a network's convolutions into micro-batches offline, from the times in a benchmark database (no device
needed).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from jcuts.base import knobs
from jcuts.base.errors import CacheError, UsageError
from jcuts.cli.printing import console, duration, size, table
from jcuts.microbatch import html_report
from jcuts.microbatch.analysis import Analysis, Row, analyse
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import Database
from jcuts.microbatch.shared_workspace_ilp import CONSTRAINTS
from jcuts.microbatch.timings import POLICIES, Division

HELP = "divide convolutions under a workspace limit, offline"
COLUMNS = (
    "kernel",
    "division",
    "time",
    "undivided",
    "gain",
    "TRUE_HALF",
    "PSEUDO_HALF",
    "workspace",
    "unlimited",
    "set",
)
HALF = ("TRUE_HALF", "PSEUDO_HALF")
WIDE = ("undivided", "unlimited", "set")
"""Columns that a narrow terminal has no room for; JSON and the page have everything."""
_UNITS = {"": 0, "b": 0, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``jcuts microbatch``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    one = actions.add_parser("analyse", help="divide every convolution of a network")
    _add_database(one)
    one.add_argument("--network", metavar="NAME", help="a network, or part of its name (default: the only one)")
    one.add_argument("--device", metavar="TEXT", help="part of a device's name (default: the only one)")
    limits = one.add_mutually_exclusive_group()
    limits.add_argument("--limit", metavar="BYTES", help="workspace per kernel (WR), e.g. 64MiB")
    limits.add_argument("--total", metavar="BYTES", help="workspace of the whole network (WD), e.g. 960MiB")
    limits.add_argument(
        "--memory", metavar="BYTES", help="activations, weights and workspaces of the network together, e.g. 8GiB"
    )
    one.add_argument("--policy", choices=POLICIES, default="all", help="micro-batch sizes to use; default: %(default)s")
    one.add_argument(
        "--constraint",
        choices=CONSTRAINTS,
        default="paper",
        help="memory constraint with --total; default: %(default)s",
    )
    one.add_argument("--front", metavar="KERNEL", help="show the Pareto front (desirable set) of this kernel")
    one.add_argument("--html", metavar="FILE", help="write an HTML page with every Pareto front as a plot")
    one.add_argument("--json", metavar="FILE", help="write everything as JSON; - is standard output, instead of tables")
    ls = actions.add_parser("ls", help="list devices, networks and convolutions")
    _add_database(ls)
    merge = actions.add_parser("merge", help="take over other databases; of two entries the newer stays")
    merge.add_argument("database", type=Path, metavar="DB")
    merge.add_argument("others", type=Path, nargs="+", metavar="OTHER")


def _add_database(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "database",
        type=Path,
        metavar="DB",
        nargs="?",
        help="benchmark database; default: what optimize(workspace_limit=...) filled below JCUTS_CACHE_DIR",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs ``jcuts microbatch``."""
    if arguments.database is None:
        arguments.database = knobs.current().cache_dir / "microbatch.sqlite"
    database = Database(arguments.database)
    if arguments.action == "merge":
        taken = database.merge(arguments.others)
        console().print(f"{taken} entries taken over from {len(arguments.others)} databases")
        return 0
    open_database(arguments.database)
    if arguments.action == "ls":
        return _ls(database)
    analysis = analyse(
        database.network(arguments.network),
        database,
        database.device(arguments.device),
        limit=parse_bytes("--limit", arguments.limit),
        total=parse_bytes("--total", arguments.total),
        memory=parse_bytes("--memory", arguments.memory),
        policy=arguments.policy,
        constraint=arguments.constraint,
    )
    shown = _kernel(analysis, arguments.front) if arguments.front else None
    if arguments.html:
        write(arguments.html, html_report.page(analysis))
    if arguments.json:
        text = json.dumps(document(analysis), indent=1)
        if arguments.json == "-":
            print(text)
        else:
            write(arguments.json, text + "\n")
    if arguments.json != "-":
        _show(analysis)
        if shown is not None:
            _show_front(shown)
    return 0


def open_database(path: Path) -> Database:
    """The database of a file that exists.  Raises: CacheError otherwise."""
    if not path.is_file():
        raise CacheError(f"{path}: no such file", path=str(path))
    return Database(path)


def parse_bytes(name: str, text: str | None) -> int | None:
    """A number of bytes with an optional binary unit.

    >>> parse_bytes("--limit", "64MiB"), parse_bytes("--limit", "1.5k"), parse_bytes("--limit", "0")
    (67108864, 1536, 0)

    Raises: UsageError if it is none.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise UsageError(f"{name} {text!r} must be bytes, or a number with KiB, MiB or GiB", value=text)
    value = float(found[1]) * 2 ** _UNITS[found[2]]
    if value >= 2**60:
        raise UsageError(f"{name} {text!r} is more than any memory", value=text)
    return int(found[1]) if found[1].isdigit() and not _UNITS[found[2]] else int(value)


def write(path: str, text: str) -> None:
    """Writes a file.  Raises: UsageError if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}", path=path) from error


def document(analysis: Analysis) -> dict[str, Any]:
    """The analysis as plain data."""
    return {
        "network": analysis.network.name,
        "device": str(analysis.device),
        "method": analysis.method,
        "limit": analysis.limit,
        "policy": analysis.policy,
        "constraint": analysis.constraint,
        "proven": analysis.proven,
        "seconds": analysis.seconds,
        "undivided_seconds": analysis.undivided,
        "workspace_total": analysis.total,
        "workspace_peak": analysis.peak,
        "memory_peak": analysis.memory or None,
        "undivided_workspace_total": analysis.undivided_total,
        "unlimited_workspace_total": analysis.unlimited_total,
        "kernels": [
            {
                "name": row.use.name,
                "convolution": row.use.convolution.to_json(),
                "batch": row.use.batch,
                "division": _division(row.division),
                "undivided": row.undivided and _division(row.undivided),
                "true_half": row.true_half and _division(row.true_half),
                "pseudo_half": row.pseudo_half and _division(row.pseudo_half),
                "desirable": [_division(division) for division in row.desirable],
            }
            for row in analysis.rows
        ],
    }


def _division(division: Division) -> dict[str, Any]:
    parts = [{"count": n, "batch": m.batch, "algorithm": m.algorithm, "math": m.math} for n, m in division.runs]
    return {"seconds": division.seconds, "workspace": division.workspace, "parts": parts}


def _show(analysis: Analysis) -> None:
    out = console()
    if analysis.limit is None:
        what = "no limit"
    elif analysis.method == "WR":
        what = f"at most {size(analysis.limit)} per kernel"
    elif analysis.with_held:
        what = f"at most {size(analysis.limit)} with all that is live beside the workspaces"
    else:
        what = f"at most {size(analysis.limit)} in all, constraint {analysis.constraint}"
    title = f"{analysis.network.name} on {analysis.device}: {analysis.method}, {what}, policy {analysis.policy}"
    out.print(title, style="bold", markup=False)
    has_half = any(row.true_half or row.pseudo_half for row in analysis.rows)
    shown = [c for c in COLUMNS if (out.width >= 110 or c not in WIDE) and (has_half or c not in HALF)]
    places = [COLUMNS.index(name) for name in shown]
    lines = [[_line(row)[place] for place in places] for row in analysis.rows]
    out.print(table("Kernels", shown, lines, right=range(2, len(shown))))
    plain = analysis.undivided
    gain = f", undivided under the same limits {duration(plain)}: {plain / analysis.seconds:.2f}x" if plain else ""
    out.print(f"time {duration(analysis.seconds)}{gain}")
    out.print(
        f"workspaces {size(analysis.total)} in all, {size(analysis.peak)} live at once; the fastest single calls take "
        f"{size(analysis.unlimited_total)} in all"
    )
    if analysis.memory:
        out.print(f"with what is live beside them at most {size(analysis.memory)} at a convolution")
    if not analysis.proven:
        out.print("not proven to be the best: the search would have outgrown memory", style="yellow")


def _line(row: Row) -> tuple[str, ...]:
    plain = row.undivided
    return (
        row.use.name,
        str(row.division),
        duration(row.division.seconds),
        duration(plain.seconds) if plain else "none fits",
        f"{plain.seconds / row.division.seconds:.2f}x" if plain else "",
        *(duration(half.seconds) if half else "" for half in (row.true_half, row.pseudo_half)),
        size(row.division.workspace),
        size(row.unlimited.workspace) if row.unlimited else "",
        str(len(row.desirable)),
    )


def _kernel(analysis: Analysis, name: str) -> Row:
    for row in analysis.rows:
        if row.use.name == name:
            return row
    names = ", ".join(row.use.name for row in analysis.rows)
    raise UsageError(f"--front {name!r}: no such kernel; there are: {names}", name=name)


def _show_front(row: Row) -> None:
    """The desirable set as text: a bar for the time, a star for the choice."""
    slowest = max(division.seconds for division in row.desirable)
    lines = [
        (
            "*" if division == row.division else "",
            size(division.workspace),
            duration(division.seconds),
            "#" * max(1, round(30 * division.seconds / slowest)),
            str(division),
        )
        for division in row.desirable
    ]
    title = f"Desirable set of {row.use.name}: {row.use.convolution}, batch {row.use.batch}"
    console().print(table(title, ("", "workspace", "time", "", "division"), lines, right=(1, 2)))


def _ls(database: Database) -> int:
    out = console()
    entries = database.entries()
    out.print(
        table(
            f"{database.path}: devices",
            ("device", "entries"),
            [(str(device), str(sum(entry.device == device for entry in entries))) for device in database.devices()],
            right=(1,),
        )
    )
    networks = [
        (n.name, str(len(n.uses)), ", ".join(str(b) for b in sorted({u.batch for u in n.uses})))
        for n in database.networks()
    ]
    out.print(table("networks", ("network", "kernels", "batch"), networks, right=(1,)))
    sizes: dict[Convolution, list[int]] = {}
    for entry in entries:
        sizes.setdefault(entry.convolution, []).append(entry.batch)
    found = [(str(c), str(len(set(b))), f"{min(b)} ... {max(b)}") for c, b in sizes.items()]
    out.print(table("convolutions", ("convolution", "sizes", "batch"), found, right=(1,)))
    return 0
