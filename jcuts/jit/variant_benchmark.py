"""Chooses which variants of a call compete, has programs timed (`end_to_end_benchmark`), ablates launch fusion."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jcuts.base.settings import LOOP_BODIES, Variant
from jcuts.jit import chain_ablation, end_to_end_benchmark, race_limits, variant_space
from jcuts.jit.decision import XLA, Decision
from jcuts.jit.paired_timing import SampleSize
from jcuts.jit.precompile import precompile_variants
from jcuts.jit.traced_call import TracedCall
from jcuts.jit.variant_planning import PlanningResult
from jcuts.pipeline import microbatch_convs
from jcuts.pipeline.outcome import Outcome
from jcuts.tune import device_slices, time_budget
from jcuts.tune.baseline import autotune_cache
from jcuts.xla import devices as xla_devices
from jcuts.xla.chains import loop as chains_loop

log = logging.getLogger("jcuts")

SIZE_GPU = SampleSize(seconds=2e-3, executions=4)
"""One sample of whole programs on a GPU: calls in a row, as a training loop makes them."""
SIZE_CPU = SampleSize(seconds=3e-4)
"""... and on a CPU."""
LOOP_CALLS = Variant((), LOOP_BODIES)
ALONE = Variant((), "none")


def benchmark(traced: TracedCall, planned: PlanningResult, again: Decision | None) -> Decision:
    """Which whole program is the fastest.

    Args: again: a decision taken in noise, of whose programs those race that may still win.
    """
    start = time.monotonic()
    options = variant_space.options(traced.platform), variant_space.loop_options(traced.closed, traced.platform)
    names = race_limits.with_separate(variant_space.programs(planned.racing, *options), traced.platform)
    out = variant_space.dominated_names(names, planned.behind)
    traced.exact.of_every_form = gains_alone = any(outcome.gains_alone for outcome in planned.outcomes)
    late: dict[str, str] = {}
    if traced.on_gpu and time_budget.current().is_limited:
        left = [name for name in names if name not in out]
        if not gains_alone:
            late = race_limits.too_little_gain(left, planned.gains, planned.plain_seconds)
        left = [name for name in left if name not in late]
        late |= race_limits.beyond_race_limit(left, planned.gains, planned.totals)
    names = [name for name in names if name not in out and name not in late]
    further = {} if traced.on_gpu else _on_cpu(traced, planned.outcomes)
    names += map(variant_space.name_of, further)
    barred = variant_space.over_workspace_limit(names, planned.rows if planned.racing else {}, traced.settings)
    contending = again.still_contending(names) if again else names
    decision = time_programs(traced, [n for n in contending if n == XLA or n not in barred], barred)
    if more := race_limits.in_place_of_refused(decision.rejected, names, late, planned.gains, planned.totals):
        log.info("none of %d programs is right, %d others are tried", len(names), len(more))
        refused, late = decision.rejected, {name: why for name, why in late.items() if name not in more}
        plain = [name for name in names if variant_space.is_xla(name) and name not in refused]
        decision = time_programs(traced, [*plain, *(name for name in more if name not in barred)], barred)
        decision = dataclasses.replace(decision, rejected={**refused, **decision.rejected})
    decision, late = _race_late_ones(traced, planned, decision, late, barred, time.monotonic() - start)
    single = chain_ablation.unchained_variant(decision, planned.joined)
    if single and not (traced.on_gpu and time_budget.current().is_limited):
        decision = _ablate_chains(traced, decision, single)
    partial = any(outcome.report.unmeasured for outcome in further.values())
    decision = dataclasses.replace(decision, rejected={**out, **late, **decision.rejected}, partial=partial)
    if again is not None:
        decision = dataclasses.replace(decision, tries=again.tries + 1)
    log.info("%d whole programs compared in %.2f s", len(names), time.monotonic() - start)
    return decision


def _race_late_ones(
    traced: TracedCall,
    planned: PlanningResult,
    decision: Decision,
    late: dict[str, str],
    barred: Mapping[str, str],
    spent: float,
) -> tuple[Decision, dict[str, str]]:
    """The decision with programs that the limit left out and for which there is time after all, and who is still out.

    Args: spent: by the race so far [s].
    """
    raced = sum(not variant_space.is_xla(name) for name in decision.seconds)
    each = spent / max(1, raced)
    left = time_budget.current().unspent()
    more = race_limits.affordable(late, left, each, planned.gains, planned.totals, decision.seconds)
    more = [name for name in more if name not in barred]
    if not more:
        return decision, late
    log.info("%d further programs are tried in the time that is left", len(more))
    names = dict.fromkeys([XLA, *(n for n in decision.seconds if variant_space.is_xla(n)), decision.chosen, *more])
    again = time_programs(traced, list(names), barred)
    seconds, speed = {**decision.seconds, **again.seconds}, {**decision.speed, **again.speed}
    rejected = {**decision.rejected, **again.rejected}
    again = dataclasses.replace(again, seconds=seconds, speed=speed, rejected=rejected)
    return again, {name: why for name, why in late.items() if name not in more}


def time_programs(traced: TracedCall, names: Sequence[str], barred: Mapping[str, str]) -> Decision:
    """Times programs against each other. Args: barred: those that may not win, and why."""
    # Options can do more on a GPU than everything else: there no program does without them.
    call = traced.call

    def compile_(name: str) -> None:
        if device_slices.current().sliced:  # a slice of the device is no time to compile in
            traced.compiler.program(name, call.placement, call.platform).call.lower(*call.args, **call.kwargs).compile()

    programs, peaks = _programs(traced, names)
    heavy = race_limits.over_memory(peaks, xla_devices.memory_bytes(traced.platform))
    decision = end_to_end_benchmark.benchmark_variants(
        {name: program for name, program in programs.items() if name not in heavy},
        traced.copies,
        donates=traced.arguments.donates,
        verify=traced.exact,
        second_opinion=traced.exact.compare,
        barred=barred,
        size=_sample_size(traced),
        prepare=compile_,
        options_gain=math.inf if traced.on_gpu else end_to_end_benchmark.OPTIONS_GAIN,
    )
    return dataclasses.replace(decision, rejected={**heavy, **decision.rejected})


def _ablate_chains(traced: TracedCall, decision: Decision, single: str) -> Decision:
    """The decision, or the program that won with single calls in place of chains, which is compiled for it."""
    start = time.monotonic()
    call = traced.call
    known = {
        name: traced.compiler.program(name, call.placement, call.platform).call.compiled
        for name in (XLA, decision.chosen)
    }
    decision = chain_ablation.ablate_chains(
        decision,
        single,
        known | _programs(traced, [single])[0],
        traced.copies,
        donates=traced.arguments.donates,
        size=_sample_size(traced),
        verify=traced.exact,
        second_opinion=traced.exact.compare,
    )
    log.info("chains and single calls compared in %.2f s", time.monotonic() - start)
    return decision


def _programs(traced: TracedCall, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Whole programs, on a GPU compiled, and of these the peak memory [bytes]."""
    call = traced.call
    more = autotune_cache.options() if traced.on_gpu else {}
    own = end_to_end_benchmark.LOOP_OPTIONS.get("cuda", {})  # other algorithms than those that were published
    mine = {n: {} if variant_space.is_xla(n) or n.partition(":")[2] in own else more for n in names}
    calls = {name: traced.compiler.program(name, call.placement, call.platform, mine[name]).call for name in names}
    peaks = {}
    if traced.on_gpu:
        peaks = precompile_variants(
            {name: functools.partial(program.lower, *call.args, **call.kwargs) for name, program in calls.items()}
        )
    return {name: program.compiled for name, program in calls.items()}, peaks


