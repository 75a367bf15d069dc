"""Calls find their program by the few arguments in which known signatures differ, and stay on JAX's fast path."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import pjit

import jcuts
from jcuts.api import Optimized
from jcuts.jit import variant_selection
from jcuts.jit.call_signature import CallSignature
from jcuts.jit.decision import JCUTS, XLA, Decision, MemoryStore
from jcuts.jit.dispatch.signature_table import SignatureTable, choose_probes
from jcuts.jit.trace_token import UnseenSignature


class Weights(NamedTuple):
    w: np.ndarray
    b: np.ndarray


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def params(width=4):
    return {"layers": [Weights(ones(width, width), ones(width)) for _ in range(3)], "scale": ones()}


def fn(*args, **kwargs):
    return args, kwargs


CALLS = {
    "batch": [((params(), ones(n, 4)), {}) for n in (1, 2, 3, 8)],
    "named": [((params(),), {"x": ones(n, 4)}) for n in (1, 2)],
    "two dimensions": [((ones(n), ones(m)), {}) for n in (1, 2, 3) for m in (1, 2)],
    "nested": [((params(n),), {}) for n in (2, 3)],
    "dtype": [((ones(2, dtype=d),), {}) for d in (np.float32, np.int32, np.uint8)],
}


def table_of(calls, options=None):
    arguments = CallSignature(fn, options or {})
    table = SignatureTable(arguments)
    runs = {arguments.signature(*call): lambda *a, n=n, **k: n for n, call in enumerate(calls)}
    return table, runs, arguments


@pytest.mark.parametrize("name", CALLS)
def test_every_known_signature_finds_its_program_without_its_signature(name, monkeypatch):
    table, runs, _ = table_of(CALLS[name])
    table.update(runs)
    monkeypatch.setattr(CallSignature, "signature", lambda *_: pytest.fail("the whole signature was made"))
    for n, (args, kwargs) in enumerate(CALLS[name]):
        assert table(*args, **kwargs) == n


@pytest.mark.parametrize("name", CALLS)
def test_signatures_that_come_later(name):
    table, runs, _ = table_of(CALLS[name])
    known = {}
    for n, (signature, run) in enumerate(runs.items()):
        known[signature] = run
        table.update(known)
        for k, (args, kwargs) in enumerate(CALLS[name]):
            if k <= n:
                assert table(*args, **kwargs) == k
    assert table.calls(next(iter(runs))) == len(runs)


def test_static_arguments_tell_apart():
    calls = [((ones(2), k), {}) for k in ("a", "b")]
    arguments = CallSignature(lambda x, k: x, {"static_argnums": 1})
    table = SignatureTable(arguments)
    table.update({arguments.signature(*call): lambda *a, n=n: n for n, call in enumerate(calls)})
    assert [table(*args) for args, _ in calls] == [0, 1]
    with pytest.raises(UnseenSignature):
        table(ones(2), "c")


def test_one_shape_is_enough_for_batches():
    arguments = CallSignature(fn, {})
    probes = choose_probes([arguments.signature(*call) for call in CALLS["batch"]])
    assert probes is not None and len(probes) == 1


@pytest.mark.parametrize(
    "call",
    [
        ((ones(9, 4),), {}),
        ((), {}),
        ((params(),), {}),
        ((params(), ones(9, 4)), {}),
        ((params(), 1.0), {}),
        ((params(), [1.0, 2.0]), {}),
        ((params(), ones(9, 4), ones(1)), {}),
    ],
)
def test_an_unseen_call_is_told(call):
    table, runs, _ = table_of(CALLS["batch"])
    table.update(runs)
    with pytest.raises(UnseenSignature):
        table(*call[0], **call[1])


def test_structures_that_differ_are_looked_up_whole():
    calls = [((ones(2),), {}), (([ones(2)],), {}), ((1.0,), {}), ((), {"x": ones(2)})]
    table, runs, _ = table_of(calls)
    table.update(runs)
    assert [table(*args, **kwargs) for args, kwargs in calls] == [0, 1, 2, 3]


def test_what_is_forgotten_is_unseen():
    table, runs, _ = table_of(CALLS["batch"])
    table.update(runs)
    table.update(dict(list(runs.items())[1:]))
    with pytest.raises(UnseenSignature):
        table(*CALLS["batch"][0][0])
    table.update({})
    with pytest.raises(UnseenSignature):
        table(*CALLS["batch"][1][0])


@pytest.mark.parametrize("programs", [(JCUTS,), (JCUTS, XLA)])
def test_calls_of_several_signatures_take_the_fast_path(monkeypatch, programs):
    """A signature that a carrier has met before it was decided would go through Python at each call."""
    decided = iter(programs * 8)
    monkeypatch.setattr(
        variant_selection.VariantSelector, "select", lambda *_, **__: Decision(next(decided), "as the test says")
    )
    f = Optimized(lambda p, x: x * p["w"], jcuts.optimize(fn, tune="off").settings, {}, MemoryStore())
    calls = [({"w": jnp.float32(2), "b": jnp.ones(3)}, jnp.ones(n)) for n in (1, 2, 3, 4)]
    for _ in range(2):
        for call in calls:
            np.testing.assert_array_equal(f(*call), 2 * np.ones(call[1].shape))
    slow = []
    run = pjit._run_python_pjit
    monkeypatch.setattr(pjit, "_run_python_pjit", lambda *a: slow.append(a) or run(*a))
    for call in calls:
        f(*call)
    assert slow == []


class Model:
    def __init__(self):
        self.w = 2.0

    @jcuts.optimize(tune="off", static_argnums=0)
    def scaled(self, x):
        """Doubles."""
        return x * self.w


def test_a_method_looks_like_its_function():
    method = Model().scaled
    assert (method.__name__, method.__doc__, method.__module__) == ("scaled", "Doubles.", __name__)
    assert method.__wrapped__ is Model.scaled.__wrapped__
    assert jax.eval_shape(lambda x: x, method.eval_shape(ones(2))).shape == (2,)
