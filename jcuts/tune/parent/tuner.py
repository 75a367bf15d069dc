"""Driver of a tuning session in the user's process: compiles and checks in parallel, measures one by one, stores
choices.

No candidate can harm the user's process: it runs in `tune.worker`.  Whatever fails, every problem gets a choice, at
least "leave it to XLA".
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from jcuts.base.errors import CandidateRejected
from jcuts.base.settings import Settings
from jcuts.kernel_ir.program import Program
from jcuts.tune.baseline import conv_relu_bound
from jcuts.tune.baseline.interpolate import interpolation_neighbours
from jcuts.tune.choice import LIBRARY, Choice, Rejection, describe
from jcuts.tune.database import Store
from jcuts.tune.measure import regime
from jcuts.tune.parent import extra_kernels, stored_choice_check
from jcuts.tune.parent.job import TuningJob, make_job
from jcuts.tune.parent.machine_lock import default_patience, gave_up_waiting, holder, is_mine, measuring_lock
from jcuts.tune.parent.measure_order import measure_in_order
from jcuts.tune.parent.remeasure import to_measure
from jcuts.tune.parent.rounds import NEGLIGIBLE_LATER, plan_round, worth_measuring
from jcuts.tune.parent.session_limits import Progress, TuningBudget
from jcuts.tune.parent.tuning_queue import TuningQueue
from jcuts.tune.parent.worker_session import shared_worker_session, workers_of
from jcuts.tune.portable.file_store import default_store
from jcuts.tune.problem import Problem
from jcuts.tune.replay import Recording
from jcuts.tune.row_signature import FOREIGN, OTHER_VERSIONS, TUNED
from jcuts.tune.select import estimate, keep_xla, keep_xla_for_now, keep_xla_over_budget, select, select_stored
from jcuts.tune.time_budget import PROFILED_SECONDS, UNLIMITED

__all__ = ["Progress", "TuningBudget", "default_store", "describe", "shared_worker_session", "tune"]
_log = logging.getLogger("jcuts.tune")
_SETTINGS = Settings()
_EFFORT = TuningBudget()


def tune(
    problems: Sequence[Problem],
    store: Store,
    *,
    settings: Settings = _SETTINGS,
    effort: TuningBudget = _EFFORT,
    prepare: Callable[[Problem], Problem] | None = None,
    progress: Progress | None = None,
    recording: Recording | None = None,
    force: bool = False,
    quiet: Callable[[bool], bool] | None = None,
    further: Callable[[str, Program], Iterable[Program]] | None = None,
    sources: dict[str, str] | None = None,
    gain: Callable[[Problem], float] | None = None,
    profiled: Callable[[str], float | None] | None = None,
) -> dict[str, Choice]:
    """A choice for every problem: from the database, else by measuring (``tune="auto"`` only).

    Args:
        problems: the subsets; equal digests are tuned once.
        store: where choices come from and go to.
        settings: ``mode`` selects, ``tune`` says what is allowed.  ``off`` estimates, ``cached`` never measures.
        effort: limits.
        prepare: called for problems that must be measured, and only for those; returns the problem with its candidates
            and exports (may be expensive).  It may raise `CandidateRejected`: the subset then stays with XLA.
        progress: told how far it is.
        recording: gets every problem that is answered from measurements.
        force: measure again what the database knows.
        quiet: whether nothing else of this process uses the GPU; called with True it waits for that.
        further: digest and a program -> those that its choice needs besides, which are compiled while others are timed.
        sources: gets, by digest, where the choices of the database come from (`tune.row_signature`).
        gain: seconds that a problem is expected to save: where time is limited (``effort.time``), the most go first.
        profiled: XLA's time of a problem in the whole program [s], by its digest, None where it is not known: XLA's own
            program of the problem is then compiled only where a kernel takes about as long.

    A stored choice that this cache has not signed, or that was made with other packages, is checked before a kernel of
    it runs, once (`tune.parent.stored_choice_check`); where nothing may be (``cached``), it is not used.
    Returns: digest -> choice.  Problems that could not be measured have origin ``library``; see their rejections.
    """
    unique = {p.digest: p for p in problems}
    if settings.tune == "off":
        return {digest: estimate(p, settings.mode) for digest, p in unique.items()}
    sources = {} if sources is None else sources
    stored = {} if force else _stored(unique, store, sources)
    waiting, origins = _take_unchecked(stored, sources, unique)
    if settings.tune == "auto":
        _adopt(stored, sources, unique, store)
    if waiting and settings.tune == "auto":
        asked_about = [(unique[digest], choice, origins[digest]) for digest, choice in waiting.items()]
        for digest, choice in _check_all(asked_about, store, effort, progress, prepare).items():
            stored[digest], sources[digest] = choice, stored_choice_check.CHECKED_AS[origins[digest]]
    known = {d: choice for d, choice in stored.items() if choice.is_enough(unique[d].mode(settings.mode))}
    missing, anew = to_measure(known, unique, effort)
    if settings.tune == "auto" and missing:
        partial = {digest: choice for digest, choice in known.items() if choice.is_cut}
        asked = _TuneRequest(
            store, effort, settings.mode, progress, force, quiet, further, gain, partial, profiled or _unknown, anew
        )
        for problem, choice in _measure_in_rounds(list(missing.values()), asked, prepare):
            if choice.problem in anew and choice.origin != "measured":  # another process had the machine
                continue
            known[choice.problem] = choice
            unique[choice.problem] = problem
            sources[choice.problem] = TUNED if choice.origin == "measured" else ""
    out = {}
    for digest, problem in unique.items():
        choice = known.get(digest)
        if choice is not None and recording is not None and choice.measurements:
            recording.add(problem, choice)
        # What is out in one mode is out in all.
        rejections = stored[digest].rejections if digest in stored else ()
        least = replace(keep_xla(problem), rejections=rejections)
        if digest in waiting and choice is None and settings.tune != "auto":
            least = stored_choice_check.unverified(problem)
        out[digest] = least if choice is None else _selected(problem, choice, problem.mode(settings.mode))
    return out


def _unknown(_: str) -> None:
    """Nothing is known of XLA's time before it is measured."""


