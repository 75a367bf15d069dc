"""Value range analysis of scalar expressions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.backward.scalar_range import value_range
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline


def range_of(function, *args):
    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    return value_range(closed.jaxpr.outvars[0], made)


COUNT = np.int32(3)
NUMBER = np.float32(3)
EXPRESSIONS = {
    "a number": (lambda n: jnp.float32(0.1), COUNT, (0.1, 0.1)),
    "a count": (lambda n: n + 1, COUNT, (-(2.0**31), 2.0**31 - 1)),
    "a share": (lambda n: jnp.clip(n, 0, 100) / 100, COUNT, (0.0, 1.0)),
    "cosine decay": (lambda n: 0.5 * (1 + jnp.cos(jnp.pi * n / 100)), COUNT, (0.0, 1.0)),
    "exponential decay": (lambda n: 0.5 ** jnp.clip(n / 10, 0.0, 4.0), COUNT, (0.0625, 1.0)),
    "polynomial decay": (lambda n: (1 - jnp.clip(n, 0, 10) / 10) ** 3, COUNT, (0.0, 1.0)),
    "warm-up": (lambda n: jnp.where(n < 10, 0.1, 0.01), COUNT, (0.01, 0.1)),
    "an inverse": (lambda n: 1 / jnp.clip(n, 1, 9).astype(jnp.float32), COUNT, (1 / 9, 1.0)),
    "an inverse of what may be zero": (lambda n: 1 / n.astype(jnp.float32), COUNT, None),
    "a root of what may be negative": (lambda n: jnp.sqrt(n.astype(jnp.float32)), COUNT, None),
    "growth without end": (lambda n: jnp.exp(n.astype(jnp.float32)), COUNT, None),
    "an argument": (lambda x: 2 * x, NUMBER, None),
    "an argument, clipped": (lambda x: jnp.clip(x, 0.0, 1.0), NUMBER, None),
    "beyond float16": (lambda n: jnp.clip(n, 0, 60_000).astype(jnp.float16) * 2, COUNT, None),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_range(name):
    function, argument, wanted = EXPRESSIONS[name]
    found = range_of(function, argument)
    assert (found is None) == (wanted is None)
    if wanted is not None:
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_values_are_within_their_range():
    rng = np.random.default_rng(3)
    for function, argument, wanted in EXPRESSIONS.values():
        if wanted is not None:
            for n in rng.integers(-(2**31), 2**31, 50, dtype=np.int64).astype(np.int32):
                value = float(jax.jit(function)(n))
                low, high = range_of(function, argument)
                assert low - 1e-6 * abs(low) <= value <= high + 1e-6 * abs(high)
