"""Bisects a wrong program: to the smallest run of equations (outlining), to a compiler option, and to an HLO pass.

The prefix of a program is wrong from some equation on: the first one is found by halving.  From there the part is cut
from the front, its operands being the values that op by op execution gives.  What is left is compiled with every option
of the registry, and without every HLO pass that XLA ran on it (names from ``xla_dump_hlo_pass_re``).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jcuts.differential import options as xla_options
from jcuts.differential.child import EACH_EQUATION
from jcuts.differential.judge import OK
from jcuts.differential.report import GOOD, Finding, VerifyReport, WayReport
from jcuts.differential.session import CRASHED, HUNG, Session
from jcuts.differential.ways import OP_BY_OP, WAYS, XLA
from jcuts.trace import jaxapi

LIMIT = 10
"""Seconds after which a part of a program is taken to hang: it has few equations, op by op has shown that it ends."""
MOST_PASSES = 80
_DUMPED = re.compile(r"\.after_(.+?)\.before_(.+?)\.txt$")


def bisected(
    report: VerifyReport,
    session: Session,
    closed: jaxapi.Closed,
    names: Sequence[str],
    lines: Sequence[str],
    refused: frozenset[str],
) -> VerifyReport:
    """The report with a finding for op by op, or for XLA's program, and for jcuts' where they are wrong.

    Args: names, lines: primitive and source line of every equation; refused: options that the jaxlib does not know.
    """
    findings, count = [], len(names)
    by_op = report.of(OP_BY_OP)
    if by_op is None:
        answer = session.ask(OP_BY_OP)
        by_op = WayReport.of(OP_BY_OP, WAYS[OP_BY_OP].about, answer)
    for way in (OP_BY_OP, XLA, "jcuts"):
        wrong = by_op if way == OP_BY_OP else report.of(way)
        if wrong is None or not wrong.is_wrong or (way == XLA and by_op.status == wrong.status):
            continue  # what an equation does by itself it does in XLA's program
        ask = _Counter(session, way)
        if way == OP_BY_OP:
            found = _first_alone(session, wrong)
        elif by_op.status in (CRASHED, HUNG):
            found = None if by_op.equation is None else (by_op.equation, by_op.equation + 1)
        else:
            found = smallest_part(count, ask.is_wrong, ask.seen)
        if found is None:
            report = report.noted(f"{way} is wrong as a whole, and no part of it is by itself")
            found = (0, count)
        answer = {"status": wrong.status, "message": wrong.message} if found == (0, count) else ask(found)
        if way == OP_BY_OP and answer["status"] in GOOD:  # an equation alone: what the search saw
            answer = {"status": wrong.status, "message": wrong.message}
        finding = Finding(
            way,
            answer["status"],
            answer.get("message", ""),
            found,
            tuple(names[found[0] : found[1]]),
            tuple(dict.fromkeys(line for line in lines[found[0] : found[1]] if line)),
            alone=way == OP_BY_OP,
        )
        if WAYS[way].is_xla or way == OP_BY_OP:
            finding = _suspects(finding, session, report.platform, refused)
        findings.append(replace(finding, runs=ask.runs))
    return replace(report, findings=tuple(findings))


class _Counter:
    """Asks whether parts are wrong in one way, each once."""

    def __init__(self, session: Session, way: str) -> None:
        self.session, self.way, self.runs = session, way, 0
        self.seen: dict[tuple[int, int], Mapping[str, Any]] = {}

    def __call__(self, part: tuple[int, int]) -> Mapping[str, Any]:
        if part not in self.seen:
            self.runs += 1
            self.seen[part] = self.session.ask(self.way, window=part, limit=min(LIMIT, self.session.limit))
        return self.seen[part]

    def is_wrong(self, start: int, stop: int) -> bool:
        """Whether this part, on operands that are right, is wrong."""
        return self((start, stop))["status"] not in GOOD


def smallest_part(
    count: int, is_wrong: Callable[[int, int], bool], seen: Mapping[Any, Any] | None = None
) -> tuple[int, int] | None:
    """The smallest part of a program of ``count`` equations that halving finds to be wrong, None if none is.

    Args: is_wrong: of the equations from ``start`` to ``stop``; the whole program is.

    >>> smallest_part(40, lambda start, stop: start <= 17 and stop > 21)
    (17, 22)
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_wrong(0, middle) else (middle, high)
    stop = high
    low, high = 0, stop
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_wrong(middle, stop) else (low, middle)
    return (low, stop) if is_wrong(low, stop) else None


def _first_alone(session: Session, wrong: WayReport) -> tuple[int, int] | None:
    """The first equation that is wrong by itself, where op by op execution is."""
    number = wrong.equation if wrong.status in (CRASHED, HUNG) else session.ask(EACH_EQUATION).get("equation")
    return None if number is None else (number, number + 1)


def _suspects(finding: Finding, session: Session, platform: str, refused: frozenset[str]) -> Finding:
    """The finding with the options and the passes that make its part right."""
    part, limit = list(finding.equations), min(LIMIT, session.limit)
    groups = (xla_options.SUSPICIOUS, xla_options.FUSION, xla_options.PASS)
    right = []
    for option in xla_options.of_group(platform, *groups):
        if option.name in refused:
            continue
        answer = session.ask(XLA, options={option.name: option.value}, limit=limit, window=part)
        if answer["status"] == OK:
            right.append((str(option), option.reason))
    passes = []
    if finding.status not in (CRASHED, HUNG) or not (right or finding.status == HUNG):  # each may cost a process
        for name in pass_names(session, part)[:MOST_PASSES]:
            answer = session.ask(XLA, options={"xla_disable_hlo_passes": name}, limit=limit, window=part)
            if answer["status"] == OK:
                passes.append(name)
    return replace(finding, options=tuple(right), passes=tuple(passes))


def pass_names(session: Session, part: Sequence[int]) -> list[str]:
    """Names of the HLO passes that changed this part of the program when XLA compiled it, in order."""
    with tempfile.TemporaryDirectory(prefix="jcuts-passes-") as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_pass_re=.*"
        before = session.environment.get("XLA_FLAGS", "")
        other = Session(session.folder, "", session.limit)
        other.environment = {**session.environment, "XLA_FLAGS": f"{before} {flags}".strip()}
        with other:
            other.ask(XLA, window=list(part), compile=True)
        found: dict[str, None] = {}
        for path in sorted(Path(folder).glob("*.txt")):
            match = _DUMPED.search(path.name)
            if match is not None:
                found.update(dict.fromkeys(name for name in match.groups() if "pipeline" not in name))
    return list(found)
