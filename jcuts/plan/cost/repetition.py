"""Repeated layers in a list of equations: maximal runs of equal consecutive periods, found without loops to go by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Run:
    """``count`` equal periods of ``period`` entries, from ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The position behind the run."""
        return self.start + self.period * self.count


def runs(keys: Sequence[Hashable], weights: Sequence[float]) -> list[Run]:
    """Runs of repeated layers, in order, without overlap: heaviest first, then what is left on either side.

    A run is at least two equal periods that together weigh something.

    Args: keys: one per entry, equal for equal entries; weights: work per entry [FLOP].

    >>> runs("abcbcbcd", [1.0] * 8)
    [Run(start=1, period=2, count=3)]
    """
    numbers: dict[Hashable, int] = {}
    code = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    weight = np.concatenate([[0.0], np.cumsum(weights)]) if len(code) else np.zeros(1)
    return _runs(code, weight, 0, len(code))


def _runs(code: NDArray[np.int64], weight: NDArray[np.float64], start: int, stop: int) -> list[Run]:
    best, gain = None, 0.0
    for period in range(1, (stop - start) // 2 + 1):
        found = _longest(code[start:stop], weight[start : stop + 1], period)
        if found is None:
            continue
        at, count = found
        saved = weight[start + at + period * count] - weight[start + at]
        # The same stretch has periods of two and three layers, too: a longer one must cover more.
        if saved > gain * (1 + TOLERANCE):
            best, gain = Run(start + at, period, count), saved
    if best is None:
        return []
    return [*_runs(code, weight, start, best.start), best, *_runs(code, weight, best.stop, stop)]


TOLERANCE = 2.0**-20
"""Relative difference of work below which two runs weigh the same."""


def _longest(code: NDArray[np.int64], weight: NDArray[np.float64], period: int) -> tuple[int, int] | None:
    """(start, count) of the heaviest run of a period; None if there is none that repeats."""
    same = np.concatenate([[False], code[:-period] == code[period:], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1])
    best, gain = None, 0.0
    for first, last in edges.reshape(-1, 2).tolist():
        count = (last - first) // period + 1
        if count < 2:
            continue
        slack = (last - first) % period
        for at in range(first, first + slack + 1):
            saved = weight[at + period * count] - weight[at]
            if saved > gain * (1 + TOLERANCE):
                best, gain = (at, count), saved
    return best
