"""First calls of ``tune="auto"`` that end before their tuning: who waits, what runs meanwhile, what comes of errors."""

from __future__ import annotations

import logging
import math
import threading
import time

import jax
import numpy as np
import pytest

import jcuts
from jcuts.api import Optimized
from jcuts.base import knobs
from jcuts.base.errors import UnsupportedError
from jcuts.jit import end_to_end_benchmark, variant_selection
from jcuts.jit.decision import JCUTS, XLA, Decision
from jcuts.jit.online import background_tuner, first_call
from jcuts.tune import device_slices, session

X = np.linspace(-1.0, 1.0, 64 * 64, dtype=np.float32).reshape(64, 64)
WON = Decision(JCUTS, "2.00 times as fast", {XLA: 2.0, JCUTS: 1.0}, measured=True, spent={"whole programs": 1.0})
AT_ONCE = 1e-3
LONG = 60.0


def softmax_rows(x, k=1.0):
    return jax.nn.softmax(x * k, axis=1)


def optimized(fn=softmax_rows, jit_options=None, **options):
    settings = jcuts.optimize(fn, **options).settings
    return Optimized(fn, settings, jit_options or {}, end_to_end_benchmark.MemoryStore())


@pytest.fixture
def deciding(monkeypatch, cache_dir):
    """Selection that waits until it may go on, then decides as told or fails; notes the thread and its slices."""

    class Fake:
        def __init__(self):
            self.may, self.decision, self.error, self.threads = threading.Event(), WON, None, []
            self.slices, self.lent = None, []

        def select(self, selector, call, *, measure, force=False, tune_seconds=None):
            self.threads.append(threading.current_thread().name)
            self.slices = device_slices.current()
            if self.slices.sliced:
                with device_slices.measuring():  # a caller that waits hands the device over at once
                    self.lent.append(not self.slices.beside)
            assert self.may.wait(LONG)
            device_slices.current().check()
            if self.error is not None:
                raise self.error
            return self.decision

    fake = Fake()
    monkeypatch.setattr(variant_selection.VariantSelector, "select", lambda s, *a, **k: fake.select(s, *a, **k))
    monkeypatch.setattr(variant_selection.VariantSelector, "of_earlier_process", lambda s, call: (None, False))
    session.set_store(None)
    yield fake
    fake.may.set()
    background_tuner.shared().gate.stop(False)
    session.set_store(None)


def state_of(f, *args):
    return f.stats()["signatures"][0]["online"]


def test_how_long_a_first_call_waits():
    usual = jcuts.optimize(softmax_rows).settings
    with knobs.scope(tune_seconds=None):
        assert first_call.patience(usual) == first_call.PATIENCE
        assert math.isinf(first_call.patience(jcuts.optimize(softmax_rows, tune_seconds=9).settings))
    with knobs.scope(tune_seconds=60.0):
        assert math.isinf(first_call.patience(usual))
    with knobs.scope(tune_seconds=60.0, first_call_seconds=2.0):
        assert first_call.patience(usual) == 2.0


@pytest.mark.parametrize(
    "options",
    [{"mode": "fusion"}, {"tune": "cached"}, {"strict": True}, {"workspace_limit": 1}, {"require": "complete"}],
)
def test_options_with_which_calls_wait_for_the_end(options):
    assert first_call.applies(jcuts.optimize(softmax_rows).settings)
    assert not first_call.applies(jcuts.optimize(softmax_rows, **options).settings)


def test_a_decision_in_time_runs_at_once(deciding, caplog):
    deciding.may.set()
    with knobs.scope(first_call_seconds=LONG), caplog.at_level(logging.INFO, logger="jcuts"):
        f = optimized()
        np.testing.assert_allclose(f(X), jax.jit(softmax_rows)(X), rtol=1e-5)
    assert f.decision(X) == WON
    assert deciding.threads == ["jcuts-online"]
    assert deciding.lent == [True]
    assert state_of(f)["state"] == "decided"
    assert caplog.text == ""


def test_a_late_decision_is_taken_over_between_calls(deciding, caplog):
    with knobs.scope(first_call_seconds=AT_ONCE), caplog.at_level(logging.INFO, logger="jcuts"):
        f, expected = optimized(), jax.jit(softmax_rows)(X)
        assert np.array_equal(f(X), expected)
        decision = f.decision(X)
        assert (decision.chosen, decision.deferred) == (XLA, True)
        assert state_of(f)["state"] == "tuning"
        assert "tuning goes on" in f.explain(X).guard["reason"]
        assert "runs XLA's program since its tuning takes more than 0.001 s" in caplog.text
        assert np.array_equal(f(X), expected)
        deciding.may.set()
        assert f.finish_tuning(LONG)
        np.testing.assert_allclose(f(X), expected, rtol=1e-5)
    assert f.decision(X).chosen == JCUTS
    assert "runs jcuts from now on: 2.00 times as fast" in caplog.text
    assert deciding.slices.beside  # nobody waits any more


