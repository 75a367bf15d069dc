"""Wall-clock timing of code blocks (`time.perf_counter`), for logs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


@contextlib.contextmanager
def timed(name: str, parts: dict[str, float] | None) -> Iterator[None]:
    """Notes the seconds that a block takes under its name; those of a repeated one add up.

    >>> parts = {}
    >>> with timed("xla", parts):
    ...     pass
    >>> list(parts)
    ['xla']
    """
    start = time.perf_counter()
    yield
    if parts is not None:
        parts[name] = parts.get(name, 0.0) + time.perf_counter() - start
