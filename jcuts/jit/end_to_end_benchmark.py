"""Chooses the whole program by an end-to-end benchmark: plain ``jax.jit`` against all variants on the user's arguments.

Timings are paired; a gain has to exceed the noise, and to show twice unless it is clear, else plain ``jax.jit`` runs,
whatever single regions gained.  Candidates are whole programs: plain XLA, jcuts, and each of them with compiler options
(which JAX accepts at top level only).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from jcuts.base.errors import JcutsError, summary
from jcuts.jit import paired_timing
from jcuts.jit.accuracy.plain_comparison import reference_of, wrong_result
from jcuts.jit.decision import JCUTS, XLA, Decision
from jcuts.jit.decision import MOST_TRIES as MOST_TRIES
from jcuts.jit.decision import DecisionStore as DecisionStore
from jcuts.jit.decision import MemoryStore as MemoryStore
from jcuts.jit.paired_timing import ms
from jcuts.tune.measure import statistics as measure_statistics

log = logging.getLogger("jcuts")

# Compiler options worth trying per platform, by a short name that the database keeps.  All of them leave the
# arithmetic as it is.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "wide": {"xla_cpu_prefer_vector_width": 512},
    },
    # Everything in CUDA graphs, as far as a version of XLA can: the first that it accepts is used.
    "cuda": {
        "graphs": {
            "xla_gpu_graph_min_graph_size": 1,
            "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,"
            "DYNAMIC_SLICE_FUSION,CONVOLUTION",
        },
        "graphs2": {
            "xla_gpu_graph_min_graph_size": 1,
            "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL",
        },
        "graph1": {"xla_gpu_graph_min_graph_size": 1},
    },
}

# Of programs with products in loops: by cuBLAS, as Triton's kernels are slow for a few rows (a recurrence's step).
LOOP_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {"cuda": {"library": {"xla_gpu_enable_triton_gemm": False}}}

# Of programs whose attention is recomputed in the backward pass: XLA's multi-output fusion joins the gradients of layer
# norms with the column sums of biases there, in a kernel of 117 us where both read and write 50 MB (an H200, jaxlib
# 0.11.2: twelve in a GPT's step, 12.0 and 10.0 % of it in float32 and bfloat16).
SEPARATE_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {"separate": {**OPTIONS["cuda"]["graphs"], "xla_disable_hlo_passes": "multi_output_fusion"}}
}

# Where XLA's compiler fails on a program: its fusion of slices at a loop's index (`DynamicSliceFusionRewriter`, on by
# default from jaxlib 0.11 on) ends in std::out_of_range for calls of kernels that read one and write the other.
SAFER_OPTIONS: dict[str, dict[str, Any]] = {"cuda": {"xla_gpu_enable_dynamic_slice_fusion": False}}

# A candidate that needs this many times the best time in each of its warm runs is not timed any further.
PRUNE_RATIO = 3.0
# Where one call of plain jax.jit takes longer [s], programs that differ by compiler options alone are not tried.
_LONG = 3.0
# A program this many times as slow as plain jax.jit in each of two runs, and by so many seconds, is not judged by
# float64.
HOPELESS = 1.05
HOPELESS_SECONDS = 1e-3
# Samples of each, interleaved.
_QUICK_ROUNDS = 2
# Compiler options do not make up for a program that needs this many times the best time in each of two runs.
OPTIONS_GAIN = 2.0
# Two standard errors of a ratio beyond this: the machine was too busy to decide for good.
_NOISY = 0.10
# ... but who is this many times as fast as plain jax.jit in three quarters of the pairs wins whatever the noise.
_CLEAR = 1.5


LEAST_GAIN = 0.02
"""Share that a whole program has to gain to be worth leaving plain jax.jit for."""


def benchmark_variants(
    calls: Mapping[str, Callable[..., Any]],
    fresh_args: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    *,
    donates: bool,
    seconds: float = 0.6,
    limit: float = 60.0,
    size: paired_timing.SampleSize = paired_timing.SHORT,
    verify: Callable[[str, Any, Any], str | None] | None = None,
    second_opinion: Callable[[Any, Any], str | None] | None = None,
    options_gain: float = OPTIONS_GAIN,
    barred: Mapping[str, str] = MappingProxyType({}),
    prepare: Callable[[str], object] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Decision:
    """Time whole programs on the same arguments and choose.

    Args:
        calls: candidate -> jitted callable, in tie order; the first is plain XLA and gives the reference result.
        fresh_args: arguments for one call (copies where they are donated).
        donates: whether a call uses its arguments up.
        seconds: wall time to spend beyond the warm runs.
        limit: where the least number of runs takes longer than this [s], fewer are taken.
        size: of one sample.
        options_gain: most that compiler options can gain: a program slower than that is not compiled with them.
        verify: ``(candidate, reference result, result)`` -> why the result is not right, or None.
        second_opinion: ``(reference result, result)`` -> why a result that differs grossly from plain XLA's is not
            right by float64, or None where it is no further off than plain XLA's.
        barred: candidates that may not be chosen while others may, with the reason; plain XLA is timed all the same.
        prepare: called with the name of a candidate before its first run, for what needs no device.
        clock: monotonic seconds.

    Returns: the fastest candidate, or the first in order within the noise margin of it.  Nothing rests on one run.
    """
    sample = functools.partial(_sample, calls, fresh_args, donates, clock)
    rejected = {name: why for name, why in barred.items() if name in calls}
    calls = {name: call for name, call in calls.items() if name == XLA or name not in barred}
    runs: dict[str, Callable[[], Any]] = {}
    reference: Any = None
    quick: dict[str, float] = {}  # shorter of two runs of the programs without options
    start = clock()
    for name in sorted(calls, key=lambda name: ":" in name):

        def run(call: Callable[..., Any] = calls[name]) -> Any:
            return paired_timing.run_once(call, fresh_args)

        if ":" in name and (why := _not_worth_options(name.partition(":")[0], quick, options_gain, barred)) is not None:
            rejected[name] = why
            continue
        begun = clock()
        try:
            prepare(name)
            result = run()
        except JcutsError:
            raise
        except Exception as error:
            if name == XLA:
                raise  # the user's own program fails: that is the user's error to see
            rejected[name] = summary(error)
            continue
        ran = clock() - begun
        if not runs:
            reference = reference_of(result)
        else:
            inner = paired_timing.executions(quick.get(XLA, _LONG), size)
            judge = _of_hopeful(second_opinion, sample, [] if XLA in barred else [XLA, name], inner)
            if (why := wrong_result(name, reference, result, verify, judge)) is not None:
                rejected[name] = why
                continue
        if ":" not in name and quick.get(XLA, 0.0) <= _LONG:
            quick[name] = min(paired_timing.timed(run, clock) for _ in range(2))
        runs[name] = run
        log.info("%s: first run in %.2f s, judged in %.2f s", name, ran, clock() - begun - ran)
    runs = {name: runs[name] for name in calls if name in runs}  # back in tie order
    warm = paired_timing.warm(runs, clock)
    best = min((min(times) for name, times in warm.items() if name not in barred), default=min(warm[XLA]))
    slow = _far_behind(warm, best)
    rejected |= slow
    runs = {name: run for name, run in runs.items() if name not in slow}
    if len(runs) == 1:
        return _choose({name: measure_statistics.Samples(tuple(warm[name])) for name in runs}, rejected)
    # Where even the longest run of the leader is far below the shortest of plain XLA, a short session settles it.
    leader = min(warm, key=lambda name: min(warm[name]))
    is_clear = min(warm[XLA]) > PRUNE_RATIO * max(warm[leader])
    rounds = max(2, min(5, int(limit / 3 / sum(min(warm[name]) for name in runs))))

    inner = paired_timing.executions(best, size)
    first = _choose(sample(list(runs), inner, seconds / 3 if is_clear else seconds, rounds), rejected, barred)
    if first.chosen == XLA or (is_clear and first.speed[first.chosen][1] > PRUNE_RATIO) or clock() - start > limit:
        return first
    return _shown_twice(first, runs, functools.partial(sample, inner=inner, seconds=seconds / 2, rounds=rounds), barred)


def _shown_twice(
    first: Decision,
    names: Iterable[str],
    sample: Callable[[Sequence[str]], Mapping[str, measure_statistics.Samples]],
    barred: Mapping[str, str],
) -> Decision:
    """The decision of a second session between plain XLA, the one that was chosen and the fastest of the first.

    One burst of another process must not send the user away from plain ``jax.jit``.
    """
    leader = max(first.speed, key=lambda name: first.speed[name][0])
    second = _choose(sample([n for n in names if n in (XLA, first.chosen, leader)]), first.rejected, barred)
    base = second.seconds[XLA]
    others = {name: base / ratio[0] for name, ratio in first.speed.items() if name not in second.seconds}
    noisy = first.noisy or second.noisy or second.chosen == XLA
    return dataclasses.replace(
        second, seconds={**second.seconds, **others}, speed={**first.speed, **second.speed}, noisy=noisy
    )


def _hopeless(seconds: float) -> float:
    """Time from which on a program cannot win [s]. Args: seconds: plain XLA's."""
    return max(HOPELESS * seconds, seconds + HOPELESS_SECONDS)


