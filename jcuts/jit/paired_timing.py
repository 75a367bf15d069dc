"""Interleaved (paired) timing of whole programs on the user's arguments, so that a disturbance slows all alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jcuts.tune.measure import statistics as measure_statistics


def timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Time of one run [s]."""
    start = clock()
    run()
    return clock() - start


def warm(runs: Mapping[str, Callable[[], Any]], clock: Callable[[], float]) -> dict[str, tuple[float, ...]]:
    """A few interleaved runs of each: noise only makes a run longer, so the shortest says most."""
    found = measure_statistics.interleave(dict(runs), seconds=0.0, least=2, most=2, clock=clock)
    times = {name: s.seconds for name, s in found.items()}
    best = min(min(t) for t in times.values())
    more = 4 if best < 0.01 else 1 if best < 0.1 else 0
    if more:
        found = measure_statistics.interleave(dict(runs), seconds=0.0, least=more, most=more, clock=clock)
        times = {name: (*times[name], *s.seconds) for name, s in found.items()}
    return times


def executions(seconds: float, chunk: float) -> int:
    """Executions per sample. Args: seconds: of one; chunk: of a sample."""
    return max(1, min(200, math.ceil(chunk / max(seconds, 1e-7))))


def sample(
    calls: Mapping[str, Callable[..., Any]],
    fresh_args: Callable[[], Any],
    inner: int,
    donates: bool,
    seconds: float,
    rounds: int,
    clock: Callable[[], float],
    waited: bool = False,
) -> dict[str, measure_statistics.Samples]:
    """Samples of programs that take turns.

    Args:
        fresh_args: arguments for one call (copies where they are donated, as ``donates`` says).
        inner: executions in a row per sample, of which only the last is waited for; 1 where arguments are donated.
        seconds: wall time to spend; rounds: least samples of each, whatever they cost.
        waited: whether each execution is waited for, not the last of a sample alone.
    """
    if donates:
        # Each execution needs its own copies, made outside the timed part.
        return _sample_with_copies(calls, fresh_args, seconds, rounds, clock)
    args, kwargs = fresh_args()
    # Several executions per sample, so that a fast function is not timed by the clock's resolution.

    def repeated(call: Callable[..., Any]) -> Callable[[], None]:
        def go() -> None:
            for _ in range(inner - 1):
                if waited:
                    jax.block_until_ready(call(*args, **kwargs))
                else:
                    call(*args, **kwargs)  # no result outlives its call
            jax.block_until_ready(call(*args, **kwargs))

        return go

    return measure_statistics.interleave(
        {n: repeated(c) for n, c in calls.items()},
        seconds=seconds,
        least=rounds,
        most=60,
        inner=dict.fromkeys(calls, inner),
        clock=clock,
    )


def _sample_with_copies(
    calls: Mapping[str, Callable[..., Any]],
    fresh_args: Callable[[], Any],
    seconds: float,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, measure_statistics.Samples]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = clock() + seconds
    order = list(calls)
    for count in range(30):
        if count >= rounds and clock() > end:
            break
        for name in order:
            args, kwargs = jax.block_until_ready(fresh_args())
            start = clock()
            jax.block_until_ready(calls[name](*args, **kwargs))
            times[name].append(clock() - start)
        order.reverse()
    return {name: measure_statistics.Samples(tuple(ts)) for name, ts in times.items()}


def paired_ratio(times: measure_statistics.Samples, base: measure_statistics.Samples) -> measure_statistics.Samples:
    """``base / times`` of neighbouring runs: what slows both down cancels."""
    return measure_statistics.Samples(
        tuple(b / max(t, 1e-12) for t, b in zip(times.seconds, base.seconds, strict=True))
    )


def error(ratios: measure_statistics.Samples) -> float:
    """Two relative standard errors of a median of ratios."""
    return 2.0 * measure_statistics.standard_error(ratios.median, *ratios.quartiles, len(ratios.seconds))


def ms(seconds: float) -> str:
    """A time in milliseconds, as text."""
    return f"{seconds * 1e3:.3g} ms"
