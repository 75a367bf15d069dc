"""Rewrites: what they apply to, what they leave alone, and that results stay within rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.rewrite.registry import RULES, applicable, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled

RNG = np.random.default_rng(3)
NHWC = ("NHWC", "HWIO", "NHWC")


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def names(closed):
    return [jaxapi.primitive_name(e) for e in closed.jaxpr.eqns]


def same(a, b, *args):
    for x, y in zip(compiled(a, *args), compiled(b, *args), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def conv(x, w, numbers=NHWC, stride=1, padding="VALID", **more):
    rank = x.ndim - 2
    return lax.conv_general_dilated(x, w, (stride,) * rank, padding, dimension_numbers=numbers, **more)


def block(x, w, d, p, stats):
    """Pointwise, depthwise and pointwise convolutions with inference batch norms."""
    for kernel, (gain, bias, mean, variance), groups in zip((w, d, p), stats, (1, 12, 1), strict=True):
        x = conv(x, kernel, padding="SAME", feature_group_count=groups)
        inverse = lax.rsqrt(variance + 1e-3) * gain
        x = x * inverse + (bias - mean * inverse)
        x = jnp.clip(x, 0.0, 6.0)
    return x


def weights():
    stats = [(values(c), values(c), values(c), jnp.abs(values(c)) + 0.5) for c in (12, 12, 5)]
    return values(1, 1, 4, 12), values(3, 3, 1, 12), values(1, 1, 12, 5), stats


def test_batch_norms_of_constants_go_into_the_weights_and_pointwise_convolutions_become_products():
    x, parts = values(2, 6, 5, 4), weights()
    closed = flat(lambda x: block(x, *parts), x)
    new = rewritten(closed, ("scales", "dots"))
    assert new.counts == {"scales": 3, "dots": 2}
    found = names(new.closed)
    assert found.count("mul") == 0 and found.count("dot_general") == 2 and found.count("conv_general_dilated") == 1
    assert "scales 3 times" in str(new) and applicable(closed) == ("scales", "dots")
    same(closed, new.closed, x)
    jaxapi.check(new.closed)


def test_a_batch_norm_behind_a_bias_leaves_one_addition():
    x, w, stats = values(2, 6, 5, 4), values(3, 3, 4, 12), [values(12) for _ in range(4)]
    bias, gain, shift, mean = stats

    def norm(x):
        y = conv(x, w) + bias
        return jax.nn.relu((y - mean) * gain + shift) + (gain * (bias + conv(x, w, padding="SAME")))[:, 1:-1, 1:-1]

    closed = flat(norm, x)
    new = rewritten(closed, ("scales",))
    assert new.counts == {"scales": 1}  # a subtraction is no addition; the second one is
    same(closed, new.closed, x)

    def inference(x):
        y = conv(x, w) + bias
        return jax.nn.relu(y * gain + (shift - mean * gain))

    closed = flat(inference, x)
    new = rewritten(closed, ("scales",))
    assert new.counts == {"scales": 1} and [n for n in names(new.closed) if n in ("add", "mul")] == ["add"]
    same(closed, new.closed, x)
    jaxapi.check(new.closed)


def test_weights_that_are_arguments_are_not_multiplied():
    x, parts = values(2, 6, 5, 4), weights()
    closed = flat(block, x, *parts)
    assert applicable(closed) == ("dots", "vectors")
    new = rewritten(closed, ("scales", "dots"))
    assert new.counts == {"dots": 2}
    same(closed, new.closed, x, *jax.tree.leaves(parts))


def test_a_product_with_a_factor_per_column_and_one_factor_for_all():
    x, w, s = values(7, 6), values(6, 5), values(5)
    closed = flat(lambda x: (x @ w) * s, x)
    new = rewritten(closed, ("scales",))
    assert new.counts == {"scales": 1} and "mul" not in names(new.closed)
    same(closed, new.closed, x)
    closed = flat(lambda x: 0.25 * (x @ w), x)
    assert rewritten(closed, ("scales",)).counts == {"scales": 1}
    same(closed, rewritten(closed, ("scales",)).closed, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, s: (x @ w) * s[0, :5].reshape(1, 5) + (x @ w),  # two users, merged into one product
        lambda x, w, s: (x @ w) * s[:, :1],  # a factor per row
        lambda x, w, s: (x @ w) * s[:, :5],
        lambda x, w, s: jnp.tanh(x @ w) * s[0, :5],
        lambda x, w, s: (x @ w) * x[:, :5],
    ],
)
def test_other_products_are_left_alone(function):
    x, w, s = values(7, 6), values(6, 5), np.asarray(values(7, 5))
    closed = flat(lambda x: function(x, w, s), x)
    assert rewritten(closed, ("scales",)).counts == {}


def test_weights_that_would_overflow_or_vanish_stay():
    x, w = values(7, 6), values(6, 5)
    for factor in (1e38, 1e-38, np.inf):
        s = np.full(5, factor, np.float32)
        closed = flat(lambda x, w=w * 100 if factor > 1 else w * 1e-3, s=s: (x @ w) * s, x)
        assert rewritten(closed, ("scales",)).counts == {}


@pytest.mark.parametrize(
    ("shape", "kernel", "numbers"),
    [
        ((2, 5, 6, 4), (1, 1, 4, 3), NHWC),
        ((2, 5, 6, 4), (3, 4, 1, 1), ("NHWC", "OIHW", "NHWC")),
        ((5, 2, 6, 4), (1, 1, 3, 4), ("HNWC", "HWOI", "HNWC")),
        ((2, 9, 4), (1, 4, 3), ("NWC", "WIO", "NWC")),
    ],
)
def test_layouts_of_pointwise_convolutions(shape, kernel, numbers):
    x, w = values(*shape), values(*kernel)
    closed = flat(lambda x, w: conv(x, w, numbers), x, w)
    new = rewritten(closed, ("dots",))
    assert new.counts == {"dots": 1}
    same(closed, new.closed, x, w)


@pytest.mark.parametrize(
    ("shape", "kernel", "numbers", "options"),
    [
        ((2, 4, 5, 6), (3, 4, 1, 1), ("NCHW", "OIHW", "NCHW"), {}),
        ((2, 5, 6, 4), (1, 1, 4, 3), ("NHWC", "HWIO", "NCHW"), {}),
        ((2, 5, 6, 4), (1, 1, 4, 3), ("NHWC", "HWIO", "HNWC"), {}),
        ((2, 5, 6, 4), (1, 1, 4, 3), NHWC, {"stride": 2}),
        ((2, 5, 6, 4), (1, 1, 4, 3), NHWC, {"padding": [(0, 1), (0, 0)]}),
        ((2, 5, 6, 4), (1, 1, 4, 3), NHWC, {"lhs_dilation": (2, 1), "padding": [(0, 0), (0, 0)]}),
        ((2, 5, 6, 4), (1, 1, 2, 4), NHWC, {"feature_group_count": 2}),
        ((2, 5, 6, 4), (1, 2, 4, 3), NHWC, {}),
    ],
)
def test_other_convolutions_stay(shape, kernel, numbers, options):
    closed = flat(lambda x, w: conv(x, w, numbers, **options), values(*shape), values(*kernel))
    assert applicable(closed) == ()


def test_precision_and_types_are_kept():
    x, w = values(2, 3, 3, 4).astype(jnp.bfloat16), values(1, 1, 4, 8).astype(jnp.bfloat16)
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    new = rewritten(flat(lambda x, w: conv(x, w, **options), x, w), ("dots",)).closed
    dot = next(e for e in new.jaxpr.eqns if jaxapi.primitive_name(e) == "dot_general")
    assert dot.params["precision"] == (lax.Precision.HIGHEST,) * 2
    assert dot.params["preferred_element_type"] == jnp.float32 and new.jaxpr.outvars[0].aval.dtype == jnp.float32


def test_loop_bodies_are_rewritten():
    w = values(1, 1, 4, 4)

    def loop(x, w):
        return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(conv(x, w)), x)

    x = values(1, 3, 3, 4)
    closed = flat(loop, x, w)
    new = rewritten(closed, tuple(RULES))
    assert new.counts == {"dots": 1}
    same(closed, new.closed, x, w)


def test_an_unknown_rule_is_an_error():
    with pytest.raises(KeyError, match="halves"):
        rewritten(flat(jnp.sin, values(3)), ("halves",))
