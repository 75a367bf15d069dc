"""Broadcast and all-gather of bytes among the processes that run one program, over JAX's coordination service.

Nothing here touches a device, so that a process may measure while the others wait.  Processes of one group make the
same exchanges in the same order, as they make the same calls: the key of an exchange is its number.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Sequence

from jcuts.base.errors import UnsupportedError
from jcuts.trace import jaxapi

log = logging.getLogger("jcuts")
POLL_SECONDS = 60
"""Seconds of waiting between two lines of the log.  The service ends the job where a process has died."""
_lock = threading.Lock()
_exchanges: collections.Counter[tuple[int, ...]] = collections.Counter()


class ProcessGroup:
    """The processes that run one program.

    Args: processes: their numbers (`jax.process_index`); me: this one's; store: the job's key-value store.
    """

    def __init__(self, processes: Sequence[int], me: int, store: jaxapi.CoordinationStore) -> None:
        self.processes = tuple(sorted(processes))
        self.me = me
        self._store = store
        self._sent: str | None = None  # what the others may not have read yet

    @property
    def leader(self) -> int:
        """The process that tunes: the first."""
        return self.processes[0]

    @property
    def leads(self) -> bool:
        """Whether this process tunes."""
        return self.me == self.leader

    def broadcast(self, value: bytes | None, what: str) -> bytes:
        """The leader's bytes, in every process.  Args: value: in the leader; what: is waited for, for the log."""
        key = self._next()
        if self.leads:
            assert value is not None
            self._sent = f"{key}/{self.leader}"
            self._store.put(self._sent, value)
            return value
        return self._wait(f"{key}/{self.leader}", what)

    def all_gather(self, value: bytes, what: str) -> dict[int, bytes]:
        """The bytes of every process, by its number.  Args: what: is waited for, for the log."""
        key = self._next()
        self._store.put(f"{key}/{self.me}", value)
        found = {rank: value if rank == self.me else self._wait(f"{key}/{rank}", what) for rank in self.processes}
        if self._sent is not None:  # who takes part in this exchange has read that of before
            self._store.delete(self._sent)
            self._sent = None
        return found

    def _next(self) -> str:
        with _lock:
            _exchanges[self.processes] += 1
            number = _exchanges[self.processes]
        return f"jcuts/{'-'.join(map(str, self.processes))}/{number}"

    def _wait(self, key: str, what: str) -> bytes:
        waited = 0.0
        while True:
            value = self._store.get(key, POLL_SECONDS)
            if value is not None:
                return value
            waited += POLL_SECONDS
            log.info("process %d waits for %s since %.0f s", self.me, what, waited)


def group_of(processes: Sequence[int], me: int) -> ProcessGroup:
    """The group of these processes.

    Raises: UnsupportedError: they have no coordination service, so that they cannot agree on a program.
    """
    store = jaxapi.coordination_store()
    if store is None:
        raise UnsupportedError("several processes, but jax.distributed.initialize was not called", processes=processes)
    return ProcessGroup(processes, me, store)
