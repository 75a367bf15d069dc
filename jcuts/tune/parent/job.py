"""State of one tuning problem in a session, and the choice that results."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from jcuts.base.errors import CandidateRejected
from jcuts.tune.baseline.interpolate import InterpolationPair, Range
from jcuts.tune.choice import (
    FAMILY,
    LIBRARY,
    OVER_BUDGET,
    PROFILED,
    SCREENED,
    UNCHECKED,
    Choice,
    Measurement,
    Rejection,
)
from jcuts.tune.kernel_file import read_kernel
from jcuts.tune.parent.worker_pool import Answer
from jcuts.tune.problem import Problem
from jcuts.tune.select import keep_xla, keep_xla_for_now, keep_xla_over_budget, noise_margin, over_budget, select

_log = logging.getLogger("jcuts.tune")
PASSING = ("memory", "disk", "start")
"""Reasons of rejections that say nothing about the candidate."""


@dataclass
class TuningJob:
    """State of one problem in a session.

    Attributes:
        problem, folder, file: with its candidates; where its files are; the problem's own.
        kernels: label -> file of the compiled kernel; compiled: label -> its digest, of those that compile.
        passed: labels of candidates that were checked and are right.
        rejected: candidates that are out, with the reason.
        compiling, checking: requests under way.
        between: two problems between which XLA's side of this one lies, as long as nobody needs more.
        parts: problems that take as long together, for the same time.
        profiled: whether a profile of the whole program tells XLA's side, for the same time.
        apart: bytes of the convolutions' results where XLA's side is measured with their ReLU apart, for the same time.
        library: the least and the most that XLA's side takes [s], once it is known.
        expected: whether that was enough, so that XLA's own program was never compiled.
        kinds: of the sets of inputs (`tune.verify.inputs`), once references are made.
        answer: what measuring gave.
        failed: XLA itself could not be run: nothing can be compared.
        transient: the failure says nothing about the problem (no process, no disk): do not store it.
        skipped: the tuning budget was spent before it was measured: nothing is known, nothing is stored.
        short: something did not fit into the memory, or on the disk, that others had left free: what was said of it.
    """

    problem: Problem
    folder: Path
    file: Path
    kernels: dict[str, Path] = field(default_factory=dict)
    compiled: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    compiling: int = 0
    checking: int = 0
    between: InterpolationPair | None = None
    parts: tuple[str, ...] = ()
    profiled: bool = False
    apart: list[int] = field(default_factory=list)
    library: Range | None = None
    expected: bool = False
    kinds: list[str] | None = None
    answer: Answer | None = None
    failed: bool = False
    transient: bool = False
    skipped: bool = False
    short: str = ""

    def reject(self, label: str, error: CandidateRejected) -> None:
        """Takes a candidate out."""
        self.rejected.append(Rejection.of(label, error))
        if error.values.get("reason") in ("memory", "disk"):
            self.short = error.message
        _log.info("%s: %s rejected: %s", self.problem.name, label, error)

    def cut(self, labels: Iterable[str]) -> None:
        """Takes candidates out that the tuning budget does not reach."""
        self.rejected += [over_budget(label) for label in labels]

    def resume(self, before: Choice | None, most: int | None) -> None:
        """Goes on after a session that ended early, with so many kernels: what it rejected stays out.

        Args: before: what that session found; most: kernels of this one, the best-ranked; None: all.
        """
        labels = {c.label for c in self.problem.candidates}
        for rejection in () if before is None else before.rejections:
            lasting = rejection.error != OVER_BUDGET and rejection.values.get("reason") not in PASSING
            if rejection.label in labels and lasting:
                self.rejected.append(rejection)
        if most is not None:
            self.cut(self.kernels_left()[most:])

    def kernels_left(self) -> list[str]:
        """Labels of kernels that are not out, compiled or not, in the problem's order."""
        out = {r.label for r in self.rejected}
        return [c.label for c in self.problem.candidates if c.kind != "stablehlo" and c.label not in out]

    def fail(self, error: CandidateRejected) -> None:
        """Gives the problem up."""
        self.failed = True
        self.transient = error.values.get("reason") == "start"
        self.reject(LIBRARY, error)

    @property
    def candidates(self) -> list[str]:
        """Labels that can be run, in the problem's order."""
        out = {r.label for r in self.rejected}
        return [
            c.label
            for c in self.problem.candidates
            if c.label not in out and (c.kind == "stablehlo" or c.label in self.compiled)
        ]

    def set_derived_time(self, seconds: float) -> None:
        """Takes a time for XLA's that was not measured of its program, beside the kernels' that were measured."""
        self.expected = True
        method = PROFILED if self.profiled else FAMILY
        if self.answer is not None:
            kept = [entry for entry in self.answer["measurements"] if entry["label"] != LIBRARY]
            line = {"label": LIBRARY, "seconds": seconds, "low": seconds, "high": seconds, "runs": 0, "method": method}
            self.answer["measurements"] = [*kept, line]

    def measured(self) -> None:
        """Notes what was measured of XLA's side."""
        found = next((m.seconds for m in self._measurements() if m.label == LIBRARY), None)
        if found is not None:
            passes = float((self.answer or {}).get("passes", 0.0)) if self.apart else 0.0
            self.library = (max(0.0, found - passes), found)

    @property
    def is_derived(self) -> bool:
        """Whether XLA's time is to follow from other problems', or from a profile."""
        return self.profiled or self.between is not None or bool(self.parts)

    def remeasure_baseline(self) -> None:
        """XLA's side is to be measured in full."""
        self.between, self.parts, self.apart, self.answer, self.profiled = None, (), [], None, False

    def fastest(self) -> float | None:
        """Time of the fastest kernel that met others in a race [s]."""
        times = [m.seconds for m in self._left() if m.label != LIBRARY and m.is_contest]
        return min(times, default=None)

    def next_to_verify(self, mode: str) -> str | None:
        """The candidate that must be checked next, so that a mode can choose; None where that is settled.

        It is the one that the mode would choose by its time.  Where that one is right, but would not win against XLA
        (or another that is right) without faster ones that nobody has looked at, it is the fastest of these.
        """
        if self.answer is None or self.failed:
            return None
        field_ = self._left()
        ours = [m for m in field_ if m.label in self.compiled]
        if mode != "mixed" and ours and not any(m.is_contest for m in ours):  # all that were in the race are wrong
            right = any(m.label in self.passed for m in ours)
            return None if right else min(ours, key=lambda m: m.seconds).label
        base = Choice(self.problem.digest, LIBRARY, "", "measured", field_, margin=noise_margin(field_))
        winner = select(self.problem, base, mode).winner
        if winner == LIBRARY or winner not in self.passed:
            return None if winner == LIBRARY else winner
        known = tuple(m for m in field_ if m.label == LIBRARY or m.label in self.passed)
        if select(self.problem, replace(base, measurements=known), mode).winner == winner:
            return None
        return min((m for m in field_ if m.is_contest and m not in known), key=lambda m: m.seconds).label

    def choice(self) -> Choice:
        """The choice that all this makes."""
        problem, answer = self.problem, self.answer
        if self.skipped or (answer is None and self._is_all_cut()):
            self.transient = True
            return keep_xla_over_budget(problem)
        base = replace(keep_xla(problem), rejections=tuple(self.rejected))
        measured = self._measurements()
        if self.short and not any(m.label in self.passed for m in measured) and not self._is_settled():
            self.transient = True
            later = keep_xla_for_now(problem, f"not enough free memory, or disk, to measure ({self.short[:300]})")
            return replace(later, rejections=(*later.rejections, *self.rejected))
        if answer is None or self.failed:
            return base if self.failed else replace(base, origin="measured")
        field_ = self._left()
        measurements = tuple(self._judged(m) for m in field_)
        labels = {m.label for m in measurements if m.label in self.passed}
        choice = replace(
            base,
            origin="measured",
            measurements=measurements,
            margin=noise_margin(field_),
            overhead_seconds=float(answer["overhead"]),
            kernels={label: digest for label, digest in self.compiled.items() if label in labels},
            digests={c.label: c.digest for c in problem.candidates if c.label in labels},
        )
        choice = select(problem, choice, "mixed")
        winners = {select(problem, choice, mode).winner for mode in ("mixed", "fusion")}
        self._persist(winners)
        chosen = [c for c in problem.candidates if c.label in winners and c.kind == "program"]
        return replace(choice, programs={c.label: c.payload for c in chosen})

    def _measurements(self) -> tuple[Measurement, ...]:
        estimates = {c.label: (c.bound_seconds, c.pul) for c in self.problem.candidates}
        found = []
        for entry in () if self.answer is None else self.answer["measurements"]:
            bound, pul = estimates.get(entry["label"], (0.0, 0.0))
            found.append(Measurement(**entry, bound_seconds=bound, pul=pul))
        return tuple(found)

    def _is_all_cut(self) -> bool:
        """Whether nothing is known of any candidate because the tuning budget was spent."""
        return bool(self.rejected) and not self.failed and all(r.error == OVER_BUDGET for r in self.rejected)

    def _is_settled(self) -> bool:
        """Whether XLA has won all the same: against some kernel, and whatever found no room was not measured."""
        starved = {r.label for r in self.rejected if r.values.get("reason") in ("memory", "disk")}
        met = {m.label for m in self._left()} - {LIBRARY}
        return bool(met) and not self.failed and not starved & {m.label for m in self._measurements()}

    def _left(self) -> tuple[Measurement, ...]:
        """Those of XLA and of candidates that are not out."""
        out = {r.label for r in self.rejected}
        return tuple(m for m in self._measurements() if m.label not in out)

    def _judged(self, measured: Measurement) -> Measurement:
        """A time says nothing about whether the candidate is right."""
        known = measured.label == LIBRARY or measured.label in self.passed or measured.method == SCREENED
        return measured if known else replace(measured, method=UNCHECKED)

    def _persist(self, winners: Iterable[str]) -> None:
        """Puts the kernels that some mode chooses into the object cache: nobody compiles them again."""
        from jcuts.xla import object_cache

        for winner in winners:
            if winner in self.kernels:
                with contextlib.suppress(CandidateRejected):
                    object_cache.store(read_kernel(self.kernels[winner]))


def make_job(problem: Problem, folder: Path, number: int) -> TuningJob:
    """A job with a folder of its own inside the session's, and the problem's file in it."""
    own = folder / f"p{number}"
    own.mkdir()
    file = own / "problem.json"
    file.write_text(json.dumps(problem.to_json()))
    return TuningJob(problem, own, file)
