"""Derivatives that depend on a convention: they are JAX's, because they come from the original program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts

pytestmark = pytest.mark.usefixtures("xla_as_shipped")


def optimised(fn):
    return jcuts.optimize(fn, mode="fusion", tune="off")


def same(fn, *args, argnums=0):
    """Value and gradient under both compilers: the derivative of the optimised and the optimised derivative."""
    value, grad = jax.jit(jax.value_and_grad(fn, argnums))(*args)
    for candidate in (
        jax.jit(jax.value_and_grad(optimised(fn), argnums)),
        optimised(jax.value_and_grad(fn, argnums)),
    ):
        got_value, got_grad = candidate(*args)
        np.testing.assert_allclose(got_value, value, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got_grad, grad)
    return grad


KINKS = np.array([-2.0, -0.0, 0.0, 1e-40, -1e-40, 3.0, np.inf, -np.inf], np.float32)


@pytest.mark.parametrize(
    ("name", "at_zero"),
    [("relu", 0.0), ("relu6", 0.0), ("leaky_relu", 1.0), ("elu", 1.0), ("silu", 0.5), ("gelu", 0.5), ("softplus", 0.5)],
)
def test_activation_at_its_kink(name, at_zero):
    function = getattr(jax.nn, name)
    grad = same(lambda x: jnp.sum(function(x[:6]) * jnp.arange(1.0, 7.0)), KINKS)
    assert float(grad[2]) == pytest.approx(3.0 * at_zero)


def test_maximum_shares_the_gradient_of_ties():
    x = np.array([1.0, 2.0, 2.0, -1.0], np.float32)
    grad = same(lambda x, y: jnp.sum(jnp.maximum(x, y)), x, np.array([1.0, 1.0, 2.0, 0.0], np.float32), argnums=(0, 1))
    np.testing.assert_array_equal(grad[0], [0.5, 1.0, 0.5, 0.0])


def test_reduce_max_shares_the_gradient_of_ties():
    x = np.array([[3.0, 1.0, 3.0], [2.0, 2.0, 2.0]], np.float32)
    grad = same(lambda x: jnp.sum(jnp.max(x, axis=1) * jnp.array([1.0, 6.0])), x)
    np.testing.assert_allclose(grad, [[0.5, 0.0, 0.5], [2.0, 2.0, 2.0]], rtol=1e-6)


def test_absolute_value_and_sign_at_zero():
    same(lambda x: jnp.sum(jnp.abs(x[:6]) + 2.0 * jnp.sign(x[:6])), KINKS)


def test_straight_through_estimator():
    @jax.custom_vjp
    def quantise(x):
        return jnp.round(x * 4.0) / 4.0

    quantise.defvjp(lambda x: (quantise(x), x), lambda x, g: (jnp.where(jnp.abs(x) <= 1.0, g, 0.0),))
    x = np.linspace(-2.0, 2.0, 41, dtype=np.float32)
    weights = np.arange(41, dtype=np.float32)
    grad = same(lambda x: jnp.sum(quantise(x) * weights), x)
    np.testing.assert_array_equal(grad, np.where(np.abs(x) <= 1.0, weights, 0.0))


@pytest.mark.parametrize(
    "row",
    [
        [-np.inf, -np.inf, -np.inf],
        [-np.inf, 0.0, 1.0],
        [np.inf, 0.0, 1.0],
        [np.inf, np.inf, 1.0],
        [np.inf, -np.inf, 0.0],
        [np.nan, 0.0, 1.0],
        [88.0, 89.0, 1000.0],
        [-1000.0, -1001.0, -999.0],
    ],
)
def test_logsumexp_at_infinities(row):
    x = np.array([row, [0.0, 1.0, 2.0]], np.float32)
    same(lambda x: jnp.sum(jax.nn.logsumexp(x, axis=1) * jnp.array([1.0, 2.0])), x)
    same(lambda x: jnp.sum(jax.nn.log_softmax(x, axis=1) * jnp.array([[1.0, 2.0, 0.5]])), x)


def test_masked_softmax_has_no_nan():
    scores = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    mask = np.random.default_rng(1).random((5, 7)) < 0.6
    mask[:, 0] = True

    def loss(x):
        return jnp.sum(jnp.square(jax.nn.softmax(x, axis=-1, where=mask)))

    assert np.isfinite(same(loss, scores)).all()


def test_custom_jvp_rule_is_used():
    @jax.custom_jvp
    def clipped_log(x):
        return jnp.log(jnp.maximum(x, 1e-3))

    @clipped_log.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return clipped_log(x), t / jnp.maximum(x, 0.5)

    x = np.array([1e-5, 0.1, 0.5, 2.0], np.float32)
    grad = same(lambda x: jnp.sum(clipped_log(x)), x)
    np.testing.assert_allclose(grad, 1.0 / np.maximum(x, 0.5), rtol=1e-6)
