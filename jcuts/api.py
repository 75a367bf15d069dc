"""``jcuts.optimize`` and ``Optimized``: the front door, a drop-in for ``jax.jit``.

Every program that an ``Optimized`` can run (plain XLA, jcuts, each with compiler options) is one ``jax.jit``-wrapped
*carrier*.  A call goes straight to the carrier used last, so its cost is that of ``jax.jit``'s own fast path.  JAX
runs the Python body of a carrier only for a signature that it has not seen; a carrier that was not asked for by
``_decide_and_call`` then raises ``_Undecided``, and the slow path traces, tunes and decides with the real arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import logging
import math
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jcuts import forms, guard, progress
from jcuts.base import knobs
from jcuts.base.errors import NotJaxError, UsageError
from jcuts.base.fingerprint import digest, versions
from jcuts.base.settings import Form, Settings
from jcuts.primitive import shard_local
from jcuts.primitive.call import jcuts_call, register_late_rules
from jcuts.primitive.lowering import plan
from jcuts.primitive.sharding import OtherPlacement, Placement, expected
from jcuts.report import FunctionReport
from jcuts.trace import jaxapi
from jcuts.trace.capture import Capture, capture, function_name
from jcuts.tune import session

log = logging.getLogger("jcuts")


class _Undecided(Exception):
    """A carrier met a signature for which no program was chosen.  Never leaves this file."""


class _Permission(threading.local):
    """The program that the slow path is calling on this thread, if any; what it traced to decide, and for whom."""

    program: Any = None
    traced: tuple[Optimized, Capture] | None = None


_permission = _Permission()

_default_store: guard.GuardStore | None = None
_default_stores = 0  # how often it was set


def set_default_store(store: guard.GuardStore | None) -> None:
    """Where every ``Optimized`` keeps the guard's decisions from now on; None for the user's tuning database."""
    global _default_store, _default_stores
    _default_store, _default_stores = store, _default_stores + 1


# Decisions taken by this process, by their key: one taken in noise is measured again by a later process.
_decided_here: set[str] = set()

# A call that could not tune because another process measured is tried again after this time [s], then twice that, ...
_RETRY_AFTER = 30.0
_RETRY_MOST = 960.0
_DEFAULT_MEMORY = (None, "device")
"""Kinds of memory that arrays live in where nobody asks for another one."""


class _Signature(NamedTuple):
    """What a decision belongs to: structure, types and places of the dynamic arguments, values of the static ones."""

    tree: Any
    leaves: tuple[Any, ...]
    statics: tuple[Any, ...]


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
        self._static = jaxapi.static_positions(fn, self._options.get("static_argnums"),
                                               self._options.get("static_argnames"))
        self._donated = jaxapi.static_positions(fn, self._options.get("donate_argnums"), None)
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._programs: dict[tuple[str, Placement], _Program] = {}
        self._decisions: dict[_Signature, tuple[_Program, guard.Decision]] = {}
        self._waiting: dict[_Signature, _Waiting] = {}
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
        except (_Undecided, OtherPlacement):
            pass
        except (TypeError, ValueError) as error:
            self._explain_arguments(args, kwargs, error)
            raise
        return self._decide_and_call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundOptimized(self, instance)

    def __repr__(self) -> str:
        return f"<jcuts.Optimized {function_name(self._fn)} mode={self.settings.mode!r} tune={self.settings.tune!r}>"

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the jcuts program (nothing is measured)."""
        # Ahead-of-time stages are not calls: nothing is decided, and concrete shardings are still made use of.
        placement = self._placement(args, kwargs)
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
        signature = self._signature(args, kwargs)
        with self._lock, _own_trace():
            self._decisions.pop(signature, None)
            self._decide(signature, args, kwargs, measure=True, force=True)
            self._refresh()
        return self.explain(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """The report for these arguments: regions, kernels, refusals, and the guard's decision.

        Nothing is measured: what was not tuned yet shows the choices that a call inside a trace would use.
        """
        signature = self._signature(args, kwargs)
        known = self._decided(signature)
        closed = original = self._closed(args, kwargs)
        if knobs.current().disable:
            decision = guard.Decision(guard.XLA, "JCUTS_DISABLE is set")
            report = FunctionReport(function_name(self._fn), self.settings.mode, self._platform(signature),
                                    notes=("left to XLA: JCUTS_DISABLE is set",))
            return _with_decision(report, decision)
        parts = shard_local.split(closed, self._placement(args, kwargs))
        if not isinstance(parts, str):
            closed = max((p.closed for p in parts.parts), key=lambda c: len(c.jaxpr.eqns))  # the report's program
        platform = self._platform(signature)
        outcome = plan(closed, self.settings, platform, may_measure=False)
        decision = known or self._kept(original, signature, outcome.closed is not closed)
        if (form := self._shown_form(decision)) is not None:
            outcome = plan(closed, self._settings_for(form), platform, may_measure=False)
        report = outcome.report
        if report is None:
            report = FunctionReport(function_name(self._fn), self.settings.mode, self._platform(signature),
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
        signature = self._signature(args, kwargs)
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
        placement = self._placement(args, kwargs)
        known = self._decided(self._signature(args, kwargs))
        platform = self._platform(self._signature(args, kwargs))
        names = [] if known is None else known.speed
        return {name: self._program(name, placement, platform).call.permitted for name in names}

    def decision(self, *args: Any, **kwargs: Any) -> guard.Decision | None:
        """What the last guard decided for these arguments, or None if they were not seen."""
        return self._decided(self._signature(args, kwargs))

    def _decided(self, signature: _Signature) -> guard.Decision | None:
        known, waiting = self._decisions.get(signature), self._waiting.get(signature)
        return known[1] if known else waiting.decision if waiting else None

    def _kept(self, closed: jaxapi.Closed, signature: _Signature, uses_jcuts: bool) -> guard.Decision:
        """What an earlier process decided about a function that this one has not called."""
        platform = self._platform(signature)
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

    def _carrier_of_call(
        self, placement: Placement | None, form: Form | None = None, *, decided: bool = False
    ) -> Callable[..., Any]:
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

    def _settings_for(self, form: Form | None) -> Settings:
        return self.settings if form is None else dataclasses.replace(self.settings, form=form)

    def _traced_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture | None:
        """What the slow path has traced to decide, at the leaves of this trace; None if it is of other types."""
        if _permission.traced is None or _permission.traced[0] is not self:
            return None
        seen = _permission.traced[1]
        leaves = [x for x in jax.tree.leaves((args, kwargs)) if jaxapi.is_tracer(x)]
        if [jaxapi.aval_of(x) for x in leaves] != list(seen.closed.in_avals):
            return None
        return dataclasses.replace(seen, leaves=leaves)

    def _program(self, name: str, placement: Placement, platform: str) -> _Program:
        key = (name, placement)
        if key not in self._programs:
            inner = (
                self._fn if forms.is_xla(name)
                else self._carrier_of_call(placement, forms.form_of(name), decided=True)
            )  # fmt: skip
            token = object()

            @functools.wraps(self._fn)
            def carrier(*args: Any, **kwargs: Any) -> Any:
                if _permission.program is not token and not jaxapi.jit_disabled():
                    raise _Undecided
                return inner(*args, **kwargs)

            options = forms.compiler_options(name, platform)
            jitted = self._jit(carrier, compiler_options=options) if options else self._jit(carrier)
            self._programs[key] = _Program(name, placement, _Permitted(jitted, token, placement))
        return self._programs[key]

    def _placement(self, args: Any, kwargs: Any) -> Placement:
        return Placement.of(jax.tree.leaves(self._split(args, kwargs)[0]))

    # ------------------------------------------------------------ deciding

    def _decide_and_call(self, *args: Any, **kwargs: Any) -> Any:
        signature = self._signature(args, kwargs)
        known = self._decisions.get(signature) or self._still_waiting(signature)
        if known is None:
            # Another thread may be deciding (a host callback inside the timed function, even): waiting for it could
            # deadlock, so this call runs the jcuts program without a decision.
            if not self._lock.acquire(blocking=False):
                return self._nested(*args, **kwargs)
            with _own_trace():
                try:
                    known = self._decide(signature, args, kwargs, measure=self.settings.tune == "auto")
                    self._refresh()
                finally:
                    self._lock.release()
                return known[0].call.permitted(*args, **kwargs)
        with _own_trace():
            return known[0].call.permitted(*args, **kwargs)

    def _by_signature(self, *args: Any, **kwargs: Any) -> Any:
        known = self._decisions.get(self._signature(args, kwargs))
        if known is None:
            raise _Undecided
        return known[0].call.permitted(*args, **kwargs)

    def _refresh(self) -> None:
        # A signature that waits must come by the slow path again.  With a single program in use its jitted function is
        # called directly; JAX sorts the signatures out.
        used = {id(program.call): program for program, _ in self._decisions.values()}
        only = next(iter(used.values())) if len(used) == 1 and not self._waiting else None
        self._current = self._by_signature if only is None else only.call.jitted

    def _still_waiting(self, signature: _Signature) -> tuple[_Program, guard.Decision] | None:
        waiting = self._waiting.get(signature)
        return None if waiting is None or time.monotonic() >= waiting.again else (waiting.program, waiting.decision)

    def _decide(self, signature: _Signature, args: Any, kwargs: Any, *,
                measure: bool, force: bool = False) -> tuple[_Program, guard.Decision]:
        platform = self._platform(signature)
        placement = self._placement(args, kwargs)
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

    def _decision_for(self, signature: _Signature, args: Any, kwargs: Any, placement: Placement,
                      platform: str, measure: bool, force: bool) -> guard.Decision:
        if knobs.current().disable:
            return guard.Decision(guard.XLA, "JCUTS_DISABLE is set")
        if jaxapi.jit_disabled():
            return guard.Decision(guard.JCUTS, "jax.disable_jit is in force: nothing is compiled")
        traced = self._plain.trace(*args, **kwargs)
        closed = traced.jaxpr
        leaves = jax.tree.leaves(self._split(args, kwargs)[0])
        racing: list[Form | None] = []
        if not placement.shardings:
            out_tree = jax.tree.structure(traced.out_info)
            _permission.traced = self, Capture(closed, [], out_tree, function_name(self._fn))
        if placement.shardings:
            parts = shard_local.split(closed, placement)
            if isinstance(parts, str):
                return guard.Decision(guard.JCUTS, f"arguments on several devices and {parts}: left to XLA")
            outcomes = shard_local.plan_parts(
                parts, lambda part: plan(part, self.settings, platform, may_measure=measure))
            uses_jcuts = any(o.closed is not p.closed for o, p in zip(outcomes, parts.parts, strict=True))
            racing = [None] if uses_jcuts else []
        elif measure and self._may_race(closed, leaves, platform):
            stored = None if force else self._stored(self._store_key(closed, signature, platform), platform, True)
            if stored is not None and stored.is_final:
                return stored  # its kernels are in the database: lowering finds them there
            found = self._plan_forms(closed, leaves, platform)
            racing, outcomes, uses_jcuts = list(found), list(found.values()), bool(found)
        else:
            outcomes = [plan(closed, self.settings, platform, may_measure=measure, examples=leaves)]
            uses_jcuts = outcomes[0].closed is not closed
            racing = [None] if uses_jcuts else []
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
        names = forms.programs(racing, forms.options(platform))
        again = stored if not force else None
        exact = forms.Exact(closed, leaves, self.settings.tolerance, platform)
        decision = self._race(args, kwargs, placement, platform, again.open_between(names) if again else names, exact)
        if again is not None:
            decision = dataclasses.replace(decision, tries=again.tries + 1)
        _decided_here.add(key)
        self._guard_store().put_guard(key, decision.to_dict())
        return decision

    def _plan_forms(self, closed: jaxapi.Closed, leaves: Sequence[Any], platform: str) -> dict[Form | None, Any]:
        def of_form(form: Form | None) -> Any:
            return plan(closed, self._settings_for(form), platform, may_measure=True, examples=leaves)

        with session.workshop():
            return forms.planned(closed, platform, of_form)

    def _not_timed(self, closed: jaxapi.Closed, leaves: Sequence[Any]) -> str | None:
        if jaxapi.has_effects(closed):
            return f"the function has effects ({', '.join(jaxapi.effects_of(closed))}): it is never run twice"
        if jax.process_count() > 1:
            return "several processes: each must compile the same program, so whole functions are not timed"
        if self._donated[0] and not guard.copies_fit(leaves):
            return "donated arguments do not fit twice into memory: not timed as a whole"
        return None

    def _may_race(self, closed: jaxapi.Closed, leaves: Sequence[Any], platform: str) -> bool:
        """Whether programs of several forms may compete: on GPUs, where whole functions are timed."""
        return self.settings.mode == "mixed" and platform in forms.GPUS and self._not_timed(closed, leaves) is None

    def _stored(self, key: str, platform: str, uses_jcuts: bool) -> guard.Decision | None:
        data = self._guard_store().guard(key)
        decision = None if data is None else guard.Decision.from_dict(data)
        if decision is None or not forms.is_known(decision.chosen, platform, uses_jcuts):
            return None
        return decision

    def _race(self, args: Any, kwargs: Any, placement: Placement, platform: str, names: Sequence[str],
              exact: forms.Exact) -> guard.Decision:
        calls = {name: self._program(name, placement, platform).call for name in names}
        on_gpu = platform in forms.GPUS
        if on_gpu:
            forms.compile_ahead({name: functools.partial(call.lower, *args, **kwargs) for name, call in calls.items()})
        # Options can do more on a GPU than everything else: there no program does without them.
        return guard.decide({name: call.permitted for name, call in calls.items()}, lambda: self._copies(args, kwargs),
                            donates=bool(self._donated[0]), verify=exact, chunk=2e-3 if on_gpu else 3e-4,
                            options_gain=math.inf if on_gpu else guard.OPTIONS_GAIN)

    def _copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def copy(tree: Any) -> Any:
            return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)

        nums, names = self._donated
        positions = {n % len(args) for n in nums if -len(args) <= n < len(args)}
        return (tuple(copy(a) if i in positions else a for i, a in enumerate(args)),
                {k: copy(v) if k in names else v for k, v in kwargs.items()})

    # ------------------------------------------------------------ arguments

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        nums, names = self._static
        where = {n % len(args) for n in nums if -len(args) <= n < len(args)}
        dynamic = (tuple(a for i, a in enumerate(args) if i not in where),
                   {k: v for k, v in kwargs.items() if k not in names})
        statics = (*((i, args[i]) for i in sorted(where)), *((k, kwargs[k]) for k in sorted(kwargs) if k in names))
        return dynamic, statics

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Signature:
        dynamic, statics = self._split(args, kwargs)
        for name, value in statics:
            try:
                hash(value)
            except TypeError as error:
                raise UsageError(
                    f"static argument {name!r} of {function_name(self._fn)} has the unhashable type "
                    f"{type(value).__name__}: pass a hashable value (a tuple for a list), or make it dynamic",
                    argument=name, value=value) from error
        leaves, tree = jax.tree.flatten(dynamic)
        return _Signature((tree, len(args), tuple(sorted(kwargs))), tuple(self._leaf(x) for x in leaves), statics)

    def _leaf(self, x: Any) -> tuple[Any, Any]:
        try:
            aval = jaxapi.aval_of(x)
        except TypeError as error:
            raise NotJaxError(
                f"an argument of {function_name(self._fn)} is a {type(x).__name__}, which is not an array: pass "
                "arrays and numbers, or name the argument in static_argnums or static_argnames",
                type=type(x).__name__, function=function_name(self._fn)) from error
        place = x.sharding if isinstance(x, jax.Array) and (x.committed or len(x.sharding.device_set) > 1) else None
        return aval, place

    def _explain_arguments(self, args: Any, kwargs: Any, error: Exception) -> None:
        """Turn JAX's complaint about an argument into ours; errors of the user's own code pass by."""
        try:
            self._signature(args, kwargs)
        except (UsageError, NotJaxError) as ours:
            raise ours from error

    @staticmethod
    def _platform(signature: _Signature) -> str:
        for _, place in signature.leaves:
            if place is not None:
                return next(iter(place.device_set)).platform
        default = jax.config.values["jax_default_device"]
        if default is not None and not isinstance(default, str):
            return default.platform
        return jax.default_backend() if default is None else default

    def _closed(self, args: Any, kwargs: Any) -> jaxapi.Closed:
        return self._plain.trace(*args, **kwargs).jaxpr

    def _guard_store(self) -> guard.GuardStore:
        chosen = self._store if self._store is not None else _default_store
        return chosen if chosen is not None else session.store()

    def _store_key(self, closed: jaxapi.Closed, signature: _Signature, platform: str) -> str:
        places = "; ".join(_place_text(place) for _, place in signature.leaves)
        kinds = sorted({d.device_kind for d in jax.local_devices() if d.platform == platform})
        return digest("guard", jaxapi.canonical_text(closed), repr(self.settings), platform, ",".join(kinds), places,
                      repr(self._options), repr(sorted(versions().items())))


def _place_text(place: Any) -> str:
    """A placement for keys: devices of one kind are equal, so a decision for one of them holds on the others."""
    if place is None or (len(place.device_set) == 1 and place.memory_kind in _DEFAULT_MEMORY):
        return ""
    return str(place)


@contextlib.contextmanager
def _own_trace() -> Iterator[None]:
    """What is traced to decide inside the block is not seen outside it, nor the other way round."""
    before, _permission.traced = _permission.traced, None
    try:
        yield
    finally:
        _permission.traced = before


class _Permitted:
    """A jitted carrier and the token that lets the slow path trace and lower it."""

    def __init__(self, jitted: Any, token: object, placement: Placement) -> None:
        self.jitted = jitted
        self._token = token
        self._placement = placement

    def permitted(self, *args: Any, **kwargs: Any) -> Any:
        before = _permission.program, expected.placement
        _permission.program, expected.placement = self._token, self._placement
        try:
            return self.jitted(*args, **kwargs)
        finally:
            _permission.program, expected.placement = before

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the carrier; what it compiles to is what a call with these arguments runs."""
        before = _permission.program, expected.placement
        _permission.program, expected.placement = self._token, self._placement
        try:
            return self.jitted.lower(*args, **kwargs)
        finally:
            _permission.program, expected.placement = before

    def clear_cache(self) -> None:
        self.jitted.clear_cache()


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


def _with_decision(report: Any, decision: guard.Decision) -> Any:
    attach = getattr(report, "with_guard", None)
    return attach(decision.to_dict()) if attach is not None else report


class _NotGiven:
    """Tells ``optimize(mode=...)``, which makes a decorator, from ``optimize(None)``, which is a mistake."""

    def __repr__(self) -> str:
        return "<not given>"


_NOT_GIVEN: Any = _NotGiven()


def optimize(fn: Callable[..., Any] = _NOT_GIVEN, *, mode: str = "mixed",
             static_argnums: int | Sequence[int] | None = None,
             static_argnames: str | Iterable[str] | None = None,
             donate_argnums: int | Sequence[int] | None = None,
             workspace_limit: int | None = None, total_workspace: int | None = None,
             tune: str = "auto", tolerance: float = 2.0, strict: bool = False) -> Any:
    """Make a JAX function faster; use it like ``jax.jit``, as a decorator with or without arguments.

    Args:
        fn: the function; left out when used as ``@optimize(...)``.
        mode: ``mixed`` (jcuts and XLA compete), ``fusion`` or ``no_fusion``.
        static_argnums, static_argnames, donate_argnums: as for ``jax.jit``.
        workspace_limit: bytes per convolution, or None.  total_workspace: bytes per network, or None.
        tune: ``auto`` measures at the first concrete top-level call of each signature, ``cached`` uses earlier
            choices only, ``off`` the estimator alone.
        tolerance: allowed error as a multiple of XLA's own error against float64.
        strict: raise ``UnsupportedError`` instead of leaving an equation to XLA that no kernel covers (one with too
            little work for a kernel of its own is left to XLA all the same).

    Like ``jax.jit``, it knows a function object that it has seen: made again for it with equal options, it gives the
    same ``Optimized``, with all that was planned and compiled.  Bound methods, callable objects, and functions that are
    defined anew each time are new functions.

    Returns: an ``Optimized``.
    Raises: UsageError for impossible options, NotJaxError if ``fn`` cannot be a JAX function.
    """
    _warn_of_misspelt_variables()
    settings = Settings(mode=mode, tune=tune, tolerance=tolerance, workspace_limit=workspace_limit,
                        total_workspace=total_workspace, strict=strict)
    if static_argnames is not None and not isinstance(static_argnames, str):
        static_argnames = tuple(static_argnames)
    options = {"static_argnums": static_argnums, "static_argnames": static_argnames,
               "donate_argnums": donate_argnums}

    def wrap(target: Callable[..., Any]) -> Optimized:
        _check_function(target)
        return _made_before(target, settings, options)

    return wrap if fn is _NOT_GIVEN else wrap(fn)


_MADE = "__jcuts_optimized__"
_making = threading.Lock()


class _Made:
    """The ``Optimized`` objects of one function, kept in its ``__dict__``: they live exactly as long as it does.

    They refer to the function and it to them, a cycle that Python's collector frees; a table of weak references could
    not do that.  ``owner`` tells the function from another to which ``functools.wraps`` copied the attribute.
    """

    def __init__(self, owner: Callable[..., Any] | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self.by_options: dict[Any, Optimized] = {}

    def __reduce__(self) -> Any:
        return _Made, ()  # a function that is pickled by value leaves its programs behind


def _made_before(fn: Callable[..., Any], settings: Settings, options: dict[str, Any]) -> Optimized:
    """The ``Optimized`` of this very function with these options, made now if there is none."""
    # Callable objects decide themselves what is equal, and a bound method is a new object each time it is looked up.
    if not isinstance(fn, types.FunctionType):
        return Optimized(fn, settings, options)
    # A wrapper made under other knobs or with another store decides anew.
    surroundings = knobs.current(), _default_stores, jaxapi.jit_disabled(), jaxapi.x64_enabled()
    key = (settings, tuple(repr(v) for v in options.values()), surroundings)
    with _making:
        made = fn.__dict__.get(_MADE)
        if not isinstance(made, _Made) or made.owner is None or made.owner() is not fn:
            made = fn.__dict__[_MADE] = _Made(fn)
        if key not in made.by_options:
            made.by_options[key] = Optimized(fn, settings, options)
        return made.by_options[key]


def _warn_of_misspelt_variables() -> None:
    for name in knobs.unknown_variables():
        if name not in _told:
            _told.add(name)
            close = difflib.get_close_matches(name, knobs.variables(), 1)
            hint = f": did you mean {close[0]}?" if close else " (jcuts doctor lists those that there are)"
            log.warning("the environment variable %s means nothing to jcuts%s", name, hint)


_told: set[str] = set()


def _check_function(fn: Any) -> None:
    if not callable(fn):
        raise NotJaxError(f"optimize needs a function, not a {type(fn).__name__}: decorate a function, or call "
                          "optimize(mode=...) with keywords only", value=fn)
    call = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    for kind, test in (("coroutine", inspect.iscoroutinefunction), ("generator", inspect.isgeneratorfunction),
                       ("asynchronous generator", inspect.isasyncgenfunction)):
        if test(fn) or test(call):
            raise NotJaxError(f"{function_name(fn)} is a {kind} function: JAX traces functions that return arrays",
                              function=function_name(fn), kind=kind)