def _far_behind(warm: Mapping[str, Sequence[float]], best: float) -> dict[str, str]:
    """Programs that are timed no further, with the reason. Args: warm: their first runs [s]; best: shortest [s]."""
    return {
        name: f"{min(times) / best:.1f} times the time of the best program in the shortest of {len(times)} runs "
        f"({ms(min(times))} against {ms(best)})"
        for name, times in warm.items()
        if min(times) > PRUNE_RATIO * best and name != XLA
    }


def _sample(
    calls: Mapping[str, Callable[..., Any]],
    fresh_args: Callable[[], Any],
    donates: bool,
    clock: Callable[[], float],
    names: Sequence[str],
    inner: int,
    seconds: float,
    rounds: int,
) -> dict[str, measure_statistics.Samples]:
    """Interleaved samples of some of the programs (`paired_timing.sample`)."""
    chosen = {name: calls[name] for name in names}
    return paired_timing.sample(chosen, fresh_args, inner, donates, seconds, rounds, clock)


def _of_hopeful(
    second_opinion: Callable[[Any, Any], str | None] | None,
    sample: Callable[..., Mapping[str, measure_statistics.Samples]],
    pair: Sequence[str],
    inner: int,
) -> Callable[[Any, Any], str | None] | None:
    """The second opinion, which takes seconds, for a program that may win.

    Donated arguments pass from call to call while it is timed: with copies of its own in each call a CUDA graph would
    be updated for new addresses every time, which a training loop never asks for.

    Args: sample: `_sample`; pair: plain XLA and the program, or none where any program may win; inner: executions per
        sample.
    """
    if second_opinion is None or not pair:
        return second_opinion

    def judged(reference: Any, result: Any) -> str | None:
        plain, mine = (min(samples.seconds) for samples in sample(pair, inner, 0.0, _QUICK_ROUNDS).values())
        if mine > _hopeless(plain):
            times = f"{ms(mine)} against {ms(plain)}"
            return f"it is slower than plain jax.jit in two samples ({times}): not judged by float64"
        return second_opinion(reference, result)

    return judged


