"""Pins what a call runs: the decision between whole programs, the choices of its kernels, and the partition.

A pinned row counts in other versions of jcuts and of its packages, too, once it was checked there; only `.tune()` and
the loss of the row change it.  What XLA itself compiles, and code generators of another version, may still round
otherwise: bits that no upgrade changes are those of an artefact.
"""

from __future__ import annotations

from dataclasses import replace

from jcuts.base.errors import UsageError
from jcuts.jit import variant_space
from jcuts.jit.decision import Decision
from jcuts.jit.decision_cache import DecisionCache
from jcuts.jit.traced_call import TracedCall
from jcuts.tune import session
from jcuts.tune.choice import Choice
from jcuts.tune.portable.file_store import FileStore


def pin(traced: TracedCall, decision: Decision, decisions: DecisionCache, *, pinned: bool = True) -> int:
    """Pins a decision with all that its program consists of, or ends that; how many rows that are.

    Raises: UsageError: nothing was measured for the call, or no database keeps what was.
    """
    store = session.store()
    if not isinstance(store, FileStore):
        raise UsageError("what several processes have agreed on, or a test's database holds, cannot be pinned")
    if decision.deferred or not (decision.measured or traced.settings.mode != "mixed"):
        raise UsageError(f"nothing was measured that could be pinned: {decision.reason}; call .tune(...) first")
    decision = replace(decision, reason=decision.reason.removesuffix("; pinned"))
    key = decisions.key(traced.closed, traced.call.signature, traced.call.platform)
    # The row is stored first: what is planned behind it is planned anew, and so looked up.
    decisions.keep_pinned(key, replace(decision, pinned=pinned))
    count = 1
    if variant_space.is_xla(decision.chosen):
        return count
    with store.noting() as noted:
        traced.plan(variant_space.form_of(decision.chosen), may_measure=False)
    for kind, where in sorted(noted):
        value, source = store.entry(kind, where)
        if kind == "choice" and value is not None:
            store.put(replace(Choice.from_json(value), pinned=pinned), source)
            count += 1
        elif kind == "partition" and value is not None:
            kept = {name: part for name, part in value.items() if name != "pinned"}
            store.put_partition(where, {**kept, "pinned": True} if pinned else kept)
            count += 1
    return count
