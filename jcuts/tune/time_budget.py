"""Wall-clock budget of autotuning (anytime search): one deadline for all tuning sessions of a first call.

It is the time beyond ``jax.jit``'s own first call: while plain XLA's program compiles for the first time the clock is
held (`jit.variant_planning`).  `jit.variant_selection` opens it (`spending`); `tune.session` hands it to the tuner,
which asks it before it prepares, compiles or times anything.  What is under way when the time is up is ended, not
killed.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from jcuts.base import knobs
from jcuts.base.settings import Settings

CANDIDATE_SECONDS = 1.0
"""One core's time to compile and check a candidate [s]: what is assumed before anything was measured."""
PROFILED_SECONDS = 1 / 4
"""Time to measure a problem whose baseline is known from a profile [s], until one was measured."""
PROBLEM_SECONDS = 1.0
"""Time to export a problem, to make its references and to measure it [s]; the same until one was measured."""


class TimeBudget:
    """Wall time that tuning may take.

    Args: seconds: from now on [s], infinite for no limit; clock: monotonic seconds.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self.start = clock()
        self._held: float | None = None
        self._measured: list[float] = []
        self._expected = PROBLEM_SECONDS
        self._reserved = 0.0
        self.again = False
        """Whether the user asked for tuning: what another regime, or a busy machine, has chosen is measured anew."""
        self.failed = False
        """Whether tuning ended for another reason than time."""

    @property
    def is_limited(self) -> bool:
        """Whether there is a deadline."""
        return math.isfinite(self.seconds)

    def spent(self) -> float:
        """Seconds since it began, less those while it was held."""
        held = self._held
        return (self.clock() if held is None else held) - self.start

    def hold(self) -> None:
        """Stops the clock: what goes on is what ``jax.jit``'s own first call takes."""
        if self._held is None:
            self._held = self.clock()

    def release(self) -> None:
        """Lets the clock go on; nothing where it is not held."""
        if self._held is not None:
            self.start += self.clock() - self._held
            self._held = None

    def reserve(self, seconds: float) -> None:
        """Keeps time from tuning for what follows it: planning, compiling and comparing whole programs [s].

        At most half of the budget is kept, whatever is asked for.
        """
        if self.is_limited:
            self._reserved = min(self._reserved + seconds, self.seconds / 2)

    @property
    def until(self) -> float:
        """When tuning has to end [s], in seconds spent; infinite without a deadline."""
        return self.seconds - self._reserved

    def left(self) -> float:
        """Seconds until tuning has to end, < 0 after that; infinite without a deadline."""
        return self.until - self.spent() if self.is_limited else math.inf

    def unspent(self) -> float:
        """Seconds until the budget ends, what was reserved among them; infinite without a deadline."""
        return self.seconds - self.spent()

    def fail(self) -> None:
        """Says that tuning ended for another reason than time."""
        self.failed = self.is_limited  # the one without a limit belongs to all

    def is_spent(self) -> bool:
        """Whether the deadline has passed."""
        return self.left() <= 0.0

    def note_measured(self, seconds: float) -> None:
        """Takes note of how long it took to measure one problem [s]."""
        if self.is_limited:
            self._measured.append(seconds)

    def measuring_seconds(self) -> float:
        """How long measuring one problem is expected to take [s]: the mean of those that were measured."""
        return sum(self._measured) / len(self._measured) if self._measured else self._expected

    def expect_measuring(self, seconds: float) -> None:
        """Says how long measuring one problem is expected to take until one was measured [s]."""
        self._expected = seconds

    def covers(self, problems: int, candidates: int, workers: int) -> bool:
        """Whether all candidates of some problems will be measured in time, as far as can be foreseen.

        Args: candidates: of all problems together; workers: processes that compile.
        """
        needed = candidates * CANDIDATE_SECONDS / workers + problems * (PROBLEM_SECONDS + self.measuring_seconds())
        return needed <= self.left()


DEFAULT_SECONDS = 60
"""Of a function's first call beyond ``jax.jit``'s own."""
UNLIMITED = TimeBudget()
"""What `tune` has without a budget: every candidate is measured."""

_open = threading.local()


def current() -> TimeBudget:
    """The budget that is open on this thread."""
    return getattr(_open, "budget", UNLIMITED)


@contextlib.contextmanager
def spending(budget: TimeBudget) -> Iterator[TimeBudget]:
    """All tuning inside the block, on this thread, shares one budget."""
    before = current()
    _open.budget = budget
    try:
        yield budget
    finally:
        _open.budget = before


def seconds_of(settings: Settings, *, explicit: bool = False) -> float:
    """Seconds that tuning may take: the option, else ``JCUTS_TUNE_SECONDS``, else `DEFAULT_SECONDS`.

    Args: explicit: the user asked for tuning (``.tune()``): there the option alone is a limit.
    """
    if settings.tune_seconds is not None:
        return float(settings.tune_seconds)
    if explicit:
        return math.inf
    found = knobs.current().tune_seconds
    return found if found is not None else DEFAULT_SECONDS
