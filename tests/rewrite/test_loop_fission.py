"""Input and output projections of recurrences as one product outside the loop: where, how exactly, what stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.rewrite.backward.registry import backward_rewrites
from jcuts.rewrite.loops.fission import loop_fission
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(43)


def normal(*shape, dtype=np.float32):
    return (0.3 * RNG.standard_normal(shape)).astype(dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def products(closed):
    """Matrix products in the loops' bodies, and outside of them."""
    loops = [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "scan"]
    bodies = [body for e in loops for _, _, body in jaxapi.inner_jaxprs(e)]
    inside, outside = (
        sum(jaxapi.primitive_name(e) == "dot_general" for c in part for e in c.jaxpr.eqns)
        for part in (bodies, [closed])
    )
    return inside, outside


def gru(x, w, u, b, v, reverse=False):
    """With its input projection, and a projection of its states."""

    def step(h, row):
        mine, own = jnp.split(row @ w + b, 3, -1), jnp.split(h @ u, 3, -1)
        r, z = jax.nn.sigmoid(mine[0] + own[0]), jax.nn.sigmoid(mine[1] + own[1])
        h = (1 - z) * jnp.tanh(mine[2] + r * own[2]) + z * h
        return h, jnp.tanh(h @ v)

    return jax.lax.scan(step, jnp.zeros((x.shape[1], u.shape[0]), x.dtype), x, reverse=reverse)


def lstm(x, w, u, b, v, reverse=False):
    def step(carry, row):
        h, c = carry
        i, f, g, o = jnp.split(row @ w + h @ u + b, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), (h @ v, h)

    zero = jnp.zeros((x.shape[1], u.shape[0]), x.dtype)
    return jax.lax.scan(step, (zero, zero), x, reverse=reverse)


def operands(parts, steps, batch, features, width):
    shapes = (steps, batch, features), (features, parts * width), (width, parts * width), (parts * width,), (width, 7)
    return [normal(*shape) for shape in shapes]


def exact(function, args):
    with jax.enable_x64(True):
        return [np.asarray(x) for x in jax.tree.leaves(function(*(a.astype(np.float64) for a in args)))]


def check(function, args, closed, divided):
    """Both programs against float64: the divided one is about as near."""
    jaxapi.check(divided)
    pairs = zip(
        exact(function, args), jaxapi.eval_closed(closed, *args), jaxapi.eval_closed(divided, *args), strict=True
    )
    for want, plain, found in pairs:
        size, plain, found = np.linalg.norm(want), np.asarray(plain), np.asarray(found)
        assert found.dtype == plain.dtype and found.shape == plain.shape
        assert np.linalg.norm(found - want) <= 2 * np.linalg.norm(plain - want) + 1e-6 * size


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("cell", "parts"), [(gru, 3), (lstm, 4)])
@pytest.mark.parametrize(("steps", "batch", "features", "width"), [(7, 3, 9, 11), (2, 1, 4, 5), (13, 2, 6, 17)])
def test_projections_leave_the_loop(cell, parts, reverse, steps, batch, features, width):
    args = operands(parts, steps, batch, features, width)
    run = lambda *args: cell(*args, reverse=reverse)  # noqa: E731
    closed = flat(run, *args)
    divided, count = loop_fission(closed)
    assert count == 2 and products(closed) == (3, 0) and products(divided) == (1, 2)
    check(run, args, closed, divided)


@pytest.mark.parametrize(("cell", "parts"), [(gru, 3), (lstm, 4)])
def test_gradients_of_inputs_leave_the_backward_loop(cell, parts):
    args = operands(parts, 9, 2, 12, 10)
    run = jax.grad(lambda *args: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(cell(*args))), (0, 1, 2, 3, 4))
    closed = flat(run, *args)
    divided, count = loop_fission(closed)
    assert count >= 2 and products(divided)[0] < products(closed)[0] and products(divided)[1] > products(closed)[1]
    check(run, args, closed, divided)


def test_only_what_is_needed_crosses_into_the_loop():
    """The bias is added ahead; the loop no longer scans over the rows."""
    args = operands(3, 5, 2, 8, 6)
    divided, _ = loop_fission(flat(gru, *args))
    (loop,) = (e for e in divided.jaxpr.eqns if jaxapi.primitive_name(e) == "scan")
    fixed = jaxapi.scan_constants(loop) + jaxapi.scan_carries(loop)
    assert [a.aval.shape for a in loop.invars[fixed:]] == [(5, 2, 18)]
    assert [v.aval.shape for v in loop.outvars[1:]] == [(5, 2, 6)]


