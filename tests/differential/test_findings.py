"""What random programs found, as programs of a few operations: classes of values, and float64 functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from benchmarks.random_programs.runner import every_kernel

pytestmark = pytest.mark.usefixtures("xla_as_shipped")


def both(function, *args, x64=False):
    """Results of `jax.jit` and of kernels for everything that can have one."""
    with jax.enable_x64(x64):
        wanted = jax.tree.leaves(jax.jit(function)(*args))
        with every_kernel(1) as (planned, watch):
            got = jax.tree.leaves(jax.jit(jcuts.optimize(function, mode="fusion", tune="off"))(*args))
        assert not watch.messages
        assert sum(s.chosen is not None for top in planned for level in top.walk() for s in level.subsets) > 0
        return [np.asarray(x) for x in wanted], [np.asarray(x) for x in got]


def same(function, *args, x64=False, rtol=0.0):
    for a, b in zip(*both(function, *args, x64=x64), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(b.astype(np.float64), a.astype(np.float64), rtol=rtol, atol=rtol)


HALF = np.array([60000, 3, -60000, 1e-4, 300, -0.0, np.inf, -np.inf, np.nan], np.float16)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + x) - x,
        lambda x: (x * x) * jnp.float16(1e-4),
        lambda x: jnp.square(x) / jnp.float16(300),
        lambda x: lax.integer_pow(x, 3) * jnp.float16(0),
        lambda x: jnp.isfinite(x * jnp.float16(2)),
        lambda x: jnp.maximum(x * jnp.float16(2), 0) - x,
    ],
)
def test_float16_overflows_where_xla_overflows(function):
    same(function, HALF)


def test_float16_product_overflows_before_its_bias():
    a, b = np.full((3, 17), 200, np.float16), np.full((17, 20), 100, np.float16)
    bias = np.full(20, -65000, np.float16)
    same(lambda a, b, c: jnp.maximum(jnp.dot(a, b) + c, 0).astype(jnp.float32), a, b, bias)


CONVOLUTIONS = {
    "float64": (np.float64, {}),
    "float32": (np.float32, {}),
    "transposed float32": (np.float32, {"lhs_dilation": (2, 2)}),
    "stretched filter, float64": (np.float64, {"rhs_dilation": (2, 2)}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_padding_meets_infinite_weights_as_in_xla(name):
    """XLA leaves padded taps out for float64 and for transposed convolutions, and multiplies with zeros otherwise."""
    dtype, options = CONVOLUTIONS[name]
    x = np.random.default_rng(0).uniform(0.5, 1, (1, 6, 6, 3)).astype(dtype)
    w = np.random.default_rng(1).uniform(0.5, 1, (3, 3, 3, 4)).astype(dtype)
    w[0, 0, 0, 1] = np.inf
    w[1, 1, :, 2] = -np.inf

    def convolution(a, b):
        return lax.conv_general_dilated(
            a, b, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        )

    same(convolution, x, w, x64=dtype == np.float64, rtol=1e-5 if dtype == np.float32 else 1e-13)


def test_atanh_near_its_switch_is_better_than_xlas():
    (xla,), (got,) = both(lax.atanh, np.array([0.4140625, -0.4140625]), x64=True)
    exact = np.array([0.4405044588647577, -0.4405044588647577])
    np.testing.assert_allclose(got, exact, rtol=5e-16)
    assert (np.abs(got - exact) <= np.abs(xla - exact)).all()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("reverse", [False, True])
def test_sums_of_negative_zeros_start_at_zero(dtype, reverse):
    x = np.array([[-0.0, 0.0, -0.0, 1.0], [-0.0, -0.0, 0.0, -1.0], [-0.0, -0.0, -0.0, -0.0]], np.float32).astype(dtype)
    for wanted, got in zip(*both(lambda x: lax.cumsum(x, axis=0, reverse=reverse), x), strict=True):
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("between", [False, True])
def test_products_with_converted_bools_are_xlas(dtype, between):
    x = np.array([[np.nan, np.inf, -np.inf, 1.0, -2.0, -0.0]], np.float32).astype(dtype)
    flags = np.array([False, False, False, True, False, True])

    def function(flags, x):
        kept = flags.astype(dtype)
        return lax.cummax(x, axis=1) * kept.reshape(1, 6) if between else kept * x[0]

    same(function, flags, x)


ZEROS = [-0.0, 0.0, -1.0, 2.0, -6e-8, np.nan]
TYPES = [np.float32, np.float64, np.float16, jnp.bfloat16]


def _bits(values):
    return [str(v) if np.isnan(v) else (float(v), bool(np.signbit(v))) for v in np.asarray(values).astype(np.float64)]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_selection_keeps_negative_zero(dtype):
    """x > 0 ? 0 : x is -0 for -0; LLVM takes it for a minimum where comparison and selection differ in type."""
    x = np.array(ZEROS, dtype)
    below = [v if not v > 0 else 0.0 for v in x.astype(np.float64)]
    cases = [lambda v: jnp.where(v > 0, v, jnp.where(v > 0, dtype(0), v))]
    wanted = [x.astype(np.float64)]
    for other in TYPES:
        cases.append(lambda v, other=other: jnp.where(v > 0, other(0), v.astype(other)))
        wanted.append(np.array(below).astype(other))
        cases.append(lambda v, other=other: jnp.where(v.astype(other) > 0, dtype(0), v))
        wanted.append(np.array(below))
    for case, want in zip(cases, wanted, strict=True):
        _, (got,) = both(case, x, x64=True)
        assert _bits(got) == _bits(want)


@pytest.mark.parametrize("dtype", TYPES)
def test_elu_keeps_negative_zero(dtype):
    x = np.array([*ZEROS, -3.0, 1.0], dtype)
    (xla,), (got,) = both(lambda v: v + jax.nn.elu(v), x, x64=True)
    assert list(np.signbit(got)[:2]) == list(np.signbit(xla)[:2]) == [True, False]


@pytest.mark.parametrize("function", [lax.expm1, lax.tanh, lax.sinh, lax.sin, lax.tan, lax.asin, lax.atan, lax.log1p])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_near_zero_return_the_smallest_normal_numbers(function, dtype):
    tiny = np.finfo(dtype).smallest_normal
    x = np.concatenate([np.array([1, 1.5, 2, 3, 4, 5], dtype) * tiny * sign for sign in (1, -1)])
    _, (got,) = both(function, x, x64=dtype == np.float64)
    np.testing.assert_allclose(got, x, rtol=4 * np.finfo(dtype).eps)


def test_contractions_with_converted_bools_keep_nan():
    """Only products are selections: XLA sums what a NaN times False is."""
    x = np.array([[np.nan, 1.0, 2.0], [3.0, np.inf, 1.0]], np.float32)
    flags = np.array([[False, True, True], [False, False, True], [True, True, False]])
    same(lambda f, x: jnp.einsum("ij,kj->ik", f.astype(jnp.float32), x), flags, x)
