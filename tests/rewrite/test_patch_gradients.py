"""Gradients of convolutions whose stride equals their filter become products of the same values; nothing else does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.known_issues.slow_convolutions import CASES, functions
from jcuts.rewrite.backward.patch_gradients import patch_gradients
from jcuts.rewrite.backward.registry import backward_rewrites
from jcuts.rewrite.backward.transposed_filter_gradients import transposed_filter_gradients
from jcuts.trace import jaxapi
from tests.rewrite.test_transposed_filter_gradients import (
    LAYOUTS,
    arguments,
    convolution,
    convolutions,
    flat,
    gradients,
    is_large_filter_over_dilated_image,
    same,
    shapes,
)

DOT = "dot_general"


def products(closed):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == DOT]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(
    ("image", "window"),
    [
        ((12,), (4,)),
        ((13,), (5,)),  # a rest that no patch reads
        ((16, 16), (4, 4)),
        ((9, 11), (2, 3)),
        ((7, 8), (1, 4)),
        ((6, 5), (4, 4)),  # more taps than patches
        ((4, 4), (4, 4)),  # one patch
        ((5, 6, 7), (2, 2, 2)),
        ((4, 6, 7), (1, 3, 2)),
    ],
)
def test_gradients_of_patch_embeddings(layout, padding, image, window):
    def layer(x, w):
        return lax.conv_general_dilated(x, w, window, padding, dimension_numbers=LAYOUTS[layout][len(image)])

    with jax.enable_x64(True):
        args = arguments(*shapes(layout, 3, 4, 5, image, window))
        closed = flat(gradients(layer), *args)
        new, count = patch_gradients(closed)
        same(closed, new, args)
    assert count == 2 and len(convolutions(new)) == 1 and len(products(new)) == 2
    assert not any(jaxapi.primitive_name(e) == "rev" for e in new.jaxpr.eqns)


@pytest.mark.parametrize("padding", [((1, 2), (0, 5)), ((-1, 3), (2, -2)), ((4, 4), (6, 6))])
def test_any_padding(padding):
    def layer(x, w):
        return lax.conv_general_dilated(x, w, (3, 4), padding, dimension_numbers=LAYOUTS["last"][2])

    with jax.enable_x64(True):
        args = arguments((2, 10, 11, 3), (3, 4, 3, 2))
        closed = flat(gradients(layer), *args)
        new, count = patch_gradients(closed)
        same(closed, new, args)
    assert count == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_transposed_convolutions_of_patches(layout, padding):
    """The layer and its filter's gradient are products; the image's gradient is a strided convolution, as before."""

    def layer(x, w):
        return lax.conv_transpose(x, w, (2, 3), padding, dimension_numbers=LAYOUTS[layout][2])

    with jax.enable_x64(True):
        args = arguments(*shapes(layout, 3, 4, 5, (5, 7), (2, 3)))
        closed = flat(gradients(layer), *args)
        new, count = patch_gradients(transposed_filter_gradients(closed)[0])
        same(closed, new, args)
    assert count == 2 and len(convolutions(new)) == 1 and convolutions(new)[0].params["window_strides"] == (2, 3)


def test_infinities_stay():
    layer = convolution(4, padding="VALID")
    x, w = (a.astype(np.float32) for a in arguments((2, 9, 9, 3), (4, 4, 3, 5)))
    x[0, 1, 2, 0], x[1, 5, 5, 1] = np.inf, np.nan
    w[1, 2, 0, 3] = -np.inf
    closed = flat(jax.grad(lambda x, w: jnp.sum(layer(x, w) ** 2), (0, 1)), x, w)
    new, count = patch_gradients(closed)
    _, want = jaxapi.eval_closed(closed, x, w)
    _, got = jaxapi.eval_closed(new, x, w)
    assert count == 2 and not np.isfinite(got).all()
    assert np.isfinite(got)[np.isfinite(want)].all()


@pytest.mark.parametrize("layout", ["last", "first"])
def test_types_and_precision_stay(layout):
    numbers = LAYOUTS[layout][2]
    window = shapes(layout, 2, 3, 8, (8, 8), (4, 4))

    def layer(x, w):
        return lax.conv_general_dilated(x, w, (4, 4), "VALID", dimension_numbers=numbers, precision="highest")

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in window]
    closed = flat(gradients(layer), *args)
    new, count = patch_gradients(closed)
    jaxapi.check(new)
    assert count == 2
    wanted = {e.params["precision"] for e in convolutions(closed)}
    assert {e.params["precision"] for e in products(new)} == wanted


def test_preferred_type_and_precision_of_each_operand():
    numbers = lax.ConvDimensionNumbers((1, 0, 2, 3), (1, 0, 2, 3), (1, 0, 2, 3))

    def gradient(x, dy):
        options = {"precision": ("highest", "default"), "preferred_element_type": jnp.float32}
        return lax.conv_general_dilated(
            x, dy, (1, 1), "VALID", rhs_dilation=(4, 4), dimension_numbers=numbers, **options
        )

    x, dy = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 3, 8, 8), (2, 8, 2, 2)))
    new, count = patch_gradients(flat(gradient, x, dy))
    (product,) = products(new)
    jaxapi.check(new)
    assert count == 1 and product.outvars[0].aval.dtype == jnp.float32
    # The filter's layout has the features of dy in front: it is the first operand of the product.
    assert product.params["precision"] == (lax.Precision.DEFAULT, lax.Precision.HIGHEST)


@pytest.mark.parametrize(
    ("layer", "window"),
    [
        (convolution(), (3, 3, 4, 8)),
        (convolution(), (1, 1, 4, 8)),
        (convolution(2), (1, 1, 4, 8)),
        (convolution(2), (3, 3, 4, 8)),
        (convolution(2, padding="VALID"), (3, 2, 4, 8)),
        (convolution(3, groups=4), (3, 3, 1, 4)),
        (convolution(3, groups=2), (3, 3, 2, 8)),
        (convolution(3, rhs_dilation=(2, 2)), (3, 3, 4, 8)),
        (convolution(rhs_dilation=(2, 2)), (3, 3, 4, 8)),
        (convolution(padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)), (3, 3, 4, 8)),
    ],
    ids=["plain", "1x1", "strided 1x1", "strided", "one axis", "depthwise", "grouped", "both", "dilated", "transposed"],
)
def test_other_gradients_stay(layer, window):
    closed = flat(gradients(layer), *arguments((2, 12, 13, 4), window))
    assert patch_gradients(closed) == (closed, 0)


@pytest.mark.parametrize("stride", [2, 4])
def test_all_rewrites_of_padded_layers(stride):
    """Padding that the layer and a gradient read is folded first; products pad for themselves."""

    def layers(x, w, v):
        y = convolution(4, padding="VALID")(jnp.pad(x, ((0, 0), (1, 2), (3, 0), (0, 0))), w)
        padded = jnp.pad(jnp.sin(y), ((0, 0), (1, 0), (2, 1), (0, 0)))
        return lax.conv_transpose(padded, v, (stride, stride), "VALID", dimension_numbers=LAYOUTS["last"][2])

    with jax.enable_x64(True):
        args = arguments((2, 13, 17, 3), (4, 4, 3, 5), (4, 4, 5, 2))
        closed = flat(jax.grad(lambda *xs: jnp.sum(layers(*xs) ** 3), (0, 1, 2)), *args)
        new = closed
        for rewrite in backward_rewrites("cuda", divides=False):
            new = rewrite.apply(new)
        same(closed, new, args)
    # The gradient of w and x are products, with a stride of four the transposed layer and the gradient of v, too.
    assert len(products(new)) == (4 if stride == 4 else 2)
    assert not any(map(is_large_filter_over_dilated_image, convolutions(new)))


def test_reported_case():
    layer, *shapes_of = CASES["large_filter"](False)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes_of]
    closed = flat(functions(layer)["gradients"], *args, jax.eval_shape(layer, *args))
    assert transposed_filter_gradients(closed) == (closed, 0)
    new, count = patch_gradients(closed)
    (forward,) = convolutions(new)
    assert count == 2 and len(products(new)) == 2 and forward.params["window_strides"] == (16, 16)