def _on_cpu(traced: TracedCall, outcomes: Sequence[Outcome]) -> dict[Variant, Outcome]:
    """The programs that race besides on a CPU: with kernels that lost by little, with scans that are one call."""
    every, loops = _near_ties(traced, outcomes), _loop_calls(traced, outcomes)
    found = {variant_space.EVERY: every, LOOP_CALLS: loops}
    return {form: outcome for form, outcome in found.items() if outcome is not None}


def _loop_calls(traced: TracedCall, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The program whose scans are one call each; None where none can be, or the plain one's are already."""
    if len(outcomes) != 1 or not chains_loop.has_scans(traced.closed) or chains_loop.has_calls(outcomes[0].closed):
        return None
    loops = traced.plan(LOOP_CALLS, may_measure=True)
    return loops if chains_loop.has_calls(loops.closed) else None


def _near_ties(traced: TracedCall, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The program with kernels that lost to XLA by little, if it is worth a race, and another one than the plain."""
    if len(outcomes) != 1 or microbatch_convs.is_asked(traced.settings):
        return None
    plain = outcomes[0].report
    if not variant_space.near_ties(plain):
        return None
    every = traced.plan(variant_space.EVERY, may_measure=True)
    return every if every.closed is not traced.closed and every.report.source != plain.source else None


def against_rewrites_alone(traced: TracedCall, decision: Decision) -> Decision:
    """The decision for a program that is not compared with plain ``jax.jit``: with kernels, or rewritten alone.

    XLA's code of the rewritten program takes plain XLA's place in the race. What is asked for is memory, so a program
    that needs more than that may not win (`race_limits.over_memory`).
    """
    start, alone, mine = time.monotonic(), variant_space.name_of(ALONE), decision.chosen
    if traced.plan(ALONE, may_measure=False).closed is traced.closed:
        return decision
    calls, peaks = _programs(traced, [mine, alone])
    if not {mine, alone} <= peaks.keys():
        return decision
    barred = race_limits.over_memory({XLA: peaks[alone], mine: peaks[mine]}, 0)
    raced = {XLA: calls[alone], mine: calls[mine]}
    found = end_to_end_benchmark.benchmark_variants(
        raced, traced.copies, donates=traced.arguments.donates, barred=barred, size=_sample_size(traced)
    )
    log.info("kernels and the rewritten program alone compared in %.2f s", time.monotonic() - start)
    return dataclasses.replace(
        found,
        chosen=alone if found.chosen == XLA else mine,
        reason=f"{decision.reason}; {alone} stands for it: {found.reason}",
        seconds={alone if name == XLA else name: value for name, value in found.seconds.items()},
        speed={alone if name == XLA else name: value for name, value in found.speed.items()},
        spent=decision.spent,
    )


def _sample_size(traced: TracedCall) -> SampleSize:
    return SIZE_GPU if traced.on_gpu else SIZE_CPU
