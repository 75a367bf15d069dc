"""Background thread of a first call: compiles and autotunes plain XLA's program on the GPU while Python plans.

The two do not compete: XLA's autotuning needs the GPU for itself and little of the host, planning needs one core of the
host and no GPU.  XLA's autotuning results are left where the measuring process reads them
(`tune.baseline.autotune_cache`), so nothing is timed twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

log = logging.getLogger("jcuts")


class BackgroundWork:
    """A queue of tasks on one background thread, which stops when the device is needed.

    Args:
        pieces: name -> what to do; one that fails fails again where it is needed, and is dealt with there.
        light: names of those that keep the host busy, and the device for milliseconds: they begin and go on while
            somebody else compiles for it, and times algorithms, but not while anything is measured.
        quiet: names of those that leave the device alone: they also begin and go on beside measurements.
    """

    def __init__(
        self, pieces: Mapping[str, Callable[[], object]], light: Collection[str] = (), quiet: Collection[str] = ()
    ) -> None:
        self._stopped = False  # no piece begins any more
        self._given = self._measuring = False  # only light and quiet ones begin; only quiet ones do
        self._light, self._quiet = {*light, *quiet}, {*quiet}
        self._running = ""
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(dict(pieces),), name="jcuts-early", daemon=True)
        self._thread.start()

    def __enter__(self) -> BackgroundWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = True
        if kind is None or issubclass(kind, Exception):  # who presses Ctrl-C does not want to wait
            self._thread.join()

    def _work(self, pieces: dict[str, Callable[[], object]]) -> None:
        for name, piece in pieces.items():
            with self._lock:
                if self._stopped:
                    return
                if name not in self._quiet and (self._measuring or (self._given and name not in self._light)):
                    continue
                self._running = name
            start = time.perf_counter()
            try:
                piece()
                log.info("early: %s in %.2f s", name, time.perf_counter() - start)
            except Exception as error:
                why = next(iter(str(error).splitlines()), "")
                log.info("early: %s failed: %s: %s", name, type(error).__name__, why)
            with self._lock:
                self._running = ""
                self._lock.notify_all()

    def quiesce(self, wait: bool) -> bool:
        """Whether the device is left alone from now on, but for light pieces.

        Args: wait: by those as well, for measurements: only quiet ones begin, and what else goes on ends before this
            does.
        """
        with self._lock:
            if not wait:
                alone = self._running in self._light
                self._given = self._given or alone
                return alone or not self._thread.is_alive()
            self._measuring = True
            if self._running not in {"", *self._quiet}:
                start = time.perf_counter()
                self._lock.wait_for(lambda: self._running in {"", *self._quiet})
                log.info("early: waited for it %.2f s", time.perf_counter() - start)
            return True
