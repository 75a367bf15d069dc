"""Masks that depend on positions alone, at the shape of what reads them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.position_masks import position_masks
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(5)
LENGTH = 96
SCORES = RNG.standard_normal((2, 3, LENGTH, LENGTH)).astype(np.float32)


def triangle(s):
    return s + jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), 0.0, -1e9)


def compared(s):
    places = jnp.arange(LENGTH)
    return jnp.where(places[None, :] <= places[:, None], s, -jnp.inf)


def window(s):
    far = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :]
    return jnp.where((far >= 0) & (far < 8), s, jnp.finfo(s.dtype).min)


def alibi(s):
    far = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :])
    return s - 0.5 * far.astype(jnp.float32)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


@pytest.mark.parametrize("mask", [triangle, compared, window])
def test_masks_have_the_shape_of_the_scores(mask):
    made, count = position_masks(flat(mask, SCORES))
    assert count >= 1
    sizes = {v.aval.size for eqn in made.jaxpr.eqns for v in eqn.outvars}
    assert not [size for size in sizes if LENGTH < size < SCORES.size]
    (got,) = jax.jit(lambda s: jaxapi.eval_closed(made, s))(SCORES)
    np.testing.assert_array_equal(got, jax.jit(mask)(SCORES))


def test_a_mask_of_several_layers_is_made_in_each():
    def layers(s):
        mask = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), 0.0, -1e9)
        return jax.nn.softmax(s + mask), jax.nn.softmax(s * 2 + mask)

    made, count = position_masks(flat(layers, SCORES))
    assert count == 2
    for got, want in zip(jax.jit(lambda s: jaxapi.eval_closed(made, s))(SCORES), jax.jit(layers)(SCORES), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-12)


def test_what_depends_on_arguments_or_is_small_stays():
    def lengths(s, n):
        return jnp.where(jnp.arange(LENGTH)[None, None, None, :] < n[:, None, None, None], s, -jnp.inf)

    def small(s):
        return s + jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), 0.0, -1e9)[:8, :8]

    assert position_masks(flat(lengths, SCORES, np.array([5, 70])))[1] == 0
    assert position_masks(flat(small, SCORES[..., :8, :8]))[1] == 0
    assert position_masks(flat(jnp.tanh, SCORES))[1] == 0
