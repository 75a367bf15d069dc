"""Memoised planning outcomes: what lowering takes over from the first call that has planned an equal jaxpr.

JAX lowers each program of a race on its own (`jax.stages.Traced.lower`), and the lowering rule would plan it again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from jcuts.base.settings import Settings
from jcuts.pipeline.outcome import Outcome
from jcuts.trace import jaxapi
from jcuts.trace.canonical import canonical_digest


class _Known(threading.local):
    digest: str = ""
    outcomes: Mapping[Settings, Outcome] = {}


_known = _Known()


@contextlib.contextmanager
def reusing(closed: jaxapi.Closed, outcomes: Mapping[Settings, Outcome]) -> Iterator[None]:
    """Lets lowering on this thread take over the outcomes of a jaxpr, by the options they were planned with.

    JAX's own tracing has eliminated dead code by then (the arguments stay).
    """
    before = _known.digest, _known.outcomes
    _known.digest, _known.outcomes = _digest(jaxapi.dce(closed)) if outcomes else "", outcomes
    try:
        yield
    finally:
        _known.digest, _known.outcomes = before


def find(closed: jaxapi.Closed, settings: Settings) -> Outcome | None:
    """The outcome of an equal jaxpr with these options, None where nobody has planned it."""
    known = _known.outcomes.get(settings)
    return known if known is not None and _digest(closed) == _known.digest else None


def _digest(closed: jaxapi.Closed) -> str:
    return canonical_digest(closed, consts="digest")