def _not_worth_options(base: str, quick: Mapping[str, float], gain: float, barred: Mapping[str, str]) -> str | None:
    """Why a program is not compiled again with options, or None."""
    if quick[XLA] > _LONG:
        return f"not tried: one call of plain jax.jit takes more than {_LONG:g} s"
    best = min([name for name in quick if name not in barred] or quick, key=lambda name: quick[name])
    if base in quick and quick[base] > gain * quick[best]:
        return f"not tried: {base} takes {ms(quick[base])} and {best} {ms(quick[best])} at first: options change less"
    return None


def _choose(
    samples: Mapping[str, measure_statistics.Samples],
    rejected: dict[str, str],
    barred: Mapping[str, str] = MappingProxyType({}),
) -> Decision:
    """The fastest by paired ratios; the plainer program where they tell two apart by less than the margin."""
    allowed = [name for name in samples if name not in barred] or list(samples)
    plain = samples[XLA]
    ratios = {name: paired_timing.paired_ratio(s, plain) for name, s in samples.items()}
    speed = {name: (r.median, *r.quartiles) for name, r in ratios.items()}
    best = max(allowed, key=lambda name: speed[name][0])
    margins = {}

    def is_equal(name: str) -> bool:
        against = paired_timing.paired_ratio(samples[best], samples[name])  # how many times as fast the best is
        margins[name] = min(measure_statistics.MOST_MARGIN, max(LEAST_GAIN, paired_timing.error(against)))
        # Leaving plain jax.jit asks for more: its undisturbed runs must have been beaten too.
        return against.median <= 1 + margins[name] or (
            name == XLA and plain.quartiles[0] <= samples[best].quartiles[0] * (1 + LEAST_GAIN)
        )

    chosen = next(name for name in allowed if name == best or is_equal(name))
    if chosen != XLA:  # with options it is as plain as without: noise says nothing against those that look better
        alike = [name for name in allowed if name.split(":")[0] == chosen.split(":")[0]]
        likely = max(alike, key=lambda name: speed[name][0])
        chosen = likely if speed[likely][0] > speed[chosen][0] * (1 + LEAST_GAIN) else chosen
    scattered = max((paired_timing.error(ratios[name]) for name in {best, chosen}), default=0.0) > _NOISY
    noisy = scattered and speed[chosen][1] < _CLEAR
    seconds = {name: plain.median / s[0] for name, s in speed.items()}
    reason = _reason(chosen, best, speed, len(plain.seconds), rejected)
    return Decision(
        chosen,
        reason,
        seconds,
        max(margins.values(), default=LEAST_GAIN),
        rejected,
        measured=True,
        speed=speed,
        noisy=noisy,
    )


