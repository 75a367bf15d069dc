"""``tune="online"``: calls run XLA's program until a decision is taken between them, and never see what goes wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.api import Optimized
from jcuts.base import knobs
from jcuts.base.errors import UsageError
from jcuts.jit import end_to_end_benchmark, variant_selection
from jcuts.jit.decision import JCUTS, XLA, Decision
from jcuts.jit.online import background_tuner
from jcuts.primitive.sharding import Placement
from jcuts.tune import device_slices, session, time_budget
from jcuts.tune.parent import machine_lock, worker_session

X = np.linspace(-1.0, 1.0, 512 * 512, dtype=np.float32).reshape(512, 512)
WON = Decision(JCUTS, "2.00 times as fast", {XLA: 2.0, JCUTS: 1.0}, measured=True, spent={"whole programs": 1.0})


def softmax_rows(x, k=1.0):
    return jax.nn.softmax(x * k, axis=1)


def online(fn=softmax_rows, store=None, **options):
    settings = jcuts.optimize(fn, tune="online").settings
    return Optimized(fn, settings, options, store or end_to_end_benchmark.MemoryStore())


@pytest.fixture
def database(cache_dir):
    """A tuning database of a test's own."""
    session.set_store(None)
    yield
    session.set_store(None)


@pytest.fixture
def deciding(monkeypatch):
    """Selection that waits until it may go on, and decides as told; notes who asked."""

    class Fake:
        def __init__(self):
            self.may, self.decision, self.threads, self.error = threading.Event(), WON, [], None

        def select(self, selector, call, *, measure, force=False, tune_seconds=None):
            self.threads.append(threading.current_thread().name)
            self.slices, self.seconds = device_slices.current(), tune_seconds
            self.workers = worker_session.workers_of()
            self.mine = machine_lock.is_mine()
            assert self.may.wait(60)
            if self.error is not None:
                raise self.error
            return self.decision

    fake = Fake()
    monkeypatch.setattr(variant_selection.VariantSelector, "select", lambda s, *a, **k: fake.select(s, *a, **k))
    yield fake
    fake.may.set()


def decision_of(f, *args):
    found = f.decision(*args)
    assert found is not None
    return found


def state_of(f):
    return [row["online"] for row in f.stats()["signatures"]]


def test_calls_run_xla_until_the_decision_and_its_program_after(deciding, caplog):
    f, expected = online(), jax.jit(softmax_rows)(X)
    with caplog.at_level(logging.INFO, logger="jcuts"):
        first = f(X)
        assert np.array_equal(first, expected)
        assert decision_of(f, X).chosen == XLA
        assert state_of(f)[0]["state"] == "tuning"
        assert "tuning goes on between calls" in f.explain(X).guard["reason"]
        deciding.may.set()
        assert f.finish_tuning(60)
        after = f(X)
    assert decision_of(f, X).chosen == JCUTS
    assert (after.dtype, after.shape, type(after)) == (first.dtype, first.shape, type(first))
    np.testing.assert_allclose(after, expected, rtol=1e-5)
    assert state_of(f)[0]["state"] == "decided"
    assert 0.0 <= state_of(f)[0]["share"] <= 1.0
    assert state_of(f)[0]["share_limit"] == 0.05
    told = [r.getMessage() for r in caplog.records if "from now on" in r.getMessage()]
    assert len(told) == 1
    assert "2.00 times as fast" in told[0]
    assert deciding.threads == ["jcuts-online"]


def test_selection_gets_slices_fewer_workers_and_more_time(deciding):
    f = online()
    with knobs.scope(tune_seconds=7.0, compile_workers=1000):
        deciding.may.set()
        f(X)
        assert f.finish_tuning(60)
    assert deciding.slices.sliced
    assert deciding.workers == max(1, worker_session.fingerprint.usable_cores() - 1)
    assert deciding.seconds == 70.0
    assert deciding.mine  # each slice has the machine's lock, the session asks for none


def test_xla_may_win(deciding):
    deciding.decision = Decision(XLA, "nothing was faster", measured=True)
    deciding.may.set()
    f = online()
    f(X)
    assert f.finish_tuning(60)
    assert decision_of(f, X).chosen == XLA
    assert state_of(f)[0]["state"] == "decided"


