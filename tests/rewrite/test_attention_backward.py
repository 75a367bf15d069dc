"""Recomputed weights in the backward pass of attention: what is recognised, what it means, what becomes of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks import workloads
from jcuts.fusion import greedy
from jcuts.fusion.dag import Dag, is_acyclic_cover
from jcuts.fusion.match_attention import fuse_attention
from jcuts.fusion.match_attention_backward import fuse_attention_backward
from jcuts.lower.patterns.attention import Attention, match
from jcuts.lower.patterns.attention_backward import AttentionBackward, match_backward
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.attention import backward as attention_backward
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled

RULE = ("recomputes",)
B, Q, K, H, D = 2, 21, 37, 3, 16
MASK = np.random.default_rng(1).random((Q, K)) < 0.8


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def operands(dtype: Any = np.float32):
    shapes = ((B, Q, H, D), (B, K, H, D), (B, K, H, D), (B, Q, H, D))
    return [normal(*s, seed=n).astype(jnp.dtype(dtype)) for n, s in enumerate(shapes)]


def _mixed(scores, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(v.dtype), v)


def plain(q, k, v):
    return _mixed(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25, v)


def scaled_before(q, k, v):
    return _mixed(jnp.einsum("bqhd,bkhd->bhqk", q * 0.25, k), v)


def masked(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    return _mixed(jnp.where(MASK[None, None], scores, -1e9), v)


def biased(q, k, v):
    bias = jnp.where(MASK, 0.0, -1e9).astype(q.dtype)
    return _mixed(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25 + bias, v)


def heads_first(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return jnp.matmul(jax.nn.softmax(jnp.matmul(q, k.transpose(0, 1, 3, 2)) * 0.25, -1), v).transpose(0, 2, 1, 3)


def of_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@jax.custom_jvp
def _softmax(x):
    powers = jnp.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    y = _softmax(*primals)
    return y, y * (tangents[0] - (y * tangents[0]).sum(-1, keepdims=True))


def other_gradient(q, k, v):
    """The softmax whose gradient JAX writes by a rule of its own."""
    return jnp.einsum("bhqk,bkhd->bqhd", _softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25), v)


TAKEN = [plain, scaled_before, masked, biased, heads_first, of_jax, other_gradient]


def step(fn):
    """Attention and its gradients, as autodiff writes them; what comes in between depends on the result."""

    def run(q, k, v, grad):
        out, backward = jax.vjp(fn, q, k, v)
        return out, *backward(grad * jnp.tanh(out))

    return run


def flat(fn, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(fn, *args)))


def regions(closed):
    graph = build_graph(closed.jaxpr)
    cover = fuse_attention_backward(graph, fuse_attention(graph, greedy.group(graph).subsets))
    dag = Dag.of((n.number for n in graph.nodes), graph.edges())
    rest = [frozenset({n}) for n in dag.nodes - {n for members, _ in cover for n in members}]
    assert is_acyclic_cover(dag, [*(members for members, _ in cover), *rest])
    return [match(p) for _, p in cover if p.template == "attention"], [
        match_backward(p) for _, p in cover if p.template == "attention_backward"
    ]


def largest_error(got, want):
    pairs = [(np.asarray(g, np.float64), np.asarray(w, np.float64)) for g, w in zip(got, want, strict=True)]
    return max(float(np.abs(g - w).max() / np.sqrt(np.mean(np.square(w)))) for g, w in pairs)


@pytest.mark.parametrize("fn", TAKEN, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_step_becomes_three_kernels_and_means_the_same(fn, dtype, monkeypatch):
    monkeypatch.setattr(attention_backward, "TF32_MANTISSA", 23)  # products of a CPU round nothing either
    args = operands(dtype)
    closed = flat(step(fn), *args)
    new = rewritten(closed, RULE)
    assert new.counts == {"recomputes": 1}
    jaxapi.check(new.closed)
    forward, backward = regions(new.closed)
    assert [isinstance(found, Attention) for found in forward] == [True]
    assert sorted(len(found.results) for found in backward if isinstance(found, AttentionBackward)) == [1, 2]
    wide = [np.asarray(a, np.float32) for a in args]
    exact = compiled(flat(step(fn), *wide), *wide)
    limit = max(1e-4, 2 * largest_error(compiled(closed, *args), exact))
    assert largest_error(compiled(new.closed, *args), exact) < limit
    assert rewritten(new.closed, RULE).counts == {}


def _bias_gradient(q, k, v, grad, bias):
    out, backward = jax.vjp(lambda q, b: _mixed(jnp.einsum("bqhd,bkhd->bhqk", q, k) + b, v), q, bias)
    return out, *backward(grad)


def _weights_too(q, k, v, grad):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    out, backward = jax.vjp(lambda *x: _mixed(jnp.einsum("bqhd,bkhd->bhqk", x[0], x[1]), x[2]), q, k, v)
    return weights, out, *backward(grad)


def _shared_keys(q, k, v, grad):
    def fn(q, k, v):
        scores = jnp.einsum("bqhd,bkd->bhqk", q, k)
        return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(scores, -1), v)

    out, backward = jax.vjp(fn, q, k[:, :, 0], v[:, :, 0])
    return out, *backward(grad)


def _capped(q, k, v, grad):
    def fn(q, k, v):
        return _mixed(jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)

    out, backward = jax.vjp(fn, q, k, v)
    return out, *backward(grad)


def _exact(q, k, v, grad):
    with jax.default_matmul_precision("highest"):
        return step(plain)(q, k, v, grad)


REFUSED: dict[str, Any] = {
    "precision": (_exact, ()),
    "bias": (_bias_gradient, (normal(Q, K),)),
    "weights": (_weights_too, ()),
    "shared keys": (_shared_keys, ()),
    "soft cap": (_capped, ()),
    "forward": (lambda q, k, v, grad: plain(q, k, v) + grad, ()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_weights_for_more_is_left_as_it_is(name):
    fn, more = REFUSED[name]
    args = (*operands(), *more)
    closed = flat(fn, *args)
    assert rewritten(closed, RULE).counts == {}


def test_layers_of_gpt_are_recomputed():
    program = workloads.WORKLOADS["GPT_training"].build(2, dtype="float32", tiny=True)
    closed = flat(program.function, *program.arguments)
    new = rewritten(closed, RULE)
    assert new.counts == {"recomputes": 1}
    forward, backward = regions(new.closed)
    assert len(forward) == 1 and len(backward) == 2 and all(isinstance(f, AttentionBackward) for f in backward)
    assert isinstance(forward[0], Attention) and forward[0].statistics is not None


@pytest.mark.parametrize("fn", TAKEN, ids=lambda fn: fn.__name__)
def test_copies_stay_apart_whatever_is_rewritten_after_them(fn):
    new = rewritten(flat(step(fn), *operands()), RULE).closed
    for _ in range(3):  # once after every further rewrite that applies
        new = simplify(new)
    forward, backward = regions(new)
    assert [isinstance(found, Attention) for found in forward] == [True]
    assert sorted(len(found.results) for found in backward if isinstance(found, AttentionBackward)) == [1, 2]
