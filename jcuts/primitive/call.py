"""``jcuts_call_p``: a call-like JAX primitive that carries a function's original jaxpr until lowering.

    outs = jcuts_call(*args)  with parameters  jaxpr, settings, name, placement

Every transformation returns a ``jcuts_call_p`` of the transformed original (as ``jit`` does), so derivatives are
those of the user's program and the derivative's jaxpr reaches the pipeline as well.  Nothing is planned before
lowering, when shapes, batching and shard-local types are final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcuts.base.settings import Settings
from jcuts.primitive import autodiff, batching, jet_sparse, lowering
from jcuts.trace import jaxapi

NAME = "jcuts_call"


def _derived_call(*args: Any, **params: Any) -> list[Any]:
    # A derived call has other arguments than the user's, so their known shardings no longer apply.
    return list(jcuts_call_p.bind(*args, **dict(params, placement=None)))


jcuts_call_p = jaxapi.new_call_primitive(
    NAME,
    jvp=lambda *xs, **params: autodiff.jvp(jcuts_call_p, *xs, **params),
    linearize=lambda *xs, **params: autodiff.linearize(jcuts_call_p, *xs, **params),
    transpose=lambda *xs, **params: autodiff.transpose(jcuts_call_p, *xs, **params),
    batch=lambda *xs, **params: batching.batch(jcuts_call_p, *xs, **params),
    derive=_derived_call,
    lower=lowering.lower,
)
jet_sparse.register_jet(jcuts_call_p, _derived_call)


def register_late_rules() -> None:
    """Registers the rules of transformations that the user has imported by now; cheap enough for every call inside a
    trace.
    """
    jet_sparse.register_sparsify(jcuts_call_p, _derived_call)


def jcuts_call(
    closed: jaxapi.Closed, args: Sequence[Any], settings: Settings, *, name: str, placement: Any = None
) -> list[Any]:
    """Bind the primitive at ``args``.

    Args:
        closed: the user's function; constants that are values of an outer trace become arguments here.
        settings: the user's options.  name: shown in profiles and in ``explain``.
        placement: shardings of the concrete arguments (see ``sharding.Placement``), or None inside a trace.
    """
    register_late_rules()
    tracers, closed = jaxapi.hoist_tracer_consts(closed)
    if tracers:
        placement = None  # it describes the user's arguments, not what their function closes over
    return list(jcuts_call_p.bind(*tracers, *args, jaxpr=closed, settings=settings, name=name, placement=placement))
