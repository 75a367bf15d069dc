"""Tunes problems: the parent's side.  Compiles and checks in parallel, measures one by one, stores each choice.

Nothing that a candidate does reaches the user's process: it runs in `tune.worker`.  Whatever goes wrong, every problem
gets a choice; the least one is "leave it to XLA".
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from jcuts.base import fingerprint, knobs
from jcuts.base.errors import CandidateRejected, WorkerFailed
from jcuts.base.settings import Settings
from jcuts.tune.choice import LIBRARY, Choice, Measurement, Rejection
from jcuts.tune.kernelfile import read_kernel
from jcuts.tune.lock import default_patience, holder, is_hopeless, measuring_lock
from jcuts.tune.pool import Answer, Pool
from jcuts.tune.problem import Problem
from jcuts.tune.replay import Recording
from jcuts.tune.select import estimate, noise_margin, postponed, select, select_stored, unknown
from jcuts.tune.store import Store, default_store
from jcuts.tune.values import NORMAL
from jcuts.tune.workshop import COMPILE, DEVICE, REFERENCE, XLA, workshop

__all__ = ["Effort", "Progress", "default_store", "describe", "tune", "workshop"]
_log = logging.getLogger("jcuts.tune")
_LIVE_REFERENCES = 4
"""Problems whose reference arrays lie on disk at the same time."""


class Progress(Protocol):
    """Told how far a session is; drawn by whoever has a terminal."""

    def update(self, stage: str, done: int, total: int, name: str) -> None:
        """``stage`` is 'wait', 'compile', 'check' or 'measure'; ``done`` of ``total`` of that stage; what is next."""
        ...


@dataclass(frozen=True)
class Effort:
    """How much a session may spend.

    Attributes:
        seconds: sampling time per candidate [s].
        finalists: kernels that are timed against XLA after the quick screening.
        patience: most seconds to wait for another process that is measuring, `JCUTS_LOCK_PATIENCE_S` by default.
        timeout: seconds one candidate may take, `JCUTS_TUNE_TIMEOUT_S` by default.
        workers: compiling processes, `JCUTSCOMPILE_WORKERS` or one per core by default.
        seed: of the check inputs, `JCUTS_SEED` by default.
    """

    seconds: float = 0.15
    finalists: int = 3
    patience: float | None = None
    timeout: float | None = None
    workers: int | None = None
    seed: int | None = None


_SETTINGS, _EFFORT = Settings(), Effort()


def tune(
    problems: Sequence[Problem],
    store: Store,
    *,
    settings: Settings = _SETTINGS,
    effort: Effort = _EFFORT,
    prepare: Callable[[Problem], Problem] | None = None,
    progress: Progress | None = None,
    recording: Recording | None = None,
    force: bool = False,
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
    Returns: digest -> choice.  Problems that could not be measured have origin ``library``; see their rejections.
    """
    unique = {p.digest: p for p in problems}
    if settings.tune == "off":
        return {digest: estimate(p, settings.mode) for digest, p in unique.items()}
    known = {} if force else _known(unique, store)
    missing = {digest: p for digest, p in unique.items() if digest not in known}
    if settings.tune == "auto" and missing:
        for problem, choice in _measure_all(list(missing.values()), store, effort, prepare, progress, force):
            known[choice.problem] = choice
            unique[choice.problem] = problem
    out = {}
    for digest, problem in unique.items():
        choice = known.get(digest)
        if choice is not None and recording is not None and choice.measurements:
            recording.add(problem, choice)
        out[digest] = unknown(problem) if choice is None else _selected(problem, choice, settings.mode)
    return out


def _known(problems: dict[str, Problem], store: Store) -> dict[str, Choice]:
    found = {digest: store.lookup(digest) for digest in problems}
    return {digest: choice for digest, choice in found.items() if choice is not None}


def _selected(problem: Problem, choice: Choice, mode: str) -> Choice:
    if choice.origin != "measured":
        return choice
    # Looked up by `space` alone, the stored measurements stand for the candidates.
    return select(problem, choice, mode) if problem.candidates else select_stored(choice, mode)


