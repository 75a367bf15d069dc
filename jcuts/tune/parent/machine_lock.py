"""Inter-process file lock with a queue (fair): one measuring process at a time per user and machine.

Two would disturb each other's times.  There are two files: the measuring process holds the first, the next in line the
second (``.queue``).  Everybody passes the queue, so that a process that measures again and again does not starve the
others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jcuts.base import knobs

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("jcuts.tune")

QUIET_SECONDS = 2.0
"""Waiting is announced after this time [s]."""
IMPATIENT_SECONDS = 1.0
"""Patience of a process that has already waited in vain [s], until it has had the lock again."""


@dataclass
class _Past:
    """Whether this process has given up waiting for the lock before."""

    gave_up: bool = False


_past = _Past()


class _HeldByThread(threading.local):
    """Thread-local: whether this thread holds the lock already (`attempt`)."""

    held: bool = False


_mine = _HeldByThread()


def lock_path() -> Path:
    """The lock file of this user on this machine (local: the database may lie on a shared file system)."""
    owner = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"jcuts-{owner}.measuring"


def default_patience() -> float:
    """``JCUTS_LOCK_PATIENCE_S``; short once this process has waited in vain."""
    patience = knobs.current().lock_patience_s
    return min(patience, IMPATIENT_SECONDS) if _past.gave_up else patience


def gave_up_waiting(path: Path | None = None) -> bool:
    """Whether this process has waited in vain and another one still measures: not worth preparing anything."""
    if not _past.gave_up or _mine.held:
        return False
    handle = _open(path or lock_path())
    if handle is None:
        return False
    try:
        return not _try(handle)
    finally:
        os.close(handle)


def holder(path: Path | None = None) -> str:
    """Who holds the lock, as that process wrote it down: 'process 12, since 10:20:30'."""
    try:
        found = json.loads((path or lock_path()).read_text())
        since = time.strftime("%H:%M:%S", time.localtime(float(found["since"])))
        return f"process {int(found['pid'])}, since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


@contextlib.contextmanager
def measuring_lock(
    *,
    patience: float,
    done: Callable[[], bool] = lambda: False,
    path: Path | None = None,
    poll: float = 0.1,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Holds the lock; the system releases it when the process dies, however it dies.

    Args:
        patience: most seconds to wait.
        done: asked while waiting; True ends the wait, because the other process has done the work.
        path: lock file, that of this user by default.
        poll: mean seconds between two looks.
        clock, sleep: monotonic seconds, and how to let them pass.
    Yields: whether this process may measure: it holds the lock, or there can be none (a read-only folder, a file
        system without locks: noisier times, but no deadlock).  False: another process still measures.
    """
    if _mine.held:
        yield True
        return
    where = path or lock_path()
    with _opened(where) as (handle, queue):
        may = handle is None or _acquire(handle, queue, where, patience, done, poll, clock, sleep)
        if may and handle is not None:
            _sign(handle)
        yield may


@contextlib.contextmanager
def try_lock(path: Path | None = None) -> Iterator[bool]:
    """Holds the lock if nobody else does, without waiting; `measuring_lock` inside, on this thread, has it at once.

    Yields: whether this thread holds it.
    """
    if _mine.held:
        yield True
        return
    with _opened(path or lock_path()) as (handle, queue):
        try:
            # Who is next in line goes first.
            may = handle is None or ((queue is None or _try(queue)) and _try(handle))
            if queue is not None:
                _release(queue)
            if may and handle is not None:
                _sign(handle)
            _mine.held = may
            _past.gave_up = _past.gave_up and not may
            yield may
        finally:
            _mine.held = False


@contextlib.contextmanager
def slice_lock(path: Path | None = None) -> Iterator[bool]:
    """Holds the lock for one slice of a thread that tunes `by_slices`, if nobody else does, without waiting.

    Yields: whether this process holds it, or there can be none.
    """
    with _opened(path or lock_path()) as (handle, queue):
        may = handle is None or ((queue is None or _try(queue)) and _try(handle))
        if queue is not None:
            _release(queue)
        if may and handle is not None:
            _sign(handle)
        yield may


@contextlib.contextmanager
def by_slices() -> Iterator[None]:
    """Sessions inside the block, on this thread, do not ask for the lock: each slice of the device has it
    (`slice_lock`), and other processes measure in between.
    """
    before, _mine.held = _mine.held, True
    try:
        yield
    finally:
        _mine.held = before


def is_mine() -> bool:
    """Whether this thread holds the lock by `attempt`."""
    return _mine.held


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int | None, int | None]]:
    """The lock file and that of the queue for it, closed at the end: this releases what they hold."""
    handle = _open(path)
    queue = _open(path.with_name(path.name + ".queue"))
    try:
        yield handle, queue
    finally:
        for each in (handle, queue):
            if each is not None:
                os.close(each)


def _open(path: Path) -> int | None:
    if fcntl is None:
        return None
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError:  # read-only or full: measuring is still possible
        return None


def _sign(handle: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)


def _acquire(
    handle: int,
    queue: int | None,
    path: Path,
    patience: float,
    done: Callable[[], bool],
    poll: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    start = clock()
    jitter = random.Random(os.getpid())
    told = False
    first = queue is None  # whether this process is next in line
    while True:
        first = first or (queue is not None and _try(queue))
        if first and _try(handle):
            if queue is not None:
                _release(queue)
            _past.gave_up = False
            return True
        waited = clock() - start
        if done():
            return False
        if waited >= patience:
            _past.gave_up = True
            return False
        if waited >= QUIET_SECONDS and not told:
            told = True
            _log.warning(
                "waiting for %s, which is measuring kernels; after %.0f s in all this call goes on with XLA and a "
                "later call tunes (JCUTS_LOCK_PATIENCE_S sets how long)",
                holder(path),
                patience,
            )
        # Uneven, so that several that wait do not look in step.
        sleep(poll * jitter.uniform(0.5, 1.5))


def _try(handle: int) -> bool:
    assert fcntl is not None  # there is a handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can wait for anybody
        return True


def _release(handle: int) -> None:
    assert fcntl is not None
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
