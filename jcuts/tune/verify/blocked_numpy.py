"""Cache-blocked, multi-threaded NumPy element-wise work on large arrays, slab by slab."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from jcuts.base import fingerprint

SLAB = 1 << 17  # elements: one float64 slab is 1 MiB
MOST_THREADS = 16

_Result = TypeVar("_Result")


def parallel_blocks(count: int, work: Callable[[slice], _Result]) -> list[_Result]:
    """``work`` on every slab of ``count`` elements, in parallel where there are several; results in order.

    NumPy's loops let other threads run, so this is for work that consists of them.
    """
    slabs = [slice(start, min(start + SLAB, count)) for start in range(0, count, SLAB)]
    if len(slabs) < 4:
        return [work(slab) for slab in slabs]
    return list(_threads().map(_quiet(work), slabs))


def parallel_max(count: int, work: Callable[[slice], float]) -> float:
    """The largest of ``work``'s results, 0 if there are no elements; NaN if one is."""
    return float(np.max(parallel_blocks(count, work), initial=0.0))


def _quiet(work: Callable[[slice], _Result]) -> Callable[[slice], _Result]:
    """NumPy keeps its error state per thread: overflow is part of what is looked at here."""

    def run(slab: slice) -> _Result:
        with np.errstate(all="ignore"):
            return work(slab)

    return run


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, fingerprint.usable_cores()), thread_name_prefix="jcuts-check")
