"""Online autotuning of one function: starts with XLA's program, tunes between calls, switches programs between two
calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jcuts.base import knobs
from jcuts.base.settings import Settings
from jcuts.jit import end_to_end_benchmark, variant_space
from jcuts.jit.call_signature import CallSignature, Signature
from jcuts.jit.decision import XLA, Decision
from jcuts.jit.online.background_tuner import BackgroundTuner
from jcuts.jit.trace_token import isolated_trace
from jcuts.jit.traced_call import Call
from jcuts.jit.variant_compiler import Program
from jcuts.jit.variant_selection import VariantSelector
from jcuts.trace import jaxapi
from jcuts.tune import time_budget
from jcuts.tune.device_gate import MOST

log = logging.getLogger("jcuts")
TUNING = "tuning"
DECIDED = "decided"
GIVEN_UP = "given up"
STORED = "stored"
STOPPED = "stopped by .tune(), clear_cache() or the end of the process"
MORE_TIME = 10
"""Nobody waits for tuning between calls: it may take so many times the seconds of a first call."""


@dataclass
class State:
    """What is known of one call signature: ``tuning``, ``decided``, ``given up`` or ``stored``, and why."""

    what: str
    why: str = ""


def budget_seconds(settings: Settings) -> float:
    """Seconds of work, without those spent waiting for the device, that tuning one signature may take."""
    if settings.tune_seconds is not None:
        return float(settings.tune_seconds)
    found = knobs.current().tune_seconds
    return MORE_TIME * (found if found is not None else time_budget.DEFAULT_SECONDS)


class OnlineTuning:
    """Tunes the calls of one function between calls.

    Args:
        name, settings: of the function; arguments: which of its arguments are static or donated.
        tuner: the thread that tunes, and its gate.
        publish: is told the selector, signature, program and decision when one was taken; it switches between calls.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        arguments: CallSignature,
        tuner: BackgroundTuner,
        publish: Callable[[VariantSelector, Signature, Program, Decision], None],
    ) -> None:
        self._name, self._settings, self._arguments = name, settings, arguments
        self._tuner, self._publish = tuner, publish
        self.states: dict[Signature, State] = {}
        self._begin: list[tuple[Signature, Callable[[], None]]] = []  # signatures whose first call is under way

    longest_slice: float = MOST
    """Longest slice of the device that one measurement takes [s]."""

    def share_limit(self) -> float:
        """Share of the run that calls may wait for measurements, in [0, 1]."""
        return knobs.current().online_share

    def rank(self, signature: Signature) -> float:
        """Of the signatures that wait the one with the highest is tuned next."""
        return 0.0

    # Deciding ---------------------------------------------------------------------------------------------------------

    def start(self, selector: VariantSelector, call: Call) -> tuple[Program, Decision]:
        """The program that a call runs now; tuning begins where no earlier process has decided."""
        if (left := self._untuned(selector, call)) is not None:
            return left
        xla = selector.carriers.program(XLA, call.placement, call.platform)
        stored, settled = selector.of_earlier_process(call)
        if stored is not None and settled:
            self.states[call.signature] = State(STORED, "an earlier process decided")
            return selector.carriers.program(stored.chosen, call.placement, call.platform), stored
        why = self._no_room(call)
        if why is not None:
            return xla, self._give_up(call, why)
        self._prepare(selector, call)
        if stored is not None:
            return selector.carriers.program(stored.chosen, call.placement, call.platform), stored
        return xla, Decision(XLA, "tuned between calls: not decided yet", deferred=True)

    def _untuned(self, selector: VariantSelector, call: Call) -> tuple[Program, Decision] | None:
        """The program of a call that is never tuned between others, None for any other call."""
        self._tuner.gate.account.begin()
        if knobs.current().disable or jaxapi.jit_disabled():
            decision = selector.select(call, measure=False)
            return selector.carriers.program(decision.chosen, call.placement, call.platform), decision
        if call.placement.spans_processes:
            why = "several processes: each must run the same program at the same time"
            return selector.carriers.program(XLA, call.placement, call.platform), self._give_up(call, why)
        return None

    def _prepare(self, selector: VariantSelector, call: Call) -> None:
        """Keeps what tuning needs of a call; it begins at `begin`."""
        kept = call._replace(**self._kept(call))
        context = jaxapi.trace_context()
        self.states[call.signature] = State(TUNING)
        self._begin.append((call.signature, lambda: self._tune(selector, kept, context)))

    def begin(self) -> None:
        """A first call was made: its tuning begins, which would have competed with its tracing for the interpreter."""
        while self._begin:
            signature, work = self._begin.pop(0)
            rank = functools.partial(self.rank, signature)
            self._tuner.submit(self, work, self.share_limit, rank, self.longest_slice)

    def _give_up(self, call: Call, why: str) -> Decision:
        self.states[call.signature] = State(GIVEN_UP, why)
        log.warning("%s stays with XLA's program, it is not tuned between calls: %s", self._name, why)
        return Decision(XLA, f"not tuned between calls: {why}")

    def _no_room(self, call: Call) -> str | None:
        """Why the arguments cannot be kept, and once more for a call that uses them up; None where they can."""
        leaves = self._arguments.leaves(call.args, call.kwargs)
        if self._arguments.donates and not end_to_end_benchmark.copies_fit([*leaves, *leaves]):
            return "copies of donated arguments do not fit into memory"
        return None

    def _kept(self, call: Call) -> dict[str, Any]:
        """The arguments for later calls of tuning's own: copies of what the user's calls use up or may change."""
        args, kwargs = self._arguments.copies(call.args, call.kwargs)

        def own(x: Any) -> Any:
            return x.copy() if isinstance(x, np.ndarray) else x

        return {"args": jax.tree.map(own, args), "kwargs": jax.tree.map(own, kwargs)}

    def _tune(self, selector: VariantSelector, call: Call, context: Any) -> None:
        """On the background thread: today's whole selection, whose measurements wait for slices of the device."""
        signature, state = call.signature, State(GIVEN_UP, STOPPED)
        try:
            if jaxapi.trace_context() != context:
                state.why = "the calls are inside of a context of JAX's configuration, which is the calling thread's"
                return
            with isolated_trace():
                if (why := selector.why_not_online(call)) is not None:
                    state.why = why
                    return
                state = self._select(selector, call)
        except Exception as error:
            state = self._failed(error)
        finally:
            self.states[signature] = state

    def _failed(self, error: Exception, *, quiet: bool = False) -> State:
        """The state of a signature whose tuning has failed. Args: quiet: somebody else is told of it."""
        state = State(GIVEN_UP, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        if not quiet:
            log.warning("%s stays with XLA's program: tuning between calls failed: %s", self._name, state.why)
        log.debug("tuning between calls failed", exc_info=True)
        return state

    def _select(self, selector: VariantSelector, call: Call) -> State:
        """Selects a program, and publishes it where one was found."""
        decision = selector.select(call, measure=True, tune_seconds=budget_seconds(self._settings))
        state = self._state_of(decision)
        if state.what == DECIDED:
            self._take_over(selector, call, decision)
        return state

    def _take_over(self, selector: VariantSelector, call: Call, decision: Decision) -> None:
        """Lets the calls that follow run the program that was chosen."""
        program = selector.carriers.program(decision.chosen, call.placement, call.platform)
        if "whole programs" not in decision.spent:  # another process decided meanwhile: nothing ran here
            program.call.lower(*call.args, **call.kwargs).compile()
        self._publish(selector, call.signature, program, replace(decision, reason=self._told(decision)))

    @staticmethod
    def _state_of(decision: Decision) -> State:
        if decision.deferred:
            return State(GIVEN_UP, decision.reason)
        if not decision.measured and not variant_space.is_xla(decision.chosen):
            return State(GIVEN_UP, f"whole programs were not compared: {decision.reason}")
        return State(DECIDED, decision.reason)

    def _told(self, decision: Decision) -> str:
        """The decision's reason, with what tuning cost; logged as one line."""
        account = self._tuner.gate.account
        cost = (
            f"tuned between calls in {account.elapsed():.0f} s of the run, of which it took "
            f"{100 * account.used():.1f}% (at most {100 * self.share_limit():g}%)"
        )
        switched = decision.chosen != XLA
        level = logging.WARNING if switched and knobs.current().progress else logging.INFO
        what = f"runs {decision.chosen} from now on" if switched else "stays with XLA's program"
        log.log(level, "%s %s: %s; %s", self._name, what, decision.reason, cost)
        return f"{decision.reason}; {cost}"

    # Calling ----------------------------------------------------------------------------------------------------------

    @property
    def is_gated(self) -> bool:
        """Whether calls have to go through `call`: anything of this process is tuned."""
        return self._tuner.is_active

    def through_gate(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A program whose calls go through `call`."""
        return lambda *args, **kwargs: self.call(run, args, kwargs)

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the user's, before which a slice of the device may be handed over."""
        gate = self._tuner.gate
        gate.before_call(lambda: _wait_for(self._tuner.last, args, kwargs))
        result = None
        try:
            result = run(*args, **kwargs)
        finally:
            self._tuner.last = last = _smallest(result)
            gate.after_call(lambda: _is_pending(last))
        return result

    # Telling ----------------------------------------------------------------------------------------------------------

    def describe(self, signature: Signature) -> dict[str, Any] | None:
        """State of a signature for ``stats``, None where it was not called."""
        state, account = self.states.get(signature), self._tuner.gate.account
        if state is None:
            return None
        return {"state": state.what, "why": state.why, "share": account.used(), "share_limit": self.share_limit()}

    def reason(self, signature: Signature, decision: Decision) -> Decision:
        """A decision with how far tuning is in its reason."""
        state, account = self.states.get(signature), self._tuner.gate.account
        if state is None or state.what != TUNING:
            return decision
        so_far = f"tuning goes on between calls and has taken {100 * account.used():.1f}% of the run so far"
        return replace(decision, reason=f"{decision.reason}; {so_far} (at most {100 * self.share_limit():g}%)")

    def cancel(self) -> None:
        """Ends tuning between calls, and waits until it has ended."""
        self._tuner.cancel(self)
        for signature, state in list(self.states.items()):
            if state.what == TUNING:
                self.states[signature] = State(GIVEN_UP, STOPPED)

    def wait(self, timeout: float | None) -> bool:
        """Waits until nothing of this function is tuned any more; whether that is so."""
        return self._tuner.wait(self, timeout)


def _smallest(result: Any) -> Any:
    arrays = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
    return min(arrays, key=lambda leaf: leaf.nbytes, default=None)


def _is_pending(result: Any) -> bool:
    """Whether the device still works on a result; False where that is not known."""
    with contextlib.suppress(Exception):  # deleted: it was donated
        return result is not None and not result.is_ready()
    return False


def _wait_for(last: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Waits for a call's result, and for the arguments of the next, which follow from it in training."""
    with contextlib.suppress(Exception):  # deleted, or an error that the user meets when they use it
        jax.block_until_ready(last)
    with contextlib.suppress(Exception):
        jax.block_until_ready((args, kwargs))
