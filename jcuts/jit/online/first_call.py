"""First calls of ``tune="auto"`` on a CPU: a call waits some seconds for its tuning, then runs XLA's program.  Tuning
goes on between the calls that follow (`jit.online.online_tuning`).

The whole selection runs on the background thread from the start, with all its checks; the caller lends it the device
until it has decided or the time is up.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from jcuts.base import knobs
from jcuts.base.settings import Settings
from jcuts.jit.decision import XLA, Decision
from jcuts.jit.online.background_tuner import Job
from jcuts.jit.online.online_tuning import DECIDED, GIVEN_UP, STOPPED, TUNING, OnlineTuning, State, budget_seconds
from jcuts.jit.trace_token import isolated_trace
from jcuts.jit.traced_call import Call
from jcuts.jit.variant_compiler import Program
from jcuts.jit.variant_selection import VariantSelector
from jcuts.trace import jaxapi
from jcuts.tune import time_budget

log = logging.getLogger("jcuts")
PATIENCE = 3
"""A first call waits for its tuning so long by default [s]."""
SHARE = 1 / 4
"""Share of the run that calls wait for measurements after a first call that did not wait for the end."""
MOST_WAITING = 16
"""Calls that wait to be tuned, each with its arguments; a later call of any other signature is tuned."""
BUSY = "tuning is busy with other calls: a later call is tuned"


def patience(settings: Settings) -> float:
    """How long a first call waits for its tuning [s]; infinite where it waits for the end."""
    asked = knobs.current().first_call_seconds
    if asked is not None:
        return asked
    explicit = settings.tune_seconds is not None or knobs.current().tune_seconds is not None
    return math.inf if explicit else PATIENCE


def applies(settings: Settings) -> bool:
    """Whether first calls of a function with these options may end before its tuning."""
    limited = settings.workspace_limit is not None or settings.total_workspace is not None
    return settings.measures and settings.mode == "mixed" and not (settings.strict or limited)


@dataclass(eq=False)
class Attempt:
    """Tuning of a first call. Attributes: decision, error: how it ended; alone: whether the caller has gone on."""

    decision: Decision | None = None
    error: Exception | None = None
    alone: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class FirstCallTuning(OnlineTuning):
    """Tunes first calls of one function, for whose end they wait some seconds.  Args: see `OnlineTuning`."""

    def share_limit(self) -> float:
        """Share of the run that calls may wait for measurements, in [0, 1]."""
        return SHARE

    def is_tuned(self, signature: Any) -> bool:
        """Whether tuning of a signature goes on, and will say which program runs."""
        state = self.states.get(signature)
        return state is not None and state.what == TUNING

    def first_call(self, selector: VariantSelector, call: Call, begun: float) -> tuple[Program, Decision] | None:
        """The program that a first call runs; None where it has to be decided on the calling thread, as it takes.

        Args: begun: when the call began (monotonic seconds).
        Raises: what tuning raises while the call waits for it.
        """
        seconds = patience(self._settings)
        if math.isinf(seconds) or not self._may_leave(selector, call):
            return None
        stored, settled = selector.of_earlier_process(call)
        if settled or self._why_alone(selector, call):
            return None
        chosen = XLA if stored is None else stored.chosen
        program = selector.carriers.program(chosen, call.placement, call.platform)
        if self._tuner.waiting >= MOST_WAITING:
            return program, Decision(chosen, BUSY, deferred=True)
        is_busy, attempt = self._tuner.is_active, Attempt()
        job = self._start(selector, call, attempt)
        if job is None:
            return None
        if not is_busy:
            self._wait_for(job, max(0, begun + seconds - time.monotonic()))
        with attempt.lock:
            if attempt.error is not None:
                raise attempt.error
            if attempt.decision is not None:
                mine = attempt.decision
                return selector.carriers.program(mine.chosen, call.placement, call.platform), mine
            if job.ended.is_set():  # it was stopped
                return None
            attempt.alone = True
        self._tell_of_more(seconds, is_busy=is_busy)
        return program, stored or Decision(XLA, "tuning goes on beside the calls: not decided yet", deferred=True)

    def _may_leave(self, selector: VariantSelector, call: Call) -> bool:
        """Whether a call need not wait for the end of its tuning, as far as that takes no trace to know."""
        plain = knobs.current().disable or jaxapi.jit_disabled() or call.placement.spans_processes
        if plain or call.placement.shardings or call.platform != "cpu" or self._tuner.is_here():
            return False
        return time_budget.seconds_of(self._settings) > 0 and jaxapi.trace_context() == _context_of_threads()

    def _why_alone(self, selector: VariantSelector, call: Call) -> str | None:
        """Why a call's tuning cannot go on without it, or None."""
        return self._no_room(call) or selector.why_not_online(call)

    def _start(self, selector: VariantSelector, call: Call, attempt: Attempt) -> Job | None:
        kept = call._replace(**self._kept(call))
        self._tuner.gate.account.begin()
        self.states[call.signature] = State(TUNING)
        work = functools.partial(self._tune_first, selector, kept, attempt)
        rank = functools.partial(self.rank, call.signature)
        return self._tuner.submit(self, work, self.share_limit, rank, self.longest_slice)

    def _wait_for(self, job: Job, seconds: float) -> None:
        try:
            self._tuner.gate.lend(seconds, job.ended)
        except BaseException:  # Ctrl-C: nobody wants the result any more
            self._tuner.cancel(self)
            raise

    def _tell_of_more(self, seconds: float, *, is_busy: bool) -> None:
        level = logging.WARNING if knobs.current().progress else logging.INFO
        why = "while another function is tuned" if is_busy else f"since its tuning takes more than {seconds:g} s"
        log.log(
            level,
            "%s runs XLA's program %s: that goes on beside the calls (.finish_tuning() waits for it, "
            "JCUTS_FIRST_CALL_SECONDS=inf makes first calls wait)",
            self._name,
            why,
        )

    def _tune_first(self, selector: VariantSelector, call: Call, attempt: Attempt) -> None:
        """On the background thread: the whole selection; the caller takes the decision over, or it is published."""
        state = State(GIVEN_UP, STOPPED)
        try:
            with isolated_trace():
                decision = selector.select(call, measure=True, tune_seconds=budget_seconds(self._settings))
                with attempt.lock:
                    attempt.decision = None if attempt.alone else decision
                state = self._state_of(decision) if attempt.alone else State(DECIDED, decision.reason)
                if attempt.alone and state.what == DECIDED:
                    self._take_over(selector, call, decision)
        except Exception as error:
            with attempt.lock:
                attempt.error = None if attempt.alone else error
            state = self._failed(error, quiet=not attempt.alone)
        finally:
            self.states[call.signature] = state


def _context_of_threads() -> Any:
    """JAX's configuration as a thread finds it that has not changed it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(jaxapi.trace_context()))
    thread.start()
    thread.join()
    return found[0]
