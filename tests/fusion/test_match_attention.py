"""Attention as one subset: where it is found, what its program is, and why look-alikes are none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks import workloads
from jcuts.base.errors import Refusal
from jcuts.fusion import greedy
from jcuts.fusion.dag import Dag, is_acyclic_cover
from jcuts.fusion.match_attention import fuse_attention
from jcuts.lower.patterns.attention import Attention, match
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.attention import schedules as attention_schedules
from jcuts.schedule.gpu.attention.tile import shape_of
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

MACHINE = gpu_candidates.GpuMachine(132)


def covered(fn, *args, rules=()):
    """Graph, and cover with attentions, of a function."""
    closed = simplify(inline(jaxapi.closed_jaxpr_of(fn, *args)))
    closed = rewritten(closed, rules).closed if rules else closed
    graph = build_graph(closed.jaxpr)
    return graph, fuse_attention(graph, greedy.group(graph).subsets)


def attentions(cover):
    return [(members, program) for members, program in cover if program.template == "attention"]


def plain(q, k, v, chain=lambda s: s, weigh=lambda w: w, **more):
    scores = chain(jnp.einsum("bqhd,bkhd->bhqk", q, k, **more))
    return jnp.einsum("bhqk,bkhd->bqhd", weigh(jax.nn.softmax(scores, -1)), v)


def operands(*shape, dtype: Any = np.float32):
    return tuple(np.zeros(shape, dtype) for _ in range(3))


@pytest.mark.parametrize("rules", [(), ("siblings",)])
@pytest.mark.parametrize("layers", [1, 3])
def test_every_layer_of_bert_has_one(layers, rules):
    fn, args = workloads.bert(2, length=64, layers=layers, width=128, heads=2, vocabulary=50, closed=True)
    graph, cover = covered(fn, *args, rules=rules)
    found = attentions(cover)
    assert len(found) == layers
    taken = [n for members, _ in cover for n in members]
    assert len(taken) == len(set(taken))
    dag = Dag.of((n.number for n in graph.nodes), graph.edges())
    alone = [frozenset({n}) for n in dag.nodes - set(taken)]
    assert is_acyclic_cover(dag, [*(members for members, _ in cover), *alone])
    for members, program in found:
        prims = [graph.nodes[n].prim for n in sorted(members)]
        assert prims.count("dot_general") == 2 and {"reduce_max", "exp", "reduce_sum", "div"} <= set(prims)
        known = match(program)
        assert isinstance(known, Attention)
        assert (known.batches, known.rows, known.keys, known.score_ops) == (4, 64, 64, 1)
        assert str(known) == "4 x 64 queries, 64 keys of 64, values of 64, float32, 1 operations on a score"
        if rules:  # one product of queries, keys and values: its parts are read where they lie
            assert [b.shape for b in program.inputs] == [(2, 64, 384)]
            assert [side.base.const for side in (known.query, known.key, known.value)] == [0, 128, 256]
        assert [b.shape for b in program.outputs] == [(2, 64, 128)]


def test_encoder():
    fn, args = workloads.encoder(batch=2, length=32, width=64, heads=4, hidden=128)
    ((_, program),) = attentions(covered(fn, *args)[1])
    assert list(gpu_candidates.candidates(program, MACHINE, 4))


def test_masks_of_all_kinds_belong_to_it():
    def causal(s):
        rows, keys = (jax.lax.broadcasted_iota(jnp.int32, s.shape, d) for d in (2, 3))
        return jnp.where(rows >= keys, s * 0.5, -jnp.inf)

    graph, cover = covered(lambda q, k, v: plain(q, k, v, causal), *operands(2, 24, 3, 16))
    ((members, program),) = attentions(cover)
    assert len(members) == len(graph.nodes) and len(program.inputs) == 3
    known = match(program)
    assert isinstance(known, Attention) and known.score_ops >= 3


@pytest.mark.parametrize("more", [{}, {"is_causal": True}, {"mask": np.ones((2, 1, 24, 24), bool)}], ids=str)
@pytest.mark.parametrize(("heads", "dtype"), [(6, "float32"), (3, "float32"), (3, "bfloat16")])
def test_what_jax_makes_of_it(heads, dtype, more):
    """Transposes lie between the scores and their weights; keys that heads share are read once per head."""
    q, k, v = (np.zeros((2, 24, n, 16), jnp.dtype(dtype)) for n in (6, heads, heads))
    _, cover = covered(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **more), q, k, v)
    ((_, program),) = attentions(cover)
    known = match(program)
    assert isinstance(known, Attention) and (known.batches, known.rows, known.keys) == (12, 24, 24)


def test_a_cap_and_a_bias():
    def fn(q, k, v, bias):
        return plain(q, k, v, lambda s: 30 * jnp.tanh(s / 30) + bias)

    ((_, program),) = attentions(covered(fn, *operands(1, 24, 2, 16), np.zeros((2, 24, 24), np.float32))[1])
    known = match(program)
    assert isinstance(known, Attention) and len(program.inputs) == 4


def through_integers(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    weights = jnp.exp((scores - scores.max(-1, keepdims=True)).astype(jnp.int32).astype(jnp.float32))
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def with_a_sink(q, k, v):
    """One more exponential in the sum of a row, as if there were a key whose value is zero."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", weights / (weights.sum(-1) + 1.0)[..., None], v)


