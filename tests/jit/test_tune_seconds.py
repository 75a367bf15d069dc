"""The tuning budget of a first call: who opens it, what a call says of it, and decisions taken before all was tuned."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.api import Optimized
from jcuts.base import knobs
from jcuts.base.errors import UsageError
from jcuts.base.settings import Settings
from jcuts.jit import decision_cache, end_to_end_benchmark, progress
from jcuts.jit.decision import Decision
from jcuts.pipeline import computation, kernel_selection, report_rows
from jcuts.report.function_report import FunctionReport
from jcuts.report.report_data import NO_TIME
from jcuts.rewrite.simplify import simplify
from jcuts.trace.inline import inline
from jcuts.tune import expected_gain, session, time_budget
from jcuts.tune.database import Store
from jcuts.tune.time_budget import TimeBudget
from tests.primitive.conftest import toy  # noqa: F401  (a fixture)

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def scaled(x, k=2.0):
    return x * k


@pytest.fixture
def short(toy, monkeypatch):  # noqa: F811
    """A pipeline that leaves so many kernels unmeasured, and notes the budget that is open; decisions without times."""
    plan, toy.unmeasured, toy.budgets, toy.raced = toy.optimize_jaxpr, 0, [], []

    def optimize_jaxpr(*args, may_measure, **kwargs):
        outcome = plan(*args, may_measure=may_measure, **kwargs)
        if may_measure:
            toy.budgets.append(time_budget.current().seconds)
        return dataclasses.replace(outcome, report=dataclasses.replace(outcome.report, unmeasured=toy.unmeasured))

    def decide(calls, fresh_args, **_):
        toy.raced.append(sorted(calls))
        return Decision(end_to_end_benchmark.XLA, "here", {"xla": 1.0}, measured=True)

    monkeypatch.setattr(sys.modules["jcuts.pipeline.passes"], "optimize_jaxpr", optimize_jaxpr)
    monkeypatch.setattr(end_to_end_benchmark, "benchmark_variants", decide)
    return toy


def optimized(store=None, **options):
    settings = jcuts.optimize(scaled, **options).settings
    return Optimized(scaled, settings, {}, store or end_to_end_benchmark.MemoryStore())


def test_a_first_call_has_the_option_s_time_else_the_variable_s(short):
    optimized(tune_seconds=5)(X)
    with knobs.scope(tune_seconds=7.0):
        optimized()(X)
    assert short.budgets == [5.0, 7.0]
    assert time_budget.current() is time_budget.UNLIMITED


def test_tune_measures_everything_unless_the_option_is_given(short):
    with knobs.scope(tune_seconds=7.0):
        optimized().tune(X)
        optimized(tune_seconds=5).tune(X)
    assert short.budgets == [math.inf, 5.0]


@pytest.mark.parametrize("mode", ["mixed", "fusion"])
def test_without_time_nothing_is_measured(short, mode):
    f = optimized(tune_seconds=0, mode=mode)
    np.testing.assert_array_equal(f(X), X * 2)
    f.tune(X)
    assert short.budgets == [] and short.raced == []
    if mode == "mixed":
        assert f.decision(X).reason == "tune_seconds=0: nothing was timed"


def test_a_decision_before_all_was_tuned_is_taken_again_by_the_next_process(short):
    store, short.unmeasured = end_to_end_benchmark.MemoryStore(), 3
    first = optimized(store, tune_seconds=5)
    first(X)
    assert first.decision(X).partial and not first.decision(X).is_final
    first(X)
    assert len(short.raced) == 1  # once per process and object
    (kept,) = store._kept.values()
    assert kept["partial"] is True and Decision.from_dict(kept).partial
    decision_cache.forget_decided_here()
    short.unmeasured = 0
    second = optimized(store, tune_seconds=5)
    second(X)
    assert short.raced[1] == short.raced[0]  # all programs: who lost may have other kernels
    assert second.decision(X).is_final and "partial" not in second.decision(X).to_dict()
    decision_cache.forget_decided_here()
    optimized(store, tune_seconds=5)(X)
    assert len(short.raced) == 2


def test_the_report_has_the_time_of_tuning_and_of_the_race_and_what_is_missing(short, caplog):
    short.unmeasured = 3
    f = optimized(tune_seconds=5)
    with caplog.at_level(logging.WARNING, logger="jcuts"):
        f(X)
    (line,) = [r.getMessage() for r in caplog.records if "not measured" in r.getMessage()]
    assert line.startswith("3 kernels of scaled were not measured within 5 s") and "tune_seconds" in line
    report = f.explain(X)
    assert report.seconds.keys() >= {"tuning", "whole programs"}
    assert report.unmeasured == 3 and "3 kernels were not measured" in str(report) and "tune_seconds" in str(report)
    assert "not measured" not in str(FunctionReport("f", "mixed", "cpu"))


def test_the_progress_line_says_how_to_allow_more_time(caplog):
    times = iter([0.0, 11.0, 11.0])
    watch = progress.Watch("predict", terminal=False, clock=lambda: next(times))
    with caplog.at_level(logging.WARNING, logger="jcuts"), time_budget.spending(TimeBudget(60.0)):
        watch.update("compile", 1, 12, "dot")
    (line,) = [r.getMessage() for r in caplog.records]
    assert "for 60 s at most (tune_seconds, JCUTS_TUNE_SECONDS)" in line


def test_impossible_options_are_refused():
    with pytest.raises(UsageError, match="tune_seconds"):
        jcuts.optimize(scaled, tune_seconds=-1)


# ------------------------------------------------------------ regions, with real problems


def level(mode):
    x = np.zeros((96, 96), np.float32)
    closed = jax.make_jaxpr(lambda x, w: jax.nn.softmax(jax.nn.relu(x @ w + 1)) + jnp.tanh(x @ w))(x, x)
    return computation.group(simplify(inline(closed)), Settings(mode=mode), computation.Fuel())


@pytest.fixture
def store():
    store = Store(None, device="test", versions="1")
    session.set_store(store)
    yield store
    session.set_store(None)


@pytest.mark.parametrize("mode", ["mixed", "fusion"])
def test_what_the_time_does_not_reach_stays_with_xla_and_is_not_stored(store, mode):
    top, settings = level(mode), Settings(mode=mode)
    assert top.subsets
    clock = iter([0.0])
    with time_budget.spending(TimeBudget(5.0, lambda: next(clock, 6.0))):
        assert kernel_selection.select(top, settings, may_measure=True).origin == "greedy"
    assert all(s.chosen is None and s.choice.is_cut for s in top.subsets)
    assert {report_rows.why_lost(s)[1] for s in top.subsets} == {NO_TIME}
    assert report_rows.unmeasured(top) >= len({s.identity for s in top.subsets})
    assert store.ls() == []
    again = level(mode)  # what `explain` plans
    kernel_selection.select(again, settings, may_measure=False)
    assert report_rows.unmeasured(again) == report_rows.unmeasured(top)


def test_gains_count_equal_regions_and_prefer_what_moves_more(store):
    def body(x, y):
        for _ in range(3):
            x = jnp.tanh(x @ y)
        return x

    def problems(size):
        x = np.zeros((size, size), np.float32)
        closed = jax.make_jaxpr(body)(x, x)
        top = computation.group(simplify(inline(closed)), Settings(), computation.Fuel())
        computation.add_candidates(top.subsets)
        return session.collect_problems(top.subsets, Settings())

    small, large = problems(96), problems(384)
    (one,), (other,) = small.gains.values(), large.gains.values()
    assert 0 < one < other and len(small.regions) == 3
    assert one == pytest.approx(3 * expected_gain.seconds(small.regions[0]))
