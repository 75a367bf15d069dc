"""Hand-over of the device between the user's calls and measurements of the same run (token passing).

The user's thread offers a slice between two calls, when one is wanted and the account allows it, and waits until it is
given back.  Who makes no calls for a while, and whose process does nothing else, is not asked.  A slice is for one
process at a time: it comes with the lock of the machine.  Calls are counted too: what works beside them is charged by
what they lose (`tune.parent.call_pace`).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from jcuts.tune.device_slices import OpenDevice, Stopped
from jcuts.tune.parent import machine_lock
from jcuts.tune.parent.call_pace import CallPace
from jcuts.tune.share_account import ShareAccount

LEAST = 1 / 20
"""Shortest slice [s]: caches hold the user's data at its begin."""
MOST = 1 / 5
"""Longest slice [s]; one round of samples goes on beyond its end."""
MOST_WAIT = 5
"""A user who has waited this long for the end of a slice goes on [s]."""
TAKEN_WITHIN = LEAST
"""Within this time a slice is taken, or offered no longer [s]."""
IDLE_AFTER = 1
"""Without a call for this time, nobody waits for the device [s]."""
WINDOW = 1 / 2
"""Over this time the process is watched [s]."""
BUSY = 1 / 5
"""Cores that a process uses which does something else, or more."""
AFTER_LOCK = 1
"""Time until another process is asked for the lock again [s]."""
LOOK = 1 / 10
FORGET = 7 / 8
"""A slice's overrun counts for the next, and less for each later one."""


class IdleWatch:
    """Whether the user's process leaves its processor alone.

    Args: clock, used: monotonic seconds, and processor seconds of this process.
    """

    def __init__(self, clock: Callable[[], float], used: Callable[[], float]) -> None:
        self._clock, self._used = clock, used
        self._calm = False
        self._seen = clock(), used()

    def skip(self) -> None:
        """What went on since the last look was tuning's own."""
        self._seen = self._clock(), self._used()

    def is_calm(self) -> bool:
        """Whether the last window had little work."""
        now, used = self._clock(), self._used()
        wall = now - self._seen[0]
        if wall >= WINDOW:
            self._calm = used - self._seen[1] <= BUSY * wall
            self._seen = now, used
        return self._calm


class DeviceGate:
    """Slices of the device for one measuring thread, from threads that call the user's functions.

    Args:
        account: what the user waits for is counted there.
        clock, used: monotonic seconds, and processor seconds of this process.
        lock: the machine's lock for one slice: a context that says whether this process has it.
    Attributes: wanted: whether somebody waits for a slice. slices: how many there were. longest: of those to come [s].
    """

    def __init__(
        self,
        account: ShareAccount,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
        lock: Callable[[], contextlib.AbstractContextManager[bool]] = machine_lock.slice_lock,
    ) -> None:
        self.account, self.clock = account, clock
        self.wanted = False
        self.slices = 0
        self.longest: float = MOST
        self._idle = IdleWatch(clock, used)
        self._lock = lock
        self._locked = contextlib.ExitStack()
        self._turn = threading.Condition()
        self._granted: float | None = None
        self._held = self._stopped = False
        self._until = self._not_before = 0.0
        self._lent = -math.inf  # until then nobody calls
        self._overrun = 0.0
        self._calls = 0  # under way
        self._last = clock()
        self._pending: Callable[[], bool] = lambda: False
        self._pace = CallPace(clock)

    # The user's thread ------------------------------------------------------------------------------------------------

    def before_call(self, ready: Callable[[], Any]) -> None:
        """Between two calls: gives a slice if one is wanted and allowed. Args: ready: waits for the call before."""
        with self._turn:
            self._calls += 1
        if self._held or self.wanted:
            self._hand_over(ready)

    def after_call(self, pending: Callable[[], bool]) -> None:
        """A call was dispatched. Args: pending: whether the device still works on it."""
        with self._turn:
            self._calls -= 1
            self._last, self._pending = self.clock(), pending
            self.account.charge(self._pace.called())

    def _hand_over(self, ready: Callable[[], Any]) -> None:
        if not self._held:
            if self.credit() < LEAST + self._overrun:
                return
            ready()
        asked = 0.0
        with self._turn:
            if not self._held and (not self.wanted or self._stopped):
                return
            start = self.clock()
            self._pace.begin_slice()
            try:
                if not self._held:
                    asked = self._granted = min(self.longest, self.credit() - self._overrun)
                    self._turn.notify_all()
                    self._turn.wait_for(lambda: self._granted is None or self._stopped, TAKEN_WITHIN)
                    self._granted = None
                self._turn.wait_for(lambda: not self._held or self._stopped, MOST_WAIT)
            finally:
                self._pace.end_slice()
                spent = self.clock() - start
                self.account.charge(spent)
            if asked:
                self._overrun = max(0.0, spent - asked, FORGET * self._overrun)

    def lend(self, seconds: float, ended: threading.Event) -> bool:
        """Hands the device over until something has ended, or for so many seconds: the caller makes no call meanwhile.

        Returns: whether it has ended.  A slice that is under way then is waited for, as before any call.
        """
        with self._turn:
            self._lent = self.clock() + seconds
            self._turn.notify_all()
        try:
            return ended.wait(min(seconds, threading.TIMEOUT_MAX)) or ended.is_set()
        finally:
            with self._turn:
                self._lent = -math.inf
                self._turn.wait_for(lambda: not self._held or self._stopped, MOST_WAIT)

    @property
    def is_lent(self) -> bool:
        """Whether a caller waits for what is measured (`lend`)."""
        return self._lent > -math.inf

    # Both -------------------------------------------------------------------------------------------------------------

    def credit(self) -> float:
        """Seconds that the user may wait now, less what calls have lost to work beside them and is not charged yet."""
        with self._turn:
            return self.account.credit() - self._pace.outstanding()

    # The measuring thread ---------------------------------------------------------------------------------------------

    def take(self, timeout: float) -> float | None:
        """Length of a slice [s], which is this thread's until `give`; None if there was none in time.

        Raises: Stopped: nobody waits for what would be measured.
        """
        end = self.clock() + timeout
        with self._turn:
            self.wanted = self.clock() >= self._not_before
            try:
                while self._granted is None:
                    self.check()
                    if self.clock() >= self._not_before and (self.is_lent or self._is_idle()):
                        self._granted = max(self._lent - self.clock(), LEAST) if self.is_lent else self.longest
                        break
                    if self.clock() >= end:
                        return None
                    self._turn.wait(min(LOOK, timeout))
                seconds, self._granted, self._held = self._granted, None, True
                self._turn.notify_all()
            finally:
                self.wanted = False
        if not self._locked.enter_context(self._lock()):
            self._not_before = self.clock() + AFTER_LOCK
            self.give()
            return None
        self.slices += 1
        self._until = self.clock() + seconds
        return seconds

    def is_over(self) -> bool:
        """Whether the slice that is held has had its time."""
        return self.clock() >= self._until

    def give(self) -> None:
        """Gives the slice back; nothing where none is held."""
        self._locked.close()
        with self._turn:
            self._held = False
            self._idle.skip()
            self._turn.notify_all()

    def tuned_here(self) -> None:
        """The calling thread is the one that measures from now on."""
        used = _thread_seconds()
        with self._turn:
            self._pace.watch(used)

    def may_use_beside(self) -> bool:
        """Whether work that cannot be cut may begin beside the user's calls; it waits until their pace is known."""
        with self._turn:
            self.account.charge(self._pace.settle())
            return self.credit() > 0.0 and not self._pace.is_worth_waiting_for()

    def begin_beside(self) -> None:
        """Something begins to work beside the user's calls, which counts by what they lose until `end_beside`."""
        with self._turn:
            self._pace.begin_work()

    def end_beside(self) -> None:
        """One of those that worked beside the user's calls has ended."""
        with self._turn:
            self._pace.end_work()
            self.account.charge(self._pace.settle())

    def check(self) -> None:
        """Raises: Stopped: see `stop`."""
        if self._stopped:
            raise Stopped

    def stop(self, stopped: bool = True) -> None:
        """Ends what is measured at the next place where it asks. Args: stopped: False lets the next begin."""
        with self._turn:
            self._stopped = stopped
            self._turn.notify_all()

    def _is_idle(self) -> bool:
        if self._calls or self.clock() - self._last < IDLE_AFTER or self._pending():
            return False
        return self._idle.is_calm()


