"""Revalidates tuning-database rows that this installation cannot trust: imported, unsigned or of other versions.

All kernels that such a choice may run are compiled and compared with the float64 reference in the session's processes,
by the tuner's acceptance rule; nothing is timed.  A correct choice is kept, and signed, under these versions; one with
a wrong kernel is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jcuts.base.errors import CandidateRejected, IRError
from jcuts.kernel_ir.verify import read
from jcuts.tune.choice import LIBRARY, SCREENED, UNCHECKED, UNVERIFIED, Choice, Rejection
from jcuts.tune.database import Store
from jcuts.tune.parent.job import TuningJob, make_job
from jcuts.tune.parent.tuning_queue import TuningQueue
from jcuts.tune.problem import Candidate, Problem, label_of
from jcuts.tune.row_signature import CHECKED, FOREIGN, OTHER_VERSIONS, RECHECKED
from jcuts.tune.select import keep_xla, select, select_stored

__all__ = ["check", "contenders", "unverified"]
_log = logging.getLogger("jcuts.tune")
_MODES = ("mixed", "fusion")
CHECKED_AS = {FOREIGN: CHECKED, OTHER_VERSIONS: RECHECKED}
"""Where a choice comes from -> the same once it is checked."""


def contenders(problem: Problem, choice: Choice) -> list[str]:
    """Labels of the kernels that some mode may choose by a stored choice."""
    found = [choice.winner]
    for mode in _MODES if choice.origin == "measured" else ():
        found.append(select_stored(choice, mode).winner)
        if problem.candidates:
            found.append(select(problem, choice, mode).winner)
    return [label for label in dict.fromkeys(found) if label != LIBRARY]


def unverified(problem: Problem) -> Choice:
    """The choice of a problem of which the database has a kernel that nothing here has checked: XLA's own code."""
    why = "the stored choice is of another cache or of other versions: a call that may tune checks it first"
    return replace(keep_xla(problem), rejections=(Rejection(LIBRARY, UNVERIFIED, why),))


def check(
    problems: Sequence[tuple[Problem, Choice, str]],
    store: Store,
    folder: Path,
    session: TuningQueue,
    prepare: Callable[[Problem], Problem] | None,
) -> dict[str, Choice]:
    """Checks stored choices; returns those that are right, by digest, with what of them was checked.

    The others are removed from the database, but for those that could not be checked for want of a process or memory,
    and those of other versions, with which they may be right.

    Args: problems: each with its choice and where that comes from; session: of processes, which measures nothing;
    prepare: as of `tune`.
    """
    jobs: list[tuple[TuningJob, Choice, str]] = []
    for number, (problem, choice, source) in enumerate(problems):
        try:
            full = prepare(problem) if prepare is not None else problem
        except CandidateRejected as error:
            _dropped(store, choice, str(error))
            continue
        candidates = _candidates(full, choice, is_own=source == OTHER_VERSIONS)
        if candidates is None:
            _dropped(store, choice, "nothing tells which kernel is meant")
            continue
        job = make_job(replace(full, candidates=candidates), folder, number)
        job.expected = True  # XLA's products need no algorithms timed
        jobs.append((job, choice, source))
        session.add(job)
    session.finish()
    right = {}
    for job, choice, source in jobs:
        wanted = [c.label for c in job.problem.candidates]
        if all(label in job.passed for label in wanted):
            kept = _checked(job.problem, choice)
            store.put(kept, CHECKED_AS[source])
            right[choice.problem] = kept
            _log.info("%s: the stored choice of another cache, or of other versions, is right", job.problem.name)
        elif not (job.transient or job.short):
            wrong = [r for r in job.rejected if r.label in (*wanted, LIBRARY)]
            _dropped(store, choice, "; ".join(f"{r.label}: {r.error}: {r.message}" for r in wrong))
    return right


def _dropped(store: Store, choice: Choice, why: str) -> None:
    store.drop(choice.problem)
    _log.warning(
        "a stored choice of another cache, or of other versions, for %s is not used, and was removed here: %s",
        choice.name or choice.problem[:12],
        why,
    )


def _candidates(problem: Problem, choice: Choice, *, is_own: bool) -> tuple[Candidate, ...] | None:
    """What a stored choice may let run, as it would; None where that is not known.

    Args: is_own: whether this cache has written it (the addresses of its programs are then not proven anew).
    """
    made = {c.label: c for c in problem.candidates}
    found = []
    for label in contenders(problem, choice):
        text = choice.programs.get(label, "")
        try:
            stored = bool(text) and label_of(read(text, signed=is_own)) == label
        except IRError:
            stored = False
        candidate = Candidate("program", text, label) if stored else made.get(label)
        if candidate is None:
            return None
        found.append(candidate)
    return tuple(found)


def _checked(problem: Problem, choice: Choice) -> Choice:
    """The part of a choice that may be believed: times of kernels that nobody has checked here count for nothing."""
    right = {c.label: c for c in problem.candidates}
    measurements = tuple(
        m if m.label == LIBRARY or m.label in right or m.method == SCREENED else replace(m, method=UNCHECKED)
        for m in choice.measurements
    )
    return replace(
        choice,
        measurements=measurements,
        kernels={label: digest for label, digest in choice.kernels.items() if label in right},
        digests={label: c.digest for label, c in right.items()},
        programs={label: c.payload for label, c in right.items() if c.kind == "program"},
        schedules=dict(problem.schedules),
    )
