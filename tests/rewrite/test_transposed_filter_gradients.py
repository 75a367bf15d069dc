"""Filter gradients of transposed convolutions become those of strided ones: the same values, and nothing else does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.known_issues.slow_convolutions import CASES, functions
from jcuts.rewrite.backward.registry import backward_rewrites
from jcuts.rewrite.backward.transposed_filter_gradients import CONVOLUTION, extents, transposed_filter_gradients
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.xla.cudnn.match import Site, recognise

RNG = np.random.default_rng(67)
LAYOUTS = {
    "last": {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")},
    "first": {1: ("NCH", "OIH", "NCH"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCDHW", "OIDHW", "NCDHW")},
    "mixed": {1: ("HNC", "IOH", "CHN"), 2: ("HNWC", "OHWI", "CWHN"), 3: ("NDHWC", "ODIHW", "NCDHW")},
}


def shapes(layout, batch, channels, features, image, window):
    """Shapes of an image and of a filter."""
    lhs, rhs, _ = LAYOUTS[layout][len(image)]
    sizes = dict(zip((letter for letter in "DHW" if letter in lhs), image, strict=True))
    taps = dict(zip(sizes, window, strict=True))
    of_image, of_filter = {"N": batch, "C": channels, **sizes}, {"I": channels, "O": features, **taps}
    return tuple(of_image[d] for d in lhs), tuple(of_filter[d] for d in rhs)


def gradients(layer):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(layer(x, w))), (0, 1))


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def convolutions(closed):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == CONVOLUTION]


def is_large_filter_over_dilated_image(eqn):
    _, window, result = extents(eqn)
    return any(d > 1 for d in eqn.params["lhs_dilation"]) and max(window) > max(result)


def arguments(*shapes_of):
    return [RNG.standard_normal(shape) for shape in shapes_of]


def same(closed, new, args):
    jaxapi.check(new)
    for got, want in zip(jaxapi.eval_closed(new, *args), jaxapi.eval_closed(closed, *args), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(
    ("image", "window", "strides"),
    [
        ((13,), (5,), (3,)),
        ((9,), (2,), (3,)),  # rows between the windows
        ((9, 7), (4, 4), (2, 2)),
        ((7, 9), (3, 2), (2, 3)),
        ((8, 5), (3, 3), (1, 2)),
        ((5, 6, 7), (3, 3, 3), (2, 2, 2)),
        ((4, 5, 3), (2, 3, 1), (1, 2, 3)),
    ],
)
def test_gradients_of_transposed_convolutions(layout, padding, image, window, strides):
    def layer(x, w):
        return lax.conv_transpose(x, w, strides, padding, dimension_numbers=LAYOUTS[layout][len(image)])

    with jax.enable_x64(True):
        args = arguments(*shapes(layout, 3, 4, 5, image, window))
        closed = flat(gradients(layer), *args)
        new, count = transposed_filter_gradients(closed)
        same(closed, new, args)
    assert count == 1
    # The layer is the only convolution with a dilated image that is left.
    assert sum(any(d > 1 for d in e.params["lhs_dilation"]) for e in convolutions(new)) == 1


@pytest.mark.parametrize("padding", [((5, 3), (0, -1)), ((-2, 4), (9, 0)), ((1, 1), (3, 12))])
def test_any_padding(padding):
    """Of which some make the new convolution's padding negative: its image is cut where XLA would not recognise it."""

    def layer(x, w):
        options = {"lhs_dilation": (2, 3), "dimension_numbers": LAYOUTS["last"][2]}
        return lax.conv_general_dilated(x, w, (1, 1), padding, **options)

    with jax.enable_x64(True):
        args = arguments((2, 8, 7, 3), (3, 4, 3, 2))
        closed = flat(gradients(layer), *args)
        new, count = transposed_filter_gradients(closed)
        same(closed, new, args)
    assert count == 1
    (gradient,) = (e for e in convolutions(new) if any(d > 1 for d in e.params["rhs_dilation"]))
    for (low, high), stride in zip(gradient.params["padding"], gradient.params["rhs_dilation"], strict=True):
        assert low >= 0 and high > -stride


def test_types_and_precision_stay():
    def gradient(x, dy):
        numbers = lax.ConvDimensionNumbers((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))
        options = {"precision": ("highest", "default"), "preferred_element_type": jnp.float32}
        return lax.conv_general_dilated(x, dy, (1, 1), [(2, 1)] * 2, (2, 2), dimension_numbers=numbers, **options)

    x, dy = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 8, 8, 3), (2, 16, 16, 4)))
    closed = flat(gradient, x, dy)
    new, count = transposed_filter_gradients(closed)
    (eqn,) = convolutions(new)
    assert count == 1 and eqn.outvars[0].aval.dtype == jnp.float32
    assert eqn.params["precision"] == (lax.Precision.DEFAULT, lax.Precision.HIGHEST)


def convolution(stride: int = 1, groups: int = 1, padding: Any = "SAME", **options: Any) -> Any:
    def layer(x, w):
        numbers = LAYOUTS["last"][2]
        options_of = {"dimension_numbers": numbers, "feature_group_count": groups, **options}
        return lax.conv_general_dilated(x, w, (stride, stride), padding, **options_of)

    return layer


@pytest.mark.parametrize(
    ("layer", "window"),
    [
        (convolution(), (3, 3, 4, 8)),
        (convolution(2), (3, 3, 4, 8)),
        (convolution(2, padding="VALID"), (3, 3, 4, 8)),
        (convolution(groups=4), (3, 3, 1, 4)),
        (convolution(2, groups=2), (3, 3, 2, 8)),
        (convolution(rhs_dilation=(2, 2)), (3, 3, 4, 8)),
        (convolution(groups=2, padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)), (3, 3, 2, 8)),
        (convolution(2, padding=((8, 8), (8, 8))), (12, 12, 4, 8)),  # a filter larger than the image
    ],
    ids=["plain", "strided", "valid", "depthwise", "grouped", "dilated", "grouped transposed", "large filter"],
)
def test_other_gradients_stay(layer, window):
    closed = flat(gradients(layer), *arguments((2, 9, 10, 4), window))
    assert transposed_filter_gradients(closed) == (closed, 0)


@pytest.mark.parametrize("case", ["transposed", "transposed_3d"])
def test_reported_cases(case):
    layer, *shapes_of = CASES[case](False)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes_of]
    closed = flat(functions(layer)["gradients"], *args, jax.eval_shape(layer, *args))
    new, count = transposed_filter_gradients(closed)
    assert count == 1 and any(map(is_large_filter_over_dilated_image, convolutions(closed)))
    assert not any(map(is_large_filter_over_dilated_image, convolutions(new)))


def test_cudnn_has_the_gradient():
    layer, *shapes_of = CASES["transposed"](True)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes_of]
    new, _ = transposed_filter_gradients(flat(gradients(layer), *args))
    (gradient,) = (e for e in convolutions(new) if any(d > 1 for d in e.params["rhs_dilation"]))
    site = recognise(gradient)
    assert isinstance(site, Site) and site.convolution.kind == "backward_filter"


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_it_is_for_gpus_and_cpus(platform):
    names = [rewrite.name for rewrite in backward_rewrites(platform, divides=False)]
    assert {"transposed filters", "patches"} <= set(names)
