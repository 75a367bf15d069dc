"""Pointwise convolutions as products, and back: parameters, operands that others share or changed, equal results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.rewrite.matmul_patterns import CONVOLUTION, DOT
from jcuts.rewrite.pointwise_conv import dot_to_conv, pointwise_convolutions
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled

RNG = np.random.default_rng(5)
NHWC = ("NHWC", "HWIO", "NHWC")


def values(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def conv(x, w, numbers=NHWC, **more):
    return lax.conv_general_dilated(x, w, (1,) * (x.ndim - 2), "VALID", dimension_numbers=numbers, **more)


def count(closed, name):
    inner = (body for e in closed.jaxpr.eqns for _, _, body in jaxapi.inner_jaxprs(e))
    return sum(jaxapi.primitive_name(e) == name for e in closed.jaxpr.eqns) + sum(count(b, name) for b in inner)


def convolutions(closed):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == CONVOLUTION]


def restored(new, wanted=lambda product: True):
    closed, found = dot_to_conv(new.closed, new.convolutions, wanted)
    jaxapi.check(closed)
    return closed, found


def equal(a, b, *args):
    for x, y in zip(compiled(a, *args), compiled(b, *args), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(x, y)


def close(a, b, *args):
    for x, y in zip(compiled(a, *args), compiled(b, *args), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("shape", "kernel", "numbers"),
    [
        ((2, 7, 5, 3), (1, 1, 3, 11), NHWC),
        ((2, 7, 5, 3), (11, 3, 1, 1), ("NHWC", "OIHW", "NHWC")),
        ((2, 7, 5, 3), (1, 1, 11, 3), ("NHWC", "HWOI", "NHWC")),
        ((3, 13, 5), (1, 5, 1), ("NWC", "WIO", "NWC")),
        ((1, 3, 2, 5, 4), (1, 1, 1, 4, 9), ("NDHWC", "DHWIO", "NDHWC")),
        ((7, 2, 5, 3), (1, 1, 3, 1), ("HNWC", "HWIO", "HNWC")),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_the_same_convolution_again(shape, kernel, numbers, dtype):
    x, w = values(*shape, dtype=dtype), values(*kernel, dtype=dtype)
    more = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    closed = flat(lambda x, w: jnp.tanh(conv(x, w, numbers, **more)), x, w)
    new = rewritten(closed, ("dots",))
    assert new.counts == {"dots": 1} and count(new.closed, CONVOLUTION) == 0 and len(new.convolutions) == 1
    again, found = restored(new)
    assert found == 1 and count(again, DOT) == 0 and count(again, "reshape") == 0
    (before,), (after,) = convolutions(closed), convolutions(again)
    assert after.params == before.params and after.invars == before.invars and after.outvars == before.outvars
    assert str(again) == str(closed)
    equal(closed, again, x, w)


def step(x, w, v, d):
    """Two pointwise convolutions with a 3x3 one between them, and all gradients."""

    def loss(x, w, v, d):
        y = jax.nn.relu(conv(x, w))
        z = lax.conv_general_dilated(y, d, (1, 1), "SAME", dimension_numbers=NHWC)
        return jnp.sum(conv(jnp.tanh(z), v) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(x, w, v, d)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_forward_pass_and_data_gradients_of_a_training_step(dtype):
    shapes = ((2, 5, 7, 6), (1, 1, 6, 9), (1, 1, 9, 5), (3, 3, 9, 9))
    args = [values(*s, dtype=dtype) for s in shapes]
    closed = flat(step, *args)
    new = rewritten(closed, ("dots",))
    assert new.counts == {"dots": 4}  # two forward, two data gradients; gradients of weights have many taps
    again, found = restored(new)
    assert found == 4 and str(again) == str(closed)
    equal(closed, again, *args)
    # one of each kind alone
    for kept in new.convolutions:
        some, found = restored(new, lambda product, kept=kept: product.eqn.outvars[0] is not kept)
        assert found == 3 and count(some, DOT) == 1 and count(some, CONVOLUTION) == count(closed, CONVOLUTION) - 1
        if dtype == jnp.float32:
            close(closed, some, *args)


def test_products_that_share_an_operand_or_weights():
    x, w, v = values(2, 5, 3, 6), values(1, 1, 6, 6), values(1, 1, 6, 4)

    def function(x, w, v):
        y = conv(x, w)
        return y, conv(x, v), conv(y, w)

    closed = flat(function, x, w, v)
    new = rewritten(closed, ("dots",))
    first, second, third = (e.outvars[0] for e in convolutions(closed))
    readers = {}
    again, found = restored(new, lambda p: readers.update({p.eqn.outvars[0]: p.readers}) is None)
    assert found == 3 and [len(readers[v]) for v in (first, second, third)] == [2, 2, 1]
    equal(closed, again, x, w, v)
    # The reshape of weights that another product reads stays, and no other.
    some, found = restored(new, lambda p: p.eqn.outvars[0] in (first, second))
    assert found == 2 and count(some, DOT) == count(some, "reshape") == 1
    close(closed, some, x, w, v)


def test_closed_over_weights_are_reshaped_back():
    x, w = values(2, 5, 3, 6), values(1, 1, 6, 7)
    closed = flat(lambda x: conv(x, w) + 1.0, x)
    new = rewritten(closed, ("dots",))
    assert count(new.closed, "reshape") == 0  # it was folded
    again, found = restored(new)
    assert (
        found == 1 and count(again, "reshape") == 1 and convolutions(again)[0].params == convolutions(closed)[0].params
    )
    equal(closed, again, x)


def test_weights_that_were_rounded_and_transposed_are_filters_of_that_order():
    x, w = values(2, 32, 32, 32), values(1, 1, 32, 64)
    for closed, args, rule in (
        (flat(lambda x, w: jnp.tanh(conv(x, w)), x, w), (x, w), "turns"),
        (flat(lambda x: jnp.tanh(conv(x, w)), x), (x,), "rounds"),
    ):
        new = rewritten(closed, ("dots", rule))
        assert new.counts == {"dots": 1, rule: 1}
        again, found = restored(new)
        (made,) = convolutions(again)
        numbers = made.params["dimension_numbers"]
        assert found == 1 and made.invars[1].aval.shape == (64, 1, 1, 32) and numbers.rhs_spec == (0, 3, 1, 2)
        assert (numbers.lhs_spec, numbers.out_spec) == ((0, 3, 1, 2), (0, 3, 1, 2))
        close(new.closed, again, *args)
        # ... which is what the rule alone makes of the convolution
        (alone,) = convolutions(rewritten(closed, (rule,)).closed)
        assert made.params == alone.params


def test_a_loops_body():
    x, w = values(2, 5, 3, 6), values(1, 1, 6, 6)

    def function(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(conv(c, w)), jnp.sum(c)), x, None, length=3)

    closed = flat(function, x, w)
    new = rewritten(closed, ("dots",))
    assert new.counts == {"dots": 1} and count(new.closed, DOT) == 1
    again, found = restored(new)
    assert found == 1 and count(again, CONVOLUTION) == 1 and count(again, DOT) == 0
    equal(closed, again, x, w)


def test_what_was_no_convolution_or_is_another_product_stays():
    x, w = values(2, 6, 4, 8), values(8, 5)
    own = flat(lambda x, w: jnp.dot(x, w.reshape(8, 5)), x, w)
    assert restored(rewritten(own, ("dots",))) == (own, 0)
    assert pointwise_convolutions(own) == {}
    # One product of two, whose results are slices of it.
    a, b = values(1, 1, 8, 16), values(1, 1, 8, 24)
    closed = flat(lambda x: (jax.nn.relu(conv(x, a)), jax.nn.relu(conv(x, b))), x)
    new = rewritten(closed, ("dots", "siblings"))
    assert new.counts == {"dots": 2, "siblings": 1}
    assert restored(new) == (new.closed, 0)
    # A product at another place: behind the pool.
    pooled = flat(lambda x: lax.reduce_window(conv(x, a), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), x)
    new = rewritten(pooled, ("dots", "pools"))
    assert new.counts == {"dots": 1, "pools": 1}
    assert restored(new) == (new.closed, 0)
