"""``tune="serve"``: no call waits for a trace, a key, planning or compiling that is not ``jax.jit``'s own."""

from __future__ import annotations

import logging
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.api import Optimized
from jcuts.base import knobs
from jcuts.base.errors import UsageError
from jcuts.jit import variant_selection
from jcuts.jit.decision import JCUTS, XLA, Decision, MemoryStore
from jcuts.jit.online import background_tuner
from jcuts.jit.serving import background_compiler
from jcuts.jit.serving.batch_buckets import BatchBuckets
from jcuts.jit.serving.bucketed import BucketedOptimized
from jcuts.jit.variant_compiler import VariantCompiler
from jcuts.tune.device_gate import LEAST, MOST

X = np.linspace(-1.0, 1.0, 64 * 64, dtype=np.float32).reshape(64, 64)
WON = Decision(JCUTS, "2.00 times as fast", {XLA: 2.0, JCUTS: 1.0}, measured=True, spent={"whole programs": 1.0})


def softmax_rows(x):
    return jax.nn.softmax(x, axis=1)


def serving(fn=softmax_rows, store=None, tune_seconds=None, **options):
    settings = jcuts.optimize(fn, tune="serve", tune_seconds=tune_seconds).settings
    return Optimized(fn, settings, options, store or MemoryStore())


def states(f):
    return [row["online"]["state"] for row in f.stats()["signatures"]]


class Background:
    """Replaces what the background thread does; it waits until it may."""

    def __init__(self):
        self.may, self.begun = threading.Event(), threading.Event()
        self.order, self.stored = [], (None, False)

    def earlier(self, selector, call):
        assert threading.current_thread().name == "jcuts-online"
        self.begun.set()
        assert self.may.wait(60)
        return self.stored

    def select(self, selector, call, **_):
        self.order.append(call.args[0].shape)
        return WON


@pytest.fixture
def background(monkeypatch):
    fake = Background()
    selector = variant_selection.VariantSelector
    monkeypatch.setattr(selector, "of_earlier_process", lambda s, call: fake.earlier(s, call))
    monkeypatch.setattr(selector, "select", lambda s, call, **k: fake.select(s, call, **k))
    yield fake
    fake.may.set()
    deadline = time.monotonic() + 60
    while background_tuner.shared().is_active and time.monotonic() < deadline:
        time.sleep(0.001)


def test_a_new_signature_runs_xla_and_switches_when_it_is_decided(background, caplog):
    f = serving()
    with caplog.at_level(logging.INFO, logger="jcuts"):
        assert np.array_equal(f(X), jax.jit(softmax_rows)(X))
    assert "new signature (..., float32[64,64]) runs XLA's program" in caplog.text
    assert states(f) == ["tuning"]
    assert f.stats()["signatures"][0]["fallback"]
    background.may.set()
    assert f.finish_tuning(60)
    assert f.decision(X).chosen == JCUTS
    assert states(f) == ["decided"]
    np.testing.assert_allclose(f(X), jax.jit(softmax_rows)(X), rtol=1e-5)


def test_the_calling_thread_does_nothing_but_call_xla(background, monkeypatch):
    """Not even a key is made: the only program that is lowered before the background may begin is XLA's."""
    made = []
    program = VariantCompiler.program

    def noted(self, name, *rest, **more):
        made.append(name)
        return program(self, name, *rest, **more)

    monkeypatch.setattr(VariantCompiler, "program", noted)
    f = serving()
    for n in (1, 2, 3):
        f(X[:n])
    assert made == [XLA] * 3


@pytest.mark.parametrize("settled", [True, False])
def test_a_stored_program_is_compiled_behind_the_call(background, settled):
    background.stored = Decision(JCUTS, "decided by an earlier process", measured=True), settled
    f = serving(tune_seconds=None if settled else 0)
    f(X)
    assert f.decision(X).chosen == XLA
    background.may.set()
    assert f.finish_tuning(60)
    assert f.decision(X).chosen == JCUTS
    assert states(f) == ["stored"]
    assert background.order == []


