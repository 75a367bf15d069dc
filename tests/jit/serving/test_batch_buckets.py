"""Batches of any size run at the sizes of their buckets, and give the rows that they would give alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jcuts
from jcuts.api import BucketedOptimized
from jcuts.base.errors import UsageError
from jcuts.jit.serving.batch_buckets import MOST_PIECES, BatchBuckets, joined, padded

W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def net(x, w=W):
    return {"y": jnp.tanh(x @ w), "sum": x.sum(axis=1)}


def rows(n):
    return np.linspace(-2, 2, 3 * n, dtype=np.float32).reshape(n, 3)


def bucketed(fn=net, sizes=(2, 4, 8), **options):
    return jcuts.optimize(fn, tune="off", batch_buckets=sizes, **options)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_padding_and_cutting_are_inverse(count, more, start):
    x = np.arange((count + start) * 2).reshape(-1, 2)
    whole = padded(x, start, start + count, count + more)
    assert whole.shape == (count + more, 2)
    assert (whole[count:] == x[-1]).all()
    assert np.array_equal(joined([whole], [count]), x[start:])


@given(st.integers(1, 100), st.sets(st.sampled_from([1, 2, 4, 8, 16, 32]), max_size=6))
def test_neighbours_hold_the_batch(count, ready):
    near = BatchBuckets.of((1, 2, 4, 8, 16, 32)).neighbour(count, ready)
    if near is None:
        assert all(size * MOST_PIECES < count for size in ready)
    else:
        assert near in ready
        assert near * MOST_PIECES >= count


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 16, 21])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_results_are_those_of_the_rows(count, kind):
    f = bucketed()
    found = f(kind(rows(count)))
    expected = net(rows(count))
    for name in ("y", "sum"):
        assert isinstance(found[name], jax.Array)
        assert found[name].shape == expected[name].shape
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_programs_are_as_many_as_sizes():
    f = bucketed()
    for count in range(1, 20):
        f(rows(count))
    told = f.stats()
    assert sorted(row["arguments"][0] for row in told["signatures"]) == [f"float32[{n},3]" for n in (2, 4, 8)]
    assert told["buckets"]["ready"] == [2, 4, 8]
    assert told["buckets"]["rows"] == sum(range(1, 20))
    assert told["buckets"]["neighbours"] == 0
    assert any(row.get("buckets") == told["buckets"] for row in jcuts.stats()["functions"])


def test_no_rows_and_traces_are_not_padded():
    f = bucketed()
    assert f(rows(0))["y"].shape == (0, 4)
    assert jax.jit(lambda x: f(x))(rows(3))["y"].shape == (3, 4)
    assert jax.grad(lambda x: f(x)["sum"].sum())(rows(3)).shape == (3, 3)


def test_batches_in_several_arguments_and_trees():
    def two(w, x, more):
        return x["a"] @ w + more

    f = jcuts.optimize(two, tune="off", batch_buckets=[4], batch_argnums=(1, 2))
    found = f(W, {"a": rows(3)}, np.ones((3, 1), np.float32))
    np.testing.assert_allclose(found, rows(3) @ W + 1, rtol=1e-6)
    with pytest.raises(UsageError, match="the same in all"):
        f(W, {"a": rows(3)}, np.ones((2, 1), np.float32))
    with pytest.raises(UsageError, match="by position"):
        f(W, {"a": rows(3)}, more=np.ones((3, 1), np.float32))


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x: x.sum(), r"shape \(\)"),
        (lambda x: x.T, r"\(3, "),
        (lambda x: (x, jnp.ones(8)), r"\(8,\)"),
        (lambda x: x @ x.T, "row for each row"),
    ],
)
def test_results_without_the_batch_are_refused(fn, why):
    with pytest.raises(UsageError, match=why):
        bucketed(fn)(rows(3))


def test_rows_that_depend_on_each_other_are_found():
    bucketed().check_rows(rows(5))
    with pytest.raises(UsageError, match="change with the others"):
        bucketed(lambda x: x - x.mean(axis=0)).check_rows(rows(5))
    with pytest.raises(UsageError, match="no other rows"):
        bucketed().check_rows(rows(1))


@pytest.mark.parametrize(
    ("sizes", "argnums"), [((), 0), ((0, 2), 0), ((1.5,), 0), (3, 0), ((2,), -1), ((2,), (0, 0)), ((2,), ("x",))]
)
def test_impossible_buckets(sizes, argnums):
    with pytest.raises(UsageError, match="batch_"):
        jcuts.optimize(net, batch_buckets=sizes, batch_argnums=argnums)


def test_batches_without_a_leading_dimension():
    with pytest.raises(UsageError, match="leading dimension"):
        bucketed()(1.0)


def test_donated_arguments_are_refused():
    with pytest.raises(UsageError, match="donate_argnums"):
        jcuts.optimize(net, batch_buckets=[2], donate_argnums=0)


def test_it_is_an_optimized_function_of_its_sizes():
    f = bucketed()
    f(rows(3))
    assert isinstance(f, BucketedOptimized)
    assert (f.__name__, f.__wrapped__) == ("net", net)
    assert f.decision(rows(3)) is f.decision(rows(4)) is not None
    assert "float32[4,4]" in str(f.lower(rows(3)).as_text()) or "4x4" in f.lower(rows(3)).as_text()
    f.clear_cache()
    assert f(rows(3))["y"].shape == (3, 4)
    with pytest.raises(AttributeError):
        f.no_such_method  # noqa: B018


class Model:
    @jcuts.optimize(tune="off", batch_buckets=[2, 4], batch_argnums=1, static_argnums=0)
    def double(self, x):
        return x * 2


def test_methods():
    assert np.array_equal(Model().double(rows(3)), rows(3) * 2)


def test_warm_up_compiles_all_sizes():
    traced = []

    def counted(x):
        traced.append(x.shape)
        return x + 1

    f = bucketed(counted)
    f.warm_up(rows(1))
    traced.clear()
    for count in (1, 2, 3, 8, 11):
        assert np.array_equal(f(rows(count)), rows(count) + 1)
    assert traced == []


def test_saved_programs_are_those_of_all_sizes(tmp_path):
    f = bucketed(sizes=(2, 4))
    f.save(tmp_path / "net.jcuts", rows(3))
    loaded = jcuts.load(tmp_path / "net.jcuts")
    for n in (2, 4):
        np.testing.assert_array_equal(loaded(rows(n))["y"], f(rows(n))["y"])
