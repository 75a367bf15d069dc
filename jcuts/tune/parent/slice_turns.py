"""Slices of the device for worker processes (token passing): one measures at a time, while the user's program pauses.

A process asks by the event ``slice`` and gives back by ``slice end``, by its answer, or by its end.  What uses a GPU
without being timed (references, checks, XLA's compiler with its own timings) cannot be cut into slices: it runs beside
the user's program, begins only while the account allows it, and counts by what the user's calls lose meanwhile
(`tune.parent.call_pace`).
"""

from __future__ import annotations

import collections
import time
from typing import Any, Protocol

from jcuts.tune.device_slices import OpenDevice
from jcuts.tune.parent.worker_environment import yield_processor

LISTEN = 1 / 20
"""Answers of other processes are heard this often while one waits for a slice [s]."""
STOP_WITHIN = 1 / 2
"""Time within which tuning beside the user's calls hears that it has to stop [s]."""
ON_DEVICE = frozenset({"reference", "check", "measure", "compile_ahead", "kernels_ahead", "run_ahead"})
"""Requests that use a GPU."""


class Process(Protocol):
    """What a worker process is here."""

    task: Any
    deadline: float
    process: Any

    def write(self, message: dict[str, Any]) -> None:
        """Writes one line to the process."""
        ...


class SliceTurns:
    """Whose turn it is. Args: slices: who hands them out."""

    def __init__(self, slices: OpenDevice) -> None:
        self._slices = slices
        self._waiting: collections.deque[Process] = collections.deque()
        self._holder: Process | None = None
        self._quick: list[Process] = []  # they have the user's priority, which waits for them
        # Processes whose request counts, and whether it does now: not while they wait for a slice or have one.
        self._beside: dict[int, bool] = {}

    def heard(self, worker: Process, answer: dict[str, Any]) -> bool:
        """Takes note of an event about slices; False for all others."""
        event = answer.get("event")
        if event == "slice":
            self._waiting.append(worker)
            self._set_beside(worker, False)
            worker.deadline = float("inf")
        elif event == "slice end":
            self._release(worker)
            self._set_beside(worker, True)
        else:
            return False
        return True

    def patience(self, seconds: float) -> float:
        """How long to listen to processes [s]: not at all where a slice can be asked for."""
        if not self._slices.sliced:
            return seconds
        while self._quick and self._slices.beside:
            yield_processor(self._quick.pop().process.pid)
        return 0.0 if self._waiting and self._holder is None else min(seconds, STOP_WITHIN)

    def grant(self) -> None:
        """Gives a slice to the next process, if there is one and the user's program lends it now."""
        if not self._waiting or self._holder is not None:
            return
        seconds = self._slices.try_take(LISTEN)
        if seconds is None:
            return
        worker = self._holder = self._waiting.popleft()
        worker.deadline = time.monotonic() + worker.task.timeout
        worker.write({"op": "slice", "seconds": seconds})

    def ended(self, worker: Process) -> None:
        """A request is over, or its process."""
        self._waiting = collections.deque(w for w in self._waiting if w is not worker)
        self._release(worker)
        self._set_beside(worker, False)
        self._beside.pop(id(worker), None)

    def may_begin(self, platform: str, request: dict[str, Any]) -> bool:
        """Whether a request may be handed out now."""
        on_device = platform != "cpu" and request.get("op") in ON_DEVICE
        return not (on_device and self._slices.sliced) or self._slices.may_use_beside()

    def sent(self, platform: str, worker: Process, request: dict[str, Any]) -> None:
        """A request was handed out."""
        if self._slices.sliced and not self._slices.beside and worker not in self._quick:
            self._quick.append(worker)
        if self._slices.sliced and platform != "cpu" and request.get("op") in ON_DEVICE:
            self._beside[id(worker)] = True
            self._slices.begin_beside()

    def wait_for_credit(self, queued: bool) -> bool:
        """Waits a moment where all that is queued has to wait for the account; whether anything is queued."""
        if queued and self._slices.sliced:
            time.sleep(LISTEN)
        return queued and self._slices.sliced

    def _set_beside(self, worker: Process, works: bool) -> None:
        if self._beside.get(id(worker)) is (not works):
            self._beside[id(worker)] = works
            (self._slices.begin_beside if works else self._slices.end_beside)()

    def _release(self, worker: Process) -> None:
        if worker is self._holder:
            self._holder = None
            self._slices.give()
