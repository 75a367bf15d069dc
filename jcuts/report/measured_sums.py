"""Sums over the regions of a program of measured kernel times and of XLA's times."""

from __future__ import annotations

from collections.abc import Callable

from jcuts.report.report_data import ReportData, SubsetReport
from jcuts.tune.choice import LIBRARY


def kernel_sums(
    report: ReportData, counts: Callable[[float, float], bool] = lambda kernel, xla: True
) -> tuple[float, float]:
    """What the kernels of a program were measured to take together, and what they gain on XLA's code [s].

    Args: counts: which do, by a kernel's time and that of XLA's code.
    """
    won = [s for s in report.subsets if s.chosen != LIBRARY and s.origin == "measured"]
    pairs = [
        (s.count * s.seconds, s.count * s.xla_seconds)
        for s in won
        if s.seconds and s.xla_seconds and counts(s.seconds, s.xla_seconds)
    ]
    return sum(ours for ours, _ in pairs), sum(xla - ours for ours, xla in pairs)


def total_seconds(report: ReportData) -> float:
    """What all regions take together, kernel or XLA's code [s]; 0 where no time is known.

    A region of unknown time is taken to move its bytes at the mean rate of the others.
    """
    known = [(s.count * time, s.count * s.bytes) for s in report.subsets if (time := seconds(s)) is not None]
    unknown = sum(s.count * s.bytes for s in report.subsets if seconds(s) is None)
    spent, moved = sum(time for time, _ in known), sum(size for _, size in known)
    return spent * (1.0 + unknown / moved) if moved else 0.0


def seconds(subset: SubsetReport) -> float | None:
    """What a region takes as it is chosen [s], None where that is not known."""
    return subset.xla_seconds if subset.chosen == LIBRARY else subset.seconds
