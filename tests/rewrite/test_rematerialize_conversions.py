"""Widening conversions that every kernel makes for itself: which are copied, and what passes through memory then."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.fusion import greedy
from jcuts.fusion.move_epilogue import fuse_prologues, split_prologues
from jcuts.fusion.sink_outputs import sink_outputs, traffic
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.backward.registry import backward_rewrites
from jcuts.rewrite.backward.rematerialize_conversions import rematerialize_conversions
from jcuts.rewrite.backward.separate_sums import LEAST_POINTS
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(59)
IMAGE = (3, 53, 59, 16)
assert IMAGE[0] * IMAGE[1] * IMAGE[2] > LEAST_POINTS
MACHINE = gpu_candidates.GpuMachine(132)


def values(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def norm(x, scale, offset):
    """A batch norm in float32 around 16 bits, as mixed-precision policies have it."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, (0, 1, 2))
    variance = jnp.mean(jnp.square(wide - mean), (0, 1, 2))
    factor = jax.lax.rsqrt(variance + 1e-3) * scale
    return jax.nn.relu((wide * factor + (offset - mean * factor)).astype(x.dtype))


def network(weights, x):
    (w, s, b), (v, t, c) = weights
    x = norm(jnp.einsum("nhwc,cd->nhwd", x, w), s, b)
    x = norm(jnp.einsum("nhwc,cd->nhwd", x, v), t, c)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def arguments(dtype=jnp.bfloat16):
    width = IMAGE[-1]
    layers = [
        (values(width, width, dtype=dtype), values(width, dtype=jnp.float32), values(width, dtype=jnp.float32))
        for _ in range(2)
    ]
    return layers, values(*IMAGE, dtype=dtype)


def conversions(closed):
    return [
        e
        for e in closed.jaxpr.eqns
        if jaxapi.primitive_name(e) == "convert_element_type" and str(e.outvars[0].aval.dtype) == "float32"
    ]


def same_values(new, closed, *args):
    leaves = jax.tree.leaves(args)
    for got, want in zip(jaxapi.eval_closed(new, *leaves), jaxapi.eval_closed(closed, *leaves), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_statistics_share_a_conversion_and_what_reads_them_has_its_own():
    args = values(*IMAGE), values(IMAGE[-1], dtype=jnp.float32), values(IMAGE[-1], dtype=jnp.float32)
    closed = flat(norm, *args)
    new, count = rematerialize_conversions(closed)
    jaxapi.check(new)
    assert count == 1 and len(conversions(new)) == len(conversions(closed)) + 1
    first, second = (e for e in conversions(new) if e.outvars[0].aval.shape == IMAGE)
    assert first.invars == second.invars
    readers = [
        [jaxapi.primitive_name(e) for e in new.jaxpr.eqns if any(a is one.outvars[0] for a in e.invars)]
        for one in (first, second)
    ]
    assert sorted(map(sorted, readers)) == [["mul"], ["reduce_sum", "sub"]]
    same_values(new, closed, *args)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (norm, (values(*IMAGE, dtype=jnp.float32), *(values(IMAGE[-1], dtype=jnp.float32) for _ in range(2)))),
        (lambda x: jax.nn.softmax(x.astype(jnp.float32)), (values(512, 512),)),  # rows are read once
        (lambda x: (x.astype(jnp.float32), x.astype(jnp.float32) * 2), (values(512, 512),)),  # a result
        (norm, (values(3, 5, 7, 16), *(values(16, dtype=jnp.float32) for _ in range(2)))),  # small
    ],
)
def test_others_stay(function, args):
    closed = flat(function, *args)
    new, count = rematerialize_conversions(closed)
    assert count == 0 and new is closed


def rewritten(closed, *, without=()):
    for rewrite in backward_rewrites("cuda", divides=False):
        closed = closed if rewrite.name in without else rewrite.apply(closed)
    return closed


def regions_of(closed):
    graph = build_graph(closed.jaxpr)
    has_form = lambda program: bool(gpu_candidates.candidates(program, MACHINE, 1))  # noqa: E731
    cover = greedy.group(graph, column_sums=True).subsets
    for move in (split_prologues, fuse_prologues, sink_outputs):
        cover = move(graph, cover, has_form)
    return graph, cover


def test_a_mixed_precision_step_passes_16_bits_between_regions():
    args = arguments()
    closed = flat(jax.value_and_grad(network), *args)
    new, other = rewritten(closed), rewritten(closed, without=("conversions",))
    jaxapi.check(new)
    same_values(new, other, *args)
    graph, cover = regions_of(new)
    large = [
        graph.tensors[tensor].type
        for members, _ in cover
        for tensor in graph.subset_outputs(members)
        if graph.tensors[tensor].type.size == np.prod(IMAGE)
    ]
    assert large and all(kind.dtype in ("bf16", "bfloat16", "bool") for kind in large), large
    before, old = regions_of(other)
    moved, was = traffic(graph, *(m for m, _ in cover)), traffic(before, *(m for m, _ in old))
    assert moved < 0.8 * was


def test_in_float32_nothing_changes():
    args = arguments(jnp.float32)
    closed = flat(jax.value_and_grad(network), *args)
    new, count = rematerialize_conversions(closed)
    assert count == 0 and new is closed