def test_every_signature_is_tuned_on_its_own(deciding):
    f = online()
    f(X)
    f(X[:256])
    assert [s["state"] for s in state_of(f)] == ["tuning", "tuning"]
    deciding.may.set()
    assert f.finish_tuning(60)
    assert [s["state"] for s in state_of(f)] == ["decided", "decided"]
    np.testing.assert_allclose(f(X[:256]), jax.jit(softmax_rows)(X[:256]), rtol=1e-5)


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError()])
def test_errors_in_the_background_never_reach_the_user(deciding, error, caplog):
    deciding.error = error
    deciding.may.set()
    f, expected = online(), jax.jit(softmax_rows)(X)
    f(X)
    assert f.finish_tuning(60)
    assert np.array_equal(f(X), expected)
    assert decision_of(f, X).chosen == XLA
    assert state_of(f)[0]["state"] == "given up"
    assert type(error).__name__ in state_of(f)[0]["why"]
    assert "tuning between calls failed" in caplog.text


def test_an_uncompared_program_never_runs(deciding):
    deciding.decision = Decision(JCUTS, "the function has effects")
    deciding.may.set()
    f = online()
    f(X)
    assert f.finish_tuning(60)
    assert decision_of(f, X).chosen == XLA
    assert "not compared" in state_of(f)[0]["why"]


def test_contexts_of_the_calling_thread_are_not_tuned(deciding):
    deciding.may.set()
    f = online()
    with jax.default_matmul_precision("float32"):
        f(X)
        assert f.finish_tuning(60)
    assert deciding.threads == []
    assert "context" in state_of(f)[0]["why"]


def test_calls_that_several_processes_make_together_stay_with_xla(deciding, monkeypatch):
    monkeypatch.setattr(Placement, "spans_processes", True)
    f = online()
    assert np.array_equal(f(X), jax.jit(softmax_rows)(X))
    assert state_of(f)[0]["state"] == "given up"
    assert "several processes" in decision_of(f, X).reason


def test_what_cannot_be_copied_stays_with_xla(deciding, monkeypatch, caplog):
    monkeypatch.setattr(end_to_end_benchmark, "copies_fit", lambda leaves: len(leaves) < 2)
    f = online(donate_argnums=0)
    f(jnp.array(X))
    assert decision_of(f, jnp.array(X)).chosen == XLA
    assert "do not fit into memory" in caplog.text
    assert deciding.threads == []


def test_arguments_that_calls_use_up_or_change_are_copied(monkeypatch):
    kept, may = [], threading.Event()

    def select(selector, call, **_):
        assert may.wait(60)
        kept.append([np.array(x) for x in call.args])
        return Decision(XLA, "seen", measured=True)

    monkeypatch.setattr(variant_selection.VariantSelector, "select", select)
    f = online(lambda x, y: x + y, donate_argnums=0)
    state, batch = jnp.array(X), X.copy()
    f(state, batch)
    batch[:] = 7.0
    may.set()
    assert f.finish_tuning(60)
    assert state.is_deleted()
    assert np.array_equal(kept[0][0], X)
    assert np.array_equal(kept[0][1], X)


def test_inside_a_trace_nothing_is_tuned(deciding):
    f = online()
    np.testing.assert_allclose(jax.jit(lambda x: f(x))(X), jax.jit(softmax_rows)(X), rtol=1e-5)
    assert f.stats()["signatures"] == []
    assert deciding.threads == []


def test_disabled(deciding, monkeypatch):
    deciding.decision = Decision(XLA, "JCUTS_DISABLE is set")
    deciding.may.set()
    monkeypatch.setenv("JCUTS_DISABLE", "1")
    f = online()
    assert np.array_equal(f(X), jax.jit(softmax_rows)(X))
    assert deciding.threads == [threading.current_thread().name]


def test_tune_stops_it_and_tunes_at_once(deciding):
    f = online()
    f(X)
    f(X[:256])
    deciding.decision = Decision(XLA, "nothing was faster", measured=True, spent={"whole programs": 1.0})
    stopped = []
    stopper = threading.Thread(target=lambda: stopped.append(f.tune(X)))
    stopper.start()
    deciding.may.set()
    stopper.join(60)
    assert len(stopped) == 1
    assert decision_of(f, X).reason == "nothing was faster"
    assert "tuning" not in [s["state"] for s in state_of(f)]
    assert deciding.threads[-1] not in ("jcuts-online",)
    assert f.finish_tuning(0.0)


