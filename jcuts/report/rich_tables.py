"""Terminal rendering of a function's report (rich tables): regions, equations left to XLA, the end-to-end decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jcuts.microbatch.report import DIVISION_HEADINGS, FRONT_HEADINGS, division_rows, division_total, pareto_rows
from jcuts.report import verdict
from jcuts.report.report_data import (
    HEADINGS,
    ReportData,
    alone_line,
    dropped,
    guard_line,
    reasons,
    refused,
    regimes,
    rows,
    sources,
    summary,
    thrown_out,
)

NUMBERS = frozenset({"n", "us", "XLA us", "gain", "predicted us", "bound us", "PUL", "score"})


def report_tables(report: ReportData) -> RenderableType:
    """Everything that ``explain`` prints, top to bottom."""
    parts: list[RenderableType] = [headline(report)]
    parts.extend(important_regions(report))
    if report.guard is not None:
        parts.extend(Text(line) for line in (guard_line(report), alone_line(report)) if line)
    parts.extend(Text(f"program {name} ruled out: {why}", style="yellow") for name, why in dropped(report))
    parts.extend(Text(f"note: {note}", style="yellow") for note in report.notes)
    if report.subsets:
        parts.append(SubsetTable(report))
        if found := sources(report):
            parts.append(Text(f"choices of kernels: {found}"))
        if found := regimes(report):
            parts.append(Text(f"measured: {found}"))
    if report.divisions:
        parts.append(text_table("Convolutions", DIVISION_HEADINGS, division_rows(report.divisions)))
        parts.append(Text(division_total(report.divisions)))
        if fronts := pareto_rows(report.divisions):
            parts.append(text_table("Pareto fronts", FRONT_HEADINGS, fronts))
    if report.refusals:
        parts.append(refusal_table(report))
    if lost := reasons(report):
        parts.append(text_table("Where XLA won", ("operations", "reason", "where"), lost))
    if rejected := thrown_out(report):
        parts.append(text_table("Rejected candidates", ("subset", "reason"), rejected))
    if report.seconds:
        parts.append(Text("stages: " + ", ".join(f"{k} {v:.3f} s" for k, v in report.seconds.items()), style="dim"))
    return Group(*parts)


def headline(report: ReportData) -> Text:
    """Name and verdict; then mode, and how much of the work runs in jcuts' kernels."""
    said = verdict.verdict(report)
    line = Text(report.name, style="bold")
    line.append(f": {said.text}", style="green" if said.gain else "yellow")
    line.append(f"\n{summary(report)}", style="not bold")
    return line


def important_regions(report: ReportData) -> list[Text]:
    """A line or two for each of the regions that matter most: gain, operations, times, source line."""
    lines = []
    for region in verdict.most_important(report):
        line = Text(f"  {region.gain:>9}  ", style="green" if region.gained else "dim")
        line.append(region.operations, style="not dim default")
        line.append(f"\n{'':13}{region.times}" + (f"; {region.where}" if region.where else ""), style="dim")
        lines.append(line)
    return lines


# Columns of the subset table that a terminal of this many characters has room for; the others are in the HTML page.
COLUMNS = (
    (0, ("n", "operations", "us", "XLA us", "gain")),
    (100, ("n", "operations", "chosen", "us", "XLA us", "gain", "bound us")),
    (140, ("n", "operations", "kind", "chosen", "us", "XLA us", "gain", "predicted us", "bound us", "PUL", "where")),
    (190, tuple(HEADINGS)),
)


class SubsetTable:
    """One row per distinct region, the costliest first; as many columns as the terminal has room for."""

    def __init__(self, report: ReportData) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [names for width, names in COLUMNS if options.max_width >= width][-1]
        places = [HEADINGS.index(name) for name in shown]
        yield text_table("Subsets", shown, ([row[k] for k in places] for row in rows(self.report)))


def refusal_table(report: ReportData) -> Table:
    """Equations left to XLA, and why."""
    cells = [(str(count), op, why, where) for op, why, count, where in refused(report)]
    return text_table("Left to XLA", ("n", "operation", "reason", "where"), cells)


def text_table(title: str, headings: Sequence[str], cells: Iterable[Sequence[str]]) -> Table:
    """A plain table; numbers to the right, brackets in a cell are no markup."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for name in headings:
        number = name in NUMBERS
        one_line = number or name == "chosen"
        made.add_column(name, justify="right" if number else "left", overflow="ellipsis", no_wrap=one_line)
    for row in cells:
        made.add_row(*(Text(cell) for cell in row))
    return made


def progress_bars(title: str) -> Progress:
    """Bars on standard error, gone when they are stopped."""
    return Progress(
        TextColumn(title, style="bold"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
