"""Sparse updates of embedding tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.backward.sparse_updates import sparse_updates
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(11)
ROWS, WIDTH, BATCH = 40_000, 32, 1_000
TABLE = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)


def looked_up(low=0, high=ROWS):
    """Row numbers, a tenth of which are one row, and some are twice there."""
    rows = RNG.integers(low, high, BATCH, dtype=np.int32)
    rows[::10] = 7
    rows[1::10] = rows[2::10]
    return rows


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def names(closed):
    return [jaxapi.primitive_name(eqn) for eqn in closed.jaxpr.eqns]


def compared(function, *args, rewritten=1, rtol=3e-7):
    """Rewrites a function, and compares values with the dense update's."""
    made, count = sparse_updates(flat(function, *args))
    assert count == rewritten
    got = jax.jit(lambda *xs: jaxapi.eval_closed(made, *xs))(*args)
    for a, b in zip(got, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=rtol * np.abs(np.asarray(b)).max()
        )
    return made


def loss(table, rows, mode=None):
    return jnp.sum(jnp.sin(table.at[rows].get(mode=mode)) ** 2)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("sign", [1, -1])
def test_sgd_moves_the_rows_of_a_batch_alone(mode, sign):
    def step(table, rows):
        gradient = jax.grad(lambda t: jnp.nansum(loss(t, rows, mode)))(table)
        return table - 0.1 * gradient if sign > 0 else -0.1 * gradient + table

    rows = looked_up() if mode == "promise_in_bounds" else looked_up(-ROWS, 3 * ROWS)
    made = compared(step, TABLE, rows)
    assert "scatter-add" in names(made)
    assert not [eqn for eqn in made.jaxpr.eqns if jaxapi.primitive_name(eqn) == "broadcast_in_dim" and is_table(eqn)]


def is_table(eqn):
    return eqn.outvars[0].aval.shape == (ROWS, WIDTH)


def test_other_rows_keep_their_bits_and_duplicates_are_rounded_once():
    def step(table, rows, gradients):
        return table - 0.5 * jnp.zeros_like(table).at[rows].add(gradients)

    table = TABLE.copy()
    table[7] = 1.0
    table[8] = -0.0
    rows, gradients = looked_up(9), RNG.standard_normal((BATCH, WIDTH)).astype(np.float32)
    gradients[rows == 7] = 2.0**-24  # each alone is lost beside 1, together they are not
    made, count = sparse_updates(flat(step, table, rows, gradients))
    assert count == 1
    (got,) = jax.jit(lambda *xs: jaxapi.eval_closed(made, *xs))(table, rows, gradients)
    untouched = np.setdiff1d(np.arange(ROWS), rows)
    np.testing.assert_array_equal(np.asarray(got)[untouched].view(np.int32), table[untouched].view(np.int32))
    np.testing.assert_array_equal(np.asarray(got)[7], np.float32(1 - 0.5 * (rows == 7).sum() * 2.0**-24))