@dataclass(frozen=True)
class _TuneRequest:
    """Arguments of one call of `tune`, passed to its steps.

    Attributes: partial: choices that lack candidates because the time was up, by digest; anew: those that are measured
        again although they lack none.
    """

    store: Store
    effort: TuningBudget
    mode: str
    progress: Progress | None
    force: bool
    quiet: Callable[[bool], bool] | None = None
    further: Callable[[str, Program], Iterable[Program]] | None = None
    gain: Callable[[Problem], float] | None = None
    partial: dict[str, Choice] = field(default_factory=dict)
    profiled: Callable[[str], float | None] = _unknown
    anew: dict[str, Choice] = field(default_factory=dict)

    def stored(self, problem: Problem) -> Choice | None:
        """What another process has found out meanwhile."""
        choice, source = (None, "") if self.force else self.store.choice(problem.digest)
        if choice is None or source == FOREIGN or choice.is_cut or choice == self.anew.get(problem.digest):
            return None
        return choice if choice.is_enough(problem.mode(self.mode)) else None

    def over_budget(self, problem: Problem) -> Choice:
        """The choice of a problem that is not reached."""
        return keep_xla_over_budget(problem, self.profiled(problem.digest))

    def better(self, problem: Problem, choice: Choice) -> Choice:
        """A choice, or the one that was known before where the time was up sooner than then."""
        before = self.partial.get(problem.digest)
        if before is None or not choice.is_cut:
            return choice
        return choice if choice.unmeasured < before.unmeasured and choice.origin == "measured" else before


def _stored(problems: dict[str, Problem], store: Store, sources: dict[str, str]) -> dict[str, Choice]:
    found = {}
    for digest in problems:
        choice, source = store.choice(digest)
        if choice is None:
            choice, source = store.other_choice(digest)
        if choice is not None:
            found[digest], sources[digest] = choice, source
    return found


def _take_unchecked(
    stored: dict[str, Choice], sources: dict[str, str], problems: dict[str, Problem]
) -> tuple[dict[str, Choice], dict[str, str]]:
    """Takes the choices out that must be checked before they are used; gives them, and where they come from."""
    waiting = {
        digest: choice
        for digest, choice in stored.items()
        if sources[digest] in stored_choice_check.CHECKED_AS
        and stored_choice_check.contenders(problems[digest], choice)
    }
    origins = {digest: sources.pop(digest) for digest in waiting}
    for digest in waiting:
        del stored[digest]
    return waiting, origins


