"""The report of ``explain``: plain data about one optimised function, as text, JSON and an HTML page."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jcuts.base.errors import UsageError
from jcuts.microbatch.report import (
    DIVISION_HEADINGS,
    FRONT_HEADINGS,
    DivisionReport,
    division_rows,
    division_total,
    microseconds,
    pareto_rows,
)


@dataclass(frozen=True)
class SubsetReport:
    """Report of one region.

    Attributes:
        name: short name; operations: primitive -> count; where: user source lines.
        level: 'register', 'shared' or 'none' (a single operation).
        kind: 'complex', 'complex (fusion)', 'simple' or 'simple (fusion)' (thesis Figure 5.2).
        chosen: label of the winner, 'xla' where the subset is left to XLA.
        origin: 'measured', 'estimated' or 'library'.
        params: chosen kernel parameters; score: its ranking score in [0, 1]; bound_seconds: its roofline bound.
        seconds, xla_seconds: measured times [s] of the chosen kernel (where XLA won: of the best kernel) and of XLA,
            None where nothing was measured.
        count: how many equal subsets share this choice; flop, bytes: of one of them.
        rejected: rejected candidates, with the reason.
        why: why XLA runs the subset, '' where a kernel does.
        source: where a kernel's choice comes from: 'tuned here', 'imported, checked here', or '' where none was stored.
        predicted_seconds, pul: of the chosen kernel, by the performance model (`pipeline.predictions`); None where it
            has none.
        regime: how the times were taken ('warm caches, alone'), '' where none were (`tune.measure.regime`).
        derived: whether XLA's time follows from other programs', or from a profile (`tune.parent.measure_order`).
    """

    name: str
    operations: dict[str, int]
    where: list[str]
    level: str
    kind: str
    chosen: str
    origin: str
    params: dict[str, Any]
    score: float
    bound_seconds: float
    seconds: float | None
    xla_seconds: float | None
    count: int
    flop: float
    bytes: float
    rejected: list[str] = field(default_factory=list)
    why: str = ""
    derived: bool = False
    source: str = ""
    predicted_seconds: float | None = None
    pul: float | None = None
    regime: str = ""


@dataclass(frozen=True)
class RefusalReport:
    """An equation that jcuts leaves to XLA, and the reason."""

    op: str
    reason: str
    where: str
    count: int = 1


@dataclass(frozen=True)
class FunctionReport:
    """Report of one planned function.

    ``library`` is the 'flop' and 'bytes' of subsets that XLA keeps without a measurement (products on a GPU);
    ``divisions`` are the convolutions under a workspace limit; ``unmeasured`` counts kernels that the tuning budget
    left out.
    """

    name: str
    mode: str
    platform: str
    subsets: tuple[SubsetReport, ...] = ()
    refusals: tuple[RefusalReport, ...] = ()
    equations: int = 0
    source: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    guard: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    postponed: bool = False
    unmeasured: int = 0
    library: dict[str, float] = field(default_factory=dict)
    divisions: tuple[DivisionReport, ...] = ()

    def with_guard(self, decision: dict[str, Any]) -> FunctionReport:
        """The report with the whole-function decision attached."""
        return replace(self, guard=decision)

    def with_seconds(self, spent: Mapping[str, float]) -> FunctionReport:
        """The report with the wall time of the first call [s], by what it went into, beside that of the stages."""
        return replace(self, seconds={**self.seconds, **spent})

    @property
    def runs_plain_xla(self) -> bool:
        """Whether the end-to-end benchmark (or JCUTS_DISABLE) left the whole function to XLA."""
        return self.guard is not None and str(self.guard.get("chosen", "")).partition(":")[0] == "xla"

    @property
    def kernels(self) -> int:
        """Calls of jcuts' kernels per execution (loop bodies counted once)."""
        return sum(s.count for s in self.subsets if s.chosen != "xla")

    def share(self, what: str) -> float:
        """Fraction of 'flop' or 'bytes' of all regions that jcuts' kernels run, in [0, 1]."""
        total = sum(getattr(s, what) * s.count for s in self.subsets) + self.library.get(what, 0.0)
        ours = sum(getattr(s, what) * s.count for s in self.subsets if s.chosen != "xla")
        return ours / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def __rich__(self) -> Any:
        """``rich.print`` shows what ``print`` shows; ``rich_tables.report_tables`` makes tables of it."""
        from rich.text import Text

        return Text(str(self))

    def to_html(self, path: str | Path) -> Path:
        """Writes a self-contained page. Raises: UsageError: that file cannot be written."""
        target = Path(path)
        try:
            target.write_text(_html(self), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror or error}", path=str(target)) from error
        return target


