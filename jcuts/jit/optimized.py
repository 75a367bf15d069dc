"""``Optimized``, the callable that ``jcuts.optimize`` returns: fast dispatch to a jitted variant, slow path for new
signatures.

A call goes straight to the variant's jitted function used last (a *carrier*, `jit.variant_compiler`), so its cost is
that of ``jax.jit``'s own fast path.  A carrier that meets a new signature raises ``NeedsDecision``; the slow path then
traces, tunes and decides with the real arguments (`jit.variant_selection`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jcuts.base import knobs, run_statistics
from jcuts.base.settings import BETWEEN_CALLS, SERVE, Settings
from jcuts.jit import variant_names
from jcuts.jit.call_signature import CallSignature, Signature, platform_of
from jcuts.jit.checked_in.stored_results import StoredResults
from jcuts.jit.decision import XLA, Decision, DecisionStore
from jcuts.jit.dispatch.bound_method import BoundOptimized
from jcuts.jit.dispatch.signature_table import SignatureTable
from jcuts.jit.trace_token import NeedsDecision, UnseenSignature, isolated_trace
from jcuts.primitive.sharding import OtherPlacement, expected
from jcuts.trace import jaxapi
from jcuts.trace.capture import function_name

# Planner, code generators and tuner are imported by the call that needs them first: importing jcuts takes little time.
if TYPE_CHECKING:
    from jcuts.jit.online.first_call import FirstCallTuning
    from jcuts.jit.online.online_tuning import OnlineTuning
    from jcuts.jit.traced_call import Call
    from jcuts.jit.variant_compiler import Postponed, Program, VariantCompiler
    from jcuts.jit.variant_selection import VariantSelector


class Optimized(StoredResults):
    """A function that runs jcuts' kernels where they win, called like the function that ``jax.jit`` returns.

    Attributes:
        settings: the user's options.
        more_stats: what `stats` has besides, by name.
        __wrapped__: the user's function.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        settings: Settings,
        jit_options: dict[str, Any],
        store: DecisionStore | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        options = {k: v for k, v in jit_options.items() if v is not None}
        self._arguments = CallSignature(fn, options)
        self.settings = settings = dataclasses.replace(settings, donates=self._arguments.donates)
        self._online: OnlineTuning | None = None
        decides = settings
        self._first_calls: FirstCallTuning | None = None  # of tune="auto", where one may end before its tuning
        if settings.tune in BETWEEN_CALLS:
            from jcuts.jit.online import background_tuner
            from jcuts.jit.online.online_tuning import OnlineTuning
            from jcuts.jit.serving.serve_tuning import ServeTuning

            tuner = background_tuner.shared()
            known = function_name(fn), settings, self._arguments, tuner, self._publish
            serves = settings.tune == SERVE
            self._online = ServeTuning(*known, lambda s: self._table.calls(s)) if serves else OnlineTuning(*known)
            tuner.listen(self)
            decides = dataclasses.replace(settings, tune="auto")
        self.more_stats: dict[str, Callable[[], Any]] = {}
        self._selector: VariantSelector | None = None
        self._selects = fn, decides, options, self._arguments, store
        self._lock = threading.RLock()
        self._making = threading.Lock()  # held while the selector is made
        self._switching = threading.Lock()  # held for the switch to another program alone
        self._reset()
        run_statistics.watch(self)

    def _reset(self) -> None:
        self._selector = None
        self._decisions: dict[Signature, tuple[Program, Decision]] = {}
        self._waiting: dict[Signature, Postponed] = {}
        self._table = SignatureTable(self._arguments)
        self._in_use: list[Any] = []  # jitted functions that calls go to
        self._current: Any = self._decide_and_call

    @property
    def _deciding(self) -> VariantSelector:
        """Selects programs; made by what needs it first."""
        if (made := self._selector) is None:
            from jcuts.jit.variant_selection import VariantSelector

            with self._making:
                made = self._selector = self._selector or VariantSelector(*self._selects)
        return made

    @property
    def _carriers(self) -> VariantCompiler:
        """The programs that compete."""
        return self._deciding.carriers

    # ------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not jaxapi.trace_state_clean():
            from jcuts.primitive.call import register_late_rules

            # What is traced already may be met now by a transformation that was imported since.
            register_late_rules()
            return self._carriers.nested(*args, **kwargs)
        try:
            return self._current(*args, **kwargs)
        except UnseenSignature:
            pass
        except (NeedsDecision, OtherPlacement):
            for jitted in self._in_use:  # the one that was called remembers this signature as one that cannot be fast
                jaxapi.clear_fast_dispatch(jitted)
        except (TypeError, ValueError) as error:
            self._arguments.explain(args, kwargs, error)
            raise
        return self._decide_and_call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundOptimized(self, instance)

    def __repr__(self) -> str:
        return f"<jcuts.Optimized {function_name(self._fn)} mode={self.settings.mode!r} tune={self.settings.tune!r}>"

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the jcuts program (nothing is measured)."""
        # Ahead-of-time stages are not calls: nothing is decided, and concrete shardings are still made use of.
        placement = self._arguments.placement(args, kwargs)
        if not placement.shardings:
            return self._carriers.nested.lower(*args, **kwargs)
        before, expected.placement = expected.placement, placement
        try:
            return self._carriers.jit(self._carriers.traced_function(placement)).lower(*args, **kwargs)
        finally:
            expected.placement = before

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Traced`` of the jcuts program."""
        return self._carriers.nested.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result; nothing is compiled."""
        return self._carriers.nested.eval_shape(*args, **kwargs)

    def tune(self, *args: Any, **kwargs: Any) -> Any:
        """Measure for these arguments now, whatever was decided before, and return the report."""
        signature = self._arguments.signature(args, kwargs)
        if self._online is not None:
            self._online.cancel()
        with self._lock, isolated_trace():
            with self._switching:
                self._decisions.pop(signature, None)
                if self._online is self._first_calls:  # what was tuned beside calls begins anew
                    self._decisions = {s: kept for s, kept in self._decisions.items() if not kept[1].deferred}
            self._decide(signature, args, kwargs, measure=True, force=True)
            self._refresh()
        return self.explain(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """The report for these arguments: regions, kernels, refusals, and the guard's decision.

        Nothing is measured: what was not tuned yet shows the choices that a call inside a trace would use.
        """
        from jcuts.pipeline.predictions import with_predictions
        from jcuts.primitive import shard_local
        from jcuts.primitive.lowering import plan
        from jcuts.report.function_report import FunctionReport

        signature = self._arguments.signature(args, kwargs)
        known = self._decided(signature)
        closed = original = self._closed(args, kwargs)
        if knobs.current().disable:
            decision = Decision(XLA, "JCUTS_DISABLE is set")
            report = FunctionReport(
                function_name(self._fn),
                self.settings.mode,
                platform_of(signature),
                notes=("left to XLA: JCUTS_DISABLE is set",),
            )
            return report.with_guard(decision.to_dict())
        parts = shard_local.split(closed, self._arguments.placement(args, kwargs))
        if not isinstance(parts, str):
            closed = max((p.closed for p in parts.parts), key=lambda c: len(c.jaxpr.eqns))  # the report's program
        platform = platform_of(signature)
        outcome = plan(closed, self.settings, platform, may_measure=False)
        uses_jcuts = outcome.closed is not closed
        decision = known or self._deciding.decisions.of_earlier_process(original, signature, uses_jcuts)
        decision = decision if self._online is None else self._online.reason(signature, decision)
        if (form := variant_names.shown_form(decision.chosen, decision.speed)) is not None:
            outcome = plan(closed, self._carriers.settings_for(form), platform, may_measure=False)
        return with_predictions(outcome).with_guard(decision.to_dict()).with_seconds(decision.spent)

    def chosen(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the very program that a call with these arguments runs.

        Decides, which measures, where nothing was decided yet.
        """
        signature = self._arguments.signature(args, kwargs)
        with self._lock:
            known = self._decisions.get(signature) or self._still_waiting(signature)
            if known is None:
                known = self._decide(signature, args, kwargs, measure=self.settings.measures, to_end=True)
                self._refresh()
        return known[0].call.lower(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Decide (with ``tune="auto"`` that measures) and compile what a call with these arguments runs."""
        self.chosen(*args, **kwargs).compile()
        if self._online is not None:
            self._online.begin()

    def programs(self, *args: Any, **kwargs: Any) -> dict[str, Callable[..., Any]]:
        """The whole programs that competed for these arguments, by name: for measurements of one's own.

        Empty where nothing was timed (yet).
        """
        placement = self._arguments.placement(args, kwargs)
        known = self._decided(self._arguments.signature(args, kwargs))
        platform = platform_of(self._arguments.signature(args, kwargs))
        names = [] if known is None else known.speed
        return {name: self._carriers.program(name, placement, platform).call.compiled for name in names}

    def decision(self, *args: Any, **kwargs: Any) -> Decision | None:
        """What the last guard decided for these arguments, or None if they were not seen."""
        return self._decided(self._arguments.signature(args, kwargs))

    def stats(self) -> dict[str, Any]:
        """What runs for every signature that was called: the program, why, and the seconds that tuning took."""
        waiting = [(signature, (w.program, w.decision)) for signature, w in list(self._waiting.items())]
        rows = [
            {
                "arguments": [str(aval) for aval, _ in signature.leaves],
                "program": decision.chosen,
                "reason": decision.reason,
                "fallback": variant_names.is_xla(decision.chosen) or decision.deferred,
                "tuning_seconds": sum(decision.spent.values()),
                **({} if self._online is None else {"online": self._online.describe(signature)}),
            }
            for signature, (_, decision) in [*list(self._decisions.items()), *waiting]
        ]
        more = {name: told() for name, told in self.more_stats.items()}
        return {"name": function_name(self._fn), "kind": "optimize", "signatures": rows, **more}

    def _decided(self, signature: Signature) -> Decision | None:
        known, waiting = self._decisions.get(signature), self._waiting.get(signature)
        return known[1] if known else waiting.decision if waiting else None

    def finish_tuning(self, timeout: float | None = None) -> bool:
        """Waits until nothing of this function is tuned between calls; whether that is so.

        Meanwhile tuning has the device to itself.  Args: timeout: most seconds to wait, None for no limit.
        """
        return self._online is None or self._online.wait(timeout)

    def clear_cache(self) -> None:
        """Forget every compiled program and decision of this function (not what the database keeps)."""
        if self._online is not None:
            self._online.cancel()
        with self._lock:
            self._carriers.clear_cache()
            self._reset()

    # ------------------------------------------------------------ deciding

    def _decide_and_call(self, *args: Any, **kwargs: Any) -> Any:
        signature = self._arguments.signature(args, kwargs)
        known = self._decisions.get(signature) or self._still_waiting(signature)
        if known is None:
            # Another thread may be deciding (a host callback inside the timed function, even): waiting for it could
            # deadlock, so this call runs the jcuts program without a decision, or XLA's where calls begin with that.
            # Several processes must agree: they wait.
            together = self._arguments.placement(args, kwargs).spans_processes
            if not self._lock.acquire(blocking=together):
                return (self._carriers.nested if self._online is None else self._carriers.plain)(*args, **kwargs)
            with isolated_trace():
                try:
                    known = self._decide(signature, args, kwargs, measure=self.settings.measures)
                    self._refresh()
                finally:
                    self._lock.release()
                try:
                    return self._run(known[0], args, kwargs)
                finally:
                    if self._online is not None:
                        self._online.begin()
        with isolated_trace():
            return self._run(known[0], args, kwargs)

    def _run(self, program: Program, args: Any, kwargs: Any) -> Any:
        if self._online is not None and self._online.is_gated:
            return self._online.call(program.call.permitted, args, kwargs)
        return program.call.permitted(*args, **kwargs)

    def _publish(self, selector: VariantSelector, signature: Signature, program: Program, decision: Decision) -> None:
        """Online tuning has decided: the next call runs that program."""
        with self._switching:
            if selector is self._deciding:
                self._decisions[signature] = program, decision
                self._set_current()

    def refresh(self) -> None:
        """Online tuning began or ended somewhere in this process."""
        with self._switching:
            self._set_current()

    def _refresh(self) -> None:
        with self._switching:
            self._set_current()

    def _set_current(self) -> None:
        # A signature that waits must come by the slow path again.  With a single program in use its jitted function is
        # called directly; JAX sorts the signatures out.
        used = {id(program.call): program for program, _ in self._decisions.values()}
        only = next(iter(used.values())) if len(used) == 1 and not self._waiting else None
        if self.settings.tune == SERVE and self._online is not None and self._online.is_gated:
            only = None  # the table counts calls: what is called most is tuned first
        self._in_use = [program.call.jitted for program in used.values()]
        run: Any
        if only is None:
            self._table.update({s: program.call.jitted for s, (program, _) in self._decisions.items()})
            run = self._table
        else:
            run = only.call.jitted
        if (online := self._online) is not None and online.is_gated:
            self._current = online.through_gate(run)
        else:
            self._current = run

    def _still_waiting(self, signature: Signature) -> tuple[Program, Decision] | None:
        waiting = self._waiting.get(signature)
        return None if waiting is None or time.monotonic() >= waiting.again else (waiting.program, waiting.decision)

    def _decide(
        self,
        signature: Signature,
        args: Any,
        kwargs: Any,
        *,
        measure: bool,
        force: bool = False,
        to_end: bool = False,
    ) -> tuple[Program, Decision]:
        from jcuts.jit import progress
        from jcuts.jit.traced_call import Call

        call = Call(signature, args, kwargs, self._arguments.placement(args, kwargs), platform_of(signature))
        if self.settings.tune in BETWEEN_CALLS and self._online is not None and not force:
            return self._kept(signature, self._online.start(self._deciding, call), lasting=True)
        if measure and not (force or to_end) and (begun := self._first_call(call)) is not None:
            return begun
        waited = self._waiting.pop(signature, None)
        if waited is not None and waited.program.name != XLA:
            self._carriers.evict(waited.program.name, call.placement)  # compiled before anything was measured
        with progress.shown(function_name(self._fn)) if measure else contextlib.nullcontext():
            decision = self._deciding.select(call, measure=measure, force=force)
        kept = (self._carriers.program(decision.chosen, call.placement, call.platform), decision)
        return self._kept(signature, kept, waited, lasting=False)

    def _first_call(self, call: Call) -> tuple[Program, Decision] | None:
        """What a first call runs that need not wait for the end of its tuning; None for any other call."""
        begun = time.monotonic()  # what is imported and traced for it counts
        from jcuts.jit.online import background_tuner, first_call

        if not first_call.applies(self.settings):
            return None
        if self._first_calls is None:
            tuner = background_tuner.shared()
            known = function_name(self._fn), self.settings, self._arguments, tuner, self._publish
            self._online = self._first_calls = first_call.FirstCallTuning(*known)
            tuner.listen(self)
        if (kept := self._first_calls.first_call(self._deciding, call, begun)) is None:
            return None
        return self._kept(call.signature, kept, lasting=self._first_calls.is_tuned(call.signature))

    def _kept(
        self, signature: Signature, kept: tuple[Program, Decision], waited: Postponed | None = None, *, lasting: bool
    ) -> tuple[Program, Decision]:
        """Keeps what was decided. Args: waited: for the same before; lasting: whether even though it is deferred."""
        from jcuts.jit.variant_compiler import Postponed

        if kept[1].deferred and not lasting:
            waited = waited or self._waiting.get(signature)
            self._waiting[signature] = Postponed.after(waited, *kept, time.monotonic())
            return kept
        with self._switching:
            self._waiting.pop(signature, None)
            return self._decisions.setdefault(signature, kept)

    def _closed(self, args: Any, kwargs: Any) -> jaxapi.Closed:
        return self._carriers.plain.trace(*args, **kwargs).jaxpr
