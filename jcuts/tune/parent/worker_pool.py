"""Process pool of measuring workers: asynchronous requests with deadlines, crashes and hangs as errors, no threads.

One event loop in the calling thread writes requests and reads answers.  A worker that dies, hangs or breaks the
protocol is killed and replaced; its request fails with `WorkerFailed`, the others continue.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jcuts.base import errors
from jcuts.base.errors import CandidateRejected, WorkerFailed
from jcuts.tune import device_slices
from jcuts.tune.parent.slice_turns import SliceTurns
from jcuts.tune.parent.worker_environment import BESIDE, NICE, environment

Answer = dict[str, Any]
Done = Callable[["Answer | CandidateRejected"], None]
START_SECONDS = 120.0
"""A new process may import JAX on a slow network file system before its first answer."""
_MAX_LINE = 64 * 2**20
_MAX_STARTS = 3

_alive: weakref.WeakSet[Worker] = weakref.WeakSet()


@dataclass
class Task:
    """One request.

    Attributes:
        request: JSON value; the pool adds ``id``.
        timeout: seconds without an answer or event after which the worker is killed.
        done: called with the answer, or with the error that stands for it.
    """

    request: dict[str, Any]
    timeout: float
    done: Done = field(repr=False)


class Worker:
    """One measuring process."""

    def __init__(
        self, folder: Path, number: int, platform: str = "cpu", more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.log = folder / f"worker{number}.log"
        with open(self.log, "wb") as log:
            # -P: a user's ./jax.py or ./numpy.py must not be imported instead of the real one.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jcuts.tune.worker.main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment(platform), **more},
            )
        _alive.add(self)
        assert self.process.stdout is not None and self.process.stdin is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.buffer = b""
        self.task: Task | None = None
        self.deadline = float("inf")
        self.running = ""
        self.id = 0
        self.answered = False

    def send(self, task: Task) -> None:
        """Sends a request (small: arrays travel as files)."""
        self.task, self.running = task, ""
        self.id += 1
        self.deadline = time.monotonic() + task.timeout + (0.0 if self.answered else START_SECONDS)
        self.write({"id": self.id, **task.request})

    def write(self, message: dict[str, Any]) -> None:
        """Writes one line to the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end shows as end of file on stdout
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[Answer] | None:
        """Complete lines that have arrived; None at end of file.

        Raises:
            ValueError: not the protocol.
        """
        assert self.process.stdout is not None
        while True:
            try:
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not chunk and b"\n" not in self.buffer:
                return None
            if not chunk:  # its last words first: they say what was running
                break
            self.buffer += chunk
            if len(self.buffer) > _MAX_LINE:
                raise ValueError("an answer of more than 64 MiB")
        *lines, self.buffer = self.buffer.split(b"\n")
        answers = [json.loads(line) for line in lines]
        if not all(isinstance(a, dict) and "id" in a for a in answers):
            raise ValueError("an answer that is not an object with an id")
        return answers

    def kill(self) -> None:
        """Ends the process at once; `stop` collects it."""
        with contextlib.suppress(OSError):
            self.process.kill()

    def stop(self) -> None:
        """Ends the process, at once, and collects it."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        _alive.discard(self)

    def stderr_tail(self) -> str:
        """The end of what it wrote to stderr."""
        try:
            return self.log.read_bytes()[-2000:].decode(errors="replace").strip()
        except OSError:
            return ""


def _end(workers: Iterable[Worker]) -> None:
    """Ends workers side by side: a process with a CUDA context takes a tenth of a second to end."""
    ending = list(workers)
    for worker in ending:
        worker.kill()
    for worker in ending:
        worker.stop()


@atexit.register
def _stop_all() -> None:
    _end(list(_alive))


class WorkerPool:
    """Named groups of workers, each with its own queue.

    Args:
        folder: private folder of the session, for logs.
        sizes: group name -> most processes; they start when there is work for them.
        platform: what JAX runs on there.
        more: group name -> environment variables of its processes.

    Use it as a context manager: every process is gone when the block ends, however it ends.
    """

    def __init__(
        self,
        folder: Path,
        sizes: dict[str, int],
        platform: str = "cpu",
        more: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.platform = platform
        self.more = more
        self.sizes = sizes
        self.queues: dict[str, collections.deque[Task]] = {name: collections.deque() for name in sizes}
        self.workers: dict[str, list[Worker]] = {name: [] for name in sizes}
        self.selector = selectors.DefaultSelector()
        self.started = 0
        self.failed_starts = 0
        self.restarts = 0
        self.slices = device_slices.current()
        self.turns = SliceTurns(self.slices)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
        self.selector.close()

    def submit(self, group: str, request: dict[str, Any], timeout: float, done: Done) -> None:
        """Queues a request for any worker of a group.  ``done`` may submit more."""
        self.queues[group].append(Task({**request, **({"sliced": True} if self.slices.sliced else {})}, timeout, done))

    def warm(self, group: str, what: str, timeout: float) -> None:
        """Starts the workers of a group that has none, and lets them load what later requests need.

        Args: what: see `operations.warm`.
        """
        if not self.workers[group] and not self.queues[group]:
            for _ in range(self.sizes[group]):
                self.submit(group, {"op": "warm", "what": what}, timeout, lambda _: None)
            self.poll()

    def drain(self) -> None:
        """Runs until no request is queued or under way."""
        while self._step(3600.0):
            pass

    def wait(self, seconds: float) -> bool:
        """Hands out and hears for at most so many seconds; False if nothing is queued or under way."""
        return self._step(seconds)

    def poll(self) -> None:
        """Hands out what is queued and hears what has been answered, without waiting."""
        self._step(0.0)

    def _step(self, patience: float) -> bool:
        """One round of the event loop, of at most so many seconds; False if nothing is under way."""
        self.slices.check()
        self._dispatch()
        busy = [w for w in self._all() if w.task is not None]
        if not busy:
            return self.turns.wait_for_credit(any(self.queues.values()))
        patience = self.turns.patience(patience)
        wait = max(0.0, min(w.deadline for w in busy) - time.monotonic())
        for key, _ in self.selector.select(min(wait, patience)):
            self._handle_answer(key.data)
        self.turns.grant()
        now = time.monotonic()
        for worker in [w for w in self._all() if w.task is not None and w.deadline <= now]:
            assert worker.task is not None
            self._fail(worker, f"no answer within {worker.task.timeout:g} s: it was killed", reason="timeout")
        self._dispatch()
        return True

    def stop(self, group: str) -> None:
        """Ends the workers of a group (they start again when needed)."""
        self._stop([group])

    def is_busy(self, group: str) -> bool:
        """Whether anything is queued or under way there."""
        return bool(self.queues[group]) or any(w.task is not None for w in self.workers[group])

    def shrink(self, group: str, size: int, heir: str = "") -> None:
        """Lets a group have fewer workers: those that are too many end when they are idle.

        Args: heir: the group that takes over what is queued where none are left.
        """
        self.sizes[group] = min(size, self.sizes[group])
        if not self.sizes[group]:
            self.queues[heir].extend(self.queues[group])
            self.queues[group].clear()

    def abandon(self) -> None:
        """Forgets what is queued and ends every worker (they start again when needed)."""
        for queue in self.queues.values():
            queue.clear()
        self._stop(self.workers)

    def _stop(self, groups: Iterable[str]) -> None:
        ended = [worker for group in groups for worker in self.workers[group]]
        for worker in ended:
            self._forget(worker)
        _end(ended)
        self.workers.update({group: [] for group in groups})

    def pids(self) -> list[int]:
        """Process ids of the workers, for tests."""
        return [w.process.pid for w in self._all()]

    def _all(self) -> Iterable[Worker]:
        return [w for group in self.workers.values() for w in group]

    def _dispatch(self) -> None:
        for group, workers in self.workers.items():
            idle = [worker for worker in workers if worker.task is None]
            for worker in idle[: max(0, len(workers) - self.sizes[group])]:
                self._forget(worker)
                worker.stop()
                workers.remove(worker)
        for group, waiting in self.queues.items():
            while waiting:
                if sum(w.task is not None for w in self.workers[group]) >= self.sizes[group]:
                    break
                worker = next((w for w in self.workers[group] if w.task is None), None)
                if worker is None:
                    worker = self._start(group)
                if worker is None:
                    self._give_up(group)
                    break
                if not self.turns.may_begin(self.platform, waiting[0].request):
                    break
                task = waiting.popleft()
                worker.send(task)
                self.turns.sent(self.platform, worker, task.request)

    def _start(self, group: str) -> Worker | None:
        if not sys.executable or self.failed_starts >= _MAX_STARTS:
            return None
        try:
            more = {**self.more.get(group, {}), **({NICE: BESIDE} if self.slices.beside else {})}
            worker = Worker(self.folder, self.started, self.platform, more)
        except (OSError, ValueError, subprocess.SubprocessError):
            self.failed_starts = _MAX_STARTS
            return None
        self.started += 1
        self.workers[group].append(worker)
        self.selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        return worker

    def _give_up(self, group: str) -> None:
        """No process can be started: every queued request of the group fails."""
        waiting, self.queues[group] = self.queues[group], collections.deque()
        for task in waiting:
            task.done(
                WorkerFailed("the measuring process cannot be started", reason="start", executable=sys.executable)
            )

    def _handle_answer(self, worker: Worker) -> None:
        try:
            answers = worker.read()
        except ValueError as error:
            self._fail(worker, f"it answered nonsense: {error}", reason="protocol")
            return
        if answers is None:
            code = worker.process.wait()
            self._fail(worker, f"it ended with {_status(code)}", reason="crash", status=code)
            return
        for answer in answers:
            task = worker.task
            if task is None or answer["id"] != worker.id:
                self._fail(worker, f"an answer to request {answer['id']} that nobody asked", reason="protocol")
                return
            if not worker.answered:
                worker.answered = True
                self.failed_starts = 0
            worker.deadline = time.monotonic() + task.timeout
            if self.turns.heard(worker, answer):
                continue
            if "event" in answer:
                worker.running = str(answer.get("label", ""))
                continue
            self.turns.ended(worker)
            worker.task, worker.deadline = None, float("inf")
            task.done(answer if answer.get("ok") else _error(answer, worker.running))

    def _fail(self, worker: Worker, what: str, **values: object) -> None:
        task = worker.task
        self._forget(worker)
        worker.stop()
        for group in self.workers.values():
            if worker in group:
                group.remove(worker)
        self.restarts += 1
        if not worker.answered:
            self.failed_starts += 1
        if task is not None:
            op = task.request.get("op", "?")
            task.done(
                WorkerFailed(
                    f"the measuring process failed during {op!r}: {what}",
                    op=op,
                    running=worker.running,
                    stderr=worker.stderr_tail(),
                    **values,
                )
            )

    def _forget(self, worker: Worker) -> None:
        self.turns.ended(worker)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(worker.process.stdout)  # type: ignore[arg-type]


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _error(answer: Answer, running: str) -> CandidateRejected:
    kind = getattr(errors, str(answer.get("error")), WorkerFailed)
    if not (isinstance(kind, type) and issubclass(kind, CandidateRejected)):
        kind = WorkerFailed
    values = answer.get("values")
    safe = {k: v for k, v in (values if isinstance(values, dict) else {}).items() if k not in ("message", "values")}
    return kind(str(answer.get("message", "no reason given")), **{"running": running, **safe})
