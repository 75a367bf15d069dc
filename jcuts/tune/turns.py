"""In which order the problems of a session are timed, and for which of them XLA's own program is compiled.

A kernel that wins or loses against what is known of XLA's side already needs no more: XLA, or cuDNN, compiles dozens of
kernels for every product and convolution before it has chosen one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from jcuts.tune import apart
from jcuts.tune.family import CLEAR, Range, settled
from jcuts.tune.job import Job
from jcuts.tune.stages import Session

_log = logging.getLogger("jcuts.tune")


def measured(session: Session, jobs: Sequence[Job], known: Callable[[str], float | None]) -> Iterator[Job]:
    """Times jobs one by one.  XLA's own program is not compiled where a kernel wins or loses by less (`tune.apart`,
    `tune.family`): those where it must be come last.

    Args: known: XLA's time of a problem that was measured before [s].
    """
    own, close = [job for job in jobs if job.between is None], []
    ranges: dict[str, Range | None] = {}
    with _told_of("%d problems measured", len(own)):
        for job in own:
            session.tell("measure", job.problem.name)
            session.measure(job)
            job.measured()
            ranges[job.problem.digest] = job.library
            if job.apart and not job.failed and not _is_settled(job, apart.FASTER, 1.0):
                close.append(job)
            else:
                yield job
    some = [job for job in jobs if job.between is not None]
    with _told_of("%d problems measured between others", len(some)):
        for job in some:
            session.tell("measure", job.problem.name)
            job.library = _line(job, ranges, known)
            if job.library is not None:
                session.measure(job, job.library[1])
            if job.failed or (job.library is not None and _is_settled(job, CLEAR, CLEAR)):
                yield job
            else:
                close.append(job)
    with _told_of("%d problems measured in full", len(close)):
        session.send_again(close)
        for job in close:
            session.measure(job)
            yield job

def _line(job: Job, ranges: Mapping[str, Range | None], known: Callable[[str], float | None]) -> Range | None:
    """XLA's time as it follows from those of two others."""
    ends = []
    for end in (job.between.low, job.between.high) if job.between is not None else ():
        seconds = None if end in ranges else known(end)
        ends.append(ranges.get(end) if seconds is None else (seconds, seconds))
    if job.between is None or ends[0] is None or ends[1] is None:
        return None
    return job.between.seconds(ends[0], ends[1])


def _is_settled(job: Job, faster: float, slower: float) -> bool:
    """Whether what is known of XLA's side is enough to choose by; then that is its time."""
    if job.library is None:
        return not job.candidates
    seconds = settled(job.fastest(), *job.library, faster, slower)
    if seconds is not None:
        job.expect(seconds)
    return seconds is not None


@contextlib.contextmanager
def _told_of(what: str, count: int) -> Iterator[None]:
    """Tells how long some steps took, if there are any."""
    start = time.perf_counter()
    yield
    if count:
        _log.info(f"{what} in %.2f s", count, time.perf_counter() - start)
