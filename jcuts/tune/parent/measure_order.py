"""Measurement scheduling: in which order a session's problems are timed, and for which XLA's own program is compiled.

A kernel that wins or loses against the known bounds of XLA's time needs no more: XLA, or cuDNN, compiles dozens of
kernels for every matmul and convolution before it has chosen one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

from jcuts.tune.baseline import conv_relu_bound
from jcuts.tune.baseline.interpolate import CLEAR, Range, decide_from_bounds
from jcuts.tune.choice import LIBRARY, PROFILED, Choice
from jcuts.tune.parent.job import TuningJob
from jcuts.tune.parent.tuning_queue import TuningQueue

_log = logging.getLogger("jcuts.tune")
WORTH = 0.25
"""Share of their own time that kernels must gain on XLA's code, for XLA's code not to be compiled where they won."""


def measure_in_order(
    session: TuningQueue,
    jobs: Sequence[TuningJob],
    known: Callable[[str], float | None],
    profiled: Callable[[str], float | None] = lambda _: None,
) -> Iterator[TuningJob]:
    """Times jobs one by one.  XLA's own program is not compiled where a kernel wins or loses by less
    (`tune.baseline.xla_profile`, `tune.baseline.conv_relu_bound`, `tune.baseline.interpolate`): those where it must be
    come last.  Where time is
    limited, times that follow from others choose without a margin, and what has parts without a time waits for them:
    XLA takes many seconds for the code of a block of layers, and whole programs are compared at the end.

    Args:
        known: XLA's time of a problem that was measured before [s].
        profiled: XLA's time of a problem in the whole program [s], of jobs that are `TuningJob.profiled`.
    """
    known_of = BaselineTimes(known, profiled)
    close: list[TuningJob] = []
    parted: list[TuningJob] = []
    own = [job for job in jobs if not job.is_derived]
    with _told_of("%d problems measured", len(own)):
        for job in own:
            session.report_progress("measure", job.problem.name)
            session.measure(job)
            job.measured()
            known_of.note(job)
            if job.apart and not job.failed and not job.skipped:
                parted.append(job)
            else:
                yield job
    enough = _kernels_win_anyway(own)
    for job in parted:
        if enough and _is_settled(job, conv_relu_bound.FASTER, math.inf):
            yield job
        else:
            close.append(job)
    clear = 1.0 if session.time.is_limited else CLEAR
    derived = (
        ("of the profile", [job for job in jobs if job.profiled]),
        ("between others", [job for job in jobs if job.between and not job.parts and not job.profiled]),
        ("of parts", [job for job in jobs if job.parts and not job.profiled]),
    )
    for what, some in derived:
        with _told_of(f"%d problems {what} measured", len(some)):
            for job in some:
                session.report_progress("measure", job.problem.name)
                job.library = known_of.range(job)
                if job.library is not None:
                    session.measure(job, job.library[1])
                elif job.parts and session.time.is_limited:
                    job.skipped = True
                if job.failed or job.skipped or (job.library is not None and _is_settled(job, clear, clear)):
                    yield job
                else:
                    close.append(job)
                known_of.note(job)
    with _told_of("%d problems measured in full", len(close)):
        session.send_again(close)
        for job in close:
            session.measure(job)
            yield job


def _kernels_win_anyway(jobs: Sequence[TuningJob]) -> bool:
    """Whether programs that leave convolutions to XLA, with their ReLUs, will hardly race: they would compile them."""
    pairs = [(job.fastest(), job.library[0]) for job in jobs if job.library is not None]
    won = [(ours, least) for ours, least in pairs if ours is not None and ours < least]
    return sum(least - ours for ours, least in won) >= WORTH * sum(ours for ours, _ in won) > 0.0


class BaselineTimes:
    """Bounds on XLA's time of problems: least and most [s].

    Args:
        stored: XLA's time of a problem that is not of this session.
        profiled: XLA's time of a problem in the whole program.
    """

    def __init__(
        self, stored: Callable[[str], float | None], profiled: Callable[[str], float | None] = lambda _: None
    ) -> None:
        self._stored, self._profiled = stored, profiled
        self._ranges: dict[str, Range | None] = {}

    def note(self, job: TuningJob) -> None:
        """Takes over what is known of a job."""
        self._ranges[job.problem.digest] = job.library

    def range(self, job: TuningJob) -> Range | None:
        """What follows from others for a job, None where that is not known."""
        if job.profiled:
            seconds = self._profiled(job.problem.digest)
            return None if seconds is None else (seconds, seconds)
        if job.parts:
            found = [self._of(part) for part in job.parts]
            ranges = [r for r in found if r is not None]
            return (sum(r[0] for r in ranges), sum(r[1] for r in ranges)) if len(ranges) == len(found) else None
        low, high = (None, None) if job.between is None else (self._of(job.between.low), self._of(job.between.high))
        return None if job.between is None or low is None or high is None else job.between.seconds(low, high)

    def _of(self, digest: str) -> Range | None:
        if digest in self._ranges:
            return self._ranges[digest]
        seconds = self._stored(digest)
        return None if seconds is None else (seconds, seconds)


def _is_settled(job: TuningJob, faster: float, slower: float) -> bool:
    """Whether what is known of XLA's side is enough to choose by; then that is its time."""
    if job.library is None:
        return not job.candidates
    seconds = decide_from_bounds(job.fastest(), *job.library, faster, slower)
    if seconds is not None:
        job.set_derived_time(seconds)
    return seconds is not None


def is_close_by_profile(choice: Choice) -> bool:
    """Whether a stored choice compares a kernel with a profile's time of XLA's that differs little: where time was
    limited that was enough, without a limit XLA's own program is measured."""
    (library, ours) = (
        [m.seconds for m in choice.measurements if (m.label == LIBRARY) == is_library and m.is_contest]
        for is_library in (True, False)
    )
    by_profile = any(m.label == LIBRARY and m.method == PROFILED for m in choice.measurements)
    return bool(by_profile and ours) and decide_from_bounds(min(ours), library[0], library[0], CLEAR, CLEAR) is None


@contextlib.contextmanager
def _told_of(what: str, count: int) -> Iterator[None]:
    """Tells how long some steps took, if there are any."""
    start = time.perf_counter()
    yield
    if count:
        _log.info(f"{what} in %.2f s", count, time.perf_counter() - start)
