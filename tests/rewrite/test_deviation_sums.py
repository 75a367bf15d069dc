"""Sums of deviations from the mean follow from the sum of the mean: where, how exactly, and what stays a reduction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.backward.deviation_sums import deviation_sums
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(31)
ROWS = (0, 1, 2)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def sums(closed, size):
    """Reductions over arrays of a size."""
    eqns = [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "reduce_sum"]
    return sum(e.invars[0].aval.size == size for e in eqns)


def batch_norm(x, scale, bias, axes=ROWS):
    mean, variance = jnp.mean(x, axes, keepdims=True), jnp.var(x, axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-3) * scale + bias


def loss(x, scale, bias, target, axes=ROWS):
    return jnp.sum(jax.nn.relu(batch_norm(x, scale, bias, axes)) * target)


def gradients(axes=ROWS):
    return lambda *args: jax.value_and_grad(lambda *a: loss(*a, axes), argnums=(0, 1, 2))(*args)


def arguments(shape, mean=0.0, axes=ROWS, dtype=np.float32):
    narrow = [1 if d in axes else n for d, n in enumerate(shape)]
    make = lambda s: RNG.standard_normal(s).astype(dtype)  # noqa: E731
    return make(shape) + dtype(mean), make(narrow) + dtype(2), make(narrow), make(shape)


@pytest.mark.parametrize("shape", [(3, 5, 7, 6), (4, 9, 3, 2), (1, 1, 1, 2)])
@pytest.mark.parametrize("axes", [ROWS, (3,), (1, 2)])
def test_the_gradient_of_a_variance_has_no_sum_of_its_own(shape, axes):
    args = arguments(shape, axes=axes)
    closed = flat(gradients(axes), *args)
    new, count = deviation_sums(closed)
    jaxapi.check(new)
    assert count == 1 or 1 in shape  # sums over one value are written in other ways
    assert sums(new, np.prod(shape)) == sums(closed, np.prod(shape)) - count
    for got, want in zip(jaxapi.eval_closed(new, *args), jaxapi.eval_closed(closed, *args), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(np.asarray(want)).max() + 1e-6)


@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_the_gradient_is_as_exact_as_before(mean):
    shape = (16, 14, 14, 24)
    args = arguments(shape, mean)
    closed = flat(gradients(), *args)
    new, count = deviation_sums(closed)
    assert count == 1
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in jax.tree.leaves(gradients()(*(jnp.asarray(a, jnp.float64) for a in args)))]
    for got, before, want in zip(jaxapi.eval_closed(new, *args), jaxapi.eval_closed(closed, *args), exact, strict=True):
        errors = [np.linalg.norm(np.asarray(x, np.float64) - want) for x in (got, before)]
        assert errors[0] <= 1.5 * errors[1] + 1e-7 * np.linalg.norm(want)


def test_not_finite_values_stay():
    x, scale, bias, target = arguments((3, 4, 4, 3))
    x[0, 0, 0, 1], x[1, 2, 3, 2] = np.inf, np.nan
    closed = flat(gradients(), x, scale, bias, target)
    new, count = deviation_sums(closed)
    assert count == 1
    for got, want in zip(
        jaxapi.eval_closed(new, x, scale, bias, target),
        jaxapi.eval_closed(closed, x, scale, bias, target),
        strict=True,
    ):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


def scaled(x, c):
    deviations = x - jnp.mean(x, 0)
    return deviations, jnp.sum(-(c * deviations) / (1 + c * c), 0), jnp.sum(2.0 * deviations * c * 0.5, 0)


@pytest.mark.parametrize("c", [np.float32(3), np.full((1, 5), 3, np.float32), np.linspace(1, 2, 5, dtype=np.float32)])
def test_factors_that_are_equal_along_the_sum_come_out(c):
    x = RNG.standard_normal((40, 5)).astype(np.float32)
    closed = flat(scaled, x, c)
    new, count = deviation_sums(closed)
    jaxapi.check(new)
    assert count == 2 and sums(new, x.size) == 1
    for got, want in zip(jaxapi.eval_closed(new, x, c), jaxapi.eval_closed(closed, x, c), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5)


@pytest.mark.parametrize("rows", [40, 43, 3 * 7 * 7 * 64])
def test_the_sum_is_zero_whatever_rounds(rows):
    """No rounding error of the mean is left, of which another order of operations has another one."""
    x = RNG.standard_normal((rows, 5)).astype(np.float32) + np.float32(1000)
    new, count = deviation_sums(flat(lambda x: (jnp.sum(x, 0), jnp.sum(x - jnp.mean(x, 0), 0)), x))
    assert count == 1
    np.testing.assert_array_equal(jaxapi.eval_closed(new, x)[1], np.zeros(5, np.float32))


def test_sums_in_float64():
    with jax.enable_x64(True):
        args = arguments((4, 3, 3, 2), dtype=np.float64)
        closed = flat(gradients(), *args)
        new, count = deviation_sums(closed)
        assert count == 1
        for got, want in zip(jaxapi.eval_closed(new, *args), jaxapi.eval_closed(closed, *args), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: jnp.sum(x - jnp.mean(y, 0), 0),  # another's mean
        lambda x, y: (jnp.sum(x, 0), jnp.sum(x - jnp.sum(x, 0) / 39, 0)),  # not the mean
        lambda x, y: (jnp.sum(x, 0), jnp.sum(x - jnp.mean(x[:20], 0), 0)),
        lambda x, y: (jnp.sum(x, 0), jnp.sum((x - jnp.mean(x, 0)) * y, 0)),  # a factor that differs along the sum
        lambda x, y: (jnp.sum(x, 1), jnp.sum(x - jnp.mean(x, 1, keepdims=True), 0)),  # over other dimensions
        lambda x, y: jnp.sum(jnp.mean(x, 0) - x, 0),
        lambda x, y: jnp.max(x - jnp.mean(x, 0), 0),
    ],
)
def test_other_sums_stay(function):
    x, y = (RNG.standard_normal((40, 5)).astype(np.float32) for _ in range(2))
    closed = flat(function, x, y)
    assert deviation_sums(closed) == (closed, 0)


def test_sums_in_sixteen_bits_stay():
    x = jnp.ones((40, 5), jnp.bfloat16)
    closed = flat(lambda x: jax.lax.reduce_sum(x - jax.lax.reduce_sum(x, (0,)) / 40, (0,)), x)
    assert deviation_sums(closed) == (closed, 0)