def test_not_tuned_at_all(background):
    background.may.set()
    f = serving(tune_seconds=0)
    f(X)
    assert f.finish_tuning(60)
    assert states(f) == ["given up"]
    assert "tune_seconds is 0" in f.decision(X).reason
    assert background.order == []


def test_what_is_called_most_is_tuned_first(background):
    f = serving()
    f(X[:1])
    assert background.begun.wait(60)  # is under way, while the others come
    for n, calls in ((2, 1), (3, 5), (4, 3)):
        for _ in range(calls):
            f(X[:n])
    background.may.set()
    assert f.finish_tuning(60)
    assert background.order == [(1, 64), (3, 64), (4, 64), (2, 64)]


def test_share_of_its_own(background):
    f = serving()
    f(X)
    assert background.begun.wait(60)
    assert background_tuner.shared().gate.longest == LEAST < MOST
    with knobs.scope(serve_share=0.25):
        assert f.stats()["signatures"][0]["online"]["share_limit"] == 0.25
        assert background_tuner.shared().share() == 0.25
    with knobs.scope(serve_share=0.0):
        assert background_tuner.shared().share() == 0.0
    background.may.set()
    assert f.finish_tuning(60)


def test_only_mixed_mode():
    with pytest.raises(UsageError, match="serve"):
        jcuts.optimize(softmax_rows, mode="fusion", tune="serve")


def test_threads_with_new_signatures_do_not_wait_for_each_other(background):
    f = serving()
    with f._lock:  # another thread decides
        done = []
        caller = threading.Thread(target=lambda: done.append(f(X)))
        caller.start()
        caller.join(60)
    assert np.array_equal(done[0], jax.jit(softmax_rows)(X))
    assert f.stats()["signatures"] == []


def test_an_unseen_batch_runs_at_a_compiled_size(background, monkeypatch):
    may, prepare = threading.Event(), Optimized.prepare

    def slowly(self, *args, **kwargs):
        assert threading.current_thread().name == "jcuts-compile"
        assert may.wait(60)
        prepare(self, *args, **kwargs)

    monkeypatch.setattr(Optimized, "prepare", slowly)
    f = BucketedOptimized(serving(), BatchBuckets.of((4, 16, 64)))
    expected = jax.jit(softmax_rows)
    np.testing.assert_allclose(f(X[:16]), expected(X[:16]), rtol=1e-6)  # the first of all waits for XLA
    for n in (3, 4, 30):
        np.testing.assert_allclose(f(X[:n]), expected(X[:n]), rtol=1e-6)
    told = f.bucket_stats()
    assert (told["ready"], told["neighbours"], told["calls"]) == ([16], 3, {16: 5})
    may.set()
    background.may.set()
    assert f.finish_tuning(60)
    assert f.bucket_stats()["ready"] == [4, 16, 64]
    f(X[:3])
    assert f.bucket_stats()["neighbours"] == 3


def test_a_size_that_does_not_compile_tells_its_caller(background, monkeypatch, caplog):
    def fails(self, *args, **kwargs):
        raise RuntimeError("no room")

    f = BucketedOptimized(serving(), BatchBuckets.of((4, 16)))
    f(X[:16])
    monkeypatch.setattr(Optimized, "prepare", fails)
    f(X[:3])
    assert background_compiler.shared().wait(60)
    assert "compiling beside calls failed" in caplog.text
    assert f(X[:3]).shape == (3, 64)  # compiled by the call itself
    assert f.bucket_stats()["ready"] == [4, 16]


def test_the_whole_of_it(cache_dir):
    """Compiled, checked and measured beside the calls; the next process starts with XLA's and takes it over."""
    store = MemoryStore()
    expected = np.asarray(jax.jit(softmax_rows)(X))
    with knobs.scope(max_candidates=2, serve_share=0.5):
        f = serving(store=store)
        results = [f(X)]
        while not f.finish_tuning(0.01):
            results.append(f(jnp.asarray(X)))
        assert states(f)[0] == "decided", f.stats()
        assert np.array_equal(results[0], expected)
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-8)
        later = serving(store=store)
        later(X)
        assert later.finish_tuning(60)
        assert later.decision(X).chosen == f.decision(X).chosen
        assert states(later) == ["stored"]
