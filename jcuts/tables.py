"""A function's report as rich tables: the subsets, what is left to XLA, and the whole-function decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jcuts.report import HEADINGS, FunctionReport, rows, summary

NUMBERS = frozenset({"n", "us", "XLA us", "gain", "bound us", "PUL"})


def report_tables(report: FunctionReport) -> RenderableType:
    """Everything that ``explain`` prints, top to bottom."""
    parts: list[RenderableType] = [headline(report)]
    if report.guard is not None:
        parts.append(Text(f"whole function: {report.guard.get('chosen')} ({report.guard.get('reason')})"))
    parts.extend(Text(f"note: {note}", style="yellow") for note in report.notes)
    if report.subsets:
        parts.append(subset_table(report))
    if report.refusals:
        parts.append(refusal_table(report))
    rejected = [(s.name, text) for s in report.subsets for text in s.rejected]
    if rejected:
        parts.append(text_table("Candidates thrown out", ("subset", "reason"), rejected))
    if report.seconds:
        parts.append(Text("stages: " + ", ".join(f"{k} {v:.3f} s" for k, v in report.seconds.items()), style="dim"))
    return Group(*parts)


def headline(report: FunctionReport) -> Text:
    """Name, mode, and how much of the work runs in jcuts' kernels."""
    line = Text(report.name, style="bold")
    line.append(f": {summary(report)}", style="not bold")
    return line


def subset_table(report: FunctionReport) -> Table:
    """One row per distinct subset, the costliest first."""
    return text_table("Subsets", HEADINGS, rows(report))


def refusal_table(report: FunctionReport) -> Table:
    """What XLA keeps, and why."""
    cells = [(str(r.count), r.op, r.reason, r.where) for r in report.refusals]
    return text_table("Left to XLA", ("n", "operation", "reason", "where"), cells)


def text_table(title: str, headings: Sequence[str], cells: Iterable[Sequence[str]]) -> Table:
    """A plain table; numbers to the right, brackets in a cell are no markup."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for name in headings:
        number = name in NUMBERS
        made.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in cells:
        made.add_row(*(Text(cell) for cell in row))
    return made
