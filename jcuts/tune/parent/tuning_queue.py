"""Work queue of a session: compile, reference, check and measure requests for its worker processes.

On a CPU every candidate is checked before anything is timed.  On a GPU, where making float64 references of large
results takes longer than timing, all are timed first (``checks_last``): then only those that would win are checked, the
fastest first, until one is right.  Unchecked candidates run in the measuring process, whose crashes and hangs cost that
candidate alone, and the times of a wrong one are discarded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from jcuts.base import knobs
from jcuts.base.errors import CandidateRejected
from jcuts.tune.baseline import autotune_cache
from jcuts.tune.measure import cuda_driver
from jcuts.tune.parent.answer_log import listed, told
from jcuts.tune.parent.compile_backlog import CompileBacklog
from jcuts.tune.parent.job import TuningJob
from jcuts.tune.parent.session_limits import Progress, TuningBudget
from jcuts.tune.parent.worker_pool import Answer, WorkerPool
from jcuts.tune.parent.worker_session import COMPILE, DEVICE, REFERENCE, XLA
from jcuts.tune.verify.inputs import NORMAL

_log = logging.getLogger("jcuts.tune")
_LIVE_REFERENCES = 4
"""Problems whose reference arrays lie on disk at the same time."""
_WAITING = 2  # ... and most that wait for theirs where time is limited
CHECK_SECONDS = 0.5
"""What is kept back for a reference and a check of one kernel on a GPU [s]: they took 0.2 to 0.3 (docs/tuning.md)."""
_AHEAD = 16
"""XLA's programs that one request compiles ahead of measuring."""


