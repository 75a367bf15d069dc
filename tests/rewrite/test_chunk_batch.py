"""The batch dimension of a program, and the program in pieces along it: same results up to rounding."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.rewrite.chunk_batch import Batch, Segment, find_batch_dimension
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


W = random(12, 12)
K = random(3, 3, 4, 5)


def dense(x):
    return jax.nn.softmax(jnp.tanh(x @ W) @ W + 1)


def convolution(x):
    y = lax.conv_general_dilated(x, K * 2, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return y.mean((1, 2)).reshape(x.shape[0], -1), y.sum(-1)


def second_dimension(x):
    return jnp.exp(W @ x.T).T * 2, W @ x.T


def weights_as_arguments(x, w):
    scale = jnp.exp(w).sum(0)
    return jnp.sin(x @ w) * scale, scale


def mixing_at_the_end(x):
    y = jnp.tanh(x @ W)
    return y - y.mean(0), y.sum()


def late_use(x):
    a = jnp.tanh(x @ W)
    b = jnp.sin(a @ W)
    return b @ W + a, x * 2


CASES = {
    "dense": (dense, (random(6, 12),)),
    "convolution": (convolution, (random(6, 7, 9, 4),)),
    "second dimension": (second_dimension, (random(6, 12),)),
    "weights": (weights_as_arguments, (random(6, 12), random(12, 12))),
    "mixing": (mixing_at_the_end, (random(6, 12),)),
    "late use": (late_use, (random(6, 12),)),
}


def flat(fn, *arguments):
    return simplify(inline(jax.make_jaxpr(fn)(*arguments)))


def batch_of(fn, *arguments) -> Batch:
    found = find_batch_dimension(flat(fn, *arguments))
    assert isinstance(found, Batch), found
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_pieces_give_the_same_results(name, size):
    fn, arguments = CASES[name]
    batch = batch_of(fn, *arguments)
    assert batch.extent == 6
    count = len(batch.eqns)
    want = [np.asarray(v) for v in jax.tree.leaves(jax.jit(fn)(*arguments))]
    for cuts in ([0, count], [0, count // 2, count], [0, 1, count // 3 + 1, count]):
        ends = sorted(set(cuts))
        segments = [Segment(a, b, size) for a, b in itertools.pairwise(ends)]
        closed = batch.looped(segments)
        jaxapi.check(closed)
        got = jax.jit(lambda *a, closed=closed: jaxapi.eval_closed(closed, *a))(*arguments)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-5)
        loops = sum(jaxapi.primitive_name(e) in ("scan", "while") for e in closed.jaxpr.eqns)
        assert loops == (0 if size == 6 else len(segments))


def test_what_mixes_positions_comes_after():
    batch = batch_of(*CASES["mixing"][:1], *CASES["mixing"][1])
    names = [jaxapi.primitive_name(e) for e in batch.eqns]
    assert names[:2] == ["dot_general", "tanh"]
    assert "reduce_sum" in [jaxapi.primitive_name(e) for e in batch.after]


def test_weights_are_computed_once():
    batch = batch_of(*CASES["weights"][:1], *CASES["weights"][1])
    assert [jaxapi.primitive_name(e) for e in batch.before][:2] == ["exp", "reduce_sum"]
    closed = batch.looped([Segment(0, len(batch.eqns), 2)])
    (loop,) = [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "scan"]
    ((_, _, body),) = jaxapi.inner_jaxprs(loop)
    assert "reduce_sum" not in [jaxapi.primitive_name(e) for e in body.jaxpr.eqns]


def test_values_that_cross_a_cut():
    batch = batch_of(*CASES["late use"][:1], *CASES["late use"][1])
    names = [jaxapi.primitive_name(e) for e in batch.eqns]
    after_tanh = names.index("tanh") + 1
    assert [v for e in batch.eqns[:after_tanh] for v in e.outvars if v in batch.crossing(after_tanh)] == [
        batch.eqns[after_tanh - 1].outvars[0]
    ]
    assert len(batch.crossing(names.index("sin") + 1)) == 2
    assert batch.crossing(0) == []
    assert len(batch.crossing(len(names))) == 2


@pytest.mark.parametrize(
    ("fn", "arguments"),
    [
        (lambda x: x.sum(0), (random(5),)),
        (lambda x: lax.sort(x, dimension=0), (random(4),)),
        (lambda: jnp.arange(4.0) * 2, ()),
        (lambda x: x * 2, (random(1, 1),)),
    ],
)
def test_no_batch(fn, arguments):
    assert isinstance(find_batch_dimension(flat(fn, *arguments)), str)


def test_effects_forbid_pieces():
    def fn(x):
        jax.debug.print("{}", x[0, 0])
        return x * 2

    assert "effects" in str(find_batch_dimension(inline(jax.make_jaxpr(fn)(random(4, 4)))))


def test_a_dimension_used_twice_in_one_value_is_no_batch():
    def outer(x):
        return x[:, None] * x[None, :]

    found = find_batch_dimension(flat(outer, random(6)))
    if isinstance(found, Batch):
        assert all(jaxapi.primitive_name(e) == "broadcast_in_dim" for e in found.eqns)
