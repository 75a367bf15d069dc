"""What `simplify` takes away: constants and conversions around 16-bit floats, dead code of loops; no value changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.rewrite.simplify import SMALL, simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(0)
HALVES = (jnp.bfloat16, jnp.float16)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def names(closed):
    return [jaxapi.primitive_name(e) for e in closed.jaxpr.eqns]


def half(dtype, *shape):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_norm_in_float32_around_halves_is_two_operations(dtype):
    x, (gain, shift, mean) = half(dtype, 3, 5, 7), half(dtype, 3, 7)
    variance = jnp.abs(half(dtype, 7)) + 1

    def norm(x):
        scale = lax.rsqrt(variance.astype(jnp.float32) + 1e-3) * gain.astype(jnp.float32)
        wide = x.astype(jnp.float32) * scale[None, None]
        return (wide + (shift.astype(jnp.float32) - mean.astype(jnp.float32) * scale)[None, None]).astype(dtype)

    closed = flat(norm, x)
    assert names(closed) == ["convert_element_type", "mul", "add", "convert_element_type"]
    got, want = jaxapi.eval_closed(closed, x)[0], norm(x)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_conversion_there_and_back_is_none(dtype):
    x = half(dtype, 4, 5)
    closed = flat(lambda x: -x.astype(jnp.float32).astype(dtype), x)
    assert names(closed) == ["neg"]
    assert (jaxapi.eval_closed(closed, x)[0] == -x).all()


def test_conversions_that_round_stay():
    x, y = jnp.float32(RNG.standard_normal(9)), half(jnp.bfloat16, 9)
    assert names(flat(lambda x: -x.astype(jnp.bfloat16).astype(jnp.float32), x)).count("convert_element_type") == 2
    assert names(flat(lambda y: -y.astype(jnp.float16).astype(jnp.bfloat16), y)).count("convert_element_type") == 2


def test_a_conversion_there_and_back_that_is_a_result_stays():
    x = half(jnp.bfloat16, 6)
    closed = flat(lambda x: x.astype(jnp.float32).astype(jnp.bfloat16), x)
    assert (jaxapi.eval_closed(closed, x)[0] == x).all()


def test_large_weights_that_are_kept_short_stay_short():
    w, few = half(jnp.bfloat16, SMALL // 8 + 1, 8), half(jnp.bfloat16, 4, 8)
    x = jnp.ones(8, jnp.float32)
    assert "convert_element_type" in names(flat(lambda x: w.astype(jnp.float32) @ x, x))
    assert "convert_element_type" not in names(flat(lambda x: few.astype(jnp.float32) @ x, x))
    wide = w.astype(jnp.float32)
    found = names(flat(lambda x: wide.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16), x))
    assert found.count("convert_element_type") == 1


def test_equations_that_differ_in_parameters_stay_apart():
    def fn(x):
        return lax.cumsum(x, 0) * lax.cumsum(x, 0, reverse=True) + lax.cumsum(x, 0)

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    closed = flat(fn, x)
    assert names(closed).count("cumsum") == 2
    np.testing.assert_allclose(jaxapi.eval_closed(closed, x)[0], fn(x))


def test_loops_lose_their_dead_code():
    """JAX itself drops what no one reads from bodies of scans only."""

    def step(x):
        jnp.argmax(x, 1), jnp.tanh(x).max(1)
        return x * 0.5

    def fn(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))[1]

    x = np.ones((4, 5), np.float32)
    loop = next(e for e in flat(fn, x).jaxpr.eqns if jaxapi.primitive_name(e) == "while")
    assert names(loop.params["body_jaxpr"]) == ["add", "mul"]


@pytest.mark.parametrize("reduction", [jnp.sum, jnp.prod, jnp.max, jnp.min])
def test_a_reduction_over_single_values_is_a_reshape(reduction):
    x = np.array([[[-0.0], [2.0], [np.nan]]], np.float32)
    closed = flat(lambda x: reduction(x, (0, 2)), x)
    assert names(closed) == ["reshape"]
    (got,) = jaxapi.eval_closed(closed, x)
    np.testing.assert_array_equal(got, x[0, :, 0])
    assert np.signbit(got[0])
    closed = flat(lambda x: reduction(x, (0, 1)), x)
    assert "reshape" not in names(closed)


def test_neutral_operands_change_nothing():
    x = np.array([1.5, -0.0, np.nan, -np.inf], np.float32)
    closed = flat(lambda x: jnp.tanh(1.0 * ((0.0 + (x + 0.0)) * 1.0 - 0.0) / 1.0), x)
    assert names(closed) == ["tanh"]
    np.testing.assert_array_equal(jaxapi.eval_closed(closed, x)[0], jnp.tanh(x))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x + 0.0, np.ones(3, np.float32)),  # a result of its own
        (lambda x: -(x + 1.0), np.ones(3, np.float32)),
        (lambda x: -(1.0 / x), np.ones(3, np.float32)),
        (lambda x: -(0.0 - x), np.ones(3, np.float32)),
        (lambda x: -(x + 0), np.ones(3, np.int32)),
    ],
)
def test_other_operands_stay(function, x):
    closed = flat(function, x)
    assert names(closed) == names(inline(jaxapi.closed_jaxpr_of(function, x)))
    np.testing.assert_array_equal(jaxapi.eval_closed(closed, x)[0], function(x))


@pytest.mark.parametrize("spelling", ["bsd,dhe->bhse", "bsd,dhe->hbse", "bsd,dhe->ebsh", "bsd,dhe->bshe"])
def test_products_have_the_last_dimension_of_their_transposed_result(spelling):
    x, w = RNG.standard_normal((2, 7, 5)), RNG.standard_normal((5, 3, 4))
    made = flat(lambda x, w: jnp.einsum(spelling, x, w), x, w)
    (product,) = (eqn for eqn in made.jaxpr.eqns if jaxapi.primitive_name(eqn) == "dot_general")
    is_natural = spelling.endswith("e")
    assert (product.invars[0] is made.jaxpr.invars[0]) == is_natural
    np.testing.assert_allclose(jaxapi.eval_closed(made, x, w)[0], jnp.einsum(spelling, x, w), rtol=2e-5, atol=1e-5)


def test_precisions_and_types_stay_with_their_operands():
    x, w = half(jnp.bfloat16, 7, 5), RNG.standard_normal((5, 3)).astype(np.float32)
    precision = lax.Precision.HIGH, lax.Precision.HIGHEST

    def product(w, x):
        made = lax.dot_general(w, x, (((0,), (1,)), ((), ())), precision, jnp.float32)
        return jnp.transpose(made)

    (eqn,) = flat(product, w, x).jaxpr.eqns
    assert [a.aval.dtype for a in eqn.invars] == [jnp.bfloat16, jnp.float32] and eqn.outvars[0].aval.shape == (7, 3)
    assert eqn.params["precision"] == precision[::-1]


def test_gradients_of_weights_are_not_transposed():
    x, w = RNG.standard_normal((2, 9, 5)), RNG.standard_normal((2, 5, 3))
    made = flat(jax.grad(lambda w: jnp.sum(jnp.sin(jnp.einsum("bnd,bde->bne", x, w)))), w)
    assert "transpose" not in names(made)
    np.testing.assert_allclose(
        jaxapi.eval_closed(made, w)[0],
        jax.grad(lambda w: jnp.sum(jnp.sin(jnp.einsum("bnd,bde->bne", x, w))))(w),
        rtol=2e-5,
        atol=1e-5,
    )


def test_products_that_are_read_as_they_are_too_stay():
    x, w = RNG.standard_normal((7, 5)), RNG.standard_normal((5, 3))
    made = flat(lambda x, w: (jnp.dot(x, w), jnp.dot(x, w).T), x, w)
    assert names(made) == ["dot_general", "transpose"]
    assert made.jaxpr.eqns[0].invars == made.jaxpr.invars


def test_equations_without_results_stay():
    def fn(x, w):
        jax.debug.print("{}", x[0, 0])
        return jnp.dot(w.T, x.T)

    x, w = RNG.standard_normal((7, 5)), RNG.standard_normal((5, 3))
    assert "dot_general" in names(flat(fn, x, w))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_tanh_are_arithmetic(dtype):
    """From jax 0.11 on they have a primitive of their own, in loops too."""

    def fn(x):
        return jnp.tanh(lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y) * 2, x)).sum()

    x = jnp.asarray(RNG.standard_normal((3, 5)), dtype)
    made = flat(jax.grad(fn), x)
    assert "one_minus_square" not in str(made)
    got, want = (np.asarray(v, np.float32) for v in (jaxapi.eval_closed(made, x)[0], jax.grad(fn)(x)))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_stacks_are_concatenations_and_their_gradients_slices(axis):
    def fn(*xs):
        return jnp.sin(jnp.stack(xs, axis)).sum()

    xs = [RNG.standard_normal((3, 5)) for _ in range(3)]
    made = flat(jax.grad(fn, (0, 2)), *xs)
    assert not {"stack", "unstack"} & set(names(made))
    for got, want in zip(jaxapi.eval_closed(made, *xs), jax.grad(fn, (0, 2))(*xs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_gradients_of_padding_are_slices_and_slices_of_all_are_nothing():
    x = jnp.asarray(RNG.standard_normal((5, 7, 3)), jnp.float32)

    def gradient(x):
        return jax.grad(lambda y: jnp.sum(jnp.sin(lax.pad(y, 0.0, ((1, 2, 0), (0, 1, 0), (0, 0, 0))))))(x) * 2

    closed = flat(gradient, x)
    assert names(closed).count("pad") == 1 and names(closed).count("slice") == 1  # of the value and of its gradient
    np.testing.assert_allclose(jaxapi.eval_closed(closed, x)[0], gradient(x), rtol=1e-6)
    closed = flat(lambda x: lax.slice(x, (0, 0, 0), x.shape) + lax.sin(x), x)
    assert names(closed) == ["sin", "add"]


def test_padding_between_elements_and_with_both_signs_stays():
    x = jnp.asarray(RNG.standard_normal((5, 7)), jnp.float32)
    for config in (((-1, 1, 0), (0, 0, 0)), ((0, 0, 1), (0, 0, 0))):
        closed = flat(lambda x, config=config: lax.pad(x, 0.0, config), x)
        assert names(closed) == ["pad"]
    closed = flat(lambda x: lax.pad(x, 0.0, ((-1, -2, 0), (0, -3, 0))), x)
    assert names(closed) == ["slice"]
    np.testing.assert_array_equal(jaxapi.eval_closed(closed, x)[0], x[1:-2, :-3])