def _adopt(stored: dict[str, Choice], sources: dict[str, str], problems: dict[str, Problem], store: Store) -> None:
    """Stores choices of XLA that this cache made with other versions under these: there is no kernel to check."""
    for digest in [digest for digest, source in sources.items() if source == OTHER_VERSIONS]:
        stored[digest] = replace(stored[digest], schedules=dict(problems[digest].schedules))
        sources[digest] = stored_choice_check.CHECKED_AS[OTHER_VERSIONS]
        store.put(stored[digest], sources[digest])


def _check_all(
    asked_about: Sequence[tuple[Problem, Choice, str]],
    store: Store,
    effort: TuningBudget,
    progress: Progress | None,
    prepare: Callable[[Problem], Problem] | None,
) -> dict[str, Choice]:
    """Checks stored choices of others in processes of a session; those that are right."""
    platform = "cuda" if any(problem.device for problem, _, _ in asked_about) else "cpu"
    try:
        with shared_worker_session() as workers_open, workers_open.folder() as folder:
            pool = workers_open.pool(platform, effort.workers or workers_of())
            session = TuningQueue(pool, replace(effort, checks_last=False, time=UNLIMITED), progress)
            return stored_choice_check.check(asked_about, store, folder, session, prepare)
    except OSError as error:
        _log.warning("stored choices of other caches could not be checked, and are not used: %s", error)
        return {}


def _selected(problem: Problem, choice: Choice, mode: str) -> Choice:
    if choice.origin != "measured":
        return choice
    # Looked up by `space` alone, the stored measurements stand for the candidates.
    return select(problem, choice, mode) if problem.candidates else select_stored(choice, mode)


def _measure_in_rounds(
    problems: Sequence[Problem], asked: _TuneRequest, prepare: Callable[[Problem], Problem] | None
) -> Iterator[tuple[Problem, Choice]]:
    """Measures all problems at once, or while there is time round by round (`tune.parent.rounds`)."""
    budget = asked.effort.time
    if not budget.is_limited:
        yield from _measure_all(problems, asked, prepare)
        return
    found = {p.digest: (p, asked.partial[p.digest]) for p in problems if p.digest in asked.partial}
    workers, progressed = asked.effort.workers or workers_of(), True
    every = first = later = {p.digest for p in problems}
    if asked.gain is not None and asked.profiled is not _unknown:
        first = worth_measuring(problems, asked.gain)
        later = worth_measuring(problems, asked.gain, NEGLIGIBLE_LATER)
        budget.expect_measuring(PROFILED_SECONDS)
    while progressed and not budget.is_spent():
        progressed = False
        left = [
            p
            for p in problems
            if p.digest in (later if p.digest in asked.partial else first)
            and (p.digest not in found or found[p.digest][1].is_cut)
        ]
        if not left and later != every:  # there is time for the others, too
            first = later = every
            progressed = True
            continue
        chosen = plan_round(left, asked.partial, budget, workers, asked.gain)
        for problem, choice in _measure_all(chosen.problems, asked, prepare, chosen.candidates):
            if problem.digest in found and (choice.is_postponed or choice == found[problem.digest][1]):
                continue
            progressed = True
            found[problem.digest] = problem, choice
            if choice.is_cut and choice.origin == "measured":
                asked.partial[problem.digest] = choice
    # The last round may have been too late.
    found = {p.digest: (p, asked.over_budget(p)) for p in problems} | found
    yield from found.values()


