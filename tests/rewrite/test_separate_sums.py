"""Copies of element-wise operations for column sums, and the kernels that the gradient of a batch norm becomes."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks import modes
from jcuts.base.settings import Settings
from jcuts.rewrite.backward.separate_sums import LEAST_POINTS, separate_sums
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(41)
LONG = (3, 53, 59, 8)
assert LONG[0] * LONG[1] * LONG[2] > LEAST_POINTS


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def layer(x, scale, offset):
    mean, variance = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    return jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + 1e-3) * scale + offset)


def gradient(x, scale, offset, g):
    return jax.vjp(layer, x, scale, offset)[1](g)


def arguments(shape=LONG):
    return values(*shape), values(shape[-1]), values(shape[-1]), values(*shape)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def test_sums_of_a_batch_norms_gradient_have_copies_of_what_they_sum():
    args = arguments()
    closed = flat(gradient, *args)
    made, count = separate_sums(closed)
    assert count >= 3
    jaxapi.check(made)
    for got, wanted in zip(jaxapi.eval_closed(made, *args), jaxapi.eval_closed(closed, *args), strict=True):
        np.testing.assert_array_equal(got, wanted)
    users = Counter(a for e in made.jaxpr.eqns for a in e.invars if not jaxapi.is_literal(a))
    made_by = {v: e for e in made.jaxpr.eqns for v in e.outvars}
    summed = [e.invars[0] for e in made.jaxpr.eqns if jaxapi.primitive_name(e) == "reduce_sum"]
    assert all(users[v] == 1 for v in summed if v in made_by)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (gradient, (2, 7, 9, 8)),  # short columns
        (lambda x, s, t, g: (d := jnp.tanh(x) * g, d.sum((0, 1, 2))), LONG),  # a result of the function
        (lambda x, s, t, g: (jnp.tanh(x).sum((0, 1, 2)), g), LONG),  # nobody else needs it
        (lambda x, s, t, g: ((d := jnp.tanh(x) * g) @ jnp.eye(8), d.sum((0, 1, 2))), LONG),  # a product reads it
        (lambda x, s, t, g: ((d := jnp.tanh(x @ jnp.eye(8))) * g, d.sum((0, 1, 2))), LONG),  # into the epilogue
        (lambda x, s, t, g: ((d := x + g + x[::-1] + g[::-1]) * g, d.sum((0, 1, 2))), LONG),  # of too many arrays
    ],
)
def test_other_sums_stay(function, shape):
    assert separate_sums(flat(function, *arguments(shape)))[1] == 0


def test_the_gradient_of_a_batch_norm_is_statistics_sums_and_one_map():
    """No kernel writes an array but the last, and each reads x and g once."""
    shape = (32, 40, 40, 64)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape[-1:], shape[-1:], shape)]
    problems = modes.pretended_regions(jaxapi.closed_jaxpr_of(gradient, *args), Settings())
    large = [
        tuple(sum(v.aval.shape == shape for v in vs) for vs in (region.inputs, region.outputs))
        for _, region in problems
    ]
    assert sorted(large) == [(1, 0), (2, 0), (2, 1)]
