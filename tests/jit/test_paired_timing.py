"""Timing of whole programs in turns: training steps whose state is donated, as a loop runs them."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.jit import paired_timing


def step(state, batch):
    w, count = state
    return (w - 0.1 * batch @ w, count + 1), jnp.sum(w)


def arguments():
    return ((jnp.eye(8), jnp.zeros((), jnp.int32)), jnp.ones((8, 8))), {}


@pytest.fixture
def made():
    """Fresh arguments, and how often they were asked for."""
    asked = []

    def fresh():
        asked.append(1)
        return jax.block_until_ready(arguments())

    fresh.asked = asked
    return fresh


def recorded(call, seen):
    @functools.wraps(call)
    def go(*args, **kwargs):
        found = call(*args, **kwargs)
        seen.append(found)
        return found

    return go


def sample(calls, fresh, inner=3, rounds=2, waited=False):
    return paired_timing.sample(calls, fresh, inner, True, 0.0, rounds, time.perf_counter, waited)


def test_a_donated_state_goes_from_step_to_step(made):
    seen = []
    call = recorded(jax.jit(step, donate_argnums=0), seen)
    times = sample({"a": call}, made)
    assert len(times["a"].seconds) == 2
    counts = [int(np.asarray(count)) for (_, count), _ in seen[-2:] if not count.is_deleted()]
    assert counts[-1] == 6  # two samples of three steps, one after the other
    assert len(made.asked) == 2


def test_programs_take_turns_on_one_state(made):
    seen = []
    calls = {n: recorded(jax.jit(step, donate_argnums=0), seen) for n in "ab"}
    times = sample(calls, made)
    assert {n: len(t.seconds) for n, t in times.items()} == {"a": 2, "b": 2}
    assert int(np.asarray(seen[-1][0][1])) == 12


def test_where_nothing_takes_a_donated_argument_over_each_call_has_copies(made):
    seen = []
    call = deleting(recorded(jax.jit(lambda state, batch: jnp.sum(state[0] @ batch)), seen))
    before = [paired_timing.kind_of(x) for x in jax.tree.leaves(arguments())]
    first = arguments()
    assert paired_timing.InputOutputAlias.of(before, first, call(*first[0])) is None
    times = sample({"a": call}, made)
    assert len(times["a"].seconds) == 2
    assert len(made.asked) == 2 + 2 and len(seen) == 1 + 1 + 2  # one execution per sample


def deleting(call):
    def go(state, batch):
        found = jax.block_until_ready(call(state, batch))
        for leaf in jax.tree.leaves(state):
            if not leaf.is_deleted():
                leaf.delete()
        return found

    return go


def test_types_are_paired_in_order_and_kept_arguments_stay():
    x, y, kept = jnp.ones(3), jnp.ones(3), jnp.ones(4)
    before = [paired_timing.kind_of(v) for v in (x, y, kept)]
    x.delete()
    y.delete()
    results = tuple(jnp.full(n, v, jnp.float32) for n, v in ((4, 9.0), (3, 1.0), (3, 2.0)))
    pairs = paired_timing.InputOutputAlias.of(before, ((x, y, kept), {}), results)
    assert pairs is not None and pairs.places == ((0, 1), (1, 2))
    (a, b, c), _ = pairs.arguments([x, y, kept], results)
    assert float(a[0]) == 1.0 and float(b[0]) == 2.0 and c is kept


def test_least_executions_of_a_sample():
    assert paired_timing.executions(1.0, paired_timing.SampleSize(0.01)) == 1
    assert paired_timing.executions(1.0, paired_timing.SampleSize(0.01, 4)) == 4
    assert paired_timing.executions(0.001, paired_timing.SampleSize(0.01, 4)) == 10