@dataclass
class _Job:
    """One problem on its way."""

    problem: Problem
    folder: Path
    file: Path
    kernels: dict[str, Path] = field(default_factory=dict)
    compiled: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    compiling: int = 0
    checking: int = 0
    kinds: list[str] | None = None
    failed: bool = False
    transient: bool = False
    """The failure says nothing about the problem (no process, no disk): do not store it."""
    short: str = ""
    """Something did not fit into the memory, or on the disk, that others had left free: what was said of it."""

    def reject(self, label: str, error: CandidateRejected) -> None:
        self.rejected.append(Rejection.of(label, error))
        if error.values.get("reason") in ("memory", "disk"):
            self.short = error.message
        _log.info("%s: %s rejected: %s", self.problem.name, label, error)

    def fail(self, error: CandidateRejected) -> None:
        """XLA itself could not be run: nothing can be compared."""
        self.failed = True
        self.transient = error.values.get("reason") == "start"
        self.reject(LIBRARY, error)


def _measure_all(
    problems: Sequence[Problem],
    store: Store,
    effort: Effort,
    prepare: Callable[[Problem], Problem] | None,
    progress: Progress | None,
    force: bool,
) -> Iterator[tuple[Problem, Choice]]:
    """Compiles and checks in peace with other processes; only measuring asks for the machine."""
    if not problems:
        return
    if is_hopeless():
        yield from ((problem, postponed(problem, f"{holder()} was measuring")) for problem in problems)
        return
    platform = "cuda" if any(p.device for p in problems) else "cpu"
    workers = effort.workers or knobs.current().compile_workers or fingerprint.usable_cores()
    try:
        with workshop() as shop, shop.folder() as folder:
            session = _Session(shop.pool(platform, workers), effort, progress)
            session.total = sum(len(problem.candidates) or problem.expected for problem in problems)
            for number, problem in enumerate(problems):
                try:
                    full = prepare(problem) if prepare is not None else problem
                except CandidateRejected as error:
                    choice = replace(unknown(problem), rejections=(Rejection.of(LIBRARY, error),))
                    store.put(choice)
                    yield problem, choice
                    continue
                # Its candidates are compiled while the next problem is prepared.
                session.add(_make_job(full, folder, number))
            session.finish()
            yield from _measure_in_turn(session, session.jobs, store, effort, force)
    except OSError as error:
        # No space or no permission for the session's files: the user's program runs on XLA.
        _log.warning("tuning stopped, what is left stays with XLA: %s", error)


def _measure_in_turn(
    session: _Session, jobs: list[_Job], store: Store, effort: Effort, force: bool
) -> Iterator[tuple[Problem, Choice]]:
    """Times every job under the lock, or says that another process kept it."""
    if not jobs:
        return

    def stored(job: _Job) -> Choice | None:
        return None if force else store.lookup(job.problem.digest)

    if session.progress is not None:
        session.progress.update("wait", 0, len(jobs), "")
    patience = default_patience() if effort.patience is None else effort.patience
    with measuring_lock(patience=patience, done=lambda: all(stored(job) is not None for job in jobs)) as may:
        busy = "" if may else holder()
        for job in jobs:
            choice = stored(job)  # another process may have tuned it meanwhile
            if choice is None and busy:
                yield job.problem, postponed(job.problem, f"{busy} was measuring")
                continue
            if choice is None:
                choice = session.measure(job)
                if not job.transient:
                    store.put(choice)
            yield job.problem, choice
        if busy and not all(stored(job) is not None for job in jobs):
            _log.warning("%s is still measuring: this call goes on with XLA, a later call tunes", busy)


def _make_job(problem: Problem, folder: Path, number: int) -> _Job:
    own = folder / f"p{number}"
    own.mkdir()
    file = own / "problem.json"
    file.write_text(json.dumps(problem.to_json()))
    return _Job(problem, own, file)