def test_schedule_of_the_step_count_is_finite_and_a_rate_from_outside_is_not():
    def scheduled(table, rows, count):
        progress = jnp.minimum(count, 1000) / 1000
        rate = 0.1 * (0.5 * (1 + jnp.cos(jnp.pi * progress))) * 0.9 ** jnp.clip(count // 30, 0, 50)
        return table - rate * jax.grad(loss)(table, rows)

    def given(table, rows, rate):
        return table - rate * jax.grad(loss)(table, rows)

    compared(scheduled, TABLE, looked_up(), np.int32(17))
    compared(given, TABLE, looked_up(), np.float32(0.1), rewritten=0)


def test_gradients_of_two_layers_meet_in_the_dense_one():
    def tied(table, rows, x):
        return jax.grad(lambda t: loss(t, rows) + jnp.sum(jnp.tanh(t @ x)))(table)

    compared(tied, TABLE, looked_up(), RNG.standard_normal((WIDTH, 3)).astype(np.float32), rtol=2e-6)


@pytest.mark.parametrize(
    ("wide", "narrow", "rewritten"),
    [("float32", "bfloat16", 1), ("bfloat16", "float32", 0), ("bfloat16", "bfloat16", 1)],
)
def test_sums_are_of_a_type_that_holds_them(wide, narrow, rewritten):
    def step(table, rows):
        gradient = jax.grad(lambda t: loss(t, rows).astype(jnp.float32))(table.astype(narrow))
        return table - jnp.asarray(0.1, wide) * gradient.astype(wide)

    table, rows = jnp.asarray(np.concatenate([TABLE, TABLE]), wide), looked_up()
    made, count = sparse_updates(flat(step, table, rows))
    assert count == rewritten
    with jax.enable_x64(True):
        exact = np.asarray(table, np.float64)
        gradient = jax.grad(lambda t: jnp.sum(jnp.sin(t[rows]) ** 2))(exact)
        exact = exact - np.float64(jnp.asarray(0.1, wide)) * np.asarray(gradient)
    (ours,) = jax.jit(lambda *xs: jaxapi.eval_closed(made, *xs))(table, rows)
    errors = [np.abs(np.asarray(got, np.float64) - exact).max() for got in (ours, jax.jit(step)(table, rows))]
    assert errors[0] <= errors[1]


def test_gradients_that_are_read_elsewhere_stay_dense():
    def returned(table, rows):
        gradient = jax.grad(loss)(table, rows)
        return table - 0.1 * gradient, gradient

    def momentum(table, velocity, rows):
        velocity = 0.9 * velocity + jax.grad(loss)(table, rows)
        return table - 0.1 * velocity, velocity

    def clipped(table, rows):
        gradient = jax.grad(loss)(table, rows)
        return table - 0.1 * (gradient / jnp.maximum(1.0, jnp.linalg.norm(gradient)))

    compared(returned, TABLE, looked_up(), rewritten=0)
    compared(clipped, TABLE, looked_up(), rewritten=0)
    made, count = sparse_updates(flat(momentum, TABLE, TABLE, looked_up()))
    assert count == 1  # the sum of the velocity and the gradient; the table itself is updated whole
    assert names(made).count("scatter-add") == 1


def test_small_tables_and_large_batches_stay_dense():
    def step(table, rows):
        return table - 0.1 * jax.grad(loss)(table, rows)

    compared(step, TABLE[:2_000], looked_up(0, 2_000), rewritten=0)
    compared(step, TABLE, np.resize(looked_up(), ROWS // 2), rewritten=0)


def test_sums_of_segments_and_windows():
    def segments(total, values, segment):
        return total + 3.0 * jax.ops.segment_sum(values, segment, total.shape[0])

    def windows(total, starts, values):
        numbers = jax.lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
        return total - jax.lax.scatter_add(jnp.zeros_like(total), starts, values, numbers, mode="drop")

    total = RNG.standard_normal(2_000_000).astype(np.float32)
    values = RNG.standard_normal(BATCH).astype(np.float32)
    compared(segments, total, values, RNG.integers(-5, total.size + 5, BATCH, dtype=np.int32))
    starts = np.stack([RNG.integers(-1, 50, BATCH), RNG.integers(0, WIDTH, BATCH)], 1).astype(np.int32)
    compared(windows, TABLE, starts, RNG.standard_normal((BATCH, 3, 4)).astype(np.float32), rtol=2e-6)


def test_donated_tables_are_updated_in_place():
    def step(table, rows):
        return table - 0.1 * jax.grad(loss)(table, rows)

    made, _ = sparse_updates(flat(step, TABLE, looked_up()))
    run = jax.jit(lambda *xs: jaxapi.eval_closed(made, *xs)[0], donate_argnums=0)
    memory = run.lower(TABLE, looked_up()).compile().memory_analysis()
    assert memory.temp_size_in_bytes < TABLE.nbytes // 4
