"""Concatenations that grow, as updates of one array: which are replaced, and that values are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks import workloads
from jcuts.rewrite.registry import applicable, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled

RNG = np.random.default_rng(4)
ONLY = ("slots",)


def values(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.integers(-9, 9, shape), dtype)


def in_place(function, *args):
    """The rewritten program, after its results were compared, bit by bit, with those of the program as it was."""
    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))
    new = rewritten(closed, ONLY)
    jaxapi.check(new.closed)
    for x, y in zip(compiled(closed, *args), compiled(new.closed, *args), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    return new


def count(closed, *names):
    return sum(jaxapi.primitive_name(e) in names for e in closed.jaxpr.eqns)


def growing(axis, layers):
    def function(x, *ys):
        for y in ys[:layers]:
            x = jnp.concatenate([x, y * jnp.sum(x, dtype=y.dtype)], axis)
        return jnp.sin(x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return function


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_a_chain_is_one_array_along_any_dimension(axis, dtype):
    x, *ys = (values(*(n if k == axis else 3 for k in range(3)), dtype=dtype) for n in (5, 2, 1, 4))
    found = in_place(growing(axis, 3), x, *ys)
    assert found.counts == {"slots": 3}
    assert count(found.closed, "concatenate") == 0
    assert count(found.closed, "dynamic_update_slice") == 4 and count(found.closed, "slice") == 2


def test_several_parts_at_a_time_and_several_chains():
    def two(x, y):
        for _ in range(3):
            x = jnp.concatenate([x, x[:, :2] * y[:, :1], x[:, :1]], 1)
            y = jnp.concatenate([y, x[:, :2]], 1)
        return x, y

    assert in_place(two, values(4, 3), values(4, 2)).counts == {"slots": 6}


def test_keys_of_random_numbers_are_left_alone():
    def function(keys):
        for _ in range(3):
            keys = jax.lax.concatenate([keys, jax.vmap(jax.random.fold_in, (0, None))(keys[:2], 7)], 0)
        return jax.vmap(jax.random.bits)(keys)

    assert in_place(function, jax.random.split(jax.random.key(0), 3)).counts == {}


def test_two_concatenations_are_too_few():
    assert in_place(growing(1, 2), values(3, 5), values(3, 2), values(3, 1)).counts == {}


def test_results_of_the_program_end_a_chain():
    def function(x, a, b, c):
        x1 = jnp.concatenate([x, a], 1)
        x2 = jnp.concatenate([x1, b], 1)
        return x1, jnp.concatenate([x2, c], 1)

    arrays = [values(3, n) for n in (5, 2, 1, 4)]
    assert in_place(function, *arrays).counts == {}
    assert in_place(lambda *xs: function(*xs)[1], *arrays).counts == {"slots": 3}


def test_forks_other_dimensions_and_repeated_parts_stay():
    def fork(x, a, b):
        x1 = jnp.concatenate([x, a], 1)
        left, right = jnp.concatenate([x1, b], 1), jnp.concatenate([x1, a * 2], 1)
        return jnp.concatenate([left, a], 1), jnp.concatenate([right, b], 1)

    def turns(x, a):
        x = jnp.concatenate([x, a], 1)
        x = jnp.concatenate([x, x[:2]], 0)
        return jnp.concatenate([x, x[:, :2]], 1)

    def doubles(x):
        for _ in range(4):
            x = jnp.concatenate([x, x], 1)
        return x

    def again(x, a, b):
        x1 = jnp.concatenate([x, a], 1)
        x2 = jnp.concatenate([x1, b], 1)
        return jnp.concatenate([x2, x1], 1) * 2

    arrays = [values(3, n) for n in (5, 2, 1)]
    assert in_place(again, *arrays).counts == {}
    assert in_place(fork, *arrays).counts == {}
    assert in_place(turns, *arrays[:2]).counts == {}
    assert in_place(doubles, arrays[0]).counts == {}


def test_bodies_of_loops_are_rewritten():
    def function(x):
        def step(carry, _):
            y = carry
            for k in range(3):
                y = jnp.concatenate([y, jnp.abs(y[:, : k + 1]) % 5], 1)
            return carry + jnp.sum(y, 1, keepdims=True), None

        return jax.lax.scan(step, x, None, length=3)[0]

    assert in_place(function, values(3, 5)).counts == {"slots": 3}


def test_a_dense_net():
    fn, args = workloads.network("DenseNet121", 1, closed=True, size=32)
    closed = simplify(inline(jaxapi.closed_jaxpr_of(fn, *args)))
    assert "slots" in applicable(closed)
    found = rewritten(closed, ONLY)
    jaxapi.check(found.closed)
    assert found.counts == {"slots": 58} and count(found.closed, "concatenate") == 0
