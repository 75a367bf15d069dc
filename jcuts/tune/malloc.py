"""glibc malloc tuning (``MALLOC_*`` variables, ``malloc_trim``) for processes that allocate and free arrays of
megabytes.

Returning pages to the kernel and faulting in new ones took more time than the arithmetic on them.  A heap that keeps
them retains everything below a block still in use, however much that is: `Heap.settle` returns it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

MOST = 1 << 30
"""Bytes that a process keeps."""
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(MOST), "MALLOC_TOP_PAD_": str(64 << 20)}
"""Environment variables of a process that keeps pages."""


class Heap:
    """Pages retained by this process's heap; a no-op unless it was started with `KEEPING`."""

    def __init__(self) -> None:
        self.keeps = all(os.environ.get(name) == value for name, value in KEEPING.items())
        self.base = resident() if self.keeps else 0

    def trim(self) -> bool:
        """Gives all free pages back if the process has grown by more than `MOST` since it last did; whether it did."""
        if not self.keeps or resident() <= self.base + MOST:
            return False
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
        self.base = resident()
        return True


def resident() -> int:
    """Bytes of this process that lie in memory; 0 where that is not told."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return 0