class TuningQueue:
    """The problems of a session in their stages over a pool of processes.

    Args:
        mode: which candidates matter where they are checked last.
        quiet: on a GPU, where this process may measure already: whether nothing else of it uses the device; XLA's side
            of the first problems is compiled, and its algorithms timed, while others are prepared.
    """

    def __init__(
        self,
        pool: WorkerPool,
        effort: TuningBudget,
        progress: Progress | None,
        mode: str = "mixed",
        quiet: Callable[[], bool] | None = None,
    ) -> None:
        self.pool, self.effort, self.progress, self.mode, self.quiet = pool, effort, progress, mode, quiet
        self.jobs: list[TuningJob] = []
        self.ahead: list[str] = []  # files of problems whose XLA side is not compiled yet
        self.sent: set[str] = set()
        self.chained: set[str] = set()  # ... whose kernels are compiled as they are timed
        current = knobs.current()
        self.timeout = effort.timeout if effort.timeout is not None else current.tune_timeout_s
        self.seed = effort.seed if effort.seed is not None else current.seed
        self.checks_last = pool.platform != "cpu" if effort.checks_last is None else effort.checks_last
        self.time = effort.time
        self._extended = 0.0  # of the budget's time, how long measuring goes on at least
        self.backlog = CompileBacklog(pool, COMPILE, self.time.is_limited, self.is_late)
        self.waiting: list[TuningJob] = []
        self.settled: Callable[[TuningJob], object] = lambda job: None
        self.live = 0
        self.answered = False  # whether all that is to be timed was
        self.counts = {"compile": 0, "check": 0, "measure": 0}
        self.total = 0

    def report_progress(self, stage: str, name: str) -> None:
        """Reports one step of a stage."""
        self.counts[stage] += 1
        if self.progress is not None:
            total = len(self.jobs) if stage == "measure" else max(self.total, self.counts[stage])
            self.progress.update(stage, self.counts[stage], total, name)

    # Compile and check: parallel -------------------------------------------------------------------------------------

    def add(self, job: TuningJob) -> None:
        """Queues the job's work and goes on with whatever is under way, without waiting."""
        self.jobs.append(job)
        for label in job.kernels_left():
            self._compile(job, label)
        if not self.checks_last:
            self.waiting.append(job)
            self._next_references()
        elif self.quiet is not None:
            self.ahead += self._for_ahead([job])
            if len(self.ahead) >= _AHEAD or self.sent:
                self._send_early()
        self.pool.poll()

    def is_late(self) -> bool:
        """Whether all time that is left is needed to measure what is under way: nothing else begins."""
        return self.time.left() <= self._reserve()

    def _reserve(self) -> float:
        """Time that it takes to measure what is under way, as far as can be foreseen [s]."""
        under_way = sum(not job.skipped and not job.failed for job in self.jobs)
        return under_way * (self.time.measuring_seconds() + self._check_seconds())

    def _allow_measuring(self) -> None:
        """What is ready is measured: one program that took long to compile must not cost the times of all others."""
        if not any(job.answer for job in self.jobs):
            self._extended = self.time.spent() + self._reserve()

    def _check_seconds(self) -> float:
        """What is kept back per measured problem for the checks behind it [s]."""
        return CHECK_SECONDS if self.checks_last else 0.0

    def wait_for_room(self) -> None:
        """Where time is limited: waits until the next problem would not only stand in a queue."""
        while self.time.is_limited and not self.is_late() and (self.backlog.is_long() or len(self.waiting) > _WAITING):
            if not self.pool.wait(1.0):
                break

    def finish(self) -> None:
        """Waits until every job is compiled, and checked if that comes first; nothing of the session runs then."""
        start = time.perf_counter()
        if self.checks_last and self.quiet is not None and self.jobs and not self.answered:
            self._warm_checks()  # while XLA's side keeps the host idle
        while self.ahead and not self.is_late() and self.pool.wait(0.1):
            self._send_early()
        self.backlog.drain()
        self._allow_measuring()
        if self.pool.platform != "cpu" and not cuda_driver.is_roomy():
            self.pool.stop(DEVICE)  # they hold the GPU's memory
        _log.info("waited %.2f s for candidates to compile, or to be checked", time.perf_counter() - start)

    def _warm_checks(self) -> None:
        """Lets the processes that check import what they need, while nothing is timed."""
        self.pool.warm(DEVICE, "tools", self.timeout)
        self.pool.warm(REFERENCE, "jax", self.timeout)

    def verify(self, jobs: list[TuningJob], settled: Callable[[TuningJob], object]) -> None:
        """Checks of every measured job the candidates that would win, one after the other, until one is right.

        Args: jobs: such as have a contender; settled: is told of each job as soon as that is known.
        """
        self.settled = settled
        self.waiting += jobs
        self.counts["check"], self.total, self.answered = 0, len(self.waiting), True
        self._next_references()
        self.finish()

    def _compile(self, job: TuningJob, label: str) -> None:
        job.compiling += 1
        out = job.folder / f"k{len(job.kernels)}.kernel"
        job.kernels[label] = out

        def done(answer: Answer | CandidateRejected) -> None:
            job.compiling -= 1
            self.report_progress("compile", job.problem.name)
            if isinstance(answer, CandidateRejected):
                job.reject(label, answer)
            else:
                job.compiled[label] = str(answer["kernel"])
                if job.kinds is not None and not self.checks_last:
                    self._check(job, label)
            self._finish(job)
            self.backlog.feed()

        def drop() -> None:
            job.compiling -= 1
            job.cut([label])
            self._finish(job)

        request = {"op": "compile", "problem": str(job.file), "label": label, "out": str(out)}
        self.backlog.add(lambda: self.pool.submit(COMPILE, request, self.timeout, done), drop)

    def _next_references(self) -> None:
        most = _LIVE_REFERENCES + self.pool.sizes.get(REFERENCE, 0)
        if not self.answered and self.is_late():
            for job in self.waiting:
                job.skipped = True
            self.waiting.clear()
        while self.waiting and self.live < most:
            self._reference(self.waiting.pop(0))

    def _reference(self, job: TuningJob) -> None:
        self.live += 1

        def done(answer: Answer | CandidateRejected) -> None:
            if isinstance(answer, CandidateRejected):
                job.fail(answer)
                self._finish(job)
                return
            parts = listed({**answer.get("parts", {}), **answer.get("cores", {})})
            _log.info("%s: reference made in %.2f s (%s)", job.problem.name, answer["seconds"], parts)
            job.kinds = list(answer["kinds"])
            if self.checks_last:
                self._check_next(job)
            else:
                for label in job.candidates:
                    self._check(job, label)
            self._finish(job)

        request = {
            "op": "reference",
            "problem": str(job.file),
            "folder": str(job.folder),
            "seed": self.seed,
            "autotuned": str(autotune_cache.folder()) if job.problem.device else "",
            "timed": not job.expected,
            "grouped": job.problem.has_grouped_convolution,
        }
        self._submit(REFERENCE if self.pool.sizes.get(REFERENCE) else XLA, request, done)

    def _submit(self, group: str, request: dict[str, Any], done: Callable[[Answer | CandidateRejected], None]) -> None:
        """Asks a group; where memory does not suffice for its several processes half of them, at last XLA's own."""

        def heard(answer: Answer | CandidateRejected) -> None:
            short = isinstance(answer, CandidateRejected) and answer.values.get("reason") == "memory"
            if not short or group not in (REFERENCE, DEVICE):
                done(answer)
                return
            if self.pool.sizes.get(REFERENCE) and not self.pool.is_busy(XLA):
                self.pool.stop(XLA)  # which keeps the memory that it has measured with
            alone = self.pool.sizes[group] <= 1
            self._make_room()
            self._submit(XLA if alone else group, request, done)

        self.pool.submit(group, request, self.timeout, heard)

    def _make_room(self) -> None:
        """After a shortage: every process takes some hundred megabytes of a GPU for itself, and what it works with."""
        self.pool.shrink(REFERENCE, self.pool.sizes.get(REFERENCE, 0) // 2, XLA)
        self.pool.shrink(DEVICE, max(1, self.pool.sizes[DEVICE] // 2))
        _log.info("out of the GPU's memory: processes are left: %s", self.pool.sizes)

    def _check_next(self, job: TuningJob) -> None:
        label = job.next_to_verify(job.problem.mode(self.mode))
        if label is not None:
            self._check(job, label)

    def _check(self, job: TuningJob, label: str) -> None:
        job.checking += 1
        kind = job.problem.candidate(label).kind
        own = DEVICE if job.problem.device else COMPILE

        def done(answer: Answer | CandidateRejected) -> None:
            job.checking -= 1
            self.report_progress("check", job.problem.name)
            if isinstance(answer, CandidateRejected):
                job.reject(label, answer)
            else:
                parts = listed({**answer.get("parts", {}), **answer.get("cores", {})})
                _log.info("%s: %s checked in %.2f s (%s)", job.problem.name, label, answer["seconds"], parts)
                job.passed.append(label)
            if self.checks_last:
                self._check_next(job)
            self._finish(job)
            self.backlog.feed()

        request = {
            "op": "check",
            "problem": str(job.file),
            "label": label,
            "folder": str(job.folder),
            "kinds": job.kinds,
            "kernel": str(job.kernels.get(label, "")),
        }
        self._submit(XLA if kind == "stablehlo" else own, request, done)

    def _finish(self, job: TuningJob) -> None:
        """Frees the disk once nothing of a problem is compared any more, and lets the next problem in."""
        settled = job.failed or (job.kinds is not None and not job.compiling and not job.checking)
        if not settled or (job.failed and job.checking):
            return
        if not (job.folder / "settled").exists():
            self.settled(job)
            (job.folder / "settled").touch()
            keep = 0 if self.checks_last or not job.kinds else job.kinds.count(NORMAL)
            for path in job.folder.glob("*.npy"):
                number, what = path.name.split(".")[:2]
                if not what.startswith("in") or int(number) >= min(3, keep):
                    path.unlink()
            self.live -= 1
            self._next_references()

    # Measure: one problem at a time, nothing else running ------------------------------------------------------------

    def compile_ahead(self, jobs: list[TuningJob]) -> None:
        """Lets the measuring process compile XLA's side of GPU problems on some cores; a failure shows in `measure`."""
        start, early = time.perf_counter(), len(self.sent)
        self.ahead = [file for file in self._for_ahead(jobs) if file not in self.sent]
        while self.ahead and not self.time.is_spent():
            self._send_ahead()
            if self.time.is_limited:  # what is queued cannot be taken back
                self.pool.drain()
        if not self.sent:
            return
        if kernels := self._few_kernels(jobs):
            self.pool.submit(XLA, {"op": "kernels_ahead", "problems": kernels}, self.timeout, told)
        self.pool.submit(XLA, {"op": "run_ahead"}, self.timeout, told)
        self._warm_checks()
        self.pool.drain()
        self._allow_measuring()
        spent = time.perf_counter() - start
        _log.info("%d programs compiled ahead, %d of them early; waited %.2f s", len(self.sent), early, spent)

    def send_again(self, jobs: list[TuningJob]) -> None:
        """XLA's own programs of jobs, of which others were compiled, or none."""
        for job in jobs:
            job.remeasure_baseline()
            self.sent.discard(str(job.file))
        if jobs:
            self.compile_ahead(jobs)

    def _few_kernels(self, jobs: list[TuningJob]) -> dict[str, dict[str, str]]:
        """Files of kernels by the problem's, where so few are left that all will meet XLA, as far as is known."""
        left = [job for job in jobs if job.problem.device and not job.failed and str(job.file) not in self.chained]
        found = {
            str(job.file): {label: str(job.kernels[label]) for label in job.candidates if label in job.kernels}
            for job in left
        }
        few = {file: kernels for file, kernels in found.items() if 0 < len(kernels) <= self.effort.finalists}
        self.chained.update(few)
        return few

    def _for_ahead(self, jobs: list[TuningJob]) -> list[str]:
        left = [job for job in jobs if (job.compiling or job.candidates) and not job.is_derived]
        return [str(job.file) for job in left if job.problem.device and not job.failed]

    def _send_early(self) -> None:
        """Some of them where the GPU is free and the process that compiles them has no others."""
        if self.quiet is not None and not self.pool.is_busy(XLA) and self.quiet():
            self._send_ahead()

    def _send_ahead(self) -> None:
        some, self.ahead = self.ahead[:_AHEAD], self.ahead[_AHEAD:]
        self.sent.update(some)
        parted = [str(job.file) for job in self.jobs if job.apart and str(job.file) in some]
        alone = not any(job.compiling for job in self.jobs)
        request = {"op": "compile_ahead", "problems": some, "apart": parted, "alone": alone}
        self.pool.submit(XLA, request, self.timeout, told)

    def measure(self, job: TuningJob, expected: float | None = None) -> None:
        """Times what can be run of a job (``job.answer``); candidates that end the process are rejected.

        Args: expected: XLA's time [s], which then is not measured.
        """
        measured = sum(job.answer is not None for job in self.jobs)
        if job.skipped or self.time.spent() + measured * self._check_seconds() >= max(self.time.until, self._extended):
            job.skipped = True
            return
        begun = self.time.clock()
        order = job.candidates if self.checks_last else [c for c in job.candidates if c in job.passed]
        answer: Answer | CandidateRejected | None = None
        while order and not job.failed:
            answer = self._measure_once(job, order, expected)
            if not isinstance(answer, CandidateRejected):
                break
            if answer.values.get("reason") == "memory" and self.pool.sizes.get(REFERENCE):
                self._make_room()
                self.pool.stop(REFERENCE)  # idle, but not without memory of the GPU
                continue
            guilty = answer.values.get("running")
            if guilty not in order:
                job.fail(answer)  # XLA's own code, or the measuring itself
                break
            job.reject(str(guilty), answer)
            order.remove(str(guilty))
            answer = None
        if isinstance(answer, dict):
            job.answer = answer
            self.time.note_measured(self.time.clock() - begun)
            parts = listed(answer.get("parts", {}))
            _log.info("%s: measured in %.2f s (%s)", job.problem.name, answer["seconds"], parts)

    def _measure_once(self, job: TuningJob, order: list[str], expected: float | None) -> Answer | CandidateRejected:
        kept: list[Answer | CandidateRejected] = []
        request = {
            "op": "measure",
            "problem": str(job.file),
            "folder": str(job.folder),
            "sets": min(3, (job.kinds or []).count(NORMAL)),
            "mode": job.problem.mode(self.mode),
            "kernels": {label: str(job.kernels[label]) for label in order if label in job.kernels},
            "stablehlo": [label for label in order if label not in job.kernels],
            "seconds": self.effort.seconds,
            "finalists": self.effort.finalists,
            "expected": expected,
            "apart": job.apart,
        }
        # The interleaved samples run without events in between.
        sampling = self.effort.seconds * (len(order) + 2)
        self.pool.submit(XLA, request, self.timeout + sampling, kept.append)
        while not kept and self.pool.wait(3600.0):
            pass  # kernels that are needed besides are compiled meanwhile: times are the device's
        return kept[0]