def test_where_another_function_is_tuned_nobody_waits(deciding):
    with knobs.scope(first_call_seconds=AT_ONCE):
        f, g = optimized(), optimized(lambda x: jax.nn.softmax(x))
        f(X)
        with knobs.scope(first_call_seconds=LONG):
            g(X)  # at once: the thread that tunes belongs to f
        assert g.decision(X).deferred
        deciding.may.set()
        assert f.finish_tuning(LONG)
        assert g.finish_tuning(LONG)
        assert (f.decision(X).chosen, g.decision(X).chosen) == (JCUTS, JCUTS)


def test_too_many_that_wait_are_tuned_by_a_later_call(deciding, monkeypatch):
    monkeypatch.setattr(first_call, "MOST_WAITING", 0)
    with knobs.scope(first_call_seconds=AT_ONCE):
        f = optimized()
        assert np.array_equal(f(X), jax.jit(softmax_rows)(X))
        assert f.decision(X).reason == first_call.BUSY
        assert deciding.threads == []


def test_errors_reach_a_call_that_waits_and_no_other(deciding, caplog):
    deciding.error = UnsupportedError("no such kernel")
    deciding.may.set()
    with knobs.scope(first_call_seconds=LONG):
        with pytest.raises(UnsupportedError, match="no such kernel"):
            optimized()(X)
        deciding.may.clear()
    with knobs.scope(first_call_seconds=AT_ONCE):
        f = optimized()
        f(X)
        deciding.may.set()
        assert f.finish_tuning(LONG)
        assert np.array_equal(f(X), jax.jit(softmax_rows)(X))
    assert state_of(f)["state"] == "given up"
    assert "no such kernel" in state_of(f)["why"]


def test_an_interrupted_call_ends_its_tuning(deciding, monkeypatch):
    def interrupted(seconds, ended):
        deciding.may.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(background_tuner.shared().gate, "lend", interrupted)
    with knobs.scope(first_call_seconds=LONG), pytest.raises(KeyboardInterrupt):
        optimized()(X)
    assert not background_tuner.shared().is_active


@pytest.mark.parametrize("how", ["context", "effects", "thread", "disabled"])
def test_what_only_the_calling_thread_can_decide(deciding, how, monkeypatch):
    deciding.may.set()
    fn = softmax_rows
    if how == "effects":

        def fn(x):
            jax.debug.callback(lambda _: None, x.sum())
            return jax.nn.softmax(x)

    if how == "thread":
        monkeypatch.setattr(background_tuner.BackgroundTuner, "is_here", lambda self: True)
    if how == "disabled":
        monkeypatch.setenv("JCUTS_DISABLE", "1")
    with knobs.scope(first_call_seconds=AT_ONCE), jax.default_matmul_precision("float32" if how == "context" else None):
        optimized(fn)(X)
    assert deciding.threads == [threading.current_thread().name]


def test_prepare_save_and_pin_wait_for_the_end(deciding, monkeypatch):
    with knobs.scope(first_call_seconds=AT_ONCE):
        f, g = optimized(), optimized()
        deciding.may.set()
        f.prepare(X)
        assert deciding.threads == [threading.current_thread().name]
        deciding.may.clear()
        g(X)
        waited = []
        waiter = threading.Thread(target=lambda: waited.append(g._settled(g._arguments.signature((X,), {}))[1]))
        waiter.start()
        time.sleep(AT_ONCE)
        assert waited == []
        deciding.may.set()
        waiter.join(LONG)
    assert waited[0].chosen == JCUTS


def test_tune_begins_anew_what_goes_on_beside_calls(deciding):
    with knobs.scope(first_call_seconds=AT_ONCE):
        f = optimized()
        f(X)
        f(X[:32])
        deciding.may.set()
        f.tune(X)
        assert f.decision(X) == WON
        assert f.decision(X[:32]) is None or not f.decision(X[:32]).deferred


def test_a_measurement_under_way_is_waited_for():
    gate = background_tuner.DeviceGate(background_tuner.ShareAccount(lambda: 0.1))
    gate.account.begin()
    taken, given = threading.Event(), []

    def measure():
        assert gate.take(LONG) is not None
        taken.set()
        time.sleep(0.05)
        given.append(True)
        gate.give()

    measuring = threading.Thread(target=measure)
    measuring.start()
    ended = threading.Event()
    waiter = threading.Thread(target=lambda: (taken.wait(LONG), ended.set()))
    waiter.start()
    assert gate.lend(LONG, ended)
    assert given == [True]
    assert not gate.is_lent
    measuring.join()
    waiter.join()