class _Session:
    def __init__(self, pool: Pool, effort: Effort, progress: Progress | None) -> None:
        self.pool, self.effort, self.progress = pool, effort, progress
        self.jobs: list[_Job] = []
        current = knobs.current()
        self.timeout = effort.timeout if effort.timeout is not None else current.tune_timeout_s
        self.seed = effort.seed if effort.seed is not None else current.seed
        self.waiting: list[_Job] = []
        self.live = 0
        self.counts = {"compile": 0, "check": 0, "measure": 0}
        self.total = 0

    def tell(self, stage: str, name: str) -> None:
        self.counts[stage] += 1
        if self.progress is not None:
            total = len(self.jobs) if stage == "measure" else self.total
            self.progress.update(stage, self.counts[stage], total, name)

    # Compile and check: parallel -------------------------------------------------------------------------------------

    def add(self, job: _Job) -> None:
        """Queues the job's work and goes on with whatever is under way, without waiting."""
        self.jobs.append(job)
        self.waiting.append(job)
        for candidate in job.problem.candidates:
            if candidate.kind != "stablehlo":
                self._compile(job, candidate.label)
        self._next_references()
        self.pool.poll()

    def finish(self) -> None:
        """Waits until every job is compiled and checked; nothing of the session runs then."""
        self.pool.drain()
        self.pool.stop(DEVICE)  # they hold the GPU's memory

    def _compile(self, job: _Job, label: str) -> None:
        job.compiling += 1
        out = job.folder / f"k{len(job.kernels)}.kernel"
        job.kernels[label] = out

        def done(answer: Answer | CandidateRejected) -> None:
            job.compiling -= 1
            self.tell("compile", job.problem.name)
            if isinstance(answer, CandidateRejected):
                job.reject(label, answer)
            else:
                job.compiled[label] = str(answer["kernel"])
                if job.kinds is not None:
                    self._check(job, label)
            self._finish(job)

        request = {"op": "compile", "problem": str(job.file), "label": label, "out": str(out)}
        self.pool.submit(COMPILE, request, self.timeout, done)

    def _next_references(self) -> None:
        most = _LIVE_REFERENCES + self.pool.sizes.get(REFERENCE, 0)
        while self.waiting and self.live < most:
            self._reference(self.waiting.pop(0))

    def _reference(self, job: _Job) -> None:
        self.live += 1
        group = REFERENCE if self.pool.sizes.get(REFERENCE) else XLA

        def done(answer: Answer | CandidateRejected) -> None:
            nonlocal group
            if isinstance(answer, CandidateRejected) and answer.values.get("reason") == "memory" and group != XLA:
                group = XLA  # which has its share of the GPU
                self._make_room()
                self.pool.submit(group, request, self.timeout, done)
                return
            if isinstance(answer, CandidateRejected):
                job.fail(answer)
                self._finish(job)
                return
            _log.info("%s: reference made in %.2f s", job.problem.name, answer["seconds"])
            job.kinds = list(answer["kinds"])
            for candidate in job.problem.candidates:
                if candidate.kind == "stablehlo" or candidate.label in job.compiled:
                    self._check(job, candidate.label)
            self._finish(job)

        request = {"op": "reference", "problem": str(job.file), "folder": str(job.folder), "seed": self.seed}
        self.pool.submit(group, request, self.timeout, done)

    def _make_room(self) -> None:
        """After a shortage: every process takes some hundred megabytes of a GPU for itself."""
        self.pool.shrink(REFERENCE, 0, XLA)
        self.pool.shrink(DEVICE, 1)

    def _check(self, job: _Job, label: str) -> None:
        job.checking += 1
        kind = job.problem.candidate(label).kind

        own = DEVICE if job.problem.device else COMPILE
        group = XLA if kind == "stablehlo" else own

        def done(answer: Answer | CandidateRejected) -> None:
            nonlocal group
            if isinstance(answer, CandidateRejected) and answer.values.get("reason") == "memory" and group == DEVICE:
                group = XLA
                self._make_room()
                self.pool.submit(group, request, self.timeout, done)
                return
            job.checking -= 1
            self.tell("check", job.problem.name)
            if isinstance(answer, CandidateRejected):
                job.reject(label, answer)
            else:
                _log.info("%s: %s checked in %.2f s", job.problem.name, label, answer["seconds"])
                job.passed.append(label)
            self._finish(job)

        request = {
            "op": "check",
            "problem": str(job.file),
            "label": label,
            "folder": str(job.folder),
            "kinds": job.kinds,
            "kernel": str(job.kernels.get(label, "")),
        }
        self.pool.submit(group, request, self.timeout, done)

    def _finish(self, job: _Job) -> None:
        """Frees the disk once nothing of a problem is compared any more, and lets the next problem in."""
        settled = job.failed or (job.kinds is not None and not job.compiling and not job.checking)
        if not settled or (job.failed and job.checking):
            return
        if not (job.folder / "settled").exists():
            (job.folder / "settled").touch()
            keep = job.kinds.count(NORMAL) if job.kinds else 0
            for path in job.folder.glob("*.npy"):
                number, what = path.name.split(".")[:2]
                if not what.startswith("in") or int(number) >= min(3, keep):
                    path.unlink()
            self.live -= 1
            self._next_references()

    # Measure: one problem at a time, nothing else running ------------------------------------------------------------

    def measure(self, job: _Job) -> Choice:
        self.tell("measure", job.problem.name)
        order = [c.label for c in job.problem.candidates if c.label in job.passed]
        answer: Answer | CandidateRejected | None = None
        while order and not job.failed:
            answer = self._measure_once(job, order)
            if not isinstance(answer, CandidateRejected):
                break
            if answer.values.get("reason") == "memory" and self.pool.sizes.get(REFERENCE):
                self._make_room()
                self.pool.stop(REFERENCE)  # idle, but not without memory of the GPU
                continue
            guilty = answer.values.get("running")
            if not isinstance(answer, WorkerFailed) or guilty not in order:
                job.fail(answer)  # XLA's own code, or the measuring itself
                break
            job.reject(str(guilty), answer)
            order.remove(str(guilty))
            answer = None
        if isinstance(answer, dict):
            made = float(answer.get("compile_seconds", 0.0))
            _log.info("%s: measured in %.2f s, of which compiling %.2f s", job.problem.name, answer["seconds"], made)
        return self._choice(job, answer if isinstance(answer, dict) else None)

    def _measure_once(self, job: _Job, order: list[str]) -> Answer | CandidateRejected:
        kept: list[Answer | CandidateRejected] = []
        request = {
            "op": "measure",
            "problem": str(job.file),
            "folder": str(job.folder),
            "sets": min(3, (job.kinds or []).count(NORMAL)),
            "kernels": {label: str(job.kernels[label]) for label in order if label in job.kernels},
            "stablehlo": [label for label in order if label not in job.kernels],
            "seconds": self.effort.seconds,
            "finalists": self.effort.finalists,
        }
        # The interleaved samples run without events in between.
        sampling = self.effort.seconds * (len(order) + 2)
        self.pool.submit(XLA, request, self.timeout + sampling, kept.append)
        self.pool.drain()
        return kept[0]

    def _choice(self, job: _Job, answer: Answer | None) -> Choice:
        problem = job.problem
        base = Choice(problem.digest, LIBRARY, "", "library", (), tuple(job.rejected), name=problem.name)
        if job.short and (answer is None or all(m["label"] == LIBRARY for m in answer["measurements"])):
            job.transient = True
            return postponed(problem, f"not enough free memory, or disk, to measure ({job.short[:300]})")
        if answer is None:
            return base if job.failed else replace(base, origin="measured")
        estimates = {c.label: (c.bound_seconds, c.pul) for c in problem.candidates}
        measurements = []
        for entry in answer["measurements"]:
            bound, pul = estimates.get(entry["label"], (0.0, 0.0))
            measurements.append(Measurement(**entry, bound_seconds=bound, pul=pul))
        labels = {m.label for m in measurements}
        choice = replace(
            base,
            origin="measured",
            measurements=tuple(measurements),
            margin=noise_margin(tuple(measurements)),
            overhead_seconds=float(answer["overhead"]),
            kernels={label: digest for label, digest in job.compiled.items() if label in labels},
            digests={c.label: c.digest for c in problem.candidates if c.label in labels},
        )
        choice = select(problem, choice, "mixed")
        winners = {select(problem, choice, mode).winner for mode in ("mixed", "fusion")}
        _persist(job, winners)
        chosen = [c for c in problem.candidates if c.label in winners and c.kind == "program"]
        return replace(choice, programs={c.label: c.payload for c in chosen})


def _persist(job: _Job, winners: Iterable[str]) -> None:
    """Puts the measured kernels that some mode chooses into the object cache: nobody compiles them again."""
    from jcuts.xla import objects

    for winner in winners:
        if winner in job.kernels:
            with contextlib.suppress(CandidateRejected):
                objects.store(read_kernel(job.kernels[winner]))


def describe(choice: Choice) -> dict[str, Any]:
    """One line of a choice for tables: name, winner, times and speed-up."""
    return {
        "name": choice.name or choice.problem[:12],
        "winner": choice.winner,
        "origin": choice.origin,
        "seconds": choice.seconds(choice.winner),
        "xla_seconds": choice.seconds(LIBRARY),
        "speedup": choice.speedup,
        "rejected": len(choice.rejections),
    }
