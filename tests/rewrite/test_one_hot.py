"""Scatters and gathers of one element per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.backward.one_hot import gathers_before_elementwise, one_hot_scatters
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(7)
LOGITS = RNG.standard_normal((5, 7, 11)).astype(np.float32)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def names(closed):
    return [jaxapi.primitive_name(eqn) for eqn in closed.jaxpr.eqns]


def equal(made, function, *args):
    got = jax.jit(lambda *xs: jaxapi.eval_closed(made, *xs))(*args)
    for a, b in zip(got, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def labels_of(axis, *, wild=False):
    shape = tuple(1 if d == axis else n for d, n in enumerate(LOGITS.shape))
    low, high = (-2 * LOGITS.shape[axis], 2 * LOGITS.shape[axis]) if wild else (0, LOGITS.shape[axis])
    return RNG.integers(low, high, shape, dtype=np.int32)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_gradient_of_one_element_per_row_is_a_comparison(axis, mode):
    def gradient(x, labels):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jnp.take_along_axis(x, labels, axis, mode=mode))))(x)

    args = LOGITS, labels_of(axis, wild=mode != "promise_in_bounds")
    made, count = one_hot_scatters(flat(gradient, *args))
    assert count == 1
    assert not [name for name in names(made) if name.startswith("scatter")]
    equal(made, gradient, *args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_gathers_from_logits_and_scatters_nothing(dtype):
    def loss(logits, labels):
        wide = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(wide, labels, -1).mean()

    args = jnp.asarray(LOGITS, dtype), labels_of(2)
    step = jax.value_and_grad(loss)
    made, scatters = one_hot_scatters(flat(step, *args))
    made, gathers = gathers_before_elementwise(made)
    assert (scatters, gathers) == (1, 1)
    (gather,) = (eqn for eqn in made.jaxpr.eqns if jaxapi.primitive_name(eqn) == "gather")
    assert gather.invars[0] is made.jaxpr.invars[0]
    got = jax.jit(lambda *xs: jaxapi.eval_closed(made, *xs))(*args)
    for a, b in zip(got, jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-6)


def test_indices_out_of_bounds_give_nan_behind_the_operations_too():
    def taken(x, labels):
        return jnp.take_along_axis(jnp.exp(x - x.max(-1, keepdims=True)) / 2, labels, -1)

    args = LOGITS, labels_of(2, wild=True)
    made, count = gathers_before_elementwise(flat(taken, *args))
    assert count == 1
    wanted = jax.jit(taken)(*args)
    assert np.isnan(wanted).any() and not np.isnan(wanted).all()
    equal(made, taken, *args)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: jnp.take_along_axis(jnp.exp(x), jnp.concatenate([i, i], 2), 2),  # two per row
        lambda x, i: jnp.take_along_axis(jnp.exp(x), i, 2, fill_value=0.0, mode="fill"),  # not NaN
        lambda x, i: jnp.take_along_axis(x > 0, i, 2),  # not floats
        lambda x, i: jnp.take_along_axis(jnp.maximum(x, 0), i, 2),  # a maximum may lose what was filled in
        lambda x, i: jnp.take_along_axis(x, i, 2),  # nothing before it
    ],
)
def test_other_gathers_stay(function):
    assert gathers_before_elementwise(flat(function, LOGITS, labels_of(2)))[1] == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: jnp.put_along_axis(x, i, 1.0, 2, inplace=False),  # not added, not to zeros
        lambda x, i: jnp.zeros((7, 11)).at[i[0, :, 0]].add(x[0]),  # whole rows
        lambda x, i: jnp.zeros(11).at[i[:, 0, 0]].add(x[:, 0, 0]),  # several may meet
    ],
)
def test_other_scatters_stay(function):
    assert one_hot_scatters(flat(function, LOGITS, labels_of(2)))[1] == 0
