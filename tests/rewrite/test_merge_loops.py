"""Two independent loops as one: which are, that no value changes, and what the time model says of them on an H200."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.pipeline import loop_bodies
from jcuts.rewrite.loops.horizontal import merge_loops
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.xla import devices as xla_devices

RNG = np.random.default_rng(61)


def normal(*shape):
    return (0.3 * RNG.standard_normal(shape)).astype(np.float32)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def scans(closed):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "scan"]


def always(apart, merged):
    assert [len(scans(one)) for one in apart] == [1, 1]
    assert len(scans(merged)) == 1
    return True


def cell(w, gates, h, reverse):
    return jax.lax.scan(lambda h, row: (jnp.tanh(row + h @ w),) * 2, h, gates, reverse=reverse)


def bidirectional(w, v, x, h, directions=(False, True)):
    (last, ahead), (first, back) = cell(w, x, h, directions[0]), cell(v, jnp.sin(x), h, directions[1])
    return jnp.concatenate([ahead, back], -1), last, first


def arguments(steps=6, batch=2, width=5):
    return normal(width, width), normal(width, width), normal(steps, batch, width), normal(batch, width)


def same_values(new, closed, args):
    jaxapi.check(new)
    for mine, want in zip(jaxapi.eval_closed(new, *args), jaxapi.eval_closed(closed, *args), strict=True):
        np.testing.assert_array_equal(mine, want)


@pytest.mark.parametrize("directions", [(False, True), (True, False), (False, False), (True, True)])
def test_both_directions_are_one_loop(directions):
    args = arguments()
    closed = flat(lambda *a: bidirectional(*a, directions), *args)
    new, count = merge_loops(closed, always)
    assert count == 1
    (loop,) = scans(new)
    assert loop.params["reverse"] == directions[0]
    reversals = sum(jaxapi.primitive_name(e) == "rev" for e in new.jaxpr.eqns)
    assert reversals == 2 * (directions[0] != directions[1])  # of what one loop scans over, and of its results
    same_values(new, closed, args)


def test_gradients_of_both_directions_are_one_loop():
    args = arguments()
    closed = flat(jax.grad(lambda *a: sum(jnp.sum(r**2) for r in bidirectional(*a)), (0, 1, 2, 3)), *args)
    new, count = merge_loops(closed, always)
    assert count == 2
    assert len(scans(new)) == 2
    for mine, want in zip(jaxapi.eval_closed(new, *args), jaxapi.eval_closed(closed, *args), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-5, atol=1e-6)


def test_what_reads_the_first_loop_follows_the_merged_one():
    def function(w, v, x, h):
        last, ahead = cell(w, x, h, False)
        between = jnp.exp(ahead) @ v  # between the loops, of the first one
        shift = jnp.cos(x)  # between the loops, for the second one
        return between, last, cell(v, shift, h, False)[1]

    args = arguments()
    closed = flat(function, *args)
    new, count = merge_loops(closed, always)
    assert count == 1
    same_values(new, closed, args)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, v, x, h: cell(v, cell(w, x, h, False)[1], h, False),  # layers
        lambda w, v, x, h: cell(v, x, jnp.sin(cell(w, x, h, False)[0]), True),  # by what is carried
        lambda w, v, x, h: (cell(w, x, h, False), cell(v, x[1:], h, True)),  # other steps
        lambda w, v, x, h: (cell(w, x, h, False), cell(v, x[:, :1], h[:1], True)),  # other rows
    ],
)
def test_others_stay(function):
    closed = flat(function, *arguments())
    new, count = merge_loops(closed, always)
    assert count == 0
    assert new is closed


def test_only_loops_that_gain_are_merged():
    closed = flat(bidirectional, *arguments())
    assert merge_loops(closed, lambda apart, merged: False) == (closed, 0)


def test_effects_between_loops_keep_their_order():
    def function(w, v, x, h):
        one = cell(w, x, h, False)[0]
        jax.debug.print("first {}", one[0, 0], ordered=True)
        jax.debug.print("second {}", x[0, 0, 0], ordered=True)
        return one, cell(v, x, h, True)[0]

    closed = flat(function, *arguments())
    assert merge_loops(closed, always) == (closed, 0)


def test_loops_that_do_not_gain_are_asked_once():
    asked = []

    def gains(apart, merged):
        asked.append(merged)
        return len(asked) == 3  # the first with the fourth

    def function(w, v, x, h):
        return [cell(m, x, h, False)[0] for m in (w, v, w + v, w - v)]

    args = arguments()
    closed = flat(function, *args)
    new, count = merge_loops(closed, gains)
    assert count == 1
    assert len(asked) == 4  # and the second with the third
    same_values(new, closed, args)


def gru(w, gates, h, reverse):
    def step(h, row):
        mine, own = jnp.split(row, 3, -1), jnp.split(h @ w, 3, -1)
        r, z = jax.nn.sigmoid(mine[0] + own[0]), jax.nn.sigmoid(mine[1] + own[1])
        h = (1 - z) * jnp.tanh(mine[2] + r * own[2]) + z * h
        return h, h

    return jax.lax.scan(step, h, gates, reverse=reverse)[1]


@pytest.mark.parametrize(("width", "merges"), [(800, True), (1600, False)])
def test_the_time_model_merges_loops_whose_weights_stay_in_registers_together(monkeypatch, width, merges):
    monkeypatch.setattr(xla_devices, "machine", lambda: GpuMachine.named("H200"))
    shapes = [(width, 3 * width)] * 2 + [(50, 1, 3 * width), (1, width)]
    args = [jax.ShapeDtypeStruct(s, np.float32) for s in shapes]
    closed = flat(lambda w, v, x, h: (gru(w, x, h, False), gru(v, x, h, True)), *args)
    assert merge_loops(closed, loop_bodies.gain_as_one)[1] == merges
