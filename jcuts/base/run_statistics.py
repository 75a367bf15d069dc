"""Run statistics of a process: which program every optimised or loaded function runs, fallbacks, tuning seconds."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol


class Watched(Protocol):
    """A callable that says what it runs."""

    def stats(self) -> dict[str, Any]:
        """``name``, ``kind`` and ``signatures``, a list of rows."""
        ...


_lock = threading.Lock()
_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(function: Watched) -> None:
    """Includes a function in `stats` for as long as it lives."""
    with _lock:
        _watched.add(function)


def stats() -> dict[str, Any]:
    """What this process runs, as JSON data.

    Returns: ``functions``, each with its ``name``, its ``kind`` ('optimize' or 'load') and its ``signatures``: types of
        the arguments, ``program`` (as reports name it), ``reason``, ``fallback`` (whether XLA's own code runs) and
        ``tuning_seconds``, with ``tune="online"`` or ``"serve"`` also ``online``: ``state``, ``why``, and the ``share``
        that tuning took of the run; with ``batch_buckets`` the function has ``buckets``, too.  And sums:
        ``signatures``, ``fallbacks``, ``tuning_seconds``.  Functions that nobody called,
        and calls inside of other traces, have no signatures.
    """
    with _lock:
        watched = list(_watched)
    functions = sorted((function.stats() for function in watched), key=lambda row: (row["kind"], row["name"]))
    rows = [row for function in functions for row in function["signatures"]]
    return {
        "functions": [function for function in functions if function["signatures"]],
        "signatures": len(rows),
        "fallbacks": sum(row["fallback"] for row in rows),
        "tuning_seconds": sum(row["tuning_seconds"] for row in rows),
    }
