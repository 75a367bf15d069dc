"""Norms of results' differences: host and device agree, NaN and infinities are left out, what cannot be on a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.jit.accuracy import result_norms
from jcuts.tune.verify import blocked_numpy


@pytest.fixture(params=["host", "slabs", "device", "resident"])
def norms(request, monkeypatch):
    monkeypatch.setattr(result_norms, "LARGE_RESIDENT", 1 if request.param == "resident" else 10**9)
    monkeypatch.setattr(result_norms, "LARGE", 1 if request.param == "device" else 10**9)
    monkeypatch.setattr(blocked_numpy, "SLAB", 60 if request.param == "slabs" else blocked_numpy.SLAB)
    return result_norms.norms


def arrays(dtype, seed=0, count=3):
    rng = np.random.default_rng(seed)
    found = [rng.standard_normal((37, 11)) for _ in range(count)]
    if np.issubdtype(dtype, np.complexfloating):
        found = [x + 1j * rng.standard_normal(x.shape) for x in found]
    return [jnp.asarray(x.astype(dtype)) for x in found]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.complex64])
def test_norms_by_definition(norms, dtype):
    want, a, b = arrays(dtype)
    wide = np.complex128 if dtype is np.complex64 else np.float64
    w, x, y = (np.asarray(v).astype(wide) for v in (want, a, b))
    found = norms(np.asarray(want), a, b)
    assert found.count == want.size and not found.nan_differs
    assert found.size == pytest.approx(np.linalg.norm(w), rel=1e-12)
    assert found.rms == pytest.approx(np.sqrt(np.mean(np.abs(w) ** 2)), rel=1e-12)
    assert found.errors == pytest.approx([np.linalg.norm(x - w), np.linalg.norm(y - w)], rel=1e-12)
    assert found.largest == pytest.approx([np.abs(x - w).max(), np.abs(y - w).max()], rel=1e-12)


def test_only_elements_that_are_finite_everywhere_count(norms):
    want, a, b = arrays(np.float32)
    a, b = a.at[3, 4].set(np.inf), b.at[5, 6].set(-np.inf)
    found = norms(want, a, b)
    assert found.count == want.size - 2 and np.isfinite(found.errors).all() and not found.nan_differs


def test_nan_on_one_side_differ(norms):
    want, a, _ = arrays(np.float32)
    both = want.at[0, 0].set(np.nan), a.at[0, 0].set(np.nan)
    assert not norms(*both).nan_differs
    assert norms(want, both[1]).nan_differs and norms(both[0], a).nan_differs


def test_float64_references_keep_their_precision(norms):
    want = np.linspace(1.0, 2.0, 400).reshape(20, 20) * (1 + 2.0**-40)
    got = jnp.asarray(want, jnp.float32)
    assert norms(want, got).errors[0] == pytest.approx(np.linalg.norm(np.asarray(got, np.float64) - want), rel=1e-12)


def test_large_magnitudes_do_not_overflow(norms):
    want = jnp.full((64,), 3e38, jnp.float32)
    assert norms(want, want).size == pytest.approx(8 * float(want[0]))


def test_nothing_and_scalars(norms):
    empty = jnp.zeros((0, 3), jnp.float32)
    assert norms(empty, empty) == (0, 0.0, (0.0,), (0.0,), False)
    assert norms(empty, empty).rms == 0.0
    assert norms(np.float32(2.0), jnp.float32(2.5)).errors == (0.5,)


def test_a_full_device_leaves_it_to_the_host(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(result_norms, "LARGE", 1)
    monkeypatch.setattr(result_norms, "LARGE_RESIDENT", 1)
    monkeypatch.setattr(result_norms, "_compiled", full)
    monkeypatch.setattr(result_norms, "_on_device", full)
    want, a, _ = arrays(np.float32)
    assert result_norms.norms(want, a).errors[0] == pytest.approx(float(jnp.linalg.norm(want - a)), rel=1e-5)


def test_groups_on_a_device_are_reduced_by_one_program_per_type(monkeypatch):
    monkeypatch.setattr(result_norms, "LARGE_RESIDENT", 100)
    monkeypatch.setattr(result_norms, "_reductions", {})
    same, few = arrays(np.float32, count=6), [jnp.ones(9), jnp.zeros(9)]
    groups = [same[:2], same[2:4], few, [np.asarray(same[4]), same[5]], same[:3]]
    found = result_norms.all_norms(groups)
    assert len(result_norms._reductions) == 2  # two operands and three; the others are small, or on the host
    for (want, *results), norms in zip(groups, found, strict=True):
        apart = [np.asarray(x, np.float64) - np.asarray(want, np.float64) for x in results]
        assert norms.errors == pytest.approx([np.linalg.norm(x) for x in apart], rel=1e-12)
        assert norms.count == want.size
    before = dict(result_norms._reductions)
    assert result_norms.all_norms(groups) == found and before == result_norms._reductions
    monkeypatch.setattr(result_norms, "MOST_REDUCTIONS", 1)
    other = [jnp.ones((50, 9)), jnp.zeros((50, 9))]
    assert result_norms.all_norms([*groups, other])[: len(found)] == found
    assert len(result_norms._reductions) == 3  # of the last call


def test_float64_results_on_a_device_keep_their_precision(monkeypatch):
    monkeypatch.setattr(result_norms, "LARGE_RESIDENT", 1)
    host = np.linspace(1.0, 2.0, 400) * (1 + 2.0**-40)
    with jax.enable_x64(True):
        want = jnp.asarray(host)
    got = jnp.asarray(host, jnp.float32)
    found = result_norms.norms(want, got)
    assert want.dtype == np.float64 and result_norms._is_resident([want, got])
    assert found.errors[0] == pytest.approx(np.linalg.norm(np.asarray(got, np.float64) - host), rel=1e-12)


@pytest.mark.parametrize(("limit", "stays"), [(10_000, True), (9_000, False), (None, False)])
def test_results_stay_on_a_device_with_room(monkeypatch, limit, stays):
    results = arrays(np.float32)[:2]
    needed = result_norms.ROOM * sum(x.nbytes for x in results)
    stats = limit and {"bytes_limit": limit - 10_000 + needed + 500, "peak_bytes_in_use": 500}

    class Device:
        def memory_stats(self):
            return stats

    device = Device()
    monkeypatch.setattr(result_norms, "_device", lambda _: device)
    found = result_norms.kept(results)
    assert [isinstance(x, jax.Array) for x in found] == [stays, stays]
    assert all((np.asarray(x) == np.asarray(y)).all() for x, y in zip(found, results, strict=True))
