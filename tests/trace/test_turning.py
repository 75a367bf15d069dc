"""Weights that are arguments: joined, turned and rounded once per call, for kernels of rounded weights."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts import forms, levels
from jcuts.base.settings import Settings
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.trace.rewrite import rewritten
from jcuts.trace.rounding import rounded_values
from jcuts.trace.simplify import simplify
from jcuts.trace.turning import LEAST_ROWS
from jcuts.tune.widen import evaluate
from tests import ptx_tensor
from tests.ops.cases import conv

RNG = np.random.default_rng(5)


def normal(*shape):
    return np.asarray(RNG.standard_normal(shape), np.float32)


def flat(function, *arguments):
    return simplify(inline(jax.make_jaxpr(function)(*arguments)))


def names(closed):
    return [jaxapi.primitive_name(e) for e in closed.jaxpr.eqns]


def attention(x, q, k, v, bq, bk, bv):
    return (x @ q + bq).reshape(2, -1, 4, 32), jnp.tanh(x @ k + bk), x @ v + bv


WEIGHTS = {
    "dot": (lambda x, w: x @ w, normal(4096, 64), [normal(64, 72)], 1),
    "along terms": (lambda x, w: x @ w.T, normal(4096, 64), [normal(72, 64)], 1),
    "a layer of many": (lambda x, w: x @ w[1], normal(4096, 64), [normal(3, 64, 72)], 1),
    "twice": (lambda x, w: (x @ w, (x + 1) @ w), normal(4096, 64), [normal(64, 72)], 1),
    "two dimensions of terms": (
        lambda x, w: jnp.einsum("mhd,hdn->mn", x, w), normal(32768, 3, 32), [normal(3, 32, 72)], 1,
    ),
    "convolution": (conv, normal(8, 32, 32, 32), [normal(3, 3, 32, 72)], 1),
    "joined with biases": (
        attention, normal(2, 1024, 64), [*(normal(64, 128) for _ in "qkv"), *(normal(128) for _ in "qkv")], 1,
    ),
    "joined without": (
        lambda x, a, b: (x @ a, jnp.tanh(x @ b)), normal(2048, 64), [normal(64, 96), normal(64, 40)], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_arguments_are_turned_and_rounded_once(name):
    function, x, weights, count = WEIGHTS[name]
    closed = flat(function, x, *weights)
    new = rewritten(closed, ("turns",))
    assert new.counts == {"turns": count}
    jaxapi.check(new.closed)
    assert names(new.closed).count("reduce_precision") == count
    assert rewritten(new.closed, ("turns",)).counts == {}
    assert len(rounded_values(new.closed)) == count and not rounded_values(closed)
    with jax.enable_x64(True):
        wide = [np.asarray(a) for a in evaluate(closed, [jnp.asarray(a, jnp.float64) for a in (x, *weights)])]
    rounded = [ptx_tensor.round_tf32(w) if w.ndim > 1 else w for w in weights]
    got, wanted = jaxapi.eval_closed(new.closed, x, *weights), jaxapi.eval_closed(closed, x, *rounded)
    for mine, same, exact in zip(got, wanted, wide, strict=True):
        assert mine.shape == exact.shape and mine.dtype == np.float32
        np.testing.assert_allclose(mine, same, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
        assert np.linalg.norm(mine - exact) < 2.0**-11 * np.linalg.norm(exact)


def test_siblings_are_one_product_with_one_bias():
    function, x, weights, _ = WEIGHTS["joined with biases"]
    new = rewritten(flat(function, x, *weights), ("turns",)).closed
    found = names(new)
    assert found.count("dot_general") == 1 and found.count("slice") == 3
    assert found.count("add") == 1 and found.count("concatenate") == 2


LEFT = {
    "constant": (lambda x: x @ jnp.ones((64, 72)), normal(4096, 64)),
    "computed": (lambda x, w: x @ jnp.tanh(w), normal(4096, 64), normal(64, 72)),
    "highest": (lambda x, w: jnp.dot(x, w, precision="highest"), normal(4096, 64), normal(64, 72)),
    "few rows": (lambda x, w: x @ w, normal(LEAST_ROWS - 1, 512), normal(512, 512)),
    "a loop": (
        lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3), normal(8192, 128),
        normal(128, 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    function, *arguments = LEFT[name]
    assert rewritten(flat(function, *arguments), ("turns",)).counts == {}


def test_products_know_that_their_weights_are_rounded():
    """What rounds stands apart from the product, which then has kernels of rounded weights alone."""
    function, x, weights, _ = WEIGHTS["dot"]
    new = rewritten(flat(lambda x, w: jnp.tanh(x @ w), x, *weights), ("turns",)).closed
    level = levels.group(new, Settings(), levels.Fuel(), "cuda")
    (product,) = [s for s in level.subsets if s.program.template == "contraction"]
    assert product.rounded == (1,) and [b.tf32 for b in product.program.inputs] == [False, True]
    assert {level.graph.nodes[m].prim for m in product.members} == {"dot_general", "tanh"}


def test_one_form_more_where_there_are_warp_groups(monkeypatch):
    closed = jaxapi.closed_jaxpr_of(lambda x, w: x @ w, normal(4096, 256), normal(256, 128))
    for capability, wanted in (((9, 0), ["None", "plain/anchored", "plain/absorbing", "turns/anchored"]),
                               ((8, 0), ["None", "plain/anchored", "plain/absorbing"])):  # fmt: skip
        machine = types.SimpleNamespace(capability=capability)
        monkeypatch.setattr(forms.gpus, "machine", lambda machine=machine: machine)
        assert [str(form) for form in forms.worth_planning(closed, "cuda")] == wanted
    assert forms.is_known("jcuts/turns/anchored:graphs", "cuda", False)
