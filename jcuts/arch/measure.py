"""Microbenchmarks of this CPU (NumPy, well under a second): sustained bandwidth and GEMM rate, which no file tells."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jcuts.arch.cpu import CpuArch

log = logging.getLogger(__name__)

_BUDGET = {"l2": 0.05, "l3": 0.08, "dram": 0.20}
_GEMM_BUDGET = 0.05
_DRAM_BYTES = 128 << 20


def measure_bandwidth(arch: CpuArch, patience: float = 1.0) -> dict[str, float]:
    """Copy bandwidth of L2, L3 and DRAM over all cores, byte/s (bytes read plus bytes written).

    Every core copies between two private arrays; together they fill half of the level (L3) or leave every cache (DRAM).
    The best of several rounds counts: noise only ever slows a copy.  ``copy`` is the DRAM figure.

    Args: patience: times the usual budget, a third of a second.
    Raises: MemoryError, RuntimeError if arrays or threads cannot be had (callers fall back to constants).
    """
    sizes = {"l2": arch.l2 // 4, "l3": arch.l3 // (4 * arch.cores)}
    large = max(4 * arch.l3, 64 << 20)
    sizes["dram"] = min(large, _DRAM_BYTES) // (2 * arch.cores)
    found: dict[str, float] = {}
    with ThreadPoolExecutor(arch.cores) as pool:
        for level, size in sizes.items():
            # an L3 share no larger than a core's L2 would measure the L2 again
            if size < 4096 or (level == "l3" and 2 * size <= arch.l2):
                continue
            found[level] = _copy_rate(pool, arch.cores, size, patience * _BUDGET[level])
    found["copy"] = found["dram"]
    return found


def measure_peak(large: int = 512, small: int = 96, patience: float = 1.0) -> dict[str, float]:
    """FLOP/s that numpy's GEMM was seen to reach over all cores, per dtype name.

    A large product uses every core, but collapses when another process holds one of them; a small one runs on the
    calling core alone and is a floor then.  The faster of the two is a rate that this machine certainly has.

    Args: large, small: M = N = K of the two products; patience: times the usual budget, a fifth of a second.
    """
    found = {}
    for kind in ("float32", "float64"):
        rates = []
        for side in (large, small):
            a = np.full((side, side), 0.5, kind)
            b = np.full((side, side), 0.25, kind)
            out = np.empty_like(a)
            rates.append(
                2.0 * side**3 / _best(lambda a=a, b=b, out=out: np.matmul(a, b, out=out), patience * _GEMM_BUDGET)
            )
        found[kind] = max(rates)
    return found


def _copy_rate(pool: ThreadPoolExecutor, cores: int, size: int, budget: float) -> float:
    pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(cores)]
    # enough copies per task that waking a thread does not count
    repeat = max(1, (4 << 20) // size)

    def work(pair: tuple[np.ndarray, np.ndarray]) -> None:
        for _ in range(repeat):
            np.copyto(pair[1], pair[0])

    def round_() -> None:
        for _ in pool.map(work, pairs):
            pass

    return 2.0 * size * repeat * cores / _best(round_, budget)


def _best(action: Callable[[], object], budget: float) -> float:
    """Shortest of the runs that fit into ``budget`` seconds (at least two, the first warms up)."""
    action()
    best = float("inf")
    end = time.perf_counter() + budget
    while True:
        start = time.perf_counter()
        action()
        now = time.perf_counter()
        best = min(best, max(now - start, 1e-9))
        if now >= end:
            return best