HEAVY = frozenset({"conv_general_dilated", "dot_general"})


def operations_text(operations: dict[str, int]) -> str:
    """'conv_general_dilated, 3 add, 2 mul': the operation that matters first, the rest by first appearance."""
    order = sorted(operations.items(), key=lambda item: item[0] not in HEAVY)
    shown = [name if count == 1 else f"{count} {name}" for name, count in order]
    return ", ".join(shown if len(shown) <= 7 else [*shown[:6], f"{len(shown) - 6} more kinds"])


def rows(report: FunctionReport) -> list[list[str]]:
    """The table of regions, as text cells."""
    result = []
    for s in sorted(report.subsets, key=lambda s: -((s.xla_seconds or s.seconds or 0.0) * s.count)):
        ratio = "-" if not (s.seconds and s.xla_seconds) else f"{s.xla_seconds / s.seconds:.2f}x"
        result.append(
            [
                str(s.count),
                operations_text(s.operations),
                s.kind,
                s.level,
                s.chosen,
                microseconds(s.seconds),
                microseconds(s.xla_seconds),
                ratio,
                microseconds(s.predicted_seconds),
                microseconds(s.bound_seconds or None),
                "-" if s.pul is None else f"{s.pul:.2f}",
                f"{s.score:.2f}",
                "; ".join(s.where[:2]),
            ]
        )
    return result


def summary(report: FunctionReport) -> str:
    """One line: mode, and how much of the work runs in jcuts' kernels."""
    start = f"mode {report.mode} on {report.platform}; {report.equations} equations, "
    calls = f"{report.kernels} kernel calls"
    flop, moved = f"{report.share('flop'):.0%} of the FLOP", f"{report.share('bytes'):.0%} of the bytes"
    if not report.runs_plain_xla:
        return f"{start}{calls}, {flop} and {moved} in jcuts' kernels"
    lost = f" (the program that lost has {calls}, with {flop} and {moved})" if report.kernels else ""
    return f"{start}all of it plain XLA: 0% of the FLOP and 0% of the bytes in jcuts' kernels{lost}"


def guard_line(report: FunctionReport) -> str:
    """The whole-function decision as one line, '' if there is none."""
    if report.guard is None:
        return ""
    again = "" if report.guard.get("is_final", True) else "; measured on a busy machine: a later process measures again"
    return f"whole function: {report.guard.get('chosen')} ({report.guard.get('reason')}{again})"


def alone_line(report: FunctionReport) -> str:
    """Sum of the kernels' single gains compared with the gain of the whole function, '' where either is unknown."""
    timed = [s for s in report.subsets if s.chosen != "xla" and s.seconds and s.xla_seconds]
    ours, theirs = (sum((getattr(s, name) or 0.0) * s.count for s in timed) for name in ("seconds", "xla_seconds"))
    guard = report.guard or {}
    speed = {name: found[0] for name, found in (guard.get("speed") or {}).items() if name[:3] != "xla"}
    if not timed or not speed:
        return ""
    count = sum(s.count for s in timed)
    whole = speed.get(str(guard.get("chosen")), max(speed.values()))
    return (
        f"of {count} kernel calls, each timed alone: {microseconds(ours)} us instead of {microseconds(theirs)} us "
        f"({theirs / ours:.2f}x); of the whole function, with what XLA runs and fuses around them: {whole:.2f}x"
    )


def reasons(report: FunctionReport) -> list[tuple[str, str, str]]:
    """Regions that XLA won: operations, reason, source lines."""
    return [(operations_text(s.operations), s.why, "; ".join(s.where[:2])) for s in report.subsets if s.why]


def sources(report: FunctionReport) -> str:
    """Provenance of the kernels' choices, as one line; '' where no stored one runs."""
    found: dict[str, int] = {}
    for s in report.subsets:
        if s.source and s.chosen != "xla":
            found[s.source] = found.get(s.source, 0) + s.count
    return ", ".join(f"{count} {source}" for source, count in sorted(found.items(), key=lambda item: -item[1]))


def regimes(report: FunctionReport) -> str:
    """How the regions' times were taken, as one line; '' where none were."""
    found: dict[str, int] = {}
    for s in report.subsets:
        if s.regime:
            found[s.regime] = found.get(s.regime, 0) + s.count
    return "; ".join(f"{count} with {text}" for text, count in sorted(found.items(), key=lambda item: -item[1]))


def budget_line(report: FunctionReport) -> str:
    """How many kernels the tuning budget left unmeasured, '' where none."""
    if not report.unmeasured:
        return ""
    return (
        f"{report.unmeasured} kernels were not measured: the time was up.  A later process, or .tune(), goes on; "
        "tune_seconds (JCUTS_TUNE_SECONDS) allows more time"
    )