def _thread_seconds() -> Callable[[], float]:
    """Processor seconds of the calling thread, for other threads; 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return float
    thread = time.pthread_getcpuclockid(threading.get_ident())

    def seconds() -> float:
        with contextlib.suppress(OSError):  # it has ended
            return time.clock_gettime(thread)
        return 0.0

    return seconds


class GateSlices(OpenDevice):
    """Slices of a gate, for the thread that tunes, which makes them (`tune.device_slices`)."""

    sliced = True

    @property
    def beside(self) -> bool:  # type: ignore[override]
        """Whether the user's program runs; while a caller waits it does not."""
        return not self._gate.is_lent

    def __init__(self, gate: DeviceGate) -> None:
        self._gate = gate
        self._depth = 0
        self._blocked = 0.0
        gate.tuned_here()

    def begin(self) -> None:
        """Waits for a slice, unless this thread is inside of one."""
        if not self._depth:
            self._take()
        self._depth += 1

    def pause(self) -> float:
        """Gives a slice back that is over, and waits for the next: for so many seconds."""
        self.check()
        if not self._depth or not self._gate.is_over():
            return 0.0
        start = time.monotonic()
        self._gate.give()
        self._take()
        return time.monotonic() - start

    def end(self) -> None:
        """Gives the slice back at the end of the outermost block."""
        self._depth -= 1
        if not self._depth:
            self._gate.give()

    def check(self) -> None:
        """Raises: Stopped: see `DeviceGate.stop`."""
        self._gate.check()

    def clock(self) -> float:
        """Monotonic seconds, less those spent waiting for slices: what a tuning budget counts."""
        return time.monotonic() - self._blocked

    def try_take(self, seconds: float) -> float | None:
        """A slice for a measuring process; `give` gives it back."""
        start = time.monotonic()
        try:
            return self._gate.take(seconds)
        finally:
            self._blocked += time.monotonic() - start

    def give(self) -> None:
        """Gives back what `try_take` took."""
        self._gate.give()

    def may_use_beside(self) -> bool:
        """Whether the account allows more work on the device beside the user's."""
        return self._gate.may_use_beside()

    def begin_beside(self) -> None:
        """Something begins to work on the device beside the user's program: see `DeviceGate.begin_beside`."""
        self._gate.begin_beside()

    def end_beside(self) -> None:
        """One of those that worked beside the user's program has ended, or waits."""
        self._gate.end_beside()

    def _take(self) -> None:
        while self.try_take(1.0) is None:
            pass
