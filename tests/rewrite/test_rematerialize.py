"""Residuals that a backward pass recomputes: which, from what, and that no value changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.backward.rematerialize import LEAST_BYTES, Crossing, is_large, rematerialize
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(53)


def values(*shape, dtype=np.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def count(closed, name):
    return sum(jaxapi.primitive_name(e) == name for e in closed.jaxpr.eqns)


def same_values(new, closed, *args):
    leaves = jax.tree.leaves(args)
    for got, want in zip(jaxapi.eval_closed(new, *leaves), jaxapi.eval_closed(closed, *leaves), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def mlp(weights, x):
    w, b, v = weights
    return jnp.sum(jnp.square(jax.nn.gelu(x @ w + b) @ v))


def arguments(rows=128, dtype=np.float32):
    return (values(32, 160, dtype=dtype), values(160, dtype=dtype), values(160, 32, dtype=dtype)), values(
        rows, 32, dtype=dtype
    )


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_gradient_of_a_gelu_keeps_one_value(dtype):
    args = arguments(256, dtype)
    closed = flat(jax.grad(mlp), *args)
    new, replaced = rematerialize(closed)
    jaxapi.check(new)
    assert replaced >= 2 and count(new, "tanh") == 2 == count(closed, "tanh") + 1
    same_values(new, closed, *args)


def exact_mlp(weights, x):
    w, b, v = weights
    return jnp.sum(jnp.square(jax.nn.gelu(x @ w + b, approximate=False) @ v))


def large_values_that_cross(closed):
    """Operations whose results element-wise operations read behind a product that follows, and no product does."""
    crossing = Crossing(closed)
    products = [n for n, e in enumerate(crossing.eqns) if jaxapi.primitive_name(e) == "dot_general"]
    made = [v for v in crossing.made if is_large(v) and not crossing.is_kept(v)]
    return [
        jaxapi.primitive_name(crossing.eqns[crossing.made[v]])
        for v in made
        if any(crossing.made[v] < p < u for p in products for u in crossing.users[v])
    ]


def test_the_gradient_of_an_exact_gelu_keeps_the_sum_with_the_bias():
    """Three functions of it are read in the backward pass, it is not."""
    args = arguments(256)
    closed = flat(jax.grad(exact_mlp), *args)
    new, replaced = rematerialize(closed)
    jaxapi.check(new)
    assert replaced >= 3
    assert large_values_that_cross(closed) == ["mul", "erfc", "exp"]
    assert large_values_that_cross(new) == ["add"]
    same_values(new, closed, *args)


def norm(x, g):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-5) * g


def test_a_normalised_value_is_made_of_its_operand():
    def loss(weights, x):
        g, w = weights
        y = norm(x @ w, g)
        return jnp.sum(jnp.tanh(y @ w.T))

    args = (values(160), values(32, 160)), values(256, 32)
    closed = flat(jax.grad(loss), *args)
    new, replaced = rematerialize(closed)
    jaxapi.check(new)
    assert replaced >= 1 and count(new, "rsqrt") == count(closed, "rsqrt")  # what is small is kept
    same_values(new, closed, *args)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x: jax.nn.softmax(x, -1), (values(256, 160),)),  # one kernel reads its rows once
        (lambda x, g: norm(x, g), (values(256, 160), values(160))),
        (lambda weights, x: mlp(weights, x), arguments(256)),  # no backward pass
        (jax.grad(mlp), arguments(LEAST_BYTES // 4 // 160 // 2)),  # too small
        (lambda x, y, w: (t := x + y, jnp.tanh((t @ w) @ w.T) + t), (*(values(256, 96) for _ in "xy"), values(96, 96))),
    ],
)
def test_others_stay(function, args):
    closed = flat(function, *args)
    assert rematerialize(closed) == (closed, 0)


def test_a_stream_of_residuals_stays():
    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x * x)

    args = [values(64, 64) / 8 for _ in range(4)], values(512, 64)
    closed = flat(jax.grad(loss), *args)
    new, _ = rematerialize(closed)
    assert count(new, "dot_general") == count(closed, "dot_general")
    assert count(new, "add") == count(closed, "add")  # sums of two large values are kept
    same_values(new, closed, *args)


def relu_norms(weights, x):
    """Layers of a product, a norm over the rows, and a ReLU whose gradient keeps a mask."""
    for w, g in weights:
        y = x @ w
        mean = jnp.mean(y, 0)
        x = jax.nn.relu6((y - mean) * (jax.lax.rsqrt(jnp.mean(jnp.square(y - mean), 0) + 1e-5) * g))
    return jnp.sum(x * x)


def crossing_masks(closed):
    """Masks in memory that element-wise operations read behind a product."""
    crossing = Crossing(closed)
    made = [v for eqn in crossing.eqns for v in eqn.outvars if str(v.aval.dtype) == "bool" and is_large(v)]
    order = {id(eqn): place for place, eqn in enumerate(crossing.eqns)}
    products = [order[id(e)] for e in crossing.eqns if jaxapi.primitive_name(e) == "dot_general"]
    return [v for v in made if any(crossing.made[v] < p < u for u in crossing.users[v] for p in products)]


def test_the_mask_of_a_relu_is_made_of_what_the_norm_reads_anyway():
    args = [(values(96, 96) / 9, values(96)) for _ in range(3)], values(1024, 96)
    closed = flat(jax.grad(relu_norms), *args)
    new, replaced = rematerialize(closed)
    jaxapi.check(new)
    assert replaced and len(crossing_masks(closed)) >= 2 and not crossing_masks(new)
    same_values(new, closed, *args)


def test_a_mask_stays_whose_source_nobody_reads_there():
    """One byte per element in memory, where its operand would be four."""

    def loss(weights, x):
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.sum(x)

    args = [values(96, 96) / 9 for _ in range(3)], values(1024, 96)
    closed = flat(jax.grad(loss), *args)
    new, _ = rematerialize(closed)
    assert len(crossing_masks(new)) == len(crossing_masks(closed)) >= 2
    same_values(new, closed, *args)


def test_values_that_read_their_source_beside_a_common_value():
    """As a gradient rule by hand has them: nothing but the source itself makes both."""

    def function(a, b, w):
        h = a + b
        e = jnp.exp(h)
        first, second = jnp.tanh(e) * h, jnp.sin(e) * h
        z = (h * 0 + jnp.cos(first) * jnp.cos(second)) @ w
        return jnp.sin(z) * first, jnp.cos(z) * second

    args = [values(256, 256) for _ in range(3)]
    closed = flat(function, *args)
    new, _ = rematerialize(closed)
    jaxapi.check(new)
    same_values(new, closed, *args)


def test_a_value_is_not_stored_for_others_that_are_too_far_from_it():
    """Four tangents are made of one stored value; of what that is made of they are too long to be repeated."""

    def function(x, y, w):
        first = e = jnp.exp(x + y)
        for _ in range(25):
            first = jnp.sin(first)
        second = jnp.cos(e)
        tangents = [jnp.tanh(first * (k + 1.0)) for k in range(4)]
        z = jnp.sin((sum(tangents) + first + second) @ w)
        out = z * first + jnp.cos(z) * second
        for k, tangent in enumerate(tangents):
            out = out + jnp.sin(z * k) * tangent
        return out @ w

    args = [values(256, 256) for _ in range(3)]
    closed = flat(function, *args)
    new, _ = rematerialize(closed)
    assert len(large_values_that_cross(new)) == 2 < len(large_values_that_cross(closed)) == 6
    same_values(new, closed, *args)
