"""Rounding inside sums: numbers of terms, sizes of errors by hand, partial sums that overflow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.trace import jaxapi
from jcuts.tune.verify import sum_rounding
from jcuts.tune.verify.float64_eval import evaluate

pytestmark = pytest.mark.usefixtures("xla_as_shipped")

MOST = float(np.finfo(np.float32).max)
F32 = np.float32


def last(function, *args):
    return jaxapi.closed_jaxpr_of(function, *args).jaxpr.eqns[-1]


def runs(function, *args, amplitude=4.0, count=24):
    """Results of ``count`` runs with simulated rounding."""
    closed = jaxapi.closed_jaxpr_of(function, *args)
    with jax.enable_x64(True):
        wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in map(np.asarray, args)]
        return np.stack([np.asarray(evaluate(closed, wide, noise=(n, amplitude))[0]) for n in range(count)])


def convolved(groups, shape, taps):
    x, w = np.zeros(shape, F32), np.zeros(taps, F32)
    return last(
        lambda a, b: lax.conv_general_dilated(
            a, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        ),
        x,
        w,
    )


ONE = np.ones((6, 8), F32)
TERMS = {
    "elementwise": (lambda: last(lambda x: x * 2, ONE), 1),
    "no operands": (lambda: last(lambda: lax.iota(F32, 4)), 1),
    "product": (lambda: last(lambda x: x @ np.ones((8, 300), F32), ONE), 8),
    "convolution": (lambda: convolved(1, (1, 9, 9, 5), (3, 3, 5, 7)), 45),
    "depthwise": (lambda: convolved(5, (1, 9, 9, 5), (3, 3, 1, 5)), 9),
    "sum": (lambda: last(lambda x: lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None), ONE), 48),
    "window": (lambda: last(lambda x: lax.reduce_window(x, F32(0), lax.add, (2, 3), (1, 1), "SAME"), ONE), 6),
    "running": (lambda: last(lambda x: lax.cumsum(x, 1), ONE), 8),
    "scattered": (lambda: last(lambda x: x.at[np.zeros(5, np.int32)].add(F32(1)), ONE), 6),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms(name):
    eqn, count = TERMS[name]
    assert sum_rounding.terms(eqn()) == count


def test_a_sum_that_cancels_is_as_uncertain_as_its_terms():
    x = np.array([[1000.0, 0.5, -1000.0, 0.25]], F32)
    got = runs(lambda v: lax.reduce_sum_p.bind(v, axes=(1,), out_sharding=None), x)
    error = 4.0 * float(np.finfo(F32).eps) * 2000.75
    assert 0 < np.abs(got - 0.75).max() <= error
    assert np.abs(got - 0.75).max() > 0.2 * error


def test_a_running_sum_forgets_nothing_of_its_largest_value():
    x = np.array([1e6, -1e6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], F32)
    got = runs(lambda v: lax.cumsum(v, 0), x)
    exact = np.cumsum(x.astype(np.float64))
    error = 4.0 * float(np.finfo(F32).eps) * 3.0 * 1e6
    assert 0.2 * error < np.abs(got - exact)[:, 1:].max() <= error
    backwards = runs(lambda v: lax.cumsum(v, 0, reverse=True), x)
    assert np.abs(backwards - np.cumsum(x[::-1].astype(np.float64))[::-1])[:, 2:].max() <= error / 1e5


def test_a_sum_of_zeros_stays_exact_with_its_sign():
    x = np.zeros((2, 5), F32)
    got = runs(lambda v: v @ np.ones((5, 3), F32), x)
    assert (got == 0).all() and not np.signbit(got).any()


def test_partial_sums_that_may_overflow_do_in_some_runs():
    row = np.array([[3e38, 2e38, -3e38]], F32)
    got = runs(lambda v: v @ np.ones((3, 1), F32), row)
    assert np.isposinf(got).any() and np.isfinite(got).any()
    assert not np.isneginf(got).any() and not np.isnan(got).any()  # no order of -3e38 alone is beyond -FLT_MAX
    both = runs(lambda v: v @ np.ones((4, 1), F32), np.array([[3e38, 2e38, -3e38, -2e38]], F32))
    assert np.isposinf(both).any() and np.isneginf(both).any() and np.isnan(both).any()
    small = runs(lambda v: v @ np.ones((3, 1), F32), row / F32(2))
    assert np.isfinite(small).all()


def test_finite_terms_of_an_infinite_sum_may_overflow_the_other_way():
    """-inf, or NaN where +inf is reached before; never +inf, and -inf alone where no order overflows."""
    row = np.array([[3e38, -np.inf, 2e38]], F32)
    got = runs(lambda v: lax.reduce_sum_p.bind(v, axes=(1,), out_sharding=None), row)
    assert np.isneginf(got).any() and np.isnan(got).any() and (np.isneginf(got) | np.isnan(got)).all()
    small = runs(lambda v: lax.reduce_sum_p.bind(v, axes=(1,), out_sharding=None), row / F32(2))
    assert np.isneginf(small).all()
    other = runs(lambda v: v @ np.ones((3, 1), F32), -row)
    assert np.isposinf(other).any() and np.isnan(other).any() and (np.isposinf(other) | np.isnan(other)).all()
    both = runs(lambda v: lax.cumsum(v, 1), np.array([[np.inf, 1.0, -np.inf, 2.0]], F32))
    assert np.isposinf(both[:, 0, :2]).all() and np.isnan(both[:, 0, 2:]).all()


def test_nothing_overflows_without_noise():
    row = np.array([[3e38, 2e38, -3e38]], F32)
    np.testing.assert_allclose(runs(lambda v: v @ np.ones((3, 1), F32), row, amplitude=0.0), 2e38, rtol=1e-6)


def test_running_logarithms_of_sums_err_absolutely():
    x = np.log(np.array([0.25, 0.25, 0.5], F32))
    got = runs(lambda v: lax.cumlogsumexp(v, 0), x)
    assert 0 < np.abs(got[:, 2]).max() <= 4 * float(np.finfo(F32).eps) * (np.sqrt(3) + 1e-6)  # the result is 0


def test_complex_results_are_perturbed_relatively():
    x = np.array([1 + 2j, 3 - 1j], np.complex64)
    closed = jaxapi.closed_jaxpr_of(lambda v: v * v, x)
    with jax.enable_x64(True):
        (got,) = evaluate(closed, [x.astype(np.complex128)], noise=(3, 4.0))
    relative = np.abs(np.asarray(got) / (x.astype(np.complex128) ** 2) - 1)
    assert 0 < relative.max() <= 4 * float(np.finfo(F32).eps)
    assert jnp.iscomplexobj(got)