def _reason(
    chosen: str, best: str, speed: Mapping[str, tuple[float, float, float]], runs: int, rejected: Mapping[str, str]
) -> str:
    def text(name: str) -> str:
        middle, low, high = speed[name]
        return f"{middle:.2f} times as fast as plain jax.jit ({low:.2f} to {high:.2f} in half of {runs} pairs of runs)"

    if len(speed) == 1:
        dropped = [f"{name}: {why}" for name, why in rejected.items() if name.startswith(JCUTS)]
        return f"every other program is out: {'; '.join(dropped)}" if dropped else "no other candidate"
    if chosen == XLA:
        other = max((n for n in speed if n != XLA), key=lambda n: speed[n][0])
        but = (
            ", but no faster in the undisturbed quarter of them"
            if speed[other][0] > 1 + measure_statistics.MOST_MARGIN
            else ""
        )
        return f"nothing was faster than plain jax.jit beyond the noise; {other} was {text(other)}{but}"
    return text(chosen) + ("" if best == chosen else f"; {best} ({speed[best][0]:.2f}) is equal within the noise")


def copies_fit(leaves: Sequence[Any]) -> bool:
    """Whether one more copy of ``leaves`` fits into what their devices have free (with half of it to spare)."""
    need = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, jax.Array))
    devices = {d for leaf in leaves if isinstance(leaf, jax.Array) for d in leaf.devices()}
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats and need > 0.5 * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)):
            return False
    if any(d.platform == "cpu" for d in devices):
        return need <= 0.5 * _free_host_bytes()
    return True


def _free_host_bytes() -> float:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return math.inf