def carried(x, u):
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ u + row), None), x[0], x)[0]


def of_other_products(x, u):
    """The input is multiplied by the state's product: no part of it is invariant."""
    return jax.lax.scan(lambda h, row: (jnp.tanh((h.T @ row) @ u), None), u, x)[0]


def alone(x, u):
    """The weights are scanned, too."""
    return jax.lax.scan(lambda h, each: (h + each[0] @ each[1], None), jnp.zeros((2, 6)), (x, jnp.stack([u] * len(x))))[
        0
    ]


@pytest.mark.parametrize("function", [carried, of_other_products, alone])
def test_what_depends_on_the_state_stays(function):
    closed = flat(function, normal(4, 2, 6) if function is not of_other_products else normal(4, 6, 6), normal(6, 6))
    assert loop_fission(closed) == (closed, 0)


def projected(x, w):
    return jax.lax.scan(lambda h, row: (h + jnp.sin(row @ w).sum(), None), jnp.zeros(()), x)[0]


@pytest.mark.parametrize(
    ("x", "w", "cache", "moves"),
    [
        (normal(6, 3, 8), normal(8, 10), 0, True),
        (normal(6, 4, 8), normal(8, 10), 0, False),  # as many rows as half the terms
        (normal(60, 1, 8), normal(8, 300), 0, False),  # stacks of 1200 bytes a step beside 32 bytes and the weights
        (normal(6, 3, 8), normal(8, 10), 4 * 8 * 10 * 4 - 4, True),
        (normal(6, 3, 8), normal(8, 10), 4 * 8 * 10 * 4, False),  # weights that lie in the cache
        (normal(1, 3, 8), normal(8, 10), 0, False),  # one step
    ],
)
def test_limits(x, w, cache, moves):
    closed = flat(projected, x, w)
    divided, count = loop_fission(closed, cache)
    assert count == moves
    check(projected, (x, w), closed, divided)


def test_weights_computed_in_the_loop_from_invariants_alone_move_with_the_product():
    def run(x, w, scale):
        return jax.lax.scan(lambda h, row: (h + jnp.sin(row @ (w * scale)), None), jnp.zeros((3, 10)), x)[0]

    args = normal(6, 3, 8), normal(8, 10), normal(10)
    closed = flat(run, *args)
    divided, count = loop_fission(closed)
    assert count == 1 and products(divided) == (0, 1)
    check(run, args, closed, divided)


def test_infinities_stay_in_their_steps():
    x, w = normal(5, 2, 8), normal(8, 10)
    x[3, 0, 2] = np.inf

    def run(x, w):
        return jax.lax.scan(lambda h, row: (h * 0.5, row @ w + h), jnp.zeros((2, 10)), x)[1]

    divided, count = loop_fission(flat(run, x, w))
    found = np.asarray(jaxapi.eval_closed(divided, x, w)[0])
    assert count == 1 and np.isfinite(found[[0, 1, 2, 4]]).all() and not np.isfinite(found[3, 0]).any()
    assert np.isfinite(found[3, 1]).all()


def test_it_is_a_rewrite_of_every_program_by_the_size_of_the_cache():
    args = operands(3, 6, 2, 40, 40)
    closed = flat(gru, *args)
    for platform, cache, moved in (("gpu", 1 << 20, True), ("cpu", 1 << 20, False), ("cpu", 1 << 10, True)):
        (rewrite,) = (
            r for r in backward_rewrites(platform, divides=False, cache_bytes=cache) if r.name == "projections"
        )
        assert rewrite.gains_alone
        assert (rewrite.apply(closed) is not closed) == moved


def test_optimize_with_large_weights():
    """Weights of 2.3 MB, whatever this machine's cache: results of `optimize` are those of `jax.jit`."""
    args = operands(3, 4, 1, 440, 440)
    found = jcuts.optimize(gru, tune="off")(*args)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(gru)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_single_row_stays_as_precise_as_it_is(rows):
    """XLA multiplies one row of a step in float32, several on tensor cores (TF32), as it does all steps' rows."""
    x, w, u, b, v = (normal(*s) for s in ((6, rows, 40), (40, 120), (40, 120), (120,), (40, 40)))
    divided, count = loop_fission(flat(gru, x, w, u, b, v))
    assert count == 2
    asked = [e.params["precision"] for e in divided.jaxpr.eqns if jaxapi.primitive_name(e) == "dot_general"]
    highest = jax.lax.Precision.HIGHEST
    assert asked == [(highest, highest) if rows == 1 else None] * 2
