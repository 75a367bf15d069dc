"""Tuning choices that the processes of a multi-controller program have agreed on: a store in memory that holds what one
process looked up, and nothing else.

Every process lowers the same program when it looks its choices up here: what the leader found is found, what it lacked
is lacking, whatever a process's own database holds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jcuts.base.errors import CacheError
from jcuts.tune.choice import Choice
from jcuts.tune.database import Store
from jcuts.tune.database_rows import PLACES
from jcuts.tune.row_signature import FOREIGN, TUNED

Entry = tuple[str, str, dict[str, Any]]
"""Kind of a row, its key and its value (`tune.database_rows`)."""
_serial = itertools.count(2)


class AgreedStore(Store):
    """Choices in memory alone.  While it records, what it lacks is read from another store, and kept.

    Args: device, versions: as of `Store`.
    """

    def __init__(self, *, device: str, versions: str) -> None:
        super().__init__(None, device=device, versions=versions)
        self._serial = next(_serial)  # no two stores have one generation: plans are remembered by it
        self._source: Store | None = None

    @contextmanager
    def recording(self, source: Store) -> Iterator[None]:
        """Inside the block, what is looked up is taken over from ``source``, where that trusts it."""
        self._source = source
        try:
            yield
        finally:
            self._source = None

    def entry(self, kind: str, key: str) -> tuple[dict[str, Any] | None, str]:
        value, source = super().entry(kind, key)
        if value is not None or self._source is None:
            return value, source
        value, source = self._source.entry(kind, key)
        if value is None or source == FOREIGN:
            return None, ""
        self._put(kind, key, value)
        return value, TUNED

    def generation(self) -> tuple[int, int]:
        return -self._serial, self._writes

    def rows(self) -> list[Entry]:
        """All that it holds."""
        return [(row.kind, row.key, row.value) for row in self.ls()]

    def add(self, rows: Sequence[Entry]) -> None:
        """Takes over the rows of another process of this job, which has checked what they say.

        Raises: CacheError: one is no row of the tuning database.
        """
        for kind, key, value in rows:
            if kind not in PLACES or not isinstance(value, dict):
                raise CacheError(f"not a row of the tuning database: {kind!r}", kind=kind)
            if kind == "choice":
                Choice.from_json(value)
            self._put(kind, key, value)


class _Current(threading.local):
    store: AgreedStore | None = None


current = _Current()
"""The agreed choices by which this thread plans now, instead of by the user's database (`using`)."""


@contextmanager
def using(store: AgreedStore | None) -> Iterator[None]:
    """Inside the block this thread plans by agreed choices; None: by the user's database, as outside."""
    before, current.store = current.store, store
    try:
        yield
    finally:
        current.store = before
