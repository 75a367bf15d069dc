"""Timing statistics: interleaved samples, medians, and the noise margin within which two times count as equal."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.tune import device_slices

LEAST_MARGIN = 0.01
"""No two programs that differ by less than this are told apart, however quiet the machine looks."""
MOST_MARGIN = 0.10
"""A noisier machine does not widen the margin further: a real 10% would otherwise be thrown away."""
CONTENDER = 1.5
"""Who takes this many times as long as the fastest cannot win any more: how exact its time is does not matter."""
HOPELESS = 2.0
"""A kernel this many times slower than the fastest in the quick screening is not timed against XLA."""
CLOSE_MARGIN = 0.015
"""Margin at which a race between contenders is over."""
LONE_MARGIN = 0.05
"""Margin at which a race is over where a single contender is left."""
_LOOK_EVERY = 4


@dataclass(frozen=True)
class Samples:
    """Times of one candidate [s per execution], in the order taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median [s]."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile [s]; both the single value if there is one."""
        if len(self.seconds) < 2:
            return self.median, self.median
        cuts = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return cuts[0], cuts[2]


def standard_error(seconds: float, low: float, high: float, runs: int) -> float:
    """Relative standard error of a median from its quartiles.

        sigma = (high - low) / 1.349,   error = 1.2533 sigma / sqrt(runs) / seconds

    Args: median and quartiles [s], number of samples.
    Returns: a ratio >= 0.
    Source: the interquartile range of a normal distribution is 1.349 sigma; the asymptotic variance of its median is
    pi/2 times that of its mean.
    """
    if seconds <= 0 or runs < 1:
        return 0.0
    return 1.2533 * (high - low) / 1.349 / math.sqrt(runs) / seconds


def margin(errors: Sequence[float]) -> float:
    """Relative margin inside which two medians of one session count as equal.

        margin = clamp(2 * sqrt(2) * max error, 0.01, 0.10)      (two standard errors of a difference)

    Args: relative standard errors of the medians compared.
    """
    return min(MOST_MARGIN, max(LEAST_MARGIN, 2.0 * math.sqrt(2.0) * max(errors, default=0.0)))


def interleave(
    runs: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = 0.5,
    least: int = 5,
    most: int = 200,
    inner: dict[str, int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    told: bool = False,
) -> dict[str, Samples]:
    """Samples every callable in turn (A B C, C B A, A B C, ...), so that a drifting clock hits all of them alike.

    Args:
        runs: callables that return when the work is done; warm (called before).
        seconds: wall time to spend in all; ``least`` samples each are taken whatever they cost.
        least, most: limits on the samples per callable.
        inner: executions that one call of each makes (times are divided by it), 1 by default.
        clock: monotonic seconds.
        told: the callables return what they took [s]: that is taken, not the clock's.
    Returns: samples per execution, for each name.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    with device_slices.measuring():
        end = clock() + seconds
        forward = True
        count = 0
        while runs and count < most and (count < least or clock() < end):
            end += device_slices.pause()
            for name in list(runs) if forward else reversed(list(runs)):
                start = clock()
                own = runs[name]()
                times[name].append((own if told else clock() - start) / (inner or {}).get(name, 1))
            forward = not forward
            count += 1
    return {name: Samples(tuple(values)) for name, values in times.items()}


def race(
    runs: Mapping[str, Callable[[], Any]],
    *,
    seconds: float,
    least: int = 7,
    most: int = 200,
    inner: dict[str, int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    told: bool = False,
) -> dict[str, Samples]:
    """Samples in turn like `interleave`, spending the time where it decides.

    Who is slower than `CONTENDER` times the fastest (its quicker quarter against the slower quarter of the fastest) is
    sampled no more; the race ends when the margin of those left is `CLOSE_MARGIN`, or `LONE_MARGIN` for one alone.

    Args:
        runs, least, most, inner, clock, told: as for `interleave`.
        seconds: most wall time to spend per callable that is still in the race.
    Returns: samples per execution, for each name: at least ``least``, more for those that stayed longer.
    """
    found: dict[str, tuple[float, ...]] = dict.fromkeys(runs, ())
    live = dict(runs)
    rounds = 0
    while live and rounds < most:
        count = least if rounds == 0 else _LOOK_EVERY
        part = interleave(live, seconds=0.0, least=count, most=count, inner=inner, clock=clock, told=told)
        for name, samples in part.items():
            found[name] += samples.seconds
        rounds += count
        so_far = {name: Samples(found[name]) for name in live}
        best = min(so_far.values(), key=lambda s: s.median)
        live = {n: run for n, run in live.items() if so_far[n].quartiles[0] <= CONTENDER * best.quartiles[1]}
        errors = [standard_error(so_far[n].median, *so_far[n].quartiles, rounds) for n in live]
        settled = margin(errors) <= (CLOSE_MARGIN if len(live) > 1 else LONE_MARGIN)
        spent = sum(math.fsum(found[n]) * (inner or {}).get(n, 1) for n in live)
        if settled or spent >= seconds * len(live):
            break
    return {name: Samples(times) for name, times in found.items()}
