"""One tuning session at a time per user and machine: two would disturb each other's times."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


def lock_path() -> Path:
    """The lock file of this user on this machine (local: the database may lie on a shared file system)."""
    owner = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"jcuts-{owner}.measuring"


@contextlib.contextmanager
def measuring_lock(
    *, patience: float, done: Callable[[], bool] = lambda: False, path: Path | None = None, poll: float = 0.1
) -> Iterator[bool]:
    """Holds the lock; the system releases it when the process dies, however it dies.

    Args:
        patience: most seconds to wait; then the block runs without the lock (noisier times, but no deadlock).
        done: asked while waiting; True ends the wait, because the other process has done the work.
        path: lock file, that of this user by default.
        poll: seconds between two looks.
    Yields: whether the lock is held.
    """
    handle = _open(path or lock_path())
    try:
        yield handle is not None and _wait(handle, patience, done, poll)
    finally:
        if handle is not None:
            os.close(handle)


def _open(path: Path) -> int | None:
    if fcntl is None:
        return None
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError:  # read-only or full: measuring is still possible
        return None


def _wait(handle: int, patience: float, done: Callable[[], bool], poll: float) -> bool:
    if fcntl is None:
        return False
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if done() or time.monotonic() >= end:
                return False
        except OSError:  # a file system without locks
            return False
        time.sleep(poll)
