"""Which program runs for a call: its forms are planned and tuned, whole programs compared, and the answer is kept."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jcuts.base import knobs
from jcuts.base.fingerprint import digest, versions
from jcuts.base.settings import Settings, Variant
from jcuts.jit import background_work, chain_ablation, end_to_end_benchmark, variant_space
from jcuts.jit.call_signature import CallSignature, Signature, place_text, platform_of
from jcuts.jit.planning_result import PlanningResult
from jcuts.jit.precompile import precompile_variants
from jcuts.jit.trace_token import permission
from jcuts.jit.variant_compiler import VariantCompiler
from jcuts.pipeline import microbatch_convs
from jcuts.pipeline.outcome import Outcome
from jcuts.primitive import shard_local
from jcuts.primitive.lowering import Started, plan, start_planning
from jcuts.primitive.sharding import Placement
from jcuts.report.function_report import NOT_CHECKED, NOT_MEASURED, FunctionReport
from jcuts.rewrite.splat_constants import numbers_of
from jcuts.trace import jaxapi
from jcuts.trace.capture import Capture, function_name
from jcuts.tune import session
from jcuts.tune.baseline import autotune_cache
from jcuts.tune.parent import machine_lock

log = logging.getLogger("jcuts")
FLOAT64 = "float64 compiled"
"""What a first call does early that needs no device: nothing is timed in that program."""
FLOAT64_RUN = "float64"
"""... and what keeps the device busy."""

_default_store: end_to_end_benchmark.DecisionStore | None = None
_default_stores = 0  # how often it was set


def set_default_store(store: end_to_end_benchmark.DecisionStore | None) -> None:
    """Where every ``Optimized`` keeps the guard's decisions from now on; None for the user's tuning database."""
    global _default_store, _default_stores
    _default_store, _default_stores = store, _default_stores + 1


def default_stores() -> int:
    """How often the default store was set."""
    return _default_stores


# Decisions taken by this process, by their key: one taken in noise is measured again by a later process.
_decided_here: set[str] = set()


class Call(NamedTuple):
    """One call to decide about: the arguments, and what is known of them."""

    signature: Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    placement: Placement
    platform: str


class VariantSelector:
    """Decides about one function.

    Args:
        fn: the user's function; settings: the user's options; options: of ``jax.jit``; arguments: what those say of
            the function's arguments.
        store: where decisions are kept, None for the default.
    Attributes: carriers: the programs that compete.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        settings: Settings,
        options: dict[str, Any],
        arguments: CallSignature,
        store: end_to_end_benchmark.DecisionStore | None,
    ) -> None:
        self.settings = settings
        self.carriers = VariantCompiler(fn, settings, options)
        self._fn = fn
        self._options = options
        self._arguments = arguments
        self._store = store

    def select(self, call: Call, *, measure: bool, force: bool = False) -> end_to_end_benchmark.Decision:
        """Which program runs for a call.

        Args: measure: whether it may be measured; force: whatever was decided before.
        """
        if knobs.current().disable:
            return end_to_end_benchmark.Decision(end_to_end_benchmark.XLA, "JCUTS_DISABLE is set")
        if jaxapi.jit_disabled():
            return end_to_end_benchmark.Decision(
                end_to_end_benchmark.JCUTS, "jax.disable_jit is in force: nothing is compiled"
            )
        traced = self.carriers.plain.trace(*call.args, **call.kwargs)
        closed = traced.jaxpr
        leaves = self._arguments.leaves(call.args, call.kwargs)
        if not call.placement.shardings:
            out_tree = jax.tree.structure(traced.out_info)
            permission.traced = self.carriers, Capture(closed, [], out_tree, function_name(self._fn))
        key = self.store_key(closed, call.signature, call.platform) if self.settings.mode == "mixed" else ""
        exact = variant_space.Float64Judge(closed, leaves, self.settings.tolerance, call.platform)
        planned = self._plan_variants(call, closed, leaves, exact, key, measure, force)
        if isinstance(planned, end_to_end_benchmark.Decision):
            return planned
        if measure and any(o.report.postponed for o in planned.outcomes):
            name = end_to_end_benchmark.XLA if self.settings.mode == "mixed" else end_to_end_benchmark.JCUTS
            return end_to_end_benchmark.Decision(
                name, "kernels could not be measured now: a later call tunes", deferred=True
            )
        if self.settings.mode != "mixed":
            return end_to_end_benchmark.Decision(
                end_to_end_benchmark.JCUTS, f"mode={self.settings.mode!r} is not compared as a whole"
            )
        stored = self._stored(key, call.platform, planned.uses_jcuts)
        if not measure:
            return stored or end_to_end_benchmark.Decision(
                end_to_end_benchmark.JCUTS, f"tune={self.settings.tune!r}: nothing was timed"
            )
        if (why := self._why_not_benchmarked(closed, leaves)) is not None:
            return end_to_end_benchmark.Decision(end_to_end_benchmark.JCUTS, why)
        if stored is not None and not force and (stored.is_final or key in _decided_here):
            return stored
        decision = self._benchmark(call, closed, leaves, exact, planned, stored if not force else None)
        if not any(o.failed for o in planned.outcomes):  # else another process may do better
            _decided_here.add(key)
            self._guard_store().put_guard(key, decision.to_dict())
        return decision

    def _plan_variants(
        self,
        call: Call,
        closed: jaxapi.Closed,
        leaves: Sequence[Any],
        exact: variant_space.Float64Judge,
        key: str,
        measure: bool,
        force: bool,
    ) -> PlanningResult | end_to_end_benchmark.Decision:
        """The forms of a function that may race, or what was decided without planning them."""
        if call.placement.shardings:
            parts = shard_local.split(closed, call.placement)
            if isinstance(parts, str):
                return end_to_end_benchmark.Decision(
                    end_to_end_benchmark.JCUTS, f"arguments on several devices and {parts}: left to XLA"
                )
            outcomes = shard_local.plan_parts(
                parts, lambda part: plan(part, self.settings, call.platform, may_measure=measure)
            )
            uses_jcuts = any(o.closed is not p.closed for o, p in zip(outcomes, parts.parts, strict=True))
            return PlanningResult.plain(outcomes, uses_jcuts)
        if measure and self._may_race(closed, leaves, call.platform):
            stored = None if force else self._stored(key, call.platform, True)
            if stored is not None and stored.is_final and self._has_kernels(stored, closed, leaves, call.platform):
                return stored  # lowering finds them in the database
            begun = time.monotonic()
            with machine_lock.try_lock() as may:
                worth = variant_space.candidate_variants(closed, call.platform)
                judge = exact if any(form is not None and form.rewrites for form in worth) else None
                todo = self.background_tasks(call, judge) if may else {}
                # The first times algorithms, which the next finds in memory; first runs keep the host busy.
                light = [name for name in list(todo)[1:] if name != FLOAT64_RUN]
                with background_work.BackgroundWork(todo, light=light, quiet=(FLOAT64,)) as busy:
                    found, outcomes = self._plan_forms(closed, leaves, call.platform, worth, busy)
            log.info("planned and tuned in %.2f s", time.monotonic() - begun)
            return PlanningResult.of_forms(found, outcomes)
        outcome = plan(closed, self.settings, call.platform, may_measure=measure, examples=leaves)
        return PlanningResult.plain([outcome], outcome.closed is not closed)

    def _has_kernels(
        self, stored: end_to_end_benchmark.Decision, closed: jaxapi.Closed, leaves: Sequence[Any], platform: str
    ) -> bool:
        """Whether all that the chosen program consists of was measured: other constants may have made other subsets."""
        if variant_space.is_xla(stored.chosen):
            return True
        settings = self.carriers.settings_for(variant_space.form_of(stored.chosen))
        outcome = plan(closed, settings, platform, may_measure=False, examples=leaves)
        return not any(s.why in (NOT_MEASURED, NOT_CHECKED) for s in outcome.report.subsets)

    def _benchmark(
        self,
        call: Call,
        closed: jaxapi.Closed,
        leaves: Sequence[Any],
        exact: variant_space.Float64Judge,
        planned: PlanningResult,
        again: end_to_end_benchmark.Decision | None,
    ) -> end_to_end_benchmark.Decision:
        """What the last guard says. Args: again: a noisy decision, of whose programs those race that may still win."""
        names, start = variant_space.programs(planned.racing, variant_space.options(call.platform)), time.monotonic()
        out = variant_space.dominated_names(names, planned.behind)
        names = [name for name in names if name not in out]
        if call.platform == "cpu" and self._near_ties_worthwhile(planned.outcomes, closed, leaves):
            names.append(variant_space.name_of(variant_space.EVERY))
        barred = variant_space.over_workspace_limit(names, planned.rows if planned.racing else {}, self.settings)
        open_ = [
            n
            for n in (again.still_contending(names) if again else names)
            if n == end_to_end_benchmark.XLA or n not in barred
        ]
        decision = self._run_benchmark(call, open_, exact, barred)
        if single := chain_ablation.unchained_variant(decision, planned.joined):
            decision = self._ablate_chains(call, decision, single, exact)
        decision = dataclasses.replace(decision, rejected={**out, **decision.rejected})
        if again is not None:
            decision = dataclasses.replace(decision, tries=again.tries + 1)
        log.info("%d whole programs compared in %.2f s", len(names), time.monotonic() - start)
        return decision

    def background_tasks(self, call: Call, exact: variant_space.Float64Judge | None) -> dict[str, Callable[[], object]]:
        """What the GPU can do for the last guard while this thread plans: all that has to do with plain XLA alone."""
        names = [
            *(f"{end_to_end_benchmark.XLA}:{option}" for option in variant_space.options(call.platform)),
            end_to_end_benchmark.XLA,
        ]
        more = (
            autotune_cache.publish_results()
        )  # the first leaves its algorithms to other processes, the next finds them in memory
        programs = {name: self.carriers.program(name, call.placement, call.platform, more).call for name in names}
        lowered = {name: program.lower(*call.args, **call.kwargs) for name, program in programs.items()}
        compiled: dict[str, Any] = {}

        def compile_(name: str) -> None:
            compiled[name] = lowered[name].compile()

        def first_run(name: str) -> None:  # not the jitted function: it would be traced again where contexts differ
            mine, named = self._arguments.split(*self._arguments.copies(call.args, call.kwargs))[0]
            jax.block_until_ready(compiled[name](*mine, **named))

        todo: dict[str, Callable[[], object]] = {f"{n} compiled": functools.partial(compile_, n) for n in names}
        todo |= {f"{n} run": functools.partial(first_run, n) for n in names}
        return todo | ({FLOAT64: exact.compile, FLOAT64_RUN: exact.precompute} if exact is not None else {})

    def _plan_forms(
        self,
        closed: jaxapi.Closed,
        leaves: Sequence[Any],
        platform: str,
        worth: Sequence[Variant | None],
        meanwhile: background_work.BackgroundWork,
    ) -> tuple[dict[Variant | None, Any], list[Any]]:
        """The forms worth a race, and the outcomes of all: one that could not be measured may change nothing."""
        outcomes = []
        measuring = functools.partial(start_planning, may_measure=True, examples=leaves)

        with session.shared_worker_session():
            start = time.monotonic()
            # These have all problems of the others.
            widest = [form for form in worth if form is None or form.regions in ("all", "absorbing")]
            started: dict[Variant | None, Started] = {}
            for form in widest:
                started[form] = measuring(closed, self.carriers.settings_for(form), platform)
                if (problems := started[form].problems) is not None:
                    session.warm_workers(problems)
            log.info("forms planned in %.2f s", time.monotonic() - start)
            collected = [planning.problems for planning in started.values() if planning.problems is not None]
            session.tune_together(collected, meanwhile.quiesce)
            meanwhile.quiesce(True)

            def of_form(form: Variant | None) -> Outcome:
                known = started.get(form) or measuring(closed, self.carriers.settings_for(form), platform)
                outcomes.append(known.finish())
                return outcomes[-1]

            start = time.monotonic()
            found = variant_space.plan_variants(closed, platform, of_form, worth)
            log.info("forms planned with what was measured in %.2f s", time.monotonic() - start)
            return found, outcomes

    def _why_not_benchmarked(self, closed: jaxapi.Closed, leaves: Sequence[Any]) -> str | None:
        if jaxapi.has_effects(closed):
            return f"the function has effects ({', '.join(jaxapi.effects_of(closed))}): it is never run twice"
        if jax.process_count() > 1:
            return "several processes: each must compile the same program, so whole functions are not timed"
        if self._arguments.donates and not end_to_end_benchmark.copies_fit(leaves):
            return "donated arguments do not fit twice into memory: not timed as a whole"
        return None

    def _may_race(self, closed: jaxapi.Closed, leaves: Sequence[Any], platform: str) -> bool:
        """Whether programs of several forms may compete: on GPUs, where whole functions are timed."""
        return (
            self.settings.mode == "mixed"
            and platform in variant_space.GPUS
            and self._why_not_benchmarked(closed, leaves) is None
        )

    def _near_ties_worthwhile(self, outcomes: Sequence[Any], closed: jaxapi.Closed, leaves: Sequence[Any]) -> bool:
        """Whether a program with kernels that lost to XLA by little is worth a race, and another one than the plain."""
        plain = outcomes[0].report if len(outcomes) == 1 else None
        if (
            not isinstance(plain, FunctionReport)
            or microbatch_convs.is_asked(self.settings)
            or not variant_space.near_ties(plain)
        ):
            return False
        every = plan(closed, self.carriers.settings_for(variant_space.EVERY), "cpu", may_measure=True, examples=leaves)
        return every.closed is not closed and every.report.source != plain.source

    def _programs(self, call: Call, names: Sequence[str]) -> dict[str, Any]:
        """Whole programs, on a GPU compiled."""
        on_gpu = call.platform in variant_space.GPUS
        more = autotune_cache.options() if on_gpu else {}
        mine = {name: {} if variant_space.is_xla(name) else more for name in names}
        calls = {name: self.carriers.program(name, call.placement, call.platform, mine[name]).call for name in names}
        if on_gpu:
            precompile_variants(
                {name: functools.partial(program.lower, *call.args, **call.kwargs) for name, program in calls.items()}
            )
        return {name: program.permitted for name, program in calls.items()}

    def _run_benchmark(
        self, call: Call, names: Sequence[str], exact: variant_space.Float64Judge, barred: Mapping[str, str]
    ) -> end_to_end_benchmark.Decision:
        on_gpu = call.platform in variant_space.GPUS
        # Options can do more on a GPU than everything else: there no program does without them.
        return end_to_end_benchmark.benchmark_variants(
            self._programs(call, names),
            lambda: self._arguments.copies(call.args, call.kwargs),
            donates=self._arguments.donates,
            verify=exact,
            barred=barred,
            chunk=_chunk(call.platform),
            options_gain=math.inf if on_gpu else end_to_end_benchmark.OPTIONS_GAIN,
        )

    def _ablate_chains(
        self, call: Call, decision: end_to_end_benchmark.Decision, single: str, exact: variant_space.Float64Judge
    ) -> end_to_end_benchmark.Decision:
        """The decision, or the program that won with single calls in place of chains, which is compiled for it."""
        start = time.monotonic()
        known = {
            name: self.carriers.program(name, call.placement, call.platform).call.permitted
            for name in (end_to_end_benchmark.XLA, decision.chosen)
        }
        decision = chain_ablation.ablate_chains(
            decision,
            single,
            known | self._programs(call, [single]),
            lambda: self._arguments.copies(call.args, call.kwargs),
            donates=self._arguments.donates,
            chunk=_chunk(call.platform),
            verify=exact,
        )
        log.info("chains and single calls compared in %.2f s", time.monotonic() - start)
        return decision

    # ------------------------------------------------------------ what is kept

    def stored_decision(
        self, closed: jaxapi.Closed, signature: Signature, uses_jcuts: bool
    ) -> end_to_end_benchmark.Decision:
        """What an earlier process decided about a function that this one has not called."""
        platform = platform_of(signature)
        kept = None
        if self.settings.mode == "mixed" and self.settings.tune != "off":
            kept = self._stored(self.store_key(closed, signature, platform), platform, uses_jcuts)
        return kept or end_to_end_benchmark.Decision(end_to_end_benchmark.JCUTS, "not called with these arguments yet")

    def _stored(self, key: str, platform: str, uses_jcuts: bool) -> end_to_end_benchmark.Decision | None:
        store = self._guard_store()
        data = store.guard(key)
        decision = None if data is None else end_to_end_benchmark.Decision.from_dict(data)
        if decision is None or not variant_space.is_known(decision.chosen, platform, uses_jcuts):
            return None
        if not variant_space.is_xla(decision.chosen) and not store.is_own(key):
            return None  # nothing here has compared the program that it chose with plain XLA's
        return decision

    def _guard_store(self) -> end_to_end_benchmark.DecisionStore:
        chosen = self._store if self._store is not None else _default_store
        return chosen if chosen is not None else session.store()

    def store_key(self, closed: jaxapi.Closed, signature: Signature, platform: str) -> str:
        """What a decision is kept under."""
        places = "; ".join(place_text(place) for _, place in signature.leaves)
        kinds = sorted({d.device_kind for d in jax.local_devices() if d.platform == platform})
        limits = ("limits 2",) if microbatch_convs.is_asked(self.settings) else ()  # changes with what they allow
        singly = ("single calls",) if platform in variant_space.GPUS and not knobs.current().chains else ()
        numbers = numbers_of(closed)  # constants that are others in other weights, where a program is another one
        known = (f"numbers {numbers}",) if numbers else ()
        return digest(
            "guard",
            *limits,
            *singly,
            *known,
            jaxapi.canonical_text(closed),
            repr(self.settings),
            platform,
            ",".join(kinds),
            places,
            repr(self._options),
            repr(sorted(versions().items())),
        )


def _chunk(platform: str) -> float:
    """Wall time of one sample of the last guard [s]."""
    return 2e-3 if platform in variant_space.GPUS else 3e-4
