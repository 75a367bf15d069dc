"""Weight gradients of recurrences as one product behind the loop: where, how exactly, and what stays in the loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.loops.hoist_weight_gradients import hoist_weight_gradients
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(41)


def normal(*shape, dtype=np.float32):
    return (0.3 * RNG.standard_normal(shape)).astype(dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def scans(closed):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "scan"]


def products(closed):
    """Matrix products in the loops' bodies, and outside of them."""
    inside = [body for e in scans(closed) for _, _, body in jaxapi.inner_jaxprs(e)]
    return [sum(jaxapi.primitive_name(e) == "dot_general" for e in c.jaxpr.eqns) for c in (*inside, closed)]


def gru(w, gates, reverse=False):
    def step(h, gates):
        r, z, n = jnp.split(gates, 3, -1)
        mine = jnp.split(h @ w, 3, -1)
        r, z = jax.nn.sigmoid(r + mine[0]), jax.nn.sigmoid(z + mine[1])
        h = (1 - z) * jnp.tanh(n + r * mine[2]) + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros((gates.shape[1], w.shape[0]), gates.dtype), gates, reverse=reverse)[1]


def lstm(w, gates, reverse=False):
    def step(carry, gates):
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((gates.shape[1], w.shape[0]), gates.dtype)
    return jax.lax.scan(step, (zero, zero), gates, reverse=reverse)[1]


def gradients(cell, reverse):
    return jax.grad(lambda w, x, v, g: jnp.sum(cell(w, x @ v, reverse) * g), (0, 1, 2))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("cell", "parts"), [(lstm, 4), (gru, 3)])
@pytest.mark.parametrize(("steps", "batch", "width"), [(7, 3, 5), (1, 1, 2), (12, 1, 9)])
def test_gradients_of_recurrent_weights_leave_the_loop(cell, parts, reverse, steps, batch, width):
    args = (
        normal(width, parts * width),
        normal(steps, batch, 6),
        normal(6, parts * width),
        normal(steps, batch, width),
    )
    step = gradients(cell, reverse)
    closed = flat(step, *args)
    hoisted, count = hoist_weight_gradients(closed)
    jaxapi.check(hoisted)
    before, after = products(closed), products(hoisted)
    # a GRU's candidate multiplies part of the gates' gradient, which is no result of the loop: a stack, if it fits
    assert count >= (cell is lstm or width > 2)
    assert sum(after[:-1]) == sum(before[:-1]) - count
    assert after[-1] == before[-1] + count
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in step(*(a.astype(np.float64) for a in args))]
    for r, p, f in zip(exact, jaxapi.eval_closed(closed, *args), jaxapi.eval_closed(hoisted, *args), strict=True):
        size, p, f = np.linalg.norm(r), np.asarray(p), np.asarray(f)
        assert np.linalg.norm(f - r) <= 2 * np.linalg.norm(p - r) + 1e-6 * size


def test_what_was_there_before_is_added_once():
    def accumulate(start, a, b):
        return jax.lax.scan(lambda w, ab: (w + ab[0].T @ ab[1], ab[0] * 2), start, (a, b))

    args = normal(5, 4), normal(6, 3, 5), normal(6, 3, 4)
    hoisted, count = hoist_weight_gradients(flat(accumulate, *args))
    assert count == 1
    assert jaxapi.scan_carries(scans(hoisted)[0]) == 0
    want, doubled = accumulate(*args)
    found = jaxapi.eval_closed(hoisted, *args)
    np.testing.assert_allclose(found[0], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], doubled)


def sines(start, a, b):
    return jax.lax.scan(lambda w, ab: (w + jnp.sin(ab[0]).T @ ab[1], None), start, (a, b))[0]


@pytest.mark.parametrize(
    ("carry", "scanned"),
    [
        ((64, 48), ((4, 3, 64), (4, 3, 48))),  # sines of all steps take less than the carry
        ((5, 4), ((60, 3, 5), (60, 3, 4))),  # more, and less than what the loop scans over
    ],
)
def test_a_value_of_its_own_is_stacked_in_the_memory_that_the_loop_takes_anyway(carry, scanned):
    args = normal(*carry), *(normal(*s) for s in scanned)
    hoisted, count = hoist_weight_gradients(flat(sines, *args))
    assert count == 1
    np.testing.assert_allclose(jaxapi.eval_closed(hoisted, *args)[0], sines(*args), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (sines, (normal(5, 4), normal(60, 9, 5), normal(60, 9, 4))),  # a step's sines take more than the carry
        (  # what the loop scans over is less than the products' operands
            lambda w, t: jax.lax.scan(lambda w, t: (w + jnp.outer(jnp.full(9, t), jnp.full(9, 2 * t)), None), w, t)[0],
            (normal(9, 9), normal(60)),
        ),
    ],
)
def test_other_values_stay(function, args):
    assert hoist_weight_gradients(flat(function, *args))[1] == 0


def test_gradients_of_biases_leave_with_the_products_that_read_the_same_stack():
    def loss(w, b, x):
        return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ w + b),) * 2, jnp.zeros_like(x[0]), x)[1] ** 2)

    args = normal(8, 8), normal(8), normal(7, 3, 8)
    closed = flat(jax.grad(loss, (0, 1)), *args)
    hoisted, count = hoist_weight_gradients(closed)
    jaxapi.check(hoisted)
    assert count == 2
    assert jaxapi.scan_carries(scans(hoisted)[-1]) == 1
    for found, want in zip(jaxapi.eval_closed(hoisted, *args), jax.grad(loss, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_gradients_of_biases_alone_stay():
    def loss(b, x):
        return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(x + h + b),) * 2, jnp.zeros_like(x[0]), x)[1] ** 2)

    assert hoist_weight_gradients(flat(jax.grad(loss), normal(8), normal(7, 3, 8)))[1] == 0


@pytest.mark.parametrize(
    "body",
    [
        lambda w, ab: (w + (ab[0].T @ ab[1]) * 2, None),  # not the product itself
        lambda w, ab: (w + ab[0].T @ ab[1], w),  # the sum so far is a result
        lambda w, ab: (w * 0.9 + ab[0].T @ ab[1], None),  # decays
        lambda w, ab: (w - ab[0].T @ ab[1], None),
    ],
)
def test_other_recurrences_stay(body):
    args = normal(5, 4), normal(6, 3, 5), normal(6, 3, 4)
    closed = flat(lambda w, a, b: jax.lax.scan(body, w, (a, b)), *args)
    hoisted, count = hoist_weight_gradients(closed)
    assert count == 0
    assert hoisted is closed


def test_a_product_with_what_is_the_same_in_all_steps_stays():
    args = normal(5, 4), normal(3, 5), normal(6, 3, 4)
    closed = flat(lambda w, a, b: jax.lax.scan(lambda w, b: (w + a.T @ b, None), w, b), *args)
    assert hoist_weight_gradients(closed)[1] == 0