def dropped(report: FunctionReport) -> list[tuple[str, str]]:
    """Program variants that the end-to-end benchmark ruled out: name, reason."""
    return list(((report.guard or {}).get("rejected") or {}).items())


def thrown_out(report: FunctionReport) -> list[tuple[str, str]]:
    """Candidates that were rejected: subset, reason; equal reasons of one subset once."""
    found: dict[tuple[str, str], int] = {}
    for s in report.subsets:
        for text in s.rejected:
            key = (s.name, text.partition(": ")[2] or text)
            found[key] = found.get(key, 0) + 1
    return [(name, text if count == 1 else f"{text} ({count} candidates)") for (name, text), count in found.items()]


def refused(report: FunctionReport) -> list[tuple[str, str, int, str]]:
    """Equations that jcuts leaves to XLA: op, reason, how many, the first source lines; equal reasons of an op once."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for refusal in report.refusals:
        places = found.setdefault((refusal.op, refusal.reason), {})
        places[refusal.where] = places.get(refusal.where, 0) + refusal.count
    return [(op, why, sum(places.values()), _first(list(places))) for (op, why), places in found.items()]


def _first(places: list[str], most: int = 2) -> str:
    left = len(places) - most
    return "; ".join(places[:most]) + (f"; {left} more" if left > 0 else "")


NOT_CHECKED = "the stored choice is of another cache or of other versions: a call that may tune checks it first"
"""Why XLA keeps a subset whose stored kernel this cache has neither measured nor checked with these versions."""
NO_TIME = "not measured: the tuning budget (tune_seconds) was spent"
"""Why XLA keeps a subset that a first call did not get to."""
NOT_MEASURED = "not measured yet"
"""Why XLA keeps a subset of which nothing is in the database."""


HEADINGS = [
    *("n", "operations", "kind", "fusion", "chosen", "us", "XLA us", "gain"),
    *("predicted us", "bound us", "PUL", "score", "where"),
]
"""Times measured, predicted by the performance model, and bounded below by the roofline; PUL and the ranking score."""


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


def _html(report: FunctionReport) -> str:
    def table(heads: list[str], body: list[list[str]]) -> str:
        head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
        cells = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"

    guard = ""
    if report.guard is not None:
        guard = "".join(f"<p>{html.escape(line)}</p>" for line in (guard_line(report), alone_line(report)) if line)
        if dropped(report):
            guard += table(["program ruled out", "reason"], [list(row) for row in dropped(report)])
    lost, out = ([list(row) for row in part] for part in (reasons(report), thrown_out(report)))
    divided = ""
    if report.divisions:
        divided = f"<h2>Convolutions</h2>{table(DIVISION_HEADINGS, division_rows(report.divisions))}"
        divided += f"<p>{html.escape(division_total(report.divisions))}</p>"
        divided += table(FRONT_HEADINGS, pareto_rows(report.divisions))
    refusals = [[str(count), op, why, where] for op, why, count, where in refused(report)]
    return (
        "<!doctype html><meta charset='utf-8'><title>jcuts: " + html.escape(report.name) + "</title>"
        "<style>body{font:14px system-ui;margin:2em;color:#222}table{border-collapse:collapse;margin:1em 0}"
        "td,th{border:1px solid #ccc;padding:3px 8px;text-align:left;font-variant-numeric:tabular-nums}"
        "th{background:#f3f3f3}tr:nth-child(even){background:#fafafa}pre{background:#f6f6f6;padding:1em;overflow:auto}</style>"
        f"<h1>{html.escape(report.name)}</h1><p>{html.escape(summary(report))}</p>{guard}"
        f"<h2>Subsets</h2>{table(HEADINGS, rows(report))}"
        + (f"<p>choices of kernels: {html.escape(found)}</p>" if (found := sources(report)) else "")
        + (f"<p>measured: {html.escape(found)}</p>" if (found := regimes(report)) else "")
        + (f"<p>{html.escape(cut)}</p>" if (cut := budget_line(report)) else "")
        + divided
        + (f"<h2>Where XLA won</h2>{table(['operations', 'reason', 'where'], lost)}" if lost else "")
        + (f"<h2>Rejected candidates</h2>{table(['subset', 'reason'], out)}" if out else "")
        + f"<h2>Left to XLA</h2>{table(['n', 'operation', 'reason', 'where'], refusals)}"
        f"<h2>Rewritten program</h2><pre>{html.escape(report.source)}</pre>"
    )
