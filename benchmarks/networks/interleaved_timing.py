"""Interleaved timing: programs take turns that reverse their order; calls back to back, and calls waited for.

Nothing here knows jcuts or a framework: ``wait`` waits for a call's result (by default `jax.block_until_ready`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], Any]
ROUNDS = 15
STREAM = 20
"""Calls of one sample of `timed`, back to back."""
TURNS = 9
MOST_CALLS = 200
"""Calls of one turn of `interleaved`, at most."""


def block(result: Any) -> None:
    """Waits for arrays of JAX."""
    import jax

    jax.block_until_ready(result)


def quantiles(samples: Sequence[float], *shares: float) -> list[float]:
    """Quantiles, linear between the two nearest samples."""
    import numpy as np

    return [float(q) for q in np.quantile(samples, shares)]


def quartiles(samples: Sequence[float]) -> list[float]:
    """Median, first and third quartile."""
    return quantiles(samples, 0.5, 0.25, 0.75)


def back_to_back(call: Call, count: int, wait: Callable[[Any], None] = block) -> float:
    """Seconds per call of a stream of calls of which only the last is waited for."""
    start, last = time.perf_counter(), None
    for _ in range(count):
        last = call()
    wait(last)
    return (time.perf_counter() - start) / count


def waited(call: Call, count: int, wait: Callable[[Any], None] = block) -> list[float]:
    """Seconds of calls of which each is waited for."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        wait(call())
        found.append(time.perf_counter() - start)
    return found


def timed(
    calls: dict[str, Call], seconds: float, wait: Callable[[Any], None] = block
) -> dict[str, dict[str, list[float]]]:
    """Medians and quartiles [s] of calls that are waited for (``step``) and of calls back to back (``stream``).

    Args: seconds: of all rounds together; at least 3 and at most `ROUNDS` rounds.
    """
    step: dict[str, list[float]] = {name: [] for name in calls}
    stream: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        waited(call, 3, wait)
    order = list(calls)
    begin, rounds = time.perf_counter(), 0
    while rounds < 3 or (rounds < ROUNDS and time.perf_counter() - begin < seconds):
        for name in order:
            waited(calls[name], 1, wait)
            step[name].append(sorted(waited(calls[name], 10, wait))[5])
            stream[name].append(back_to_back(calls[name], STREAM, wait))
        order.reverse()
        rounds += 1
    return {name: {"step": quartiles(step[name]), "stream": quartiles(stream[name])} for name in calls}


@dataclass
class Samples:
    """Seconds per call: one of every turn back to back, one of every call that was waited for."""

    stream: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Back to back: median and quartiles over turns. Waited: p50, p90, p99 over calls."""
        stream = zip(("median", "q1", "q3"), quartiles(self.stream), strict=True)
        latency = zip(("p50", "p90", "p99"), quantiles(self.waited, 0.5, 0.9, 0.99), strict=True)
        return {
            "back_to_back": dict(stream) | {"turns": len(self.stream)},
            "waited": dict(latency) | {"calls": len(self.waited)},
        }


def interleaved(
    calls: dict[str, Call], seconds: float, turns: int = TURNS, wait: Callable[[Any], None] = block
) -> dict[str, dict[str, Any]]:
    """Summaries (`Samples.summary`) of programs that take turns.

    Args: seconds: budget of a program; half of it for streams, half for calls that are waited for.
    """
    found = {name: Samples() for name in calls}
    fastest = {name: min(waited(call, 3, wait)) for name, call in calls.items()}
    counts = {n: max(2, min(MOST_CALLS, int(seconds / 2 / turns / t))) for n, t in fastest.items()}
    order = list(calls)
    for turn in range(turns):
        for name in order if turn % 2 == 0 else reversed(order):
            found[name].stream.append(back_to_back(calls[name], counts[name], wait))
            found[name].waited += waited(calls[name], counts[name], wait)
    return {name: samples.summary() for name, samples in found.items()}


def ratio(times: dict[str, dict[str, Any]], name: str, base: str) -> float:
    """Time of one program over another's, back to back."""
    return times[name]["back_to_back"]["median"] / times[base]["back_to_back"]["median"]
