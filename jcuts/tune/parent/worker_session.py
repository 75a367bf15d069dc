"""Autotuning session: lifetime of worker processes and their scratch folder, shared by nested calls of the tuner."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from jcuts.base import fingerprint, knobs
from jcuts.tune import device_slices, malloc
from jcuts.tune.baseline import autotune_cache
from jcuts.tune.parent.worker_pool import WorkerPool

COMPILE = "compile"
"""Group of processes: any number that compile and check."""
XLA = "xla"
"""One process that runs XLA and measures."""
DEVICE = "device"
"""On a GPU, several that check kernels there: they wait for copies."""
REFERENCE = "reference"
"""On a GPU, several that make references: they wait for XLA's compiler."""
MOST_ON_GPU = 8
MOST_REFERENCES = 8
"""Most processes that check, and that make references, on a GPU."""
_FRUGAL = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
"""Several processes share a GPU: memory that one does not use goes back."""


class WorkerSession:
    """Measuring processes and a folder for their files, for one or several calls of `tune`."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        self.made: dict[tuple[str, int], WorkerPool] = {}
        self.base: Path | None = None
        self.folders = 0
        self.ahead: set[str] = set()
        """Digests of programs that were given to processes to compile before anything asked for them."""

    def _base(self) -> Path:
        if self.base is None:
            self.base = self.stack.enter_context(_session_folder())
        return self.base

    def pool(self, platform: str, workers: int) -> WorkerPool:
        """The processes for a platform; they start when there is work for them."""
        key = (platform, workers)
        if key not in self.made:
            sizes = {COMPILE: workers, XLA: 1, DEVICE: 1}
            if platform != "cpu":
                sizes[COMPILE] = max(1, workers // 2)  # XLA compiles and times its algorithms at the same time
                # Compilers and arithmetic on large arrays have threads of their own: more processes are no faster.
                sizes[DEVICE] = max(1, min(MOST_ON_GPU, workers // 2))
                sizes[REFERENCE] = max(1, min(MOST_REFERENCES, workers // 2))
            more = (
                {}
                if platform == "cpu"
                else {
                    XLA: autotune_cache.flags(shared=True),
                    REFERENCE: {**_FRUGAL, **malloc.KEEPING, **autotune_cache.flags(shared=False)},
                    DEVICE: {**malloc.KEEPING, "MALLOC_ARENA_MAX": "1"},  # slabs of all threads in what is kept
                }
            )
            self.made[key] = self.stack.enter_context(WorkerPool(self._base(), sizes, platform, more))
        return self.made[key]

    def warm(self, platform: str, workers: int) -> None:
        """Starts the processes that compile kernels and the one that measures, ahead of what they are for."""
        pool, timeout = self.pool(platform, workers), knobs.current().tune_timeout_s
        pool.warm(COMPILE, "compiler", timeout)
        pool.warm(XLA, "xla", timeout)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder of its own for one call (workers remember problems by their path: none comes twice)."""
        self.folders += 1
        own = self._base() / f"call{self.folders}"
        own.mkdir()
        try:
            yield own
        except BaseException:  # what is queued is about files that are gone
            for pool in self.made.values():
                pool.abandon()
            raise
        finally:
            shutil.rmtree(own, ignore_errors=True)


_open_session = threading.local()


def current_worker_session() -> WorkerSession | None:
    """The session that is open on this thread."""
    return getattr(_open_session, "session", None)


def workers_of() -> int:
    """Processes of a session that compile: beside the user's program they leave it a core."""
    asked = knobs.current().compile_workers or fingerprint.usable_cores()
    return max(1, min(asked, fingerprint.usable_cores() - 1)) if device_slices.current().sliced else asked


@contextlib.contextmanager
def shared_worker_session() -> Iterator[WorkerSession]:
    """All calls of `tune` inside the block, on this thread, share their processes: starting one costs seconds."""
    session = current_worker_session()
    if session is not None:
        yield session
        return
    session = _open_session.session = WorkerSession()
    try:
        with session.stack:
            yield session
    finally:
        _open_session.session = None


@contextlib.contextmanager
def _session_folder() -> Iterator[Path]:
    """A private folder (mode 0700) for one session; those of dead sessions are removed."""
    base = Path(tempfile.gettempdir())
    for old in base.glob(autotune_cache.PREFIX + "*"):
        with contextlib.suppress(OSError, ValueError):
            owner = int(old.name[len(autotune_cache.PREFIX) :].split("-")[0])
            if old.stat().st_uid == os.getuid() and not _is_alive(owner):
                shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{autotune_cache.PREFIX}{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
