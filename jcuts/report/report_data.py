"""Plain data of the report of ``explain`` about one optimised function (JSON), and the words and rows made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jcuts.microbatch.report import (
    DivisionReport,
    microseconds,
)


@dataclass(frozen=True)
class CandidateReport:
    """One candidate of a region, and why it is not the one that runs ('' of the winner).

    Attributes: seconds: measured time [s], None where it has none; bound_seconds, pul: of the estimator, 0 where
        unknown; method: how it was timed (`tune.choice.Measurement`), '' where it was rejected.
    """

    label: str
    seconds: float | None
    bound_seconds: float
    pul: float
    method: str
    lost: str = ""


@dataclass(frozen=True)
class GraphNode:
    """One equation in the partition graph: primitive, source line, and its region.

    Attributes: row: of the region in `ReportData.subsets`, -1 where XLA keeps the equation; region: number of the
        region (equal regions are one row); reason: why XLA keeps the equation; reads: numbers of the nodes it reads.
    """

    primitive: str
    where: str
    row: int
    region: int
    reason: str = ""
    reads: tuple[int, ...] = ()


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
        candidates: every candidate that was measured or rejected, XLA's code among them, in the order of measurement.
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
    candidates: tuple[CandidateReport, ...] = ()
    regime: str = ""


@dataclass(frozen=True)
class RefusalReport:
    """An equation that jcuts leaves to XLA, and the reason."""

    op: str
    reason: str
    where: str
    count: int = 1


@dataclass(frozen=True)
class ReportData:
    """Report of one planned function.

    ``library`` is the 'flop' and 'bytes' of subsets that XLA keeps without a measurement (products on a GPU);
    ``divisions`` are the convolutions under a workspace limit; ``unmeasured`` counts kernels that the tuning budget
    left out.  ``graph`` is the function's partition (loop bodies are a node each); ``peaks`` are the device's 'flop'
    [FLOP/s] and 'bytes' [byte/s]; ``programs`` the chosen kernel programs of ``subsets``, not part of the JSON.
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
    graph: tuple[GraphNode, ...] = ()
    peaks: dict[str, float] = field(default_factory=dict)
    programs: Sequence[Any] = field(default=(), repr=False, compare=False)

    def with_guard(self, decision: dict[str, Any]) -> ReportData:
        """The report with the whole-function decision attached."""
        return replace(self, guard=decision)

    def with_seconds(self, spent: Mapping[str, float]) -> ReportData:
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
        return asdict(replace(self, programs=()))


HEAVY = frozenset({"conv_general_dilated", "dot_general"})


def operations_text(operations: dict[str, int]) -> str:
    """'conv_general_dilated, 3 add, 2 mul': the operation that matters first, the rest by first appearance."""
    order = sorted(operations.items(), key=lambda item: item[0] not in HEAVY)
    shown = [name if count == 1 else f"{count} {name}" for name, count in order]
    return ", ".join(shown if len(shown) <= 7 else [*shown[:6], f"{len(shown) - 6} more kinds"])


def costliest_first(report: ReportData) -> list[int]:
    """Numbers of the regions in the order in which they are shown."""

    def cost(number: int) -> float:
        s = report.subsets[number]
        return (s.xla_seconds or s.seconds or 0) * s.count

    return sorted(range(len(report.subsets)), key=cost, reverse=True)


def rows(report: ReportData) -> list[list[str]]:
    """The table of regions, as text cells."""
    result = []
    for s in (report.subsets[number] for number in costliest_first(report)):
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


def summary(report: ReportData) -> str:
    """One line: mode, and how much of the work runs in jcuts' kernels."""
    start = f"mode {report.mode} on {report.platform}; {report.equations} equations, "
    calls = f"{report.kernels} kernel calls"
    flop, moved = f"{report.share('flop'):.0%} of the FLOP", f"{report.share('bytes'):.0%} of the bytes"
    if not report.runs_plain_xla:
        return f"{start}{calls}, {flop} and {moved} in jcuts' kernels"
    lost = f" (the program that lost has {calls}, with {flop} and {moved})" if report.kernels else ""
    return f"{start}all of it plain XLA: 0% of the FLOP and 0% of the bytes in jcuts' kernels{lost}"


def guard_line(report: ReportData) -> str:
    """The whole-function decision as one line, '' if there is none."""
    if report.guard is None:
        return ""
    again = "" if report.guard.get("is_final", True) else "; measured on a busy machine: a later process measures again"
    return f"whole function: {report.guard.get('chosen')} ({report.guard.get('reason')}{again})"


def alone_line(report: ReportData) -> str:
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


def reasons(report: ReportData) -> list[tuple[str, str, str]]:
    """Regions that XLA won: operations, reason, source lines."""
    return [(operations_text(s.operations), s.why, "; ".join(s.where[:2])) for s in report.subsets if s.why]


def sources(report: ReportData) -> str:
    """Provenance of the kernels' choices, as one line; '' where no stored one runs."""
    found: dict[str, int] = {}
    for s in report.subsets:
        if s.source and s.chosen != "xla":
            found[s.source] = found.get(s.source, 0) + s.count
    return ", ".join(f"{count} {source}" for source, count in sorted(found.items(), key=lambda item: -item[1]))


def regimes(report: ReportData) -> str:
    """How the regions' times were taken, as one line; '' where none were."""
    found: dict[str, int] = {}
    for s in report.subsets:
        if s.regime:
            found[s.regime] = found.get(s.regime, 0) + s.count
    return "; ".join(f"{count} with {text}" for text, count in sorted(found.items(), key=lambda item: -item[1]))


def budget_line(report: ReportData) -> str:
    """How many kernels the tuning budget left unmeasured, '' where none."""
    if not report.unmeasured:
        return ""
    return (
        f"{report.unmeasured} kernels were not measured: the time was up.  A later process, or .tune(), goes on; "
        "tune_seconds (JCUTS_TUNE_SECONDS) allows more time"
    )


def dropped(report: ReportData) -> list[tuple[str, str]]:
    """Program variants that the end-to-end benchmark ruled out: name, reason."""
    return list(((report.guard or {}).get("rejected") or {}).items())


def thrown_out(report: ReportData) -> list[tuple[str, str]]:
    """Candidates that were rejected: subset, reason; equal reasons of one subset once."""
    found: dict[tuple[str, str], int] = {}
    for s in report.subsets:
        for text in s.rejected:
            key = (s.name, text.partition(": ")[2] or text)
            found[key] = found.get(key, 0) + 1
    return [(name, text if count == 1 else f"{text} ({count} candidates)") for (name, text), count in found.items()]


def refused(report: ReportData) -> list[tuple[str, str, int, str]]:
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
