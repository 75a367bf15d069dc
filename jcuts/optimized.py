"""``Optimized``: what ``jcuts.optimize`` makes of a function.

Every program that an ``Optimized`` can run (plain XLA, jcuts, each with compiler options) is one ``jax.jit``-wrapped
*carrier*.  A call goes straight to the carrier used last, so its cost is that of ``jax.jit``'s own fast path.  JAX
runs the Python body of a carrier only for a signature that it has not seen; a carrier that was not asked for by
``_decide_and_call`` then raises ``Undecided``, and the slow path traces, tunes and decides with the real arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jcuts import divide, early, forms, guard, progress
from jcuts.arguments import Arguments, Signature, place_text, platform_of
from jcuts.base import knobs
from jcuts.base.fingerprint import digest, versions
from jcuts.base.settings import Form, Settings
from jcuts.microbatch.shown import DivisionReport
from jcuts.permission import Permitted, Undecided, own_trace, permission
from jcuts.primitive import shard_local
from jcuts.primitive.call import jcuts_call, register_late_rules
from jcuts.primitive.lowering import plan
from jcuts.primitive.sharding import OtherPlacement, Placement, expected
from jcuts.report import FunctionReport
from jcuts.trace import jaxapi
from jcuts.trace.capture import Capture, capture, function_name
from jcuts.tune import autotuned, lock, session

log = logging.getLogger("jcuts")


_default_store: guard.GuardStore | None = None
_default_stores = 0  # how often it was set


def set_default_store(store: guard.GuardStore | None) -> None:
    """Where every ``Optimized`` keeps the guard's decisions from now on; None for the user's tuning database."""
    global _default_store, _default_stores
    _default_store, _default_stores = store, _default_stores + 1


def default_stores() -> int:
    """How often the default store was set."""
    return _default_stores


# Decisions taken by this process, by their key: one taken in noise is measured again by a later process.
_decided_here: set[str] = set()

# A call that could not tune because another process measured is tried again after this time [s], then twice that, ...
_RETRY_AFTER = 30.0
_RETRY_MOST = 960.0


class _Program(NamedTuple):
    """One way to run the function: ``name`` as in ``forms``, and the jitted carrier."""

    name: str
    placement: Placement
    call: Any


@dataclasses.dataclass
class _Waiting:
    """A signature that could not be tuned yet, and when to try again (monotonic seconds)."""

    program: _Program
    decision: guard.Decision
    pause: float
    again: float


class Optimized:
    """A function that runs jcuts' kernels where they win, called like the function that ``jax.jit`` returns.

    Attributes:
        settings: the user's options.
        __wrapped__: the user's function.
    """

    def __init__(self, fn: Callable[..., Any], settings: Settings, jit_options: dict[str, Any],
                 store: guard.GuardStore | None = None) -> None:
        functools.update_wrapper(self, fn)
        self.settings = settings
        self._fn = fn
        self._options = {k: v for k, v in jit_options.items() if v is not None}
        self._store = store
        self._arguments = Arguments(fn, self._options)
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._programs: dict[tuple[str, Placement], _Program] = {}
        self._decisions: dict[Signature, tuple[_Program, guard.Decision]] = {}
        self._waiting: dict[Signature, _Waiting] = {}
        self._nested = self._jit(self._carrier_of_call(None))
        self._plain = self._jit(self._fn)
        self._current: Any = self._decide_and_call

    # ------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not jaxapi.trace_state_clean():
            # What is traced already may be met now by a transformation that was imported since.
            register_late_rules()
            return self._nested(*args, **kwargs)
        try:
            return self._current(*args, **kwargs)
        except (Undecided, OtherPlacement):
            pass
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
            return self._nested.lower(*args, **kwargs)
        before, expected.placement = expected.placement, placement
        try:
            return self._jit(self._carrier_of_call(placement)).lower(*args, **kwargs)
        finally:
            expected.placement = before

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Traced`` of the jcuts program."""
        return self._nested.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result; nothing is compiled."""
        return self._nested.eval_shape(*args, **kwargs)

    def tune(self, *args: Any, **kwargs: Any) -> Any:
        """Measure for these arguments now, whatever was decided before, and return the report."""
        signature = self._arguments.signature(args, kwargs)
        with self._lock, own_trace():
            self._decisions.pop(signature, None)
            self._decide(signature, args, kwargs, measure=True, force=True)
            self._refresh()
        return self.explain(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """The report for these arguments: regions, kernels, refusals, and the guard's decision.

        Nothing is measured: what was not tuned yet shows the choices that a call inside a trace would use.
        """
        signature = self._arguments.signature(args, kwargs)
        known = self._decided(signature)
        closed = original = self._closed(args, kwargs)
        if knobs.current().disable:
            decision = guard.Decision(guard.XLA, "JCUTS_DISABLE is set")
            report = FunctionReport(function_name(self._fn), self.settings.mode, platform_of(signature),
                                    notes=("left to XLA: JCUTS_DISABLE is set",))
            return _with_decision(report, decision)
        parts = shard_local.split(closed, self._arguments.placement(args, kwargs))
        if not isinstance(parts, str):
            closed = max((p.closed for p in parts.parts), key=lambda c: len(c.jaxpr.eqns))  # the report's program
        platform = platform_of(signature)
        outcome = plan(closed, self.settings, platform, may_measure=False)
        decision = known or self._kept(original, signature, outcome.closed is not closed)
        if (form := self._shown_form(decision)) is not None:
            outcome = plan(closed, self._settings_for(form), platform, may_measure=False)
        report = outcome.report
        if report is None:
            report = FunctionReport(function_name(self._fn), self.settings.mode, platform_of(signature),
                                    notes=(outcome.note,))
        return _with_decision(report, decision)

    @staticmethod
    def _shown_form(decision: guard.Decision) -> Form | None:
        """The form that the report is about: the chosen one, or where XLA won the fastest that lost."""
        if not forms.is_xla(decision.chosen):
            return forms.form_of(decision.chosen)
        lost = [name for name in decision.speed if not forms.is_xla(name)]
        return forms.form_of(max(lost, key=lambda name: decision.speed[name][0])) if lost else None

    def chosen(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the very program that a call with these arguments runs.

        Decides, which measures, where nothing was decided yet.
        """
        signature = self._arguments.signature(args, kwargs)
        with self._lock:
            known = self._decisions.get(signature) or self._still_waiting(signature)
            if known is None:
                known = self._decide(signature, args, kwargs, measure=self.settings.tune == "auto")
                self._refresh()
        return known[0].call.lower(*args, **kwargs)

    def programs(self, *args: Any, **kwargs: Any) -> dict[str, Callable[..., Any]]:
        """The whole programs that competed for these arguments, by name: for measurements of one's own.

        Empty where nothing was timed (yet).
        """
        placement = self._arguments.placement(args, kwargs)
        known = self._decided(self._arguments.signature(args, kwargs))
        platform = platform_of(self._arguments.signature(args, kwargs))
        names = [] if known is None else known.speed
        return {name: self._program(name, placement, platform).call.permitted for name in names}

    def decision(self, *args: Any, **kwargs: Any) -> guard.Decision | None:
        """What the last guard decided for these arguments, or None if they were not seen."""
        return self._decided(self._arguments.signature(args, kwargs))

    def _decided(self, signature: Signature) -> guard.Decision | None:
        known, waiting = self._decisions.get(signature), self._waiting.get(signature)
        return known[1] if known else waiting.decision if waiting else None

    def _kept(self, closed: jaxapi.Closed, signature: Signature, uses_jcuts: bool) -> guard.Decision:
        """What an earlier process decided about a function that this one has not called."""
        platform = platform_of(signature)
        kept = None
        if self.settings.mode == "mixed" and self.settings.tune != "off":
            kept = self._stored(self._store_key(closed, signature, platform), platform, uses_jcuts)
        return kept or guard.Decision(guard.JCUTS, "not called with these arguments yet")

    def clear_cache(self) -> None:
        """Forget every compiled program and decision of this function (not what the database keeps)."""
        with self._lock:
            for program in self._programs.values():
                program.call.clear_cache()
            self._nested.clear_cache()
            self._plain.clear_cache()
            self._reset()

    # ------------------------------------------------------------ programs

    def _jit(self, carrier: Callable[..., Any], **more: Any) -> Any:
        return jax.jit(carrier, **self._options, **more)

    def _carrier_of_call(self, placement: Placement | None, form: Form | None = None, *,
                         decided: bool = False) -> Callable[..., Any]:
        """A function to jit.  ``decided``: called by the slow path, which has traced the user's function already."""
        fn, settings = self._fn, self._settings_for(form)

        @functools.wraps(fn)
        def carrier(*args: Any, **kwargs: Any) -> Any:
            if jaxapi.jit_disabled():
                return fn(*args, **kwargs)
            seen = (self._traced_for(args, kwargs) if decided else None) or capture(fn, args, kwargs)
            outs = jcuts_call(seen.closed, seen.leaves, settings, name=seen.name, placement=placement)
            return jax.tree.unflatten(seen.out_tree, outs)

        return carrier

    def _traced_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture | None:
        """What the slow path has traced to decide, at the leaves of this trace; None if it is of other types."""
        if permission.traced is None or permission.traced[0] is not self:
            return None
        seen = permission.traced[1]
        leaves = [x for x in jax.tree.leaves((args, kwargs)) if jaxapi.is_tracer(x)]
        if [jaxapi.aval_of(x) for x in leaves] != list(seen.closed.in_avals):
            return None
        return dataclasses.replace(seen, leaves=leaves)

    def _settings_for(self, form: Form | None) -> Settings:
        return self.settings if form is None else dataclasses.replace(self.settings, form=form)

    def _program(self, name: str, placement: Placement, platform: str, more: dict[str, Any] | None = None) -> _Program:
        key = (name, placement)
        if key not in self._programs:
            inner = self._fn
            if not forms.is_xla(name):
                inner = self._carrier_of_call(placement, forms.form_of(name), decided=True)
            token = object()

            @functools.wraps(self._fn)
            def carrier(*args: Any, **kwargs: Any) -> Any:
                if permission.program is not token and not jaxapi.jit_disabled():
                    raise Undecided
                return inner(*args, **kwargs)

            options = forms.compiler_options(name, platform)
            options = {**options, **(more or {})} if options else None
            jitted = self._jit(carrier, compiler_options=options) if options else self._jit(carrier)
            self._programs[key] = _Program(name, placement, Permitted(jitted, token, placement))
        return self._programs[key]

    # ------------------------------------------------------------ deciding

    def _decide_and_call(self, *args: Any, **kwargs: Any) -> Any:
        signature = self._arguments.signature(args, kwargs)
        known = self._decisions.get(signature) or self._still_waiting(signature)
        if known is None:
            # Another thread may be deciding (a host callback inside the timed function, even): waiting for it could
            # deadlock, so this call runs the jcuts program without a decision.
            if not self._lock.acquire(blocking=False):
                return self._nested(*args, **kwargs)
            with own_trace():
                try:
                    known = self._decide(signature, args, kwargs, measure=self.settings.tune == "auto")
                    self._refresh()
                finally:
                    self._lock.release()
                return known[0].call.permitted(*args, **kwargs)
        with own_trace():
            return known[0].call.permitted(*args, **kwargs)

    def _by_signature(self, *args: Any, **kwargs: Any) -> Any:
        known = self._decisions.get(self._arguments.signature(args, kwargs))
        if known is None:
            raise Undecided
        return known[0].call.permitted(*args, **kwargs)

    def _refresh(self) -> None:
        # A signature that waits must come by the slow path again.  With a single program in use its jitted function is
        # called directly; JAX sorts the signatures out.
        used = {id(program.call): program for program, _ in self._decisions.values()}
        only = next(iter(used.values())) if len(used) == 1 and not self._waiting else None
        self._current = self._by_signature if only is None else only.call.jitted

    def _still_waiting(self, signature: Signature) -> tuple[_Program, guard.Decision] | None:
        waiting = self._waiting.get(signature)
        return None if waiting is None or time.monotonic() >= waiting.again else (waiting.program, waiting.decision)

    def _decide(self, signature: Signature, args: Any, kwargs: Any, *,
                measure: bool, force: bool = False) -> tuple[_Program, guard.Decision]:
        platform = platform_of(signature)
        placement = self._arguments.placement(args, kwargs)
        waited = self._waiting.pop(signature, None)
        if waited is not None and waited.program.name != guard.XLA:
            self._programs.pop((waited.program.name, placement), None)  # compiled before anything was measured
        with progress.shown(function_name(self._fn)) if measure else contextlib.nullcontext():
            decision = self._decision_for(signature, args, kwargs, placement, platform, measure, force)
        kept = (self._program(decision.chosen, placement, platform), decision)
        if decision.deferred:
            pause = _RETRY_AFTER if waited is None else min(_RETRY_MOST, 2 * waited.pause)
            self._waiting[signature] = _Waiting(*kept, pause, time.monotonic() + pause)
        else:
            self._decisions[signature] = kept
        return kept

    def _decision_for(self, signature: Signature, args: Any, kwargs: Any, placement: Placement,
                      platform: str, measure: bool, force: bool) -> guard.Decision:
        if knobs.current().disable:
            return guard.Decision(guard.XLA, "JCUTS_DISABLE is set")
        if jaxapi.jit_disabled():
            return guard.Decision(guard.JCUTS, "jax.disable_jit is in force: nothing is compiled")
        traced = self._plain.trace(*args, **kwargs)
        closed = traced.jaxpr
        leaves = self._arguments.leaves(args, kwargs)
        if not placement.shardings:
            out_tree = jax.tree.structure(traced.out_info)
            permission.traced = self, Capture(closed, [], out_tree, function_name(self._fn))
        racing: list[Form | None] = []
        exact = forms.Exact(closed, leaves, self.settings.tolerance, platform)
        rows: dict[Form | None, Sequence[DivisionReport]] = {}
        behind: dict[Form | None, str] = {}
        if placement.shardings:
            parts = shard_local.split(closed, placement)
            if isinstance(parts, str):
                return guard.Decision(guard.JCUTS, f"arguments on several devices and {parts}: left to XLA")
            outcomes = shard_local.plan_parts(
                parts, lambda part: plan(part, self.settings, platform, may_measure=measure))
            uses_jcuts = any(o.closed is not p.closed for o, p in zip(outcomes, parts.parts, strict=True))
            racing = [None] if uses_jcuts else []
            rows = {None: [row for o in outcomes for row in _divisions(o)]}
        elif measure and self._may_race(closed, leaves, platform):
            stored = None if force else self._stored(self._store_key(closed, signature, platform), platform, True)
            if stored is not None and stored.is_final:
                return stored  # its kernels are in the database: lowering finds them there
            begun = time.monotonic()
            with lock.attempt() as may:
                worth = forms.worth_planning(closed, platform)
                judge = exact if any(form is not None and form.rewrites for form in worth) else None
                todo = self._meanwhile(args, kwargs, placement, platform, judge) if may else {}
                with early.Early(todo) as meanwhile:
                    found, outcomes = self._plan_forms(closed, leaves, platform, worth, meanwhile)
            log.info("planned and tuned in %.2f s", time.monotonic() - begun)
            racing, uses_jcuts, behind = list(found), bool(found), forms.left_behind(found)
            rows = {form: _divisions(outcome) for form, outcome in found.items()}
        else:
            outcomes = [plan(closed, self.settings, platform, may_measure=measure, examples=leaves)]
            uses_jcuts = outcomes[0].closed is not closed
            racing = [None] if uses_jcuts else []
            rows = {None: _divisions(outcomes[0])}
        if measure and any(getattr(o.report, "postponed", False) for o in outcomes):
            name = guard.XLA if self.settings.mode == "mixed" else guard.JCUTS
            return guard.Decision(name, "kernels could not be measured now: a later call tunes", deferred=True)
        if self.settings.mode != "mixed":
            return guard.Decision(guard.JCUTS, f"mode={self.settings.mode!r} is not compared as a whole")
        key = self._store_key(closed, signature, platform)
        if not measure:
            stored = self._stored(key, platform, uses_jcuts)
            return stored or guard.Decision(guard.JCUTS, f"tune={self.settings.tune!r}: nothing was timed")
        if (why := self._not_timed(closed, leaves)) is not None:
            return guard.Decision(guard.JCUTS, why)
        stored = self._stored(key, platform, uses_jcuts)
        if stored is not None and not force and (stored.is_final or key in _decided_here):
            return stored
        names, start = forms.programs(racing, forms.options(platform)), time.monotonic()
        out = forms.names_behind(names, behind)
        names = [name for name in names if name not in out]
        if platform == "cpu" and self._has_every(outcomes, closed, leaves):
            names.append(forms.name_of(forms.EVERY))
        again = stored if not force else None
        barred = forms.barred(names, rows if racing else {}, self.settings)
        open_ = [n for n in (again.open_between(names) if again else names) if n == guard.XLA or n not in barred]
        decision = self._race(args, kwargs, placement, platform, open_, exact, barred)
        decision = dataclasses.replace(decision, rejected={**out, **decision.rejected})
        if again is not None:
            decision = dataclasses.replace(decision, tries=again.tries + 1)
        log.info("%d whole programs compared in %.2f s", len(names), time.monotonic() - start)
        _decided_here.add(key)
        self._guard_store().put_guard(key, decision.to_dict())
        return decision

    def _meanwhile(self, args: Any, kwargs: Any, placement: Placement, platform: str,
                   exact: forms.Exact | None) -> dict[str, Callable[[], object]]:
        """What the GPU can do for the last guard while this thread plans: all that has to do with plain XLA alone."""
        names = [*(f"{guard.XLA}:{option}" for option in forms.options(platform)), guard.XLA]
        more = autotuned.sharing()  # the first leaves its algorithms to other processes, the next finds them in memory
        lowered = {name: self._program(name, placement, platform, more).call.lower(*args, **kwargs) for name in names}
        compiled: dict[str, Any] = {}

        def compile_(name: str) -> None:
            compiled[name] = lowered[name].compile()

        def first_run(name: str) -> None:  # not the jitted function: it would be traced again where contexts differ
            mine, named = self._arguments.split(*self._arguments.copies(args, kwargs))[0]
            jax.block_until_ready(compiled[name](*mine, **named))

        todo: dict[str, Callable[[], object]] = {f"{n} compiled": functools.partial(compile_, n) for n in names}
        todo |= {"float64": exact.ahead} if exact is not None else {}
        return todo | {f"{n} run": functools.partial(first_run, n) for n in names}

    def _plan_forms(self, closed: jaxapi.Closed, leaves: Sequence[Any], platform: str,
                    worth: Sequence[Form | None], meanwhile: early.Early
                    ) -> tuple[dict[Form | None, Any], list[Any]]:
        """The forms worth a race, and the outcomes of all: one that could not be measured may change nothing."""
        outcomes = []

        def of_form(form: Form | None) -> Any:
            outcomes.append(plan(closed, self._settings_for(form), platform, may_measure=True, examples=leaves))
            return outcomes[-1]

        with session.workshop():
            start = time.monotonic()
            with session.gathering(meanwhile.is_done):  # these have all problems of the others
                for form in worth:
                    if form is None or form.regions in ("all", "absorbing"):
                        of_form(form)
                log.info("forms planned in %.2f s", time.monotonic() - start)
            meanwhile.is_done(True)
            outcomes.clear()
            start = time.monotonic()
            found = forms.planned(closed, platform, of_form, worth)
            log.info("forms planned with what was measured in %.2f s", time.monotonic() - start)
            return found, outcomes

    def _not_timed(self, closed: jaxapi.Closed, leaves: Sequence[Any]) -> str | None:
        if jaxapi.has_effects(closed):
            return f"the function has effects ({', '.join(jaxapi.effects_of(closed))}): it is never run twice"
        if jax.process_count() > 1:
            return "several processes: each must compile the same program, so whole functions are not timed"
        if self._arguments.donates and not guard.copies_fit(leaves):
            return "donated arguments do not fit twice into memory: not timed as a whole"
        return None

    def _may_race(self, closed: jaxapi.Closed, leaves: Sequence[Any], platform: str) -> bool:
        """Whether programs of several forms may compete: on GPUs, where whole functions are timed."""
        return self.settings.mode == "mixed" and platform in forms.GPUS and self._not_timed(closed, leaves) is None

    def _has_every(self, outcomes: Sequence[Any], closed: jaxapi.Closed, leaves: Sequence[Any]) -> bool:
        """Whether a program with kernels that lost to XLA by little is worth a race, and another one than the plain."""
        plain = outcomes[0].report if len(outcomes) == 1 else None
        if not isinstance(plain, FunctionReport) or divide.is_asked(self.settings) or not forms.lost_by_little(plain):
            return False
        every = plan(closed, self._settings_for(forms.EVERY), "cpu", may_measure=True, examples=leaves)
        return every.closed is not closed and every.report.source != plain.source

    def _stored(self, key: str, platform: str, uses_jcuts: bool) -> guard.Decision | None:
        data = self._guard_store().guard(key)
        decision = None if data is None else guard.Decision.from_dict(data)
        if decision is None or not forms.is_known(decision.chosen, platform, uses_jcuts):
            return None
        return decision

    def _race(self, args: Any, kwargs: Any, placement: Placement, platform: str, names: Sequence[str],
              exact: forms.Exact, barred: Mapping[str, str]) -> guard.Decision:
        on_gpu = platform in forms.GPUS
        more = autotuned.options() if on_gpu else {}
        mine = {name: {} if forms.is_xla(name) else more for name in names}
        calls = {name: self._program(name, placement, platform, mine[name]).call for name in names}
        if on_gpu:
            forms.compile_ahead({name: functools.partial(call.lower, *args, **kwargs) for name, call in calls.items()})
        # Options can do more on a GPU than everything else: there no program does without them.
        return guard.decide({name: call.permitted for name, call in calls.items()},
                            lambda: self._arguments.copies(args, kwargs), donates=self._arguments.donates,
                            verify=exact, barred=barred, chunk=2e-3 if on_gpu else 3e-4,
                            options_gain=math.inf if on_gpu else guard.OPTIONS_GAIN)

    # ------------------------------------------------------------ keys

    def _closed(self, args: Any, kwargs: Any) -> jaxapi.Closed:
        return self._plain.trace(*args, **kwargs).jaxpr

    def _guard_store(self) -> guard.GuardStore:
        chosen = self._store if self._store is not None else _default_store
        return chosen if chosen is not None else session.store()

    def _store_key(self, closed: jaxapi.Closed, signature: Signature, platform: str) -> str:
        places = "; ".join(place_text(place) for _, place in signature.leaves)
        kinds = sorted({d.device_kind for d in jax.local_devices() if d.platform == platform})
        limits = ("limits 1",) if divide.is_asked(self.settings) else ()  # changes with what they allow
        return digest("guard", *limits, jaxapi.canonical_text(closed), repr(self.settings), platform, ",".join(kinds),
                      places, repr(self._options), repr(sorted(versions().items())))


class BoundOptimized:
    """An ``Optimized`` method bound to its object, which is the first argument of everything."""

    def __init__(self, optimized: Optimized, instance: Any) -> None:
        self.__func__ = optimized
        self.__self__ = instance
        functools.update_wrapper(self, optimized.__wrapped__)  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__func__, name)
        if name in ("lower", "trace", "eval_shape", "tune", "explain", "decision"):
            return functools.partial(value, self.__self__)
        return value

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"


def _divisions(outcome: Any) -> Sequence[DivisionReport]:
    return getattr(outcome.report, "divisions", ())


def _with_decision(report: Any, decision: guard.Decision) -> Any:
    attach = getattr(report, "with_guard", None)
    return attach(decision.to_dict()) if attach is not None else report
