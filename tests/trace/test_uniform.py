"""Constant arrays of one number become numbers; everything else stays, and no value changes by a bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.trace.simplify import simplify
from jcuts.trace.uniform import MOST, uniform

RNG = np.random.default_rng(3)
OPERATIONS = {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "max": lax.max, "min": lax.min}
NUMBERS = (0.0, -0.0, 1.0, 0.1, -3.5, 1e-40, 6e4)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def same_bits(closed, made, *args):
    before, after = (jax.jit(jax.extend.core.jaxpr_as_fun(c))(*args) for c in (closed, made))
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_vector_of_one_number_becomes_the_number_on_either_side(dtype, name, number):
    vector, x = jnp.full((1, 7), number, dtype), jnp.asarray(RNG.standard_normal((5, 7)), dtype)
    x = x.at[0, :3].set(jnp.asarray([0.0, -0.0, np.inf], dtype))
    closed = flat(lambda x: (OPERATIONS[name](x, jnp.broadcast_to(vector, x.shape)),
                             OPERATIONS[name](jnp.broadcast_to(vector, x.shape), x)), x)  # fmt: skip
    made = uniform(closed)
    finite = bool(jnp.isfinite(vector).all())
    assert (len(made.consts) == 0) == finite and len(closed.consts) > 0
    assert same_bits(closed, made, x)


def test_integers_too():
    x, vector = jnp.arange(12, dtype=jnp.int32).reshape(3, 4), np.full((3, 4), 5, np.int32)
    closed = flat(lambda x: x * vector + vector, x)
    made = uniform(closed)
    assert not made.consts and same_bits(closed, made, x)


@pytest.mark.parametrize("values", [
    np.float32([1, 1, 2]), np.float32([2, 1, 2]), np.float32([0.0, -0.0, 0.0]), np.float32([np.nan] * 3),
    np.float32([np.inf] * 3), np.float32([1]),
])  # fmt: skip
def test_what_is_not_one_finite_number_stays(values):
    x = jnp.asarray(RNG.standard_normal((4, len(values))), jnp.float32)
    closed = flat(lambda x: x + values, x)
    assert uniform(closed) is closed


def test_large_arrays_are_not_looked_at():
    x = jnp.ones((MOST + 1,), jnp.float32)
    closed = flat(lambda x: x + np.ones((MOST + 1,), np.float32), x)
    assert uniform(closed) is closed


def test_an_array_that_is_needed_as_one_stays_for_that():
    ones, x = jnp.ones((6,), jnp.float32), jnp.asarray(RNG.standard_normal((4, 6)), jnp.float32)
    closed = flat(lambda x: (x + ones, lax.dot(x, ones), ones), x)
    made = uniform(closed)
    assert len(made.consts) == 1 and same_bits(closed, made, x)
    total = next(e for e in made.jaxpr.eqns if jaxapi.primitive_name(e) == "add")
    assert any(jaxapi.is_literal(a) for a in total.invars)


def test_both_operands_of_one_number_leave_an_array():
    closed = jaxapi.closed_jaxpr_of(lambda x: (jnp.ones((3, 3)) + jnp.ones((3, 3))) * x, jnp.ones((3, 3)))
    made = uniform(inline(closed))
    assert same_bits(inline(closed), made, jnp.full((3, 3), 2.0))


def test_kernels_take_the_number():
    bias, w = jnp.zeros((24,), jnp.float32), jnp.asarray(RNG.standard_normal((16, 24)), jnp.float32)
    x = jnp.asarray(RNG.standard_normal((9, 16)), jnp.float32)

    def layer(x):
        return jnp.maximum(x @ w + bias, 0.0) * jnp.ones((24,), jnp.float32)

    got = jcuts.optimize(layer)(x)
    np.testing.assert_allclose(got, np.maximum(np.asarray(x, np.float64) @ np.asarray(w, np.float64), 0), rtol=2e-5,
                               atol=1e-5)  # fmt: skip
