"""Cooperative time slicing of the device: where measurements begin, may pause, and end.

What times programs does it inside of `measuring`, and calls `pause` between rounds of samples.  With an open device
both do nothing.  While a program trains and is tuned (`jit.online`), a measurement begins when the training hands the
device over, and pauses when its slice is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class Stopped(BaseException):
    """Tuning beside the user's calls ends now: no error, and no reason against any candidate."""


class OpenDevice:
    """The device belongs to who measures.

    Attributes: sliced: whether somebody else uses the device between slices. beside: whether somebody else's program
        wants the processor now.
    """

    sliced = False
    beside = False

    def begin(self) -> None:
        """Waits for the device."""

    def pause(self) -> float:
        """Gives the device back if the slice is over, and waits for the next: for so many seconds."""
        return 0.0

    def end(self) -> None:
        """Gives the device back."""

    def check(self) -> None:
        """Raises: Stopped: nobody wants the result any more."""

    def clock(self) -> float:
        """Monotonic seconds, less those spent waiting for slices."""
        return time.monotonic()

    def try_take(self, seconds: float) -> float | None:
        """Length of a slice that somebody else may use [s], None if there was none within so many seconds."""
        return seconds

    def give(self) -> None:
        """Gives back what `try_take` took."""

    def may_use_beside(self) -> bool:
        """Whether work on the device that is not timed may begin beside the user's."""
        return True

    def begin_beside(self) -> None:
        """Something begins to work on the device beside the user's program; it may not be the only one."""

    def end_beside(self) -> None:
        """One of those that worked beside the user's program has ended, or waits."""


_OPEN = OpenDevice()
_here = threading.local()


def current() -> OpenDevice:
    """Who hands out the device on this thread."""
    return getattr(_here, "slices", _OPEN)


@contextlib.contextmanager
def using(slices: OpenDevice) -> Iterator[None]:
    """Measurements inside the block, on this thread, wait for these slices."""
    before = current()
    _here.slices = slices
    try:
        yield
    finally:
        _here.slices = before


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Holds the device, but for pauses.  Inside of another one it does nothing."""
    slices = current()
    slices.begin()
    try:
        yield
    finally:
        slices.end()


def pause() -> float:
    """A place where a measurement may be interrupted: between rounds, so that neighbouring samples share a slice.

    Returns: seconds that it was interrupted for.
    """
    return current().pause()
