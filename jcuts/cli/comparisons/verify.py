"""Says whether XLA computes a function right: its programs, and jcuts', against float64 on fresh random inputs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jcuts.base.settings import TUNE, Settings
from jcuts.cli import explain
from jcuts.cli.output_files import check_writable, write
from jcuts.cli.printing import console, table

HELP = "is XLA's program of a function right, is jcuts'? against float64, bisected"
COLOURS = {"ok": "green", "no reference": "yellow", "special values": "yellow"}
"""Of verdicts; all others are red."""
MOST_OUTPUTS = 4
"""Outputs whose histograms are shown, the worst ones; all are in the JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain.add_function(parser)
    parser.add_argument("--seeds", type=int, default=3, help="sets of random inputs; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first set; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=60, help="time limit of one run; what takes longer hangs; default: 60"
    )
    parser.add_argument(
        "--ways", metavar="WAY,...", help="only these: xla, no fusion, op by op, options off, jcuts; default: all"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=Settings().tolerance,
        help="allowed error, in multiples of what rounding does; default: %(default)s",
    )
    parser.add_argument("--no-special", action="store_true", help="no set of inputs with NaN, infinities and denormals")
    parser.add_argument("--no-bisect", action="store_true", help="verdicts only")
    parser.add_argument(
        "--tune", choices=TUNE, default="off", help="of jcuts' program; off: kernels wherever there can be one"
    )
    parser.add_argument("--reproducer", type=Path, metavar="FILE.py", help="write what is wrong, without jcuts")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - for standard output")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report. Returns: 1 where something is wrong."""
    from jcuts.differential.run import verify

    for target in (arguments.json, arguments.reproducer):
        check_writable(None if target is None else str(target))
    fn = explain.load(arguments.function)
    positional, keywords = explain.example_arguments(arguments.args)
    explain.check_arguments(fn, positional, keywords, arguments)
    report = verify(
        fn,
        *positional,
        seeds=arguments.seeds,
        seed=arguments.seed,
        seconds=arguments.seconds,
        ways=None if arguments.ways is None else [way.strip() for way in arguments.ways.split(",")],
        tolerance=arguments.tolerance,
        special=not arguments.no_special,
        bisection=not arguments.no_bisect,
        tune=arguments.tune,
        write_to=arguments.reproducer,
        **keywords,
    )
    if arguments.json is not None:
        write(arguments.json, report.to_dict())
    if arguments.json != "-":
        show(report, console())
    return 1 if report.wrong else 0


def show(report: Any, to: Console) -> None:
    """The report on a terminal: verdict, a line per way, histograms, findings."""
    line = Text(report.name, style="bold")
    line.append(f": {report.verdict}", style="red" if report.wrong else "green")
    to.print(line)
    kinds = f"{report.seeds} sets of random inputs" + (", 1 with special values" if report.special else "")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    to.print(Text(f"{report.equations} equations, {kinds}; {versions}; {report.seconds:.0f} s", style="dim"))
    to.print(_ways(report))
    for output, is_float in _worst_outputs(report):
        to.print(_histogram(report, output) if is_float else _unequal(report, output))
    for way in report.wrong:
        to.print(Text(f"{way.way}: {way.message}", style=COLOURS.get(way.status, "red")))
    for finding in report.findings:
        _show_finding(finding, to)
    for note in report.notes:
        to.print(Text(f"note: {note}", style="yellow"))
    if report.reproducer:
        to.print(Text(f"reproducer, without jcuts: {report.reproducer}"))


def _ways(report: Any) -> Any:
    rows = []
    for way in report.ways:
        worst = max(way.outputs, key=lambda o: (o["status"] != "ok", o["rms_ulp"]), default=None)
        rows.append(
            [
                way.way + (f" ({way.kernels} kernels)" if way.kernels is not None else ""),
                way.status,
                _number(worst and worst["rms_ulp"]),
                _number(worst and worst["limit_ulp"]),
                _sum(way.outputs, "nan_lost", "nan_made"),
                _sum(way.outputs, "infinite"),
                f"{way.seconds:.1f}" if way.seconds else "-",
            ]
        )
    return table("", ("way", "verdict", "error ulp", "limit", "NaN", "inf", "s"), rows, right=(2, 3, 4, 5, 6))


def _number(value: float | None) -> str:
    return f"{value:.3g}" if value else "-"


def _sum(outputs: Any, *names: str) -> str:
    total = sum(output[name] for output in outputs for name in names)
    return str(total) if outputs else "-"


def _worst_outputs(report: Any) -> list[tuple[int, bool]]:
    """The outputs that are shown: number, and whether they are floats."""
    worst: dict[int, tuple[int, float]] = {}
    kinds: dict[int, bool] = {}
    for way in report.ways:
        for output in way.outputs:
            key = (int(output["status"] != "ok"), output["most_ulp"] + output["unequal"])
            worst[output["output"]] = max(worst.get(output["output"], (0, 0.0)), key)
            kinds[output["output"]] = sum(output["histogram"]) > 0 or "float" in output["dtype"]
    order = sorted(worst, key=lambda number: worst[number], reverse=True)[:MOST_OUTPUTS]
    return [(number, kinds[number]) for number in sorted(order)]


def _of(way: Any, number: int) -> Mapping[str, Any] | None:
    return next((o for o in way.outputs if o["output"] == number), None)


def _histogram(report: Any, number: int) -> Any:
    """Shares of the elements by their distance from float64 in ulp, a row per way."""
    from jcuts.differential.judge import BINS

    rows, spec = [], None
    for way in report.ways:
        output = _of(way, number)
        if output is None:
            continue
        spec, total = output, sum(output["histogram"])
        rows.append([way.way, *(_share(count, total) for count in output["histogram"]), _number(output["most_ulp"])])
    assert spec is not None  # it is of some way
    heads = ("ulp of an element", *(f"≤{edge:g}" for edge in BINS), "more", "most")
    shape = ",".join(map(str, spec["shape"]))
    return table(f"output {number}, {spec['dtype']}[{shape}]", heads, rows, right=tuple(range(1, len(heads))))


def _share(count: int, total: int) -> str:
    if not count:
        return "."
    percent = 100 * count / total
    return f"{percent:.0f}%" if percent >= 1 else str(count)


def _unequal(report: Any, number: int) -> Any:
    rows = [[way.way, str(output["unequal"])] for way in report.ways if (output := _of(way, number)) is not None]
    return table(f"output {number}, elements that differ from float64's", ("way", "elements"), rows, right=(1,))


def _show_finding(finding: Any, to: Console) -> None:
    from jcuts.differential.report import finding_text

    head, *_ = finding_text(finding).split("; right ")
    to.print(Text(head, style="bold"))
    for option, reason in finding.options:
        to.print(Text(f"  right with {option}: {reason}"))
    for name in finding.passes:
        to.print(Text(f"  right without the HLO pass {name}"))
