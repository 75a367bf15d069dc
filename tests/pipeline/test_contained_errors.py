"""Errors of jcuts' own planning: what they are about is left to XLA, with a warning; raised where that is asked for."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.base import warn_once
from jcuts.base.errors import UsageError
from jcuts.base.settings import Settings
from jcuts.jit.end_to_end_benchmark import MemoryStore
from jcuts.jit.optimized import Optimized
from jcuts.pipeline import computation
from jcuts.pipeline import passes as pipeline_passes
from jcuts.primitive import lowering

X = np.linspace(-2, 2, 3 * 1031, dtype=np.float32).reshape(3, 1031)


def function(x):
    return jnp.tanh(x) * jnp.exp(-x * x) + 1.0


@pytest.fixture(autouse=True)
def fresh(cache_dir, monkeypatch):
    monkeypatch.setattr(warn_once, "_told", set())
    monkeypatch.setattr(lowering, "_told", set())
    monkeypatch.setattr(computation, "_rankings", {})
    pipeline_passes.forget()
    yield
    pipeline_passes.forget()


def broken(*_, **__):
    raise ZeroDivisionError("float division by zero")


PLACES = {
    "schedules of a subset": (computation.cpu_candidates, "candidates"),
    "everything": (pipeline_passes, "optimize_jaxpr"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tune", ["auto", "off"])
def test_what_fails_is_left_to_xla_with_one_warning(place, tune, monkeypatch, caplog):
    monkeypatch.setattr(*PLACES[place], broken)
    monkeypatch.setenv("JCUTS_RAISE_ERRORS", "0")
    ours = jcuts.optimize(function, tune=tune)
    with caplog.at_level(logging.WARNING, logger="jcuts"):
        results = [ours(X), ours(X)]
    for got in results:
        np.testing.assert_array_equal(got, jax.jit(function)(X))
    # The tuner's own logger may say that another process of the machine is measuring.
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "jcuts"]
    assert "left to XLA" in warning and "ZeroDivisionError: float division by zero" in warning
    assert "JCUTS_RAISE_ERRORS" in warning


@pytest.mark.parametrize("place", PLACES)
def test_errors_are_raised_where_that_is_asked_for(place, monkeypatch):
    monkeypatch.setattr(*PLACES[place], broken)
    with pytest.raises(ZeroDivisionError):
        jcuts.optimize(function)(X[:, 1:])  # of no other test: subsets keep their schedules


def test_errors_meant_for_the_user_are_always_raised(monkeypatch):
    def refused(*_, **__):
        raise UsageError("no such thing")

    monkeypatch.setattr(pipeline_passes, "optimize_jaxpr", refused)
    monkeypatch.setenv("JCUTS_RAISE_ERRORS", "0")
    with pytest.raises(UsageError, match="no such thing"):
        jcuts.optimize(function)(X)


def test_nothing_is_kept_of_a_program_whose_planning_failed(monkeypatch):
    monkeypatch.setenv("JCUTS_RAISE_ERRORS", "0")
    store = MemoryStore()
    kept = []
    monkeypatch.setattr(store, "put_guard", lambda key, decision, on_gpu=False: kept.append(key))
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_passes, "optimize_jaxpr", broken)
        Optimized(function, Settings(), {}, store)(X)
    assert not kept
    Optimized(function, Settings(), {}, store)(X)
    assert len(kept) == 1
