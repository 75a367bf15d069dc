"""The background thread of online autotuning: one per process, with the gate through which it gets the device.

All functions that are tuned beside their calls share it: there is one device, one run, and one account of what the user
waits for.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from jcuts.base import knobs
from jcuts.tune import device_slices
from jcuts.tune.device_gate import MOST, DeviceGate, GateSlices
from jcuts.tune.parent import machine_lock
from jcuts.tune.share_account import ShareAccount

log = logging.getLogger("jcuts")
AT_EXIT = 20
"""Most seconds that the end of the process waits for the thread: XLA's compiler cannot be interrupted."""


SWITCH_INTERVAL = 1 / 1000
"""The interpreter's switch interval while anything is tuned [s]: a call waits so long for the lock, several times."""


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Shortens the interpreter's switch interval (`sys.setswitchinterval`), unless it is shorter, and restores it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL))
    mine = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == mine:  # else somebody else has set it meanwhile
            sys.setswitchinterval(before)


def _online_share() -> float:
    return knobs.current().online_share


class Listener(Protocol):
    """Who sends its calls through the gate while anything is tuned."""

    def refresh(self) -> None:
        """Tuning began, or nothing is tuned any more."""
        ...


@dataclass(eq=False)
class Job:
    """Tuning of one call signature.

    Attributes: owner: whose it is; work: tunes; ended: set once it is over, however it ended; share: of the run that
        calls may wait for it; rank: of those that wait the one with the highest comes next, the first of equal ones;
        longest: slice of the device that it takes [s].
    """

    owner: Any
    work: Callable[[], None]
    ended: threading.Event
    share: Callable[[], float]
    rank: Callable[[], float]
    longest: float


class BackgroundTuner:
    """Jobs, one after the other, on one thread, which lives while there are any.

    Args: gate: hands out the device.
    Attributes: last: the smallest result of the last call: it is ready when all of them are.
    """

    def __init__(self, gate: DeviceGate) -> None:
        self.gate = gate
        self.last: Any = None
        self._lock = threading.RLock()
        self._jobs: collections.deque[Job] = collections.deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._over = False

    @property
    def is_active(self) -> bool:
        """Whether anything is tuned, or waits for it."""
        return self._running is not None or bool(self._jobs)

    def share(self) -> float:
        """Share of the run that calls may wait for what is tuned now, in [0, 1]."""
        job = self._running
        return _online_share() if job is None else job.share()

    def listen(self, listener: Listener) -> None:
        """Tells a function when calls have to go through the gate."""
        self._listeners.add(listener)

    def submit(
        self,
        owner: Any,
        work: Callable[[], None],
        share: Callable[[], float] = _online_share,
        rank: Callable[[], float] = float,
        longest: float = MOST,
    ) -> Job | None:
        """Tunes when its turn comes; None at the end of the process, where nothing is tuned any more.

        Args: work: may raise anything: it is logged; share, rank, longest: `Job`.
        """
        with self._lock:
            if self._over:
                return None
            job = Job(owner, work, threading.Event(), share, rank, longest)
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="jcuts-online", daemon=True)
                self._thread.start()
        self._tell()
        return job

    @property
    def waiting(self) -> int:
        """How many jobs wait for their turn."""
        return len(self._jobs)

    def is_here(self) -> bool:
        """Whether the calling thread is the one that tunes."""
        return threading.current_thread() is self._thread

    def cancel(self, owner: Any) -> None:
        """Ends all jobs of an owner, and waits until none is under way."""
        with self._lock:
            for dropped in [job for job in self._jobs if job.owner is owner]:
                self._jobs.remove(dropped)
                dropped.ended.set()
            job = self._running
            mine = job is not None and job.owner is owner
            if mine:
                self.gate.stop()
        if mine and job is not None and threading.current_thread() is not self._thread:
            job.ended.wait()

    def wait(self, owner: Any, timeout: float | None = None) -> bool:
        """Waits until nothing of an owner is tuned, for at most so many seconds; whether that is so."""
        with self._lock:
            left = [job for job in (self._running, *self._jobs) if job is not None and job.owner is owner]
        return all(job.ended.wait(timeout) for job in left)

    def close(self) -> None:
        """Ends all of it, at the end of the process."""
        with self._lock:
            self._over = True
            self._jobs.clear()
            self.gate.stop()
            thread = self._thread
        if thread is not None:
            thread.join(AT_EXIT)

    def _work(self) -> None:
        slices = GateSlices(self.gate)
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    break
                job = self._running = max(self._jobs, key=lambda waiting: waiting.rank())
                self._jobs.remove(job)
                self.gate.longest = job.longest
                self.gate.stop(self._over)
            try:
                with device_slices.using(slices), machine_lock.by_slices(), short_turns():
                    job.work()
            except device_slices.Stopped:
                log.info("online tuning was stopped")
            except Exception:
                log.exception("online tuning failed, the program of XLA goes on")
            finally:
                with self._lock:
                    self._running = None
                job.ended.set()
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener.refresh()


@functools.cache
def shared() -> BackgroundTuner:
    """The background tuner of this process."""
    tuner = BackgroundTuner(DeviceGate(ShareAccount(lambda: tuner.share())))
    atexit.register(tuner.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=shared.cache_clear)  # the thread is the parent's
    return tuner
