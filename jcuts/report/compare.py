"""Compares two reports of ``explain`` (JSON): the whole function, every region, and what was left to XLA."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jcuts.base.errors import UsageError
from jcuts.report.function_report import FunctionReport
from jcuts.report.report_data import (
    CandidateReport,
    GraphNode,
    RefusalReport,
    SubsetReport,
    operations_text,
    refused,
)
from jcuts.report.verdict import verdict


@dataclass(frozen=True)
class RegionPair:
    """A region of both reports, or of one. Attributes: change: in words; seconds: of all its calls, in A and in B [s].

    Regions are equal that have the same operations at the same source lines.
    """

    operations: str
    where: str
    seconds: tuple[float | None, float | None]
    chosen: tuple[str, str]

    @property
    def ratio(self) -> float | None:
        """Times of B over those of A."""
        a, b = self.seconds
        return b / a if a and b else None

    @property
    def change(self) -> str:
        """What differs, '' if nothing does."""
        a, b = self.chosen
        if not a or not b:
            return "only in B" if not a else "only in A"
        return "" if a == b else f"{a} -> {b}"


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side.

    Attributes: verdicts: of A and B; regions: those whose time or kernel differs or that one report has, the largest
        difference first; same: how many are equal; refusals: (operation, reason, count in A, count in B) that differ.
    """

    names: tuple[str, str]
    verdicts: tuple[str, str]
    gains: tuple[float | None, float | None]
    kernels: tuple[int, int]
    regions: tuple[RegionPair, ...]
    same: int
    refusals: tuple[tuple[str, str, int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        regions = [
            {"operations": r.operations, "where": r.where, "seconds": r.seconds, "chosen": r.chosen, "ratio": r.ratio}
            for r in self.regions
        ]
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**found, "regions": regions}


def read(path: str | Path) -> FunctionReport:
    """A report that ``jcuts explain --json`` wrote.

    Raises: UsageError: the file cannot be read, is no JSON, or is no such report.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}", path=str(path)) from error
    try:
        return from_dict(data)
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is no report of `jcuts explain --json`: {error}", path=str(path)) from error


def from_dict(data: Mapping[str, Any]) -> FunctionReport:
    """The report that `FunctionReport.to_dict` gave; fields of other versions are left out."""
    if not isinstance(data, Mapping) or not {"name", "mode", "platform", "subsets"} <= set(data):
        raise TypeError("it has no name, mode, platform and subsets")
    parts = {
        "subsets": tuple(_subset(s) for s in data["subsets"]),
        "refusals": tuple(_made(RefusalReport, r) for r in data.get("refusals", ())),
        "graph": tuple(_made(GraphNode, {**g, "reads": tuple(g["reads"])}) for g in data.get("graph", ())),
        "notes": tuple(data.get("notes", ())),
        "divisions": (),
    }
    return _made(FunctionReport, {**data, **parts})


def _subset(data: Mapping[str, Any]) -> SubsetReport:
    candidates = tuple(_made(CandidateReport, c) for c in data.get("candidates", ()))
    return _made(SubsetReport, {**data, "candidates": candidates})


def _made(kind: Any, data: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in data.items() if name in known})


def compare(a: FunctionReport, b: FunctionReport) -> Comparison:
    """The differences of two reports, of one function or of two versions of it."""
    ours, theirs = _regions(a), _regions(b)
    pairs = []
    for key in dict.fromkeys([*ours, *theirs]):
        times = tuple(_seconds(side.get(key)) for side in (ours, theirs))
        chosen = tuple("" if key not in side else _chosen(side[key]) for side in (ours, theirs))
        pairs.append(RegionPair(key[0], key[1], times, chosen))  # type: ignore[arg-type]
    differ = [p for p in pairs if p.change or (p.ratio is not None and p.ratio != 1)]
    differ.sort(key=lambda p: abs((p.seconds[1] or 0) - (p.seconds[0] or 0)), reverse=True)
    left = [Counter({(op, why): count for op, why, count, _ in refused(r)}) for r in (a, b)]
    refusals = tuple(
        (op, why, left[0][op, why], left[1][op, why])
        for op, why in dict.fromkeys([*left[0], *left[1]])
        if left[0][op, why] != left[1][op, why]
    )
    said = verdict(a), verdict(b)
    return Comparison(
        (a.name, b.name),
        (said[0].text, said[1].text),
        (said[0].gain, said[1].gain),
        (a.kernels, b.kernels),
        tuple(differ),
        len(pairs) - len(differ),
        refusals,
    )


def _regions(report: FunctionReport) -> dict[tuple[str, str], list[SubsetReport]]:
    found: dict[tuple[str, str], list[SubsetReport]] = {}
    for s in report.subsets:
        found.setdefault((operations_text(s.operations), "; ".join(s.where[:2])), []).append(s)
    return found


def _seconds(subsets: list[SubsetReport] | None) -> float | None:
    """What they take as they run, with all calls; None where one of them was not measured."""
    times = [(s.xla_seconds if s.chosen == "xla" else s.seconds, s.count) for s in subsets or ()]
    known = [time * count for time, count in times if time is not None]
    return sum(known) if times and len(known) == len(times) else None


def _chosen(subsets: list[SubsetReport]) -> str:
    return ", ".join(dict.fromkeys(s.chosen for s in subsets))
