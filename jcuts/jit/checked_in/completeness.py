"""``require="complete"``: a call follows what was measured, or raises an error that lists what was not."""

from __future__ import annotations

from jcuts.base.errors import UsageError
from jcuts.jit import variant_space
from jcuts.jit.decision import JCUTS, Decision
from jcuts.jit.decision_cache import DecisionCache
from jcuts.jit.traced_call import TracedCall
from jcuts.report.completeness import incomplete, unmeasured

NO_DECISION = "the comparison of whole programs: not measured here, or with other versions"
PARTIAL = "the comparison of whole programs: taken before all kernels were measured"


def complete_decision(traced: TracedCall, name: str, decisions: DecisionCache) -> Decision:
    """The stored decision of a call, all of whose kernels were measured.

    Args: name: of the function.
    Raises: IncompleteTuning: something is missing; ``missing`` lists it.
    """
    call = traced.call
    if call.placement.shardings:
        raise UsageError("require='complete' is for calls whose arguments are on one device")
    missing: list[str] = []
    stored: Decision | None = Decision(JCUTS, f"mode={traced.settings.mode!r} is not compared as a whole")
    if traced.settings.mode == "mixed":
        key = decisions.key(traced.closed, call.signature, call.platform)
        stored = decisions.lookup(key, call.platform)
        if stored is None:
            missing.append(NO_DECISION)
        elif stored.partial and not stored.pinned:
            missing.append(PARTIAL)
    form = None if stored is None else variant_space.form_of(stored.chosen)
    if stored is None or not variant_space.is_xla(stored.chosen):
        missing += unmeasured(traced.plan(form, may_measure=False).report)
    if missing or stored is None:
        raise incomplete(name, [aval for aval, _ in call.signature.leaves], missing)
    return stored
