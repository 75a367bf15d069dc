"""Calls that are timed take the jitted function's own path once they are compiled, and ask to trace where they must."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jcuts.jit.trace_token import AuthorizedCall, NeedsDecision, permission
from jcuts.primitive.sharding import Placement


def guarded(traces: list) -> AuthorizedCall:
    """A call whose function may be traced with its token alone, as those of `jit.variant_compiler`."""
    token = object()

    def carrier(x):
        if permission.program is not token:
            raise NeedsDecision
        traces.append(x.shape)
        return x * 2

    return AuthorizedCall(jax.jit(carrier), token, Placement(()))


def test_only_the_first_call_of_a_signature_gives_permission(monkeypatch):
    traces: list = []
    call, given = guarded(traces), []
    original = AuthorizedCall.permitted
    monkeypatch.setattr(AuthorizedCall, "permitted", lambda self, *xs: given.append(xs) or original(self, *xs))
    for _ in range(3):
        np.testing.assert_array_equal(call.compiled(np.ones(3)), 2 * np.ones(3))
    assert traces == [(3,)] and len(given) == 1
    for _ in range(2):
        np.testing.assert_array_equal(call.compiled(np.ones(4)), 2 * np.ones(4))
    assert traces == [(3,), (4,)] and len(given) == 2
    with pytest.raises(NeedsDecision):
        call.jitted(np.ones(5))
