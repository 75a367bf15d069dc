"""Selects the program variant for a call signature: plan every variant, tune its kernels, benchmark end to end,
store.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from jcuts.base import knobs
from jcuts.base.settings import Settings
from jcuts.jit.accuracy.float64_check import output_roles
from jcuts.jit.call_signature import CallSignature
from jcuts.jit.checked_in import pinning
from jcuts.jit.checked_in.completeness import complete_decision
from jcuts.jit.decision import JCUTS, XLA, Decision, DecisionStore
from jcuts.jit.decision_cache import DecisionCache
from jcuts.jit.end_to_end_benchmark import SAFER_OPTIONS
from jcuts.jit.multi_controller.agreement import Participant, agree
from jcuts.jit.multi_controller.process_group import group_of
from jcuts.jit.trace_token import permission
from jcuts.jit.traced_call import Call, TracedCall
from jcuts.jit.variant_benchmark import against_rewrites_alone, benchmark
from jcuts.jit.variant_compiler import VariantCompiler
from jcuts.jit.variant_planning import has_kernels_of, has_variants, plan_call
from jcuts.pipeline import passes
from jcuts.primitive import planned_outcomes, shard_local
from jcuts.trace import jaxapi
from jcuts.trace.capture import Capture, function_name
from jcuts.tune import device_slices, session, time_budget
from jcuts.tune.agreed_store import AgreedStore

log = logging.getLogger("jcuts")


class VariantSelector:
    """Selects the program variants of one function.

    Args:
        fn: the user's function; settings: the user's options; options: of ``jax.jit``; arguments: what those say of
            the function's arguments.
        store: where decisions are kept, None for the default.
    Attributes: carriers: the programs that compete. decisions: those that are stored.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        settings: Settings,
        options: dict[str, Any],
        arguments: CallSignature,
        store: DecisionStore | None,
    ) -> None:
        self.settings = settings
        self.carriers = VariantCompiler(fn, settings, options)
        self.decisions = DecisionCache(settings, options, store)
        self._fn = fn
        self._arguments = arguments
        self._agreed: AgreedStore | None = None

    def select(self, call: Call, *, measure: bool, force: bool = False, tune_seconds: float | None = None) -> Decision:
        """Which program runs for a call; one that all processes agree on, where several make it.

        Args: measure: whether it may be measured; force: whatever was decided before; tune_seconds: that tuning may
            take, None for what the options say.
        """
        alone = functools.partial(self._select_alone, call, measure=measure, force=force, tune_seconds=tune_seconds)
        if call.placement.spans_processes:
            return self._select_together(call, alone)
        return alone()

    def _select_together(self, call: Call, alone: Callable[[], Decision]) -> Decision:
        """The decision of all processes that make a call. Args: alone: decides in one, the leader."""
        own = session.store()
        agreed = self._agreed = self._agreed or AgreedStore(device=own.device, versions=own.versions)
        group = group_of(call.placement.processes, jax.process_index())

        def lower(decision: Decision) -> str:
            program = self.carriers.program(decision.chosen, call.placement, call.platform).call
            program.agreed = agreed
            return program.lower(*call.args, **call.kwargs).as_text()

        identity = jaxapi.canonical_digest(self._trace(call).closed)
        return agree(group, Participant(identity, alone, lower, agreed))

    def _select_alone(self, call: Call, *, measure: bool, force: bool, tune_seconds: float | None) -> Decision:
        if knobs.current().disable:
            return Decision(XLA, "JCUTS_DISABLE is set")
        if jaxapi.jit_disabled():
            return Decision(JCUTS, "jax.disable_jit is in force: nothing is compiled")
        traced = self._trace(call)
        if self.settings.require is not None and not force:
            return complete_decision(traced, function_name(self._fn), self.decisions)
        seconds = time_budget.seconds_of(self.settings, explicit=force) if tune_seconds is None else tune_seconds
        budget = time_budget.TimeBudget(seconds, device_slices.current().clock)
        budget.again = force
        with time_budget.spending(budget):
            return self._select(call, traced, budget, measure=measure and seconds > 0, force=force)

    def of_earlier_process(self, call: Call) -> tuple[Decision | None, bool]:
        """The stored decision that a call can follow at once, if there is one, and whether that settles it."""
        if not self.decisions.may_have_any():
            return None, False
        traced = self._trace(call)
        key = self.decisions.key(traced.closed, call.signature, call.platform)
        stored = self.decisions.lookup(key, call.platform)
        if stored is None or not has_kernels_of(stored, traced):
            return None, False
        return stored, self.decisions.settled(key, call.platform) is not None

    def pin(self, call: Call, decision: Decision, *, pinned: bool) -> int:
        """Pins what a call runs, or ends that (`jit.checked_in.pinning`); how many rows that are."""
        return pinning.pin(self._trace(call), decision, self.decisions, pinned=pinned)

    def why_not_online(self, call: Call) -> str | None:
        """Why a call cannot be tuned between others (`jit.online`), or None."""
        if self.settings.workspace_limit is not None or self.settings.total_workspace is not None:
            return "divisions of convolutions under a workspace limit are not measured between calls"
        return self._trace(call).why_not_benchmarked()

    def _select(
        self, call: Call, traced: TracedCall, budget: time_budget.TimeBudget, *, measure: bool, force: bool
    ) -> Decision:
        """`select` of a traced call, while a tuning budget is open."""
        parts = shard_local.split(traced.closed, call.placement) if call.placement.shardings else None
        if isinstance(parts, str):
            return Decision(JCUTS, f"arguments on several devices and {parts}: left to XLA")
        mixed = self.settings.mode == "mixed"
        key = self.decisions.key(traced.closed, call.signature, call.platform) if mixed else ""
        if measure and not force and parts is None and has_variants(traced):
            stored = self.decisions.lookup(key, call.platform)
            if stored is not None and stored.is_final and has_kernels_of(stored, traced):
                return stored  # lowering finds them in the database
        planned = plan_call(traced, parts, measure=measure)
        spent = {"tuning": budget.spent()} if measure else {}
        unmeasured = max((o.report.unmeasured for o in planned.outcomes), default=0) if measure else 0
        if unmeasured and not budget.failed and knobs.current().progress:
            log.warning(
                "%d kernels of %s were not measured within %g s: a later process, or .tune(), goes on where this "
                "ended; tune_seconds (JCUTS_TUNE_SECONDS) allows more time",
                unmeasured,
                function_name(self._fn),
                budget.seconds,
            )
        if measure and any(o.report.postponed for o in planned.outcomes):
            why = "kernels could not be measured now: a later call tunes"
            return Decision(XLA if mixed else JCUTS, why, deferred=True)
        if not mixed:
            return Decision(JCUTS, f"mode={self.settings.mode!r} is not compared as a whole", spent=spent)
        if not measure:
            stored = self.decisions.lookup(key, call.platform, planned.uses_jcuts)
            no_time = self.settings.tune == "auto" and not budget.seconds
            option = "tune_seconds=0" if no_time else f"tune={self.settings.tune!r}"
            return stored or Decision(JCUTS, f"{option}: nothing was timed")
        if (why_not := traced.why_not_benchmarked()) is not None:
            return self._not_compared(traced, Decision(JCUTS, why_not, spent=spent), "" if force else key)
        if not force and (settled := self.decisions.settled(key, call.platform, planned.uses_jcuts)) is not None:
            return settled
        again = None if force else self.decisions.lookup(key, call.platform, planned.uses_jcuts)
        if again is not None and again.partial:
            again = None  # who lost then may have better kernels now
        outcomes = {self.carriers.settings_for(form): outcome for form, outcome in planned.of_form.items()}
        with planned_outcomes.reusing(traced.closed, outcomes):
            decision = benchmark(traced, planned, again)
        spent["whole programs"] = budget.spent() - spent["tuning"]
        decision = dataclasses.replace(decision, partial=decision.partial or bool(unmeasured), spent=spent)
        why_none = passes.unusable(call.platform)
        if why_none and not planned.uses_jcuts:
            decision = dataclasses.replace(decision, reason=f"{decision.reason}; no kernels: {why_none}")
        if not why_none and not any(o.failed for o in planned.outcomes):  # else another process may do better
            self.decisions.keep(key, decision)
        return decision

    def _not_compared(self, traced: TracedCall, decision: Decision, key: str) -> Decision:
        """The decision for a program that is not compared with plain ``jax.jit``. Args: key: of a stored one, or ''."""
        stored = self.decisions.lookup(key, traced.call.platform) if key else None
        if stored is not None and stored.is_final:
            return stored
        decision = self._compiled_or_plain(traced, decision)
        if traced.on_gpu and decision.chosen == JCUTS and traced.has_chunked_logits():
            decision = against_rewrites_alone(traced, decision)
            if decision.chosen != JCUTS and key:  # a program with kernels may need other options to compile
                self.decisions.keep(key, decision)
        return decision

    def _compiled_or_plain(self, traced: TracedCall, decision: Decision) -> Decision:
        """The decision for a program that is not timed, or for XLA's where XLA cannot compile that on a GPU.

        A race finds out by itself.  What is compiled here is what the call runs.
        """
        call, compiler, name = traced.call, traced.compiler, decision.chosen
        if not traced.on_gpu or call.placement.spans_processes:
            return decision
        why = ""
        for options in ({}, SAFER_OPTIONS["cuda"]):
            if options:
                log.info("%s: compiled again with %s: %s", function_name(self._fn), options, why)
                compiler.evict(name, call.placement)
                compiler.safer = options
            try:
                program = compiler.program(name, call.placement, call.platform)
                program.call.lower(*call.args, **call.kwargs).compile()
                return decision
            except Exception as error:  # whatever XLA's compiler raises: std::out_of_range comes as an IndexError
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
        log.warning("XLA cannot compile %s with jcuts' kernels: %s", function_name(self._fn), why)
        compiler.safer = {}
        return dataclasses.replace(decision, chosen=XLA, reason=f"XLA cannot compile the program: {why}")

    def _trace(self, call: Call) -> TracedCall:
        """The call with its jaxpr, which the chosen program's own trace takes over."""
        traced = self.carriers.plain.trace(*call.args, **call.kwargs)
        closed = traced.jaxpr
        if not call.placement.shardings:
            out_tree = jax.tree.structure(traced.out_info)
            permission.traced = self.carriers, Capture(closed, [], out_tree, function_name(self._fn))
        leaves = tuple(self._arguments.leaves(call.args, call.kwargs))
        roles = output_roles(traced.out_info)
        return TracedCall(call, closed, leaves, self.carriers, self._arguments, self.settings, roles)
