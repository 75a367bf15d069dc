"""Ablation of launch fusion: the winning program with its kernels in chains against single calls, by measurement.

A kernel of a chain starts before the one in front of it has ended, and there are fewer host calls; but equations are
reordered for it, and waiting blocks occupy multiprocessors (`xla.chains`).  Which matters more is measured.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jcuts.base.errors import JcutsError, summary
from jcuts.base.settings import Variant
from jcuts.jit import end_to_end_benchmark, paired_timing
from jcuts.jit.accuracy.plain_comparison import reference_of, wrong_result
from jcuts.jit.decision import Decision
from jcuts.jit.paired_timing import ms
from jcuts.jit.variant_names import form_of, is_xla, name_of
from jcuts.tune.measure import statistics as measure_statistics

PER_KERNEL = 10e-6
"""No kernel gains or loses more by standing in a chain, each time it runs [s] (measured: 0.1 to 1.6e-6)."""
SECONDS = 0.3
"""Wall time of a session of samples."""
ROUNDS = 5
"""Least pairs of samples in a session."""


def unchained_variant(decision: Decision, joined: Mapping[Variant | None, float]) -> str:
    """The chosen program's name with single calls; '' where it has no chains, or they cannot matter.

    Args: joined: kernels in chains of two or more, as often as they run, of the forms that have any.
    """
    name = decision.chosen
    if is_xla(name) or not decision.measured or name not in decision.seconds:
        return ""
    form = form_of(name)
    kernels = joined.get(form, 0)
    if kernels * PER_KERNEL < measure_statistics.LEAST_MARGIN * decision.seconds[name]:
        return ""
    return name_of(Variant.single(form), name.partition(":")[2]) if kernels else ""


def ablate_chains(
    decision: Decision,
    single: str,
    calls: Mapping[str, Callable[..., Any]],
    fresh_args: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    *,
    donates: bool,
    size: paired_timing.SampleSize,
    verify: Callable[[str, Any, Any], str | None] | None = None,
    second_opinion: Callable[[Any, Any], str | None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Decision:
    """The decision with the better of two programs; chains where they are equal within the noise.

    Single calls have to be faster as the last guard times, many calls in a row, in two sessions; and that has to be
    more than what they lose where each call is waited for, as nobody knows which way the user calls.

    Args:
        decision: the last guard's.
        single: name of the program with single calls.
        calls: it, the chosen program and plain XLA, which gives the reference result.
        fresh_args, donates, size, verify, second_opinion, clock: as for `guard.decide`.
    """
    chained = decision.chosen
    why = _wrong(single, calls, fresh_args, verify, second_opinion)
    if why is not None:
        return dataclasses.replace(decision, rejected={**decision.rejected, single: why})
    pair = {name: calls[name] for name in (chained, single)}

    def run(name: str) -> Callable[[], Any]:
        def go() -> None:
            args, kwargs = fresh_args()
            jax.block_until_ready(pair[name](*args, **kwargs))

        return go

    warm = paired_timing.warm({name: run(name) for name in pair}, clock)
    executions = paired_timing.executions(min(map(min, warm.values())), size)

    def session(*, waited: bool = False) -> dict[str, measure_statistics.Samples]:
        return paired_timing.sample(pair, fresh_args, executions, donates, SECONDS, ROUNDS, clock, waited)

    def ratios_of(times: Mapping[str, measure_statistics.Samples]) -> measure_statistics.Samples:
        return paired_timing.paired_ratio(times[single], times[chained])  # how many times as fast single calls are

    ratios = ratios_of(session())
    if not _is_gain(ratios):
        return _with(decision, single, ratios)
    ratios = ratios_of(session())  # it has to show twice
    if not _is_gain(ratios):
        return _with(decision, single, ratios)
    waited = session(waited=True)
    return _with(decision, single, ratios, (ratios_of(waited), waited[chained].median, waited[single].median))


def _wrong(
    single: str,
    calls: Mapping[str, Callable[..., Any]],
    fresh_args: Callable[[], Any],
    verify: Callable[[str, Any, Any], str | None] | None,
    second_opinion: Callable[[Any, Any], str | None] | None,
) -> str | None:
    """Why the program with single calls is out, None if it is right."""

    def result_of(name: str) -> Any:
        return paired_timing.run_once(calls[name], fresh_args)

    reference = reference_of(result_of(end_to_end_benchmark.XLA))
    try:
        result = result_of(single)
    except JcutsError:
        raise
    except Exception as error:
        return summary(error)
    return wrong_result(single, reference, result, verify, second_opinion)


def _margin(*errors: float) -> float:
    """The relative difference below which programs count as equal. Args: errors: of ratios that are multiplied."""
    return min(measure_statistics.MOST_MARGIN, max(measure_statistics.LEAST_MARGIN, math.hypot(*errors)))


def _is_gain(*ratios: measure_statistics.Samples) -> bool:
    """Whether single calls gain beyond the noise, in several ways of calling together."""
    return math.prod(r.median for r in ratios) > 1 + _margin(*map(paired_timing.error, ratios))


def _with(
    decision: Decision,
    single: str,
    ratios: measure_statistics.Samples,
    waited: tuple[measure_statistics.Samples, float, float] | None = None,
) -> Decision:
    """The decision with what was measured of single calls.

    Args: ratios: their speed against chains; waited: the same where each call is waited for, and both times [s].
    """
    chained, (low, high) = decision.chosen, ratios.quartiles
    before, after = decision.seconds[chained], decision.seconds[chained] / ratios.median
    text = (
        f"its kernels in chains: {ms(before)}, in single calls: {ms(after)} ({low:.3f} to {high:.3f} times as fast in "
        f"half of {len(ratios.seconds)} pairs of runs)"
    )
    is_better = waited is not None and _is_gain(ratios, waited[0])
    if waited is None:
        text += (
            ": chains are faster"
            if ratios.median < 1 - _margin(paired_timing.error(ratios))
            else ": equal within the noise"
        )
    else:
        verdict = "single calls are faster" if is_better else "chains lose no more than they gain there"
        text += f", where each call is waited for: {ms(waited[1])} and {ms(waited[2])}: {verdict}"
    return dataclasses.replace(
        decision,
        chosen=single if is_better else chained,
        reason=f"{decision.reason}; {text}",
        seconds={**decision.seconds, single: after},
        speed={**decision.speed, single: _times(decision.speed[chained], ratios.median)},
    )


def _times(speed: tuple[float, float, float], ratio: float) -> tuple[float, float, float]:
    return speed[0] * ratio, speed[1] * ratio, speed[2] * ratio