def _measure_all(
    problems: Sequence[Problem],
    asked: _TuneRequest,
    prepare: Callable[[Problem], Problem] | None,
    most: int | None = None,
) -> Iterator[tuple[Problem, Choice]]:
    """Compiles in peace with other processes, and checks if that comes first; measuring asks for the machine.

    Args: most: kernels per problem in this round, the best-ranked; None: all.
    """
    if not problems:
        return
    if gave_up_waiting():
        yield from ((problem, keep_xla_for_now(problem, f"{holder()} was measuring")) for problem in problems)
        return
    platform = "cuda" if any(p.device for p in problems) else "cpu"
    workers = asked.effort.workers or workers_of()
    try:
        with shared_worker_session() as workers_open, workers_open.folder() as folder:
            quiet = asked.quiet or (lambda _: True)
            early = functools.partial(quiet, False) if platform != "cpu" and is_mine() else None
            session = TuningQueue(workers_open.pool(platform, workers), asked.effort, asked.progress, asked.mode, early)
            derives = asked.mode == "mixed" and platform != "cpu"
            digests, lines = (
                {p.digest for p in problems},
                interpolation_neighbours({p.digest: p.text for p in problems}),
            )
            session.total = sum(len(problem.candidates) or problem.expected for problem in problems)
            for number, problem in enumerate(problems):
                session.wait_for_room()
                if session.is_late():
                    yield problem, asked.better(problem, asked.over_budget(problem))
                    continue
                try:
                    full = prepare(problem) if prepare is not None else problem
                except CandidateRejected as error:
                    choice = replace(keep_xla(problem), rejections=(Rejection.of(LIBRARY, error),))
                    asked.store.put(choice)
                    yield problem, choice
                    continue
                # Its candidates are compiled while the next problem is prepared.
                job = make_job(full, folder, number)
                job.resume(asked.partial.get(problem.digest), most)
                if derives and all(c.kind != "stablehlo" for c in full.candidates):
                    job.between, job.apart = (
                        lines.get(problem.digest),
                        conv_relu_bound.conv_relu_result_bytes(problem.text),
                    )
                    job.parts = problem.parts if digests.issuperset(problem.parts) else ()
                    job.profiled = asked.profiled(problem.digest) is not None
                session.add(job)
            session.finish()
            quiet(True)
            yield from _measure_in_turn(session, asked)
    except OSError as error:
        # No space or no permission for the session's files: the user's program runs on XLA.
        asked.effort.time.fail()
        where = tempfile.gettempdir()
        _log.warning("tuning stopped, what is left stays with XLA: %s (its files are in %s: TMPDIR)", error, where)


def _measure_in_turn(session: TuningQueue, asked: _TuneRequest) -> Iterator[tuple[Problem, Choice]]:
    """Times every job under the lock, or says that another process kept it."""
    jobs = session.jobs
    if not jobs:
        return
    if session.progress is not None:
        session.progress.update("wait", 0, len(jobs), "")
    patience = default_patience() if asked.effort.patience is None else asked.effort.patience
    patience = max(0.0, min(patience, session.time.left()))
    open_: list[TuningJob] = []  # measured, but whether the fastest is right is not known yet
    made: dict[str, Choice] = {}

    def finished(job: TuningJob) -> tuple[Problem, Choice]:
        mine = job.choice()
        if mine.origin == "measured":
            mine = replace(mine, regime=regime.now(job.problem.platform))
        choice = made[job.problem.digest] = asked.better(job.problem, mine)
        if not job.transient and choice is mine:
            asked.store.put(choice)
        return job.problem, choice

    def foreseen(job: TuningJob, label: str) -> None:
        """Has compiled what a job will need besides, if the candidate that is fastest is right."""
        chosen = next((c for c in job.problem.candidates if c.label == label and c.kind == "program"), None)
        if asked.further is None or chosen is None or not job.problem.device:
            return
        try:
            program = Program.from_json(chosen.payload)
            extra_kernels.submit_extra_kernels(session.pool, asked.further(job.problem.digest, program))
        except Exception as error:  # planning meets it again, where that is dealt with
            _log.info("%s: what it needs is not compiled ahead: %s", job.problem.name, error)

    with measuring_lock(patience=patience, done=lambda: all(asked.stored(job.problem) for job in jobs)) as may:
        busy = "" if may else holder()
        found = {job.problem.digest: asked.stored(job.problem) for job in jobs}  # by other processes meanwhile
        missing = [job for job in jobs if found[job.problem.digest] is None]
        if missing and not busy:
            session.compile_ahead(missing)
        for job in jobs:
            choice = found[job.problem.digest]
            if choice is not None:
                yield job.problem, choice
            elif busy:
                yield job.problem, keep_xla_for_now(job.problem, f"{busy} was measuring")

        def known(digest: str) -> float | None:
            choice = found.get(digest)
            return None if choice is None else choice.measured_seconds(LIBRARY)  # errors would add up

        for job in measure_in_order(session, [] if busy else missing, known, asked.profiled):
            contender = job.next_to_verify(job.problem.mode(asked.mode)) if session.checks_last else None
            if contender is not None:
                open_.append(job)
                foreseen(job, contender)
            else:
                yield finished(job)
        session.verify(open_, finished)  # under the lock: who waits for it finds all results, and measures in peace
        for job in open_:
            yield job.problem, made.get(job.problem.digest) or finished(job)[1]
        if busy and missing and not all(asked.stored(job.problem) for job in missing):
            _log.warning("%s is still measuring: this call goes on with XLA, a later call tunes", busy)
