"""Plans the program variants of a function for one call: all tuning problems in one session, then every variant's
passes.

While this thread plans, `background_tasks` compiles and runs plain XLA's programs on the device.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jcuts.base import collector
from jcuts.base.settings import ATTENTION, UNBROKEN, Variant
from jcuts.jit import background_work, end_to_end_benchmark, race_limits, variant_space
from jcuts.jit.decision import Decision
from jcuts.jit.paired_timing import ms
from jcuts.jit.traced_call import TracedCall
from jcuts.microbatch.report import DivisionReport
from jcuts.pipeline.outcome import Outcome
from jcuts.primitive import shard_local
from jcuts.primitive.lowering import Started, plan
from jcuts.report import measured_sums
from jcuts.report.report_data import NOT_CHECKED, NOT_MEASURED
from jcuts.trace import jaxapi
from jcuts.tune import device_slices, session, time_budget
from jcuts.tune.baseline import autotune_cache, xla_profile
from jcuts.tune.parent import machine_lock
from jcuts.xla.chains import fuse as chains_fuse

log = logging.getLogger("jcuts")
COMPILED = " compiled"
FLOAT64 = f"float64{COMPILED}"
"""What a first call does early that needs no device: nothing is timed in that program."""
FLOAT64_AHEAD = f"{FLOAT64} ahead"
"""... and begins on a thread of its own."""
FLOAT64_RUN = "float64"
"""... and what keeps the device busy."""
COMPILATIONS_AFTER = 3
"""Compilations' time that follows tuning: a program with kernels is lowered, compiled, and compared with float64."""
PLANS_PER_FINISH = 2
"""Planning takes at least so many times as long as planning with measured choices (2 to 5 in training steps of CNNs and
encoders)."""
PROFILE = "profile"
"""The profile of plain XLA's program (`tune.baseline.xla_profile`): it runs on the device."""


@dataclass(frozen=True)
class PlanningResult:
    """Result of planning a function.

    Attributes:
        outcomes: of every form that was planned: one that could not be measured may change nothing.
        of_form: outcomes by form, of a function in one part.
        racing: the forms whose programs may race, the plainest first.
        rows: their convolutions under a workspace limit.
        behind: those of them that are left out, with the reason.
        gains: what the kernels of each gain on XLA's code by measured sums [s].
        totals: what all regions take together, of forms that have all (`variant_space.measured_totals`) [s].
        joined: kernels in chains of two or more, as often as they run, of the forms that have any.
        plain_seconds: kernels of plain XLA's program by its profile [s], None without one, and where loops run them.
    """

    outcomes: Sequence[Outcome]
    racing: Sequence[Variant | None]
    rows: Mapping[Variant | None, Sequence[DivisionReport]]
    behind: Mapping[Variant | None, str] = field(default_factory=dict)
    gains: Mapping[Variant | None, float] = field(default_factory=dict)
    totals: Mapping[Variant | None, float] = field(default_factory=dict)
    joined: Mapping[Variant | None, float] = field(default_factory=dict)
    plain_seconds: float | None = None
    of_form: Mapping[Variant | None, Outcome] = field(default_factory=dict)

    @classmethod
    def plain(cls, outcomes: Sequence[Outcome], uses_jcuts: bool) -> PlanningResult:
        """The plain form alone, of a function in one part or several."""
        rows: dict[Variant | None, Sequence[DivisionReport]] = {None: [row for o in outcomes for row in _divisions(o)]}
        return cls(outcomes, [None] if uses_jcuts else [], rows, joined=_joined({None: outcomes}))

    @classmethod
    def of_forms(cls, found: Mapping[Variant | None, Outcome], outcomes: Sequence[Outcome]) -> PlanningResult:
        """Several forms. Args: found: outcomes of those that may race; outcomes: of all."""
        rows = {form: _divisions(outcome) for form, outcome in found.items()}
        joined = _joined({form: [outcome] for form, outcome in found.items()})
        behind = variant_space.dominated_variants(found)
        gains = {form: measured_sums.kernel_sums(outcome.report)[1] for form, outcome in found.items()}
        totals = variant_space.measured_totals(found)
        return cls(outcomes, list(found), rows, behind, gains, totals, joined, of_form=found)

    @property
    def uses_jcuts(self) -> bool:
        """Whether any form has a kernel."""
        return bool(self.racing)


def _joined(outcomes: Mapping[Variant | None, Sequence[Outcome]]) -> dict[Variant | None, float]:
    counts = {form: sum(chains_fuse.joined(outcome.closed) for outcome in mine) for form, mine in outcomes.items()}
    return {form: count for form, count in counts.items() if count}


