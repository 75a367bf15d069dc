"""``tune="serve"``: a call with a new signature runs XLA's program at once; stored decisions and tuning follow beside.

What `jit.online` does before the first call is done behind it here: the key of a stored decision, which costs a trace
and a digest, planning by stored choices, and compiling the program that was chosen.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from jcuts.base import knobs
from jcuts.base.settings import Settings
from jcuts.jit.call_signature import CallSignature, Signature
from jcuts.jit.decision import XLA, Decision
from jcuts.jit.online.background_tuner import BackgroundTuner
from jcuts.jit.online.online_tuning import GIVEN_UP, STORED, OnlineTuning, State, budget_seconds
from jcuts.jit.traced_call import Call
from jcuts.jit.variant_compiler import Program
from jcuts.jit.variant_selection import VariantSelector
from jcuts.tune.device_gate import LEAST

log = logging.getLogger("jcuts")
SWITCH_SECONDS = 1 / 2000
"""A call waits for the interpreter for so long at most, where planning holds it [s] (Python's own limit: 5 ms)."""
NOT_TUNED = "serving: XLA's program; tune_seconds is 0, so that nothing is measured"


class ServeTuning(OnlineTuning):
    """Tunes the calls of one function beside them; what was called most often comes first.

    Args: see `OnlineTuning`; calls: how often a signature was called while anything was tuned.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        arguments: CallSignature,
        tuner: BackgroundTuner,
        publish: Callable[[VariantSelector, Signature, Program, Decision], None],
        calls: Callable[[Signature], int],
    ) -> None:
        super().__init__(name, settings, arguments, tuner, publish)
        self._calls = calls

    longest_slice = LEAST  # a request waits for the end of one at most, where it meets one

    def share_limit(self) -> float:
        """Share of the run that calls may wait for measurements, in [0, 1]."""
        return knobs.current().serve_share

    def rank(self, signature: Signature) -> float:
        """How often a signature was called."""
        return float(self._calls(signature))

    def start(self, selector: VariantSelector, call: Call) -> tuple[Program, Decision]:
        """XLA's program; whatever else there is to know about the call is found out behind it."""
        if (left := self._untuned(selector, call)) is not None:
            return left
        xla = selector.carriers.program(XLA, call.placement, call.platform)
        if (why := self._no_room(call)) is not None:
            return xla, self._give_up(call, why)
        self._prepare(selector, call)
        shapes = ", ".join(str(aval) for aval, _ in call.signature.leaves[-3:])
        log.info("%s: a new signature (..., %s) runs XLA's program", self._name, shapes)
        return xla, Decision(XLA, "serving: XLA's program at once, nothing is decided yet", deferred=True)

    def _select(self, selector: VariantSelector, call: Call) -> State:
        with _quick_switches():
            stored, settled = selector.of_earlier_process(call)
            if stored is not None:
                program = selector.carriers.program(stored.chosen, call.placement, call.platform)
                if stored.chosen != XLA:
                    program.call.lower(*call.args, **call.kwargs).compile()
                self._publish(selector, call.signature, program, stored)
                log.info("%s runs %s from now on, as was decided earlier", self._name, stored.chosen)
            if settled:
                return State(STORED, "an earlier process decided")
            if budget_seconds(self._settings) > 0:
                return super()._select(selector, call)
            if stored is not None:
                return State(STORED, "an earlier process decided for now, and tune_seconds is 0")
            xla = selector.carriers.program(XLA, call.placement, call.platform)
            self._publish(selector, call.signature, xla, Decision(XLA, NOT_TUNED))
            return State(GIVEN_UP, "tune_seconds is 0: nothing is measured")


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Calls get the interpreter sooner than usual while this thread plans."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
