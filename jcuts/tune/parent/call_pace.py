"""Interference accounting: seconds that the user's calls lose to work beside them, by their throughput against a
baseline from windows without such work.

Calls are counted in windows that begin and end with the end of a call.  Of a window with wall time w, in which n calls
ended and something worked beside them for b seconds,

    lost = min(b, max(0, w - n * pace))

is counted, whatever has slowed the calls: the device, the processor, or that none were made.  Several processes that
work beside the calls at the same time count once: b is the length of the union of their intervals.  Seconds of slices
belong to neither w nor b: who hands the device over counts them.

The pace [s per call] is the lower quartile over the latest windows without work beside them in which the tuning thread
left the interpreter alone.  Other windows are upper bounds of it, since interference only slows calls down: the lower
quartile over them is taken where it is the smaller one, which it is after calls became cheaper.  A pace that is too
small counts too much.  As long as it is not known, all of b counts, as it does where no calls are made.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

WINDOW = 1 / 4
"""Shortest window [s]."""
FEW = 3
"""Fewest calls of a window."""
KNOWN_FROM = 4
"""Windows without work beside them from which the pace is known."""
KEPT = 64
"""Latest windows of each kind that are kept."""
BUSY = 1 / 5
"""Cores that the tuning thread uses which competes with calls for the interpreter, or more."""
PATIENCE = 10
"""Work beside the calls waits for the pace to be known for so long [s], as long as calls are made."""
SILENCE = 1
"""Without a call for this time, and for that of `FEW` calls, the user's loop does something else [s]."""


class CallPace:
    """The pace of calls, and what they lose.  Not thread-safe: its owner has a lock.

    Args: clock: monotonic seconds.
    Attributes: seconds: from the end of one call to that of the next without anything beside them, None where that is
        not known.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: float | None = None
        self._clock = clock
        self._used: Callable[[], float] = float
        self._used_seen = 0.0
        self._calm: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._disturbed: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._works = self._slices = 0  # under way
        self._begun = False  # the window that is open begins with the end of a call
        self._calls = 0
        self._wall = self._beside = 0.0  # of the window that is open [s]
        self._seen = self._called = clock()
        self._asked: float | None = None

    def watch(self, used: Callable[[], float]) -> None:
        """Another thread tunes: what was known of calls is forgotten.  Args: used: its processor seconds."""
        self._used, self._used_seen = used, used()
        self._calm.clear()
        self._disturbed.clear()
        self.seconds = self._asked = None

    def begin_work(self) -> None:
        """Something begins to work beside the calls; it may not be the only one."""
        self._advance()
        self._works += 1

    def end_work(self) -> None:
        """One of those that worked beside the calls has ended."""
        self._advance()
        self._works -= 1

    def begin_slice(self) -> None:
        """A call waits for a slice from now on: it counts elsewhere."""
        self._advance()
        self._slices += 1

    def end_slice(self) -> None:
        """A call has waited for a slice."""
        self._advance()
        self._slices -= 1

    def called(self) -> float:
        """A call has ended.  Returns: seconds that calls have lost and that were not returned before."""
        self._advance()
        self._calls += 1
        self._called = self._seen
        if self._begun and (self._wall < WINDOW or self._calls < FEW):
            return 0.0
        lost = self._lost()
        if self._begun:
            self._note(self._wall / self._calls)
        self._open(begun=True)
        return lost

    def settle(self) -> float:
        """Ends a window in which no more calls are made.  Returns: as `called`; 0 as long as calls are made."""
        self._advance()
        if not self._is_silent():
            return 0.0
        lost = self._lost()
        self._open(begun=False)
        return lost

    def outstanding(self) -> float:
        """Seconds lost that `called` has not returned yet; a call that is under way counts as lost until it ends."""
        self._advance()
        return self._lost()

    def is_worth_waiting_for(self) -> bool:
        """Whether the pace will be known soon, so that what begins then need not count in full."""
        self._advance()
        if self.seconds is not None or self._is_silent():
            return False
        if self._asked is None:
            self._asked = self._seen
        return self._seen - self._asked < PATIENCE

    def _advance(self) -> None:
        now = self._clock()
        if not self._slices:
            self._wall += now - self._seen
            if self._works:
                self._beside += now - self._seen
        self._seen = now

    def _open(self, begun: bool) -> None:
        self._begun = begun
        self._calls, self._wall, self._beside = 0, 0.0, 0.0

    def _is_silent(self) -> bool:
        return self._seen - self._called >= max(SILENCE, FEW * (self.seconds or 0))

    def _lost(self) -> float:
        if self.seconds is None or not self._begun:
            return self._beside
        return min(self._beside, max(0.0, self._wall - self._calls * self.seconds))

    def _note(self, seconds: float) -> None:
        """Takes a window's seconds per call into account."""
        used = self._used()
        busy = used - self._used_seen > BUSY * self._wall
        self._used_seen = used
        if self._beside or busy:
            self._disturbed.append(seconds)
        else:
            self._calm.append(seconds)
            if self._disturbed:  # they are forgotten as calm ones come: calls may have become slower
                self._disturbed.popleft()
        if len(self._calm) >= KNOWN_FROM:
            kinds = [self._calm, self._disturbed] if len(self._disturbed) >= KNOWN_FROM else [self._calm]
            self.seconds = min(sorted(kind)[len(kind) // 4] for kind in kinds)
