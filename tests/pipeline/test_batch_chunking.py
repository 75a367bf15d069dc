"""Pieces along the batch in the pipeline: taken where caches are too small, right in every case."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from jcuts.arch.cpu import CpuArch
from jcuts.base import knobs
from jcuts.pipeline import batch_chunking
from jcuts.pipeline import passes as pipeline_passes
from jcuts.rewrite.chunk_batch import Batch, find_batch_dimension
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

SMALL = CpuArch(
    name="small",
    machine="x86_64",
    cores=2,
    frequency=2e9,
    simd_bits=256,
    fma_ports=2,
    alu_ports=2,
    load_ports=2,
    store_ports=1,
    vector_registers=16,
    line=64,
    l1d=2048,
    l2=8192,
    l3=65536,
    bandwidth={"l2": 100e9, "l3": 60e9, "dram": 1e9},
)


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


KERNELS = [random(1, 1, 16, 16, seed=k) * 0.2 for k in range(4)]
X = random(8, 12, 12, 16)


def network(x):
    for kernel in KERNELS:
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    return x.mean((1, 2)) @ random(16, 10)


@pytest.fixture
def small_caches(monkeypatch):
    monkeypatch.setattr("jcuts.schedule.cpu.time_estimate.host_arch", lambda: SMALL)
    monkeypatch.setattr(batch_chunking, "host_arch", lambda: SMALL)
    pipeline_passes.forget()
    yield
    pipeline_passes.forget()


def batch_of(fn, *arguments) -> Batch:
    found = find_batch_dimension(simplify(inline(jax.make_jaxpr(fn)(*arguments))))
    assert isinstance(found, Batch)
    return found


def test_sizes():
    assert batch_chunking.sizes_of(1) == [1]
    assert batch_chunking.sizes_of(7) == [1, 7]
    assert batch_chunking.sizes_of(8) == [1, 2, 4, 8]
    assert batch_chunking.sizes_of(256) == [1, 2, 4, 256]


def test_pieces_where_caches_are_too_small(small_caches):
    plan = batch_chunking.plan(batch_of(network, X))
    assert plan is not None and plan.seconds < batch_chunking.GAIN * plan.whole_seconds
    assert plan.segments[0].size < 8
    assert plan.segments[0].begin == 0
    assert all(a.end == b.begin for a, b in itertools.pairwise(plan.segments))
    assert "in pieces" in str(plan)


def test_no_pieces_where_everything_fits():
    assert batch_chunking.plan(batch_of(network, X[:2])) is None


def test_the_plan_is_the_best_of_all(small_caches, monkeypatch):
    """Dynamic programming against every set of cuts and sizes."""
    monkeypatch.setattr(batch_chunking, "LOOP_SECONDS", 1e-4)
    batch = batch_of(network, X)
    plan = batch_chunking.plan(batch)
    assert plan is not None
    costs = {size: batch_chunking._Costs(batch, size) for size in (1, 2, 4, 8)}
    end = len(batch.eqns)
    cuts = [p for p in costs[8].cuts if all(p in c.cuts for c in costs.values()) and 0 < p < end]
    cuts = [p for p in cuts if len(batch.crossing(p)) <= batch_chunking.MOST_CROSSING]
    best = np.inf
    for chosen in itertools.chain.from_iterable(itertools.combinations(cuts, n) for n in range(4)):
        ends = [0, *chosen, end]
        for sizes in itertools.product(costs, repeat=len(ends) - 1):
            total = 0.0
            for a, b, size in zip(ends[:-1], ends[1:], sizes, strict=True):
                turns = 8 // size
                total += turns * costs[size].between(a, b)
                if turns > 1:
                    moved = sum(jaxapi.nbytes(v) for v in (*batch.crossing(a), *batch.crossing(b)))
                    total += turns * 1e-4 + batch_chunking.cached_traffic_seconds(2 * moved)
            best = min(best, total)
    assert plan.seconds <= best * (1 + 1e-12)


def test_end_to_end_with_estimated_pieces(small_caches):
    fast = jcuts.optimize(network, mode="fusion", tune="off")
    want = np.asarray(jax.jit(network)(X))
    np.testing.assert_allclose(np.asarray(fast(X)), want, rtol=2e-4, atol=2e-5)
    assert any("in pieces" in note for note in fast.explain(X).notes)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_forced_pieces(size):
    pipeline_passes.forget()
    with knobs.scope(chunk=size):
        fast = jcuts.optimize(network, mode="fusion", tune="off")
        got = np.asarray(fast(X))
        notes = fast.explain(X).notes
    np.testing.assert_allclose(got, np.asarray(jax.jit(network)(X)), rtol=2e-4, atol=2e-5)
    assert any("in pieces" in note for note in notes) == (size in (1, 2))
    pipeline_passes.forget()


def test_gradients_do_not_see_the_pieces():
    pipeline_passes.forget()
    with knobs.scope(chunk=2):
        fast = jcuts.optimize(network, mode="fusion", tune="off")
        got = jax.grad(lambda x: fast(x).sum())(X)
    want = jax.grad(lambda x: network(x).sum())(X)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-3, atol=2e-4)
    pipeline_passes.forget()


def test_never(small_caches):
    with knobs.scope(chunk=0):
        fast = jcuts.optimize(network, mode="fusion", tune="off")
        assert not any("in pieces" in note for note in fast.explain(jnp.asarray(X)).notes)