def test_clear_cache_ends_tuning(deciding):
    f = online()
    f(X)
    stopper = threading.Thread(target=f.clear_cache)
    stopper.start()
    deciding.may.set()
    stopper.join(60)
    assert f.stats()["signatures"] == []
    assert f.finish_tuning(60)
    assert f.decision(X) is None  # what it decided before it heard is no decision of the new programs


def test_only_mixed_mode():
    with pytest.raises(UsageError, match="online"):
        jcuts.optimize(softmax_rows, mode="fusion", tune="online")


@pytest.mark.parametrize(("found", "seconds"), [(None, 600), (12.0, 12.0)])
def test_time_for_tuning(monkeypatch, found, seconds):
    monkeypatch.delenv("JCUTS_TUNE_SECONDS", raising=False)
    settings = jcuts.optimize(softmax_rows, tune="online", tune_seconds=found).settings
    assert sys.modules["jcuts.jit.online.online_tuning"].budget_seconds(settings) == seconds
    assert time_budget.DEFAULT_SECONDS == 60


def test_tunes_between_calls_and_the_next_process_starts_with_it(database, caplog):
    """The whole of it, with processes that compile, check and measure: calls go on until a decision is taken."""
    store = end_to_end_benchmark.MemoryStore()
    expected = np.asarray(jax.jit(softmax_rows)(X))
    with knobs.scope(max_candidates=2, online_share=0.5):
        f = online(store=store)
        results = [f(X)]
        while not f.finish_tuning(0.01):
            results.append(f(X))
        results.append(f(X))
        assert state_of(f)[0]["state"] == "decided", state_of(f)
        assert decision_of(f, X).measured
        assert np.array_equal(results[0], expected)
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-8)
        assert background_tuner.shared().gate.slices > 0
        assert not background_tuner.shared().is_active
        later = online(store=store)
        later(X)
        assert decision_of(later, X).chosen == decision_of(f, X).chosen
        np.testing.assert_allclose(later(X), expected, rtol=1e-5, atol=1e-8)


KILLED = """
import sys, time
import numpy as np, jax, jcuts
x = np.ones((256, 512), np.float32)
f = jcuts.optimize(lambda x: jax.nn.softmax(x * 3.0, axis=1), tune="online")
f(x)
print(f.stats()["signatures"][0]["online"]["state"], flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    jax.block_until_ready(f(x))
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_a_process_that_ends_while_it_tunes_leaves_the_caches_intact(tmp_path, with_module_code, how):
    environment = {**os.environ, "JCUTS_CACHE_DIR": str(with_module_code(tmp_path))}
    command = [sys.executable, "-c", KILLED, "60" if how == "killed" else "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tuning\n"
        if how == "killed":
            process.send_signal(signal.SIGKILL)
        status = process.wait(300)
    assert status == (-signal.SIGKILL if how == "killed" else 0)
    if (tmp_path / "tuning.db").exists():
        with contextlib.closing(sqlite3.connect(tmp_path / "tuning.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert list(tmp_path.glob("tuning.db.aside-*")) == []


@pytest.mark.parametrize("asked", [None, 1e-2])
def test_the_interpreter_switches_more_often_while_anything_is_tuned(asked):
    found, before = sys.getswitchinterval(), 1 / 128
    sys.setswitchinterval(before)
    try:
        with background_tuner.short_turns():
            assert sys.getswitchinterval() == pytest.approx(background_tuner.SWITCH_INTERVAL, abs=3e-6)
            if asked is not None:
                sys.setswitchinterval(asked)
        assert sys.getswitchinterval() == pytest.approx(before if asked is None else asked, abs=3e-6)
        sys.setswitchinterval(1e-4)
        with background_tuner.short_turns():
            assert sys.getswitchinterval() == pytest.approx(1e-4, abs=3e-6)
    finally:
        sys.setswitchinterval(found)
