"""Residuals that are parts of arrays in memory: masks of ReLUs, operands of concatenations; no value changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.backward.rematerialize import Crossing, is_large
from jcuts.rewrite.backward.stored_residuals import stored_residuals
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(59)


def values(*shape, dtype=np.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def same_values(new, closed, *args):
    jaxapi.check(new)
    leaves = jax.tree.leaves(args)
    for got, want in zip(jaxapi.eval_closed(new, *leaves), jaxapi.eval_closed(closed, *leaves), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def far(closed, name):
    """Bytes of the results of an operation that element-wise ones read behind a product."""
    crossing = Crossing(closed)
    made = [v for eqn in crossing.eqns if jaxapi.primitive_name(eqn) == name for v in eqn.outvars]
    order = {id(eqn): place for place, eqn in enumerate(crossing.eqns)}
    products = [order[id(e)] for e in crossing.eqns if jaxapi.primitive_name(e) == "dot_general"]
    return [
        jaxapi.nbytes(v)
        for v in made
        if is_large(v)
        and any(
            crossing.made[v] < p < u and crossing.is_cheap(crossing.eqns[u])
            for u in crossing.users[v]
            for p in products
        )
    ]


def residual_network(weights, x):
    for w in weights:
        x = jax.nn.relu(x @ w + x)
    return jnp.sum(x * x)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_masks_of_relus_are_made_of_what_the_filter_gradient_reads(dtype):
    args = [values(96, 96, dtype=dtype) / 9 for _ in range(4)], values(1024, 96, dtype=dtype).at[3, 5].set(jnp.nan)
    closed = flat(jax.grad(residual_network), *args)
    new, replaced = stored_residuals(closed)
    assert replaced == 3 == len(far(closed, "gt")) - len(far(new, "gt"))  # the last result is read by no product
    same_values(new, closed, *args)


def test_a_mask_stays_whose_result_no_product_of_the_backward_pass_reads():
    """The weights have no gradient: the results are not kept."""
    args = [values(96, 96) / 9 for _ in range(3)], values(1024, 96)
    closed = flat(jax.grad(residual_network, 1), *args)
    new, replaced = stored_residuals(closed)
    assert replaced == 0
    assert new is closed


def dense_block(weights, x):
    """Every layer reads all results before it; a norm's gradient reads its operand."""
    for w in weights:
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), 0) + 1e-5)
        x = jnp.concatenate([x, jnp.tanh(y) @ w], 1)
    return jnp.sum(x**3)


def test_a_dense_block_keeps_its_last_concatenation():
    args = [values(64 + 32 * n, 32) / 9 for n in range(4)], values(512, 64)
    closed = flat(jax.grad(dense_block, (0, 1)), *args)
    new, replaced = stored_residuals(closed)
    assert replaced >= 3
    assert len(far(closed, "concatenate")) == 3
    assert not far(new, "concatenate")  # slices of the last one
    same_values(new, closed, *args)


def test_the_operand_of_a_wider_array_that_is_read_no_more_stays():
    """As the skip connection of a U-Net: keeping the concatenation would take more."""

    def loss(w, v, x):
        skip = x @ w
        deep = jnp.tanh(skip @ w) @ w
        return jnp.sum(jnp.sin(jnp.concatenate([skip, deep, deep], 1) @ v)) + jnp.sum(jnp.sin(skip))

    args = values(96, 96) / 9, values(288, 8) / 9, values(512, 96)
    closed = flat(jax.grad(loss, (0, 2)), *args)
    assert stored_residuals(closed)[1] == 0


@pytest.mark.parametrize("dimension", [0, 1])
def test_slices_along_any_dimension(dimension):
    def loss(w, a, b):
        c = jnp.concatenate([jnp.exp(a @ w), b @ w], dimension)
        d = jnp.concatenate([c, jnp.sin(c)], dimension)
        return jnp.sum(
            jnp.square((d.T if dimension else d) @ jnp.ones((d.shape[1 - dimension], 4), d.dtype)) ** 2 * 0.5
        )

    args = values(96, 96) / 9, values(256, 96), values(256, 96)
    closed = flat(jax.grad(loss), *args)
    same_values(stored_residuals(closed)[0], closed, *args)


def test_masks_of_concatenated_results_are_made_of_the_concatenation():
    def function(x, weights, v):
        hs = [x @ w for w in weights]
        ys, masks = [jnp.maximum(h, 0.0) for h in hs], [h > 0 for h in hs]
        c = jnp.concatenate(ys, 1)
        z = jnp.sin(c @ v)
        return [jnp.where(m, z * y, 0.0) for m, y in zip(masks, ys, strict=True)], jax.lax.dot_general(
            c, z, (((0,), (0,)), ((), ()))
        )

    args = values(1024, 96), [values(96, 96) for _ in range(3)], values(288, 96)
    closed = flat(function, *args)
    new, replaced = stored_residuals(closed)
    assert replaced == 6
    assert len(far(closed, "max")) == len(far(closed, "gt")) == 3
    assert not far(new, "max")
    assert not far(new, "gt")
    same_values(new, closed, *args)


def test_a_mask_that_is_read_later_than_its_result_stays():
    def function(x, w, g):
        h = x @ w
        y, mask = jnp.maximum(h, 0.0), h > 0
        q = (jnp.where(mask, jnp.sin(y @ w), 0.0) * y) @ w
        for _ in range(2):
            q = jnp.sin(q) @ w
        return jnp.where(mask, q * g, 0.0)

    args = values(256, 256), values(256, 256) / 16, values(256, 256)
    assert stored_residuals(flat(function, *args))[1] == 0


def test_thresholds_are_compared_as_they_are():
    """Neighbours that are one number in float64, and numbers that have no order."""
    with jax.enable_x64(True):
        limit = 2**53

        def function(x, w, g):
            y, mask = jax.lax.max(x, jnp.int64(limit + 1)), x > jnp.int64(limit)
            z = y.astype(jnp.float32) @ w
            return jnp.where(mask, z * g, 0.0), (y + 1) @ y, z @ w

        args = jnp.full((256, 256), limit - 5), values(256, 256), values(256, 256)
        assert stored_residuals(flat(function, *args))[1] == 0
    args = values(256, 256).astype(jnp.complex64), values(256, 256).astype(jnp.complex64)
    assert stored_residuals(flat(lambda x, w: jnp.maximum(x, jnp.complex64(0)) @ w, *args))[1] == 0
