"""A softmax's backward equations as polynomials in P, dP and row sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.rewrite.attention.softmax_algebra import GRADIENT, ONE, PRODUCT, REMOVED, SUM, WEIGHT, Rows, SoftmaxAlgebra
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

ROWS = Rows((2, 3, 5), 2)


def polynomial(fn):
    """What the algebra makes of a function of exponentials, their sums and gradients of the weights."""
    shapes = (ROWS.shape, ROWS.kept, ROWS.shape)
    closed = inline(jaxapi.closed_jaxpr_of(fn, *(jax.ShapeDtypeStruct(s, np.float32) for s in shapes)))
    powers, total, gradient = closed.jaxpr.invars
    algebra = SoftmaxAlgebra(ROWS, {powers: {(1, 0, 1, 0): 1.0}, total: {SUM: 1.0}, gradient: {GRADIENT: 1.0}})
    for eqn in closed.jaxpr.eqns:
        algebra.evaluate(eqn)
    return algebra.known.get(closed.jaxpr.outvars[0])


def by_quotients(e, s, g):
    inner = (g * s**-2 * e).sum(-1, keepdims=True)
    return (g / s - inner) * e


def by_a_rule(e, s, g):
    p = e / s
    return p * g + -(p * g).sum(-1)[..., None] * p


def with_squeezed_sums(e, s, g):
    p = e / lax.broadcast_in_dim(lax.reshape(s, ROWS.flat), ROWS.shape, (0, 1))
    return p * (g - jnp.sum(p * g, -1, keepdims=True))


@pytest.mark.parametrize("fn", [by_quotients, by_a_rule, with_squeezed_sums], ids=lambda fn: fn.__name__)
def test_every_spelling_of_the_gradient_is_one_polynomial(fn):
    assert polynomial(fn) == {PRODUCT: 1.0, REMOVED: -1.0}


def test_rows_of_weights_sum_to_one():
    assert polynomial(lambda e, s, g: (e / s).sum(-1)) == {ONE: 1.0}
    assert polynomial(lambda e, s, g: jnp.square(s) * (e / s) / s) == {(1, 0, 1, 0): 1.0}
    assert polynomial(lambda e, s, g: 2 * (e / s) * 0.5) == {WEIGHT: 1.0}


UNKNOWN = {
    "gradients alone": lambda e, s, g: g.sum(-1),
    "squares of weights": lambda e, s, g: ((e / s) * (e / s)).sum(-1),
    "another axis": lambda e, s, g: (e / s).sum(1),
    "both axes": lambda e, s, g: (e / s).sum((1, 2)),
    "division by a sum of terms": lambda e, s, g: e / (s + e),
    "division by zero": lambda e, s, g: e / 0.0,
    "another function": lambda e, s, g: jnp.tanh(e),
    "a transpose": lambda e, s, g: jnp.swapaxes(e, 0, 1),
    "rows in another order": lambda e, s, g: lax.broadcast_in_dim(s.reshape(6), (5, 6), (1,)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_no_such_polynomial_is_unknown(name):
    assert polynomial(UNKNOWN[name]) is None
