"""Vectors of arguments alone: which are made by the one call, that values stay the same, and what stays where it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.registry import applicable, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled

RNG = np.random.default_rng(23)


def values(*shape, dtype=jnp.float32):
    return jnp.asarray(0.5 + RNG.random(shape), dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def calls(closed):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) in ("jit", "pjit")]


def norm(y, gain, bias, mean, variance):
    scale = gain * jax.lax.rsqrt(variance + 1e-3)
    return y * scale + (bias - mean * scale)


def network(layers, x):
    for w, *parameters in layers:
        x = jax.nn.relu(norm(x @ w, *parameters))
    return x


LAYERS = [(values(n, m), *(values(m) for _ in range(4))) for n, m in ((7, 13), (13, 1), (1, 9), (9, 5))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_vectors_per_batch_norm_come_from_one_call(dtype):
    layers, x = jax.tree.map(lambda a: a.astype(dtype), (LAYERS, values(3, 7)))
    closed = flat(network, layers, x)
    assert "vectors" in applicable(closed)
    new = rewritten(closed, ("vectors",))
    jaxapi.check(new.closed)
    (call,) = calls(new.closed)
    assert new.closed.jaxpr.eqns[0] is call
    assert sorted(v.aval.size for v in call.outvars if v.aval.size != 1) == [5, 5, 9, 9, 13, 13]
    rest = [e for e in new.closed.jaxpr.eqns[1:] if e.outvars[0].aval.size > 1]
    assert not any(jaxapi.primitive_name(e) == "rsqrt" for e in rest)
    flat_args = jax.tree.leaves((layers, x))
    for got, want in zip(
        compiled(new.closed, *flat_args), compiled(closed, *flat_args), strict=True
    ):  # XLA contracts products and sums as it finds them together
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=8 * float(jnp.finfo(dtype).eps)
        )


def test_what_stays():
    x = values(64, 16)
    for function, args in (
        (lambda b, x: x + b, (values(16), x)),  # nothing is computed
        (lambda x: x * jnp.sqrt(x.sum(0)), (x,)),  # of the data
        (lambda x: x * jnp.sqrt(jnp.arange(16.0) + 1), (x,)),  # of constants alone
        (lambda v: jnp.exp(v), (values(16),)),  # a result of the program and nothing else
        (lambda s, x: x * jnp.sqrt(s), (values(), x)),  # a number
    ):
        assert "vectors" not in applicable(flat(function, *args))


def test_a_vector_that_is_also_a_result_stays_a_result():
    def function(v, x):
        scale = jnp.exp(v)
        return x * scale, scale

    v, x = values(16), values(8, 16)
    closed = flat(function, v, x)
    new = rewritten(closed, ("vectors",)).closed
    for got, want in zip(compiled(new, v, x), function(v, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
