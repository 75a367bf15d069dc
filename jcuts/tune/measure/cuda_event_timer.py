"""Device-side timing of a jitted XLA program between two marks (CUDA events), independent of host launch latency.

A delay kernel precedes the first event: meanwhile the host enqueues the whole program, which the device then runs
without waiting for the host.  Imports JAX.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from collections.abc import Callable

import jax

from jcuts.base.errors import NativeError
from jcuts.tune.measure import cuda_driver
from jcuts.xla import cuda_launcher

log = logging.getLogger("jcuts.tune")

LEAST_DELAY = 200e-6
"""Shortest delay of the device before the first event [s]."""
MOST_DELAY = 20e-3
"""Longest delay [s]."""
AHEAD = 1.25  # by how much the delay exceeds what the host took
TRIES = 4
WAIT = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wait(.param .u64 nanoseconds)
{
  .reg .u64 %t<4>;
  .reg .pred %p;
  ld.param.u64 %t0, [nanoseconds];
  mov.u64 %t1, %globaltimer;
again:
  mov.u64 %t2, %globaltimer;
  sub.u64 %t3, %t2, %t1;
  setp.lt.u64 %p, %t3, %t0;
  @%p bra again;
  ret;
}
"""


class Stopwatch:
    """Times programs between `cuda_launcher.begin` and `cuda_launcher.keep`; one at a time.

    Raises: NativeError: no launcher, no driver, or it does not take the waiting kernel.
    """

    def __init__(self) -> None:
        self.device = cuda_driver.device()
        self.events = cuda_driver.Events(self.device)
        self.delay = LEAST_DELAY
        self.marks = [0.0, 0.0]  # when the host came by
        self.seen = 0
        self.problem: NativeError | None = None
        self.wait = self.device.function(WAIT, "wait")
        self._hook = cuda_launcher.HOOK(self._mark)  # C holds the pointer: the object must live as long
        cuda_launcher.set_hook(self._hook)

    def _mark(self, number: int, stream: int | None) -> None:
        """Called by the launcher on XLA's thread; nothing may propagate into C."""
        try:
            with self.device.current():
                if number == 0:
                    self.marks[0] = time.perf_counter()
                    self.device.launch(self.wait, stream or 0, ctypes.c_uint64(int(self.delay * 1e9)))
                self.events.record(number, stream or 0)
            if number == 1:
                self.marks[1] = time.perf_counter()
            self.seen |= 1 << number
        except NativeError as error:
            self.problem = error

    def seconds(self, run: Callable[[], object]) -> float:
        """Time between the marks of a program on the device [s]. Args: run: runs it once, and waits for it.

        Raises: NativeError: the driver refused something, or the program has no marks.
        """
        for _ in range(TRIES):
            self.seen, self.problem = 0, None
            run()
            if self.problem is not None:
                raise self.problem
            if self.seen != 3:
                raise NativeError("a program to be timed has no marks, or XLA left them out")
            found, host = self.events.elapsed(), self.marks[1] - self.marks[0]
            enough = AHEAD * host <= self.delay or self.delay >= MOST_DELAY
            # A host that was busy once is not for ever: a delay that nobody needs any more is halved.
            wanted = 2 * AHEAD * host
            self.delay = min(MOST_DELAY, max(LEAST_DELAY, wanted, 0.5 * self.delay if enough else 0.0))
            if enough:
                break
        return found


@functools.cache
def stopwatch() -> Stopwatch | None:
    """The process' only one; None where there is no CUDA device, or none that can be asked."""
    if jax.default_backend() == "cpu":
        return None
    try:
        return Stopwatch()
    except NativeError as error:
        log.info("programs are timed by the host's clock: %s", error.message)
        return None