def _divisions(outcome: Outcome) -> Sequence[DivisionReport]:
    return outcome.report.divisions


def has_variants(traced: TracedCall) -> bool:
    """Whether programs of several variants may compete: on GPUs, where whole functions are timed."""
    return traced.settings.mode == "mixed" and traced.on_gpu and traced.why_not_benchmarked() is None


def has_kernels_of(decision: Decision, traced: TracedCall) -> bool:
    """Whether all that the chosen program consists of was measured: other constants may have made other regions."""
    if variant_space.is_xla(decision.chosen):
        return True
    outcome = traced.plan(variant_space.form_of(decision.chosen), may_measure=False)
    return not any(s.why in (NOT_MEASURED, NOT_CHECKED) for s in outcome.report.subsets)


def plan_call(traced: TracedCall, parts: shard_local.Split | None, *, measure: bool) -> PlanningResult:
    """The variants of a function that may race, planned and tuned.

    Args: parts: the function's shard-local parts where its arguments are on several devices.
    """
    if parts is not None:
        return _plan_shards(traced, parts, measure)
    if measure and has_variants(traced):
        return _plan_variants(traced)
    outcome = traced.plan(None, may_measure=measure)
    planned = PlanningResult.plain([outcome], outcome.closed is not traced.closed)
    return replace(planned, of_form={None: outcome})


def _plan_shards(traced: TracedCall, parts: shard_local.Split, measure: bool) -> PlanningResult:
    outcomes = shard_local.plan_parts(
        parts, lambda part: plan(part, traced.settings, traced.platform, may_measure=measure)
    )
    uses_jcuts = any(o.closed is not p.closed for o, p in zip(outcomes, parts.parts, strict=True))
    return PlanningResult.plain(outcomes, uses_jcuts)


def _plan_variants(traced: TracedCall) -> PlanningResult:
    begun = time.monotonic()
    with machine_lock.try_lock() as mine:
        may = mine and not device_slices.current().sliced  # nothing runs on the device beside the user's program
        budget = time_budget.current()
        worth = variant_space.allowed(variant_space.candidate_variants(traced.closed, traced.platform), traced.settings)
        worth = race_limits.most_rewritten(worth) if budget.is_limited else worth
        judge = traced.exact if any(form is not None and form.rewrites for form in worth) else None
        profiler = xla_profile.RegionProfiler(traced.closed, traced.leaves) if may else None
        todo = beyond_plain_jit(background_tasks(traced, judge, profiler, budget), budget) if may else {}
        # The first times algorithms, which the next finds in memory; first runs keep the host busy.
        light = [name for name in list(todo)[1:] if name != FLOAT64_RUN]
        quiet = [name for name in light if name == FLOAT64_AHEAD or name.endswith(COMPILED)]
        try:
            with background_work.BackgroundWork(todo, light=light, quiet=quiet) as busy:
                result = _tune_and_plan(traced, worth, busy, profiler)
        finally:
            budget.release()
            if profiler is not None:
                profiler.close()
    log.info("planned and tuned in %.2f s", time.monotonic() - begun)
    return result


def beyond_plain_jit(
    todo: dict[str, Callable[[], object]], budget: time_budget.TimeBudget
) -> dict[str, Callable[[], object]]:
    """The same tasks, with a tuning budget held until the first has ended: what plain ``jax.jit`` would take."""
    first = next(iter(todo), None)
    if first is None:
        return todo
    task = todo[first]

    def timed() -> object:
        try:
            return task()
        finally:
            budget.release()

    budget.hold()
    return {**todo, first: timed}


