"""Accounting of tuning beside the user's calls: seconds that the user has waited, and what is left of a share of the
run.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class ShareAccount:
    """What tuning may take of a run.

        used = waited / (now - first call) <= share

    Args: share: of the wall time, in (0, 1], asked each time; clock: monotonic seconds.
    Attributes: waited: seconds that the user has waited.
    """

    def __init__(self, share: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self.share, self.clock = share, clock
        self.waited = 0.0
        self._start: float | None = None

    def begin(self) -> None:
        """The run begins now, unless it has begun."""
        if self._start is None:
            self._start = self.clock()

    def elapsed(self) -> float:
        """Seconds since the first call."""
        return 0.0 if self._start is None else self.clock() - self._start

    def used(self) -> float:
        """Share of the run that the user has waited, in [0, 1]."""
        elapsed = self.elapsed()
        return self.waited / elapsed if elapsed > 0 else 0.0

    def credit(self) -> float:
        """Seconds that the user may wait now; < 0 after something took longer than was foreseen."""
        return self.share() * self.elapsed() - self.waited

    def charge(self, seconds: float) -> None:
        """Counts seconds that the user has waited."""
        self.waited += max(0.0, seconds)
