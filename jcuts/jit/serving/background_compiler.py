"""A thread that compiles what a server will need, while calls run what is compiled."""

from __future__ import annotations

import atexit
import collections
import functools
import logging
import threading
from collections.abc import Callable

log = logging.getLogger("jcuts")
AT_EXIT = 20
"""Most seconds that the end of the process waits: XLA's compiler cannot be interrupted."""


class BackgroundCompiler:
    """Work in its order on one thread, which lives while there is any."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._over = False

    def submit(self, work: Callable[[], None]) -> None:
        """Does it later. Args: work: what it raises is logged."""
        with self._lock:
            if self._over:
                return
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jcuts-compile", daemon=True)
                self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is left to do, for so many seconds at most; whether that is so."""
        with self._lock:
            return self._lock.wait_for(lambda: self._thread is None, timeout)

    def close(self) -> None:
        """Drops what has not begun, and waits for what has."""
        with self._lock:
            self._over = True
            self._work.clear()
            thread = self._thread
        if thread is not None:
            thread.join(AT_EXIT)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._thread = None
                    self._lock.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except Exception:
                log.exception("compiling beside calls failed")


@functools.cache
def shared() -> BackgroundCompiler:
    """The compiler thread of this process."""
    compiler = BackgroundCompiler()
    atexit.register(compiler.close)
    return compiler
