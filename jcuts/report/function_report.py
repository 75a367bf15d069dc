"""The report of ``explain``: what `report_data` holds, shown as text, as rich tables and as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jcuts.base.errors import UsageError
from jcuts.microbatch.report import DIVISION_HEADINGS, FRONT_HEADINGS, division_rows, division_total, pareto_rows
from jcuts.report.report_data import (
    HEADINGS,
    ReportData,
    alone_line,
    budget_line,
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


class FunctionReport(ReportData):
    """Report of one planned function (`report_data.ReportData` has its fields)."""

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def __rich__(self) -> Any:
        """``rich.print`` shows what ``print`` shows; ``rich_tables.report_tables`` makes tables of it."""
        from rich.text import Text

        return Text(str(self))

    def to_html(self, path: str | Path) -> Path:
        """Writes a self-contained page (`report.html.page`). Raises: UsageError: that file cannot be written."""
        from jcuts.report.html.page import document

        target = Path(path)
        try:
            target.write_text(document(self), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror or error}", path=str(target)) from error
        return target


def _text(report: FunctionReport) -> list[str]:
    lines = [f"{report.name}: {summary(report)}"]
    if report.guard is not None:
        lines.extend(line for line in (guard_line(report), alone_line(report)) if line)
        lines.extend(f"program {name} ruled out: {why}" for name, why in dropped(report))
    if report.subsets:
        lines.extend(_columns([HEADINGS, *rows(report)]))
    if found := sources(report):
        lines.append(f"choices of kernels: {found}")
    if found := regimes(report):
        lines.append(f"measured: {found}")
    lines.extend(line for line in [budget_line(report)] if line)
    if report.divisions:
        lines.extend(_columns([DIVISION_HEADINGS, *division_rows(report.divisions)]))
        lines.extend(line for line in [division_total(report.divisions)] if line)
        if fronts := pareto_rows(report.divisions):
            lines.extend(_columns([FRONT_HEADINGS, *fronts]))
    lines.extend(f"XLA keeps {operations}: {why} [{where}]" for operations, why, where in reasons(report))
    lines.extend(f"rejected for {name}: {why}" for name, why in thrown_out(report))
    lines.extend(f"left to XLA: {count} x {op}: {why} [{where}]" for op, why, count, where in refused(report))
    lines.extend(f"note: {note}" for note in report.notes)
    if report.seconds:
        lines.append("stages: " + ", ".join(f"{k} {v:.3f} s" for k, v in report.seconds.items()))
    return lines


def _columns(table: list[list[str]]) -> list[str]:
    widths = [min(48, max(len(row[k]) for row in table)) for k in range(len(table[0]))]
    return ["  ".join(cell[: widths[k]].ljust(widths[k]) for k, cell in enumerate(row)).rstrip() for row in table]
