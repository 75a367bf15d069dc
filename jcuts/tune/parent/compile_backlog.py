"""Bounded job admission: compile requests enter the pool's queue as workers get free, until a deadline.

A request that is in the pool's queue will run.  With a time limit candidates therefore wait here, in their order, and
what still waits when time is short is dropped, not compiled.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from jcuts.tune.parent.worker_pool import WorkerPool


class CompileBacklog:
    """Requests for one group of a pool that have not been handed on.

    Args:
        pool, group: who works.
        limited: whether anything may be held back; else every request is handed on at once.
        is_late: whether nothing else may begin.
    """

    def __init__(self, pool: WorkerPool, group: str, limited: bool, is_late: Callable[[], bool]) -> None:
        self._pool, self._group, self._limited, self._is_late = pool, group, limited, is_late
        self._held: collections.deque[tuple[Callable[[], None], Callable[[], None]]] = collections.deque()

    def add(self, submit: Callable[[], None], drop: Callable[[], None]) -> None:
        """Takes a request. Args: submit: hands it to the pool; drop: is called instead when time is short."""
        if not self._limited:
            submit()
            return
        self._held.append((submit, drop))
        self.feed()

    def is_long(self) -> bool:
        """Whether more is held than the workers will begin next."""
        return len(self._held) > self._pool.sizes[self._group]

    def feed(self) -> None:
        """Hands on as many as there are workers; drops all when time is short."""
        while self._held:
            late = self._is_late()
            if not late and len(self._pool.queues[self._group]) >= self._pool.sizes[self._group]:
                return
            submit, drop = self._held.popleft()
            (drop if late else submit)()

    def drain(self) -> None:
        """Runs until nothing is held, queued or under way."""
        self._pool.drain()
        while self._held:  # no process could be started: what was queued has failed
            self.feed()
            self._pool.drain()
