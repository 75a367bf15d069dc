"""What a first call does with the GPU while Python plans: plain XLA's program is compiled, and its algorithms timed.

That needs the GPU for itself and little of the host, as measuring kernels does; planning needs one core of the host and
no GPU.  What XLA found out is left where the measuring process reads it (`tune.autotuned`): nothing is timed twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

log = logging.getLogger("jcuts")


class Early:
    """Work on a thread of its own, one piece after the other, until somebody needs the device.

    Args:
        pieces: name -> what to do; one that fails fails again where it is needed, and is dealt with there.
        quiet: names of those that leave the device alone: they go on beside whoever needs it.
    """

    def __init__(self, pieces: Mapping[str, Callable[[], object]], quiet: Collection[str] = ()) -> None:
        self._stopped = False
        self._quiet = quiet
        self._running = ""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, args=(dict(pieces),), name="jcuts-early", daemon=True)
        self._thread.start()

    def __enter__(self) -> Early:
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
                self._running = name
            start = time.perf_counter()
            try:
                piece()
                log.info("early: %s in %.2f s", name, time.perf_counter() - start)
            except Exception as error:
                why = next(iter(str(error).splitlines()), "")
                log.info("early: %s failed: %s: %s", name, type(error).__name__, why)

    def is_done(self, wait: bool) -> bool:
        """Whether the device is left alone from now on.

        Args: wait: ends what goes on, after its piece, and waits for that.
        """
        with self._lock:
            if self._running in self._quiet:
                self._stopped = True
                return True
        if wait:
            start = time.perf_counter()
            self._stopped = True
            self._thread.join()
            log.info("early: waited for it %.2f s", time.perf_counter() - start)
        return not self._thread.is_alive()