@pytest.mark.parametrize(
    "fn",
    [
        through_integers,
        with_a_sink,
        lambda q, k, v: plain(q, k, v, weigh=lambda w: w.astype(jnp.int8).astype(jnp.float32)),
        lambda q, k, v: plain(q, k, v, weigh=lambda w: w * w),
        lambda q, k, v: plain(q, k, v, precision="highest"),
        lambda q, k, v: plain(q[..., :20], k[..., :20], v),
        lambda q, k, v: jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bqhd,bkhd->bhqk", q, k) * 2, v),
        lambda q, k, v: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), 2), v),
    ],
    ids=["integers", "sink", "integer weights", "other weights", "precision", "depth", "no softmax", "other axis"],
)
def test_look_alikes_are_left_as_they_were(fn):
    closed = simplify(inline(jaxapi.closed_jaxpr_of(fn, *operands(2, 24, 3, 32))))
    graph = build_graph(closed.jaxpr)
    before = greedy.group(graph).subsets
    assert fuse_attention(graph, before) == sorted(before, key=lambda item: max(item[0]))


@pytest.mark.parametrize(
    "chain, weigh",
    [
        (lambda s: s.astype(jnp.float64), lambda w: w.astype(jnp.float32)),
        (lambda s: s.astype(jnp.float64) * 0.2, lambda w: w.astype(jnp.float32)),
        (lambda s: (s - s.max(-1, keepdims=True)).astype(jnp.float64), lambda w: w.astype(jnp.float32)),
    ],
    ids=["softmax", "scale", "exponentials"],
)
def test_float64_between_its_products_is_not_narrowed(chain, weigh):
    with jax.enable_x64(True):
        _, cover = covered(lambda q, k, v: plain(q, k, v, chain=chain, weigh=weigh), *operands(2, 64, 4, 32))
        assert not attentions(cover)
        _, cover = covered(plain, *operands(2, 64, 4, 32, dtype=np.float64))
        assert not attentions(cover)


def test_weights_that_are_a_result_keep_the_products_apart():
    def fn(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), weights

    assert not attentions(covered(fn, *operands(2, 24, 3, 32))[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "length"), [(1, 384), (8, 384), (8, 1024), (1, 37)])
def test_schedules(batch, length, dtype):
    arrays = operands(batch, length, 12, 64, dtype=jnp.dtype(dtype))
    ((_, program),) = attentions(covered(plain, *arrays)[1])
    found = gpu_candidates.candidates(program, MACHINE, 8)
    assert len(found) >= 4 and all(0 < score <= 1 for _, score in found)
    known = match(program)
    assert isinstance(known, Attention)
    for candidate, _ in found:
        shape = shape_of(candidate)
        assert not isinstance(shape, Refusal) and shape.fits
        cycles = attention_schedules.cycles(shape, candidate, MACHINE)
        assert cycles >= attention_schedules.bound(known, program, MACHINE)
        assert candidate.renamed("x").digest == candidate.digest and shape.shared <= 227 << 10


def test_lines_of_shared_memory_meet_no_bank_twice():
    """Eight lines of 16 bytes read as a matrix; of float32 values pairs of every second line."""
    for depth in range(8, 129, 8):
        for dtype in ("float32", "bfloat16"):
            arrays = operands(1, 32, 2, depth, dtype=jnp.dtype(dtype))
            ((_, program),) = attentions(covered(plain, *arrays)[1])
            for candidate, _ in gpu_candidates.candidates(program, MACHINE, 1):
                shape = shape_of(candidate)
                assert not isinstance(shape, Refusal)
                key, value = (shape.pitch(side) for side in (shape.attention.key, shape.attention.value))
                for pitch in (key,) if dtype == "float32" else (key, value):
                    assert len({(line * pitch // 4 + word) % 32 for line in range(8) for word in range(4)}) == 32
                if dtype == "float32":  # half a warp at once
                    lanes = [(lane // 4, lane % 4) for lane in range(16)]
                    words = [(2 * low * value // 4 + 2 * high + k) % 32 for high, low in lanes for k in range(2)]
                    assert len(set(words)) == 32
