"""Zero padding that several convolutions read is part of them: where, and that gradients are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.rewrite.backward.explicit_padding import fold_padding
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(61)


def values(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def convolution(x, w, stride=2, groups=1, **options):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (stride, stride), ((0, 0), (0, 0)), dimension_numbers=layout, feature_group_count=groups, **options
    )


def padded(x, low=0, high=1):
    return jnp.pad(x, ((0, 0), (low, high), (low, high), (0, 0)))


def gradients(layer):
    return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(layer(x, w))), argnums=(0, 1))


def pads(closed):
    """Equations that pad an array with zeros; negative widths cut it (the gradient of padding)."""
    made = [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "pad"]
    return [e for e in made if any(low > 0 or high > 0 for low, high, _ in e.params["padding_config"])]


@pytest.mark.parametrize(
    ("layer", "w"),
    [
        (lambda x, w: convolution(padded(jnp.tanh(x)), w, groups=6), values(3, 3, 1, 6)),
        (lambda x, w: convolution(padded(jnp.tanh(x), 3, 2), w), values(5, 3, 6, 4)),
        (lambda x, w: convolution(padded(jnp.tanh(x), 1, 0), w, stride=1, rhs_dilation=(2, 3)), values(3, 2, 6, 5)),
        (lambda x, w: convolution(padded(jnp.tanh(x), 1, 2), w, stride=1, lhs_dilation=(2, 3)), values(3, 3, 6, 5)),
        (lambda x, w: convolution(padded(jnp.tanh(x)), w, groups=2), values(3, 3, 3, 4)),
    ],
    ids=["depthwise", "dense", "dilated filter", "dilated input", "groups"],
)
def test_gradients_of_padded_layers(layer, w):
    args = values(2, 9, 8, 6), w
    closed = flat(gradients(layer), *args)
    new, count = fold_padding(closed)
    jaxapi.check(new)
    assert count == 1 and len(pads(new)) == len(pads(closed)) - 1
    for got, want in zip(jaxapi.eval_closed(new, *args), jaxapi.eval_closed(closed, *args), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(np.asarray(want)).max())


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: convolution(padded(x), w),  # one reader: its kernel pads
        lambda x, w: (convolution(padded(x), w), jnp.sum(jnp.exp(padded(x)))),  # something else reads it
        lambda x, w: (convolution(p := padded(x), w), p, convolution(p, -w)),  # a result
        lambda x, w: (convolution(p := jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1), w), p @ p.mT),
        lambda x, w: (convolution(p := jnp.pad(x, ((0, 1), (0, 1), (0, 0), (0, 0))), w), convolution(p, -w)),  # batch
        lambda x, w: (convolution(x, w), [jnp.abs(s * jnp.pad(1j * x, 1)) for s in (1, 2)]),  # complex numbers
        lambda x, w: (convolution(p := lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0))), w), -p),
        lambda x, w: (convolution(p := lax.pad(x, 0.0, ((0, 0, 0), (-1, 1, 0), (0, 0, 0), (0, 0, 0))), w), 2 * p),
    ],
)
def test_other_padding_stays(function):
    x, w = values(2, 9, 8, 6), values(3, 3, 6, 4)
    closed = flat(function, x, w)
    assert fold_padding(closed) == (closed, 0)


def test_the_filter_is_not_padded_so():
    x = values(2, 9, 9, 6)

    def function(x):
        kernel = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
        layout = ("NHWC", "OHWI", "NHWC")
        return [lax.conv_general_dilated(s * x, kernel, (1, 1), "SAME", dimension_numbers=layout) for s in (1.0, 2.0)]

    closed = flat(function, x)
    assert fold_padding(closed) == (closed, 0)