def background_tasks(
    traced: TracedCall,
    exact: variant_space.Float64Judge | None,
    profiler: xla_profile.RegionProfiler | None = None,
    budget: time_budget.TimeBudget = time_budget.UNLIMITED,
) -> dict[str, Callable[[], object]]:
    """What the GPU can do for the last guard while this thread plans: all that has to do with plain XLA alone.

    Args: budget: what a compilation takes whose algorithms are known is kept of it for the program with kernels.
    """
    call = traced.call
    options = variant_space.options(traced.platform)
    names = [*(f"{end_to_end_benchmark.XLA}:{option}" for option in options), end_to_end_benchmark.XLA]
    more = autotune_cache.publish_results()  # the first leaves its algorithms to others, the next finds them in memory
    programs = {name: traced.compiler.program(name, call.placement, traced.platform, more).call for name in names}
    lowered = {name: program.lower(*call.args, **call.kwargs) for name, program in programs.items()}
    compiled: dict[str, Any] = {}
    second = names[0] if profiler is not None else names[-1]  # the first whose algorithms are known

    def compile_(name: str) -> None:
        start = time.monotonic()
        compiled[name] = lowered[name].compile()
        if name == second:
            budget.reserve(COMPILATIONS_AFTER * (time.monotonic() - start))

    def first_run(name: str) -> None:  # not the jitted function: it would be traced again where contexts differ
        mine, named = traced.arguments.split(*traced.copies())[0]
        jax.block_until_ready(compiled[name](*mine, **named))

    # The first times algorithms, which all others find in memory; tuning waits for the profile.
    todo: dict[str, Callable[[], object]] = {}
    if profiler is not None:
        profiler.lower()
        todo |= {f"{PROFILE}{COMPILED}": profiler.compile, PROFILE: profiler.run}
    compiles = {f"{n}{COMPILED}": functools.partial(compile_, n) for n in names}
    first = next(iter(compiles))
    todo[first] = compiles[first]
    todo |= {FLOAT64_AHEAD: exact.compile_ahead} if exact is not None else {}  # planning has ended when it is traced
    todo |= compiles
    todo |= {f"{n} run": functools.partial(first_run, n) for n in names}
    return todo | ({FLOAT64: exact.compile, FLOAT64_RUN: exact.precompute} if exact is not None else {})


def _tune_and_plan(
    traced: TracedCall,
    worth: Sequence[Variant | None],
    meanwhile: background_work.BackgroundWork,
    profiler: xla_profile.RegionProfiler | None = None,
) -> PlanningResult:
    """The variants worth a race, and the outcomes of all: one that could not be measured may change nothing."""
    outcomes = []
    with session.shared_worker_session():
        start = time.monotonic()
        started: dict[Variant | None, Started] = {}
        with collector.paused():
            for form in worth:
                if form is None or form.regions in (
                    "all",
                    "absorbing",
                    ATTENTION,
                    UNBROKEN,
                ):  # these have all problems of the others
                    started[form] = traced.start_planning(form)
                    if (problems := started[form].problems) is not None:
                        session.warm_workers(problems)
        log.info("variants planned in %.2f s", time.monotonic() - start)
        time_budget.current().reserve((time.monotonic() - start) / PLANS_PER_FINISH)
        # What most is rewritten in is expected to win: its problems come first.
        ordered = sorted(started, key=lambda form: -len(form.rewrites) if form is not None else 0)
        collected = [planning.problems for planning in started.values() if planning.problems is not None]
        first = started[ordered[0]].problems if ordered else None
        session.tune_together(collected, meanwhile.quiesce, profiler, first)
        meanwhile.quiesce(True)

        def of_form(form: Variant | None) -> Outcome:
            planning = started.get(form)
            if planning is None:
                planning = traced.start_planning(form)
                if planning.problems is not None:
                    session.adopt_choices(planning.problems, collected)
            outcomes.append(planning.finish())
            return outcomes[-1]

        start = time.monotonic()
        found = variant_space.plan_variants(traced.closed, traced.platform, of_form, worth)
        log.info("variants planned with measured choices in %.2f s", time.monotonic() - start)
        # How often the kernels of a loop's body run is not known.
        seconds = None if profiler is None or variant_space.has_loops(traced.closed) else profiler.total
        _add_derived(found, traced.closed, of_form, seconds)
    planned = PlanningResult.of_forms(found, outcomes)
    for form, total in planned.totals.items():
        told = variant_space.name_of(form), ms(total), ms(planned.gains[form])
        log.info("%s: regions take %s by measured sums, of which kernels gain %s", *told)
    return replace(planned, plain_seconds=seconds)


def _add_derived(
    found: dict[Variant | None, Outcome],
    closed: jaxapi.Closed,
    plan: Callable[[Variant | None], Outcome],
    plain_seconds: float | None,
) -> None:
    """Adds the variants that follow from measured times where they are programs of their own: of the partition search,
    of attention beside all other kernels, and of clear gains.

    Args: plain_seconds: kernels of plain XLA's program by its profile [s].
    """
    searched = None if time_budget.current().is_spent() else variant_space.variant_to_search(found)
    for form, what in (
        (searched, "partition of %s searched in %.2f s"),
        (variant_space.variant_with_attention(found), "%s planned in %.2f s"),
        (variant_space.variant_of_clear(found, plain_seconds), "clear gains of %s planned in %.2f s"),
    ):
        if form is None:
            continue
        start = time.monotonic()
        outcome = plan(form)
        if outcome.closed is not closed and all(outcome.report.source != o.report.source for o in found.values()):
            found[form] = outcome
        log.info(what, variant_space.name_of(form), time.monotonic() - start)
