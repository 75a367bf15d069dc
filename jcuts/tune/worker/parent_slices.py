"""Slices of the device for a measuring process, which its parent hands out (`tune.parent.slice_turns`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from jcuts.tune.device_slices import OpenDevice


class Queue(Protocol):
    """Messages of the parent."""

    def get(self) -> dict[str, Any]:
        """The next one, waited for."""
        ...


class ParentSlices(OpenDevice):
    """Slices of one request.

    Args: tell: sends an event to the parent; granted: its answers; clock: monotonic seconds.
    """

    sliced = True

    def __init__(
        self, tell: Callable[[str], None], granted: Queue, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._tell, self._granted, self._clock = tell, granted, clock
        self._depth = 0
        self._until = 0.0

    def begin(self) -> None:
        """Waits for a slice, unless inside of one."""
        if not self._depth:
            self._ask()
        self._depth += 1

    def pause(self) -> float:
        """Gives a slice back that is over, and waits for the next: for so many seconds."""
        start = self._clock()
        if not self._depth or start < self._until:
            return 0.0
        self._tell("slice end")
        self._ask()
        return self._clock() - start

    def end(self) -> None:
        """Gives the slice back at the end of the outermost block."""
        self._depth -= 1
        if not self._depth:
            self._tell("slice end")

    def _ask(self) -> None:
        self._tell("slice")
        self._until = float(self._granted.get()["seconds"]) + self._clock()
