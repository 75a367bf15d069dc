"""Convolutions by Winograd's minimal filtering and by FFT: where, where not, and against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.rewrite import fft_conv, winograd_conv
from jcuts.rewrite.dense_conv import DenseConv
from jcuts.rewrite.registry import applicable, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled, exact

RNG = np.random.default_rng(23)
NHWC, NCHW, MIXED = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HWNC", "OHWI", "NCHW")
KEPT = 2.0
"""Times the direct convolution's error that is accepted."""
FEW = 2.0
"""Times what is accepted, in sums of few terms: such convolutions are not transformed outside of tests."""


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def convolution(
    layout: Any = NHWC,
    padding: Any = "SAME",
    strides: Any = (1, 1),
    dilation: Any = (1, 1),
    precision: Any = "highest",
    **more: Any,
):
    def function(x, w):
        return lax.conv_general_dilated(
            x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=layout, precision=precision, **more
        )

    return function


def placed(spec, names, sizes):
    """Sizes by name in the order of a layout. Args: names: of the sizes."""
    return [sizes[names.index(letter)] for letter in spec]


def operands(layout, image, filters):
    """Args: image: N, H, W, C; filters: H, W, I, O."""
    return values(*placed(layout[0], "NHWC", image)), values(*placed(layout[1], "HWIO", filters))


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def floor(closed):
    """What the acceptance rule allows beside a multiple of XLA's error: 4 eps sqrt(K), K terms of a sum."""
    (eqn,) = (e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "conv_general_dilated")
    conv = DenseConv.of(eqn)
    assert conv is not None
    return 4 * float(jnp.finfo(jnp.float32).eps) * np.sqrt(np.prod(conv.taps) * conv.channels)


def replaced(rule, function, *args, slack=FEW):
    """Results of a rewritten program beside float64's, whose error may be as large as is accepted of a kernel."""
    closed = flat(function, *args)
    new = rewritten(closed, (rule,))
    jaxapi.check(new.closed)
    assert new.counts == {rule: 1}
    names = {jaxapi.primitive_name(e) for e in new.closed.jaxpr.eqns}
    assert "conv_general_dilated" not in names and not names & {"jit", "pjit", "closed_call"}
    (right,), (old,), (got,) = exact(closed, *args), compiled(closed, *args), compiled(new.closed, *args)
    assert got.dtype == old.dtype and got.shape == old.shape
    scale = np.sqrt(np.mean(np.square(right)))
    plain, mine = (np.abs(np.asarray(a, np.float64) - np.asarray(right)).max() / scale for a in (old, got))
    assert mine <= slack * (KEPT * plain + floor(closed)), (mine, plain)
    return new.closed


@pytest.fixture
def everywhere(monkeypatch):
    """Small convolutions are transformed, too."""
    monkeypatch.setattr(winograd_conv, "LEAST_CHANNELS", 0.0)
    monkeypatch.setattr(winograd_conv, "LEAST_TILES", 1)
    monkeypatch.setattr(fft_conv, "LEAST_TAPS", 2.0)
    monkeypatch.setattr(fft_conv, "LEAST_CHANNELS", 1)
    monkeypatch.setattr(fft_conv, "LEAST_RESULTS", 0.0)


@pytest.mark.parametrize("layout", [NHWC, NCHW, MIXED], ids=["NHWC", "NCHW", "mixed"])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 0), (0, 5)), ((-1, 2), (3, -2))])
@pytest.mark.parametrize("image", [(2, 12, 16, 5), (1, 7, 9, 8), (3, 3, 6, 4)])
def test_minimal_filtering_gives_what_the_convolution_gives(everywhere, layout, padding, image):
    args = operands(layout, image, (3, 3, image[3], 7))
    function = convolution(layout, padding)
    if 0 in jax.eval_shape(function, *args).shape:
        assert "winograd" not in applicable(flat(function, *args))
        return
    replaced("winograd", function, *args)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_with_many_channels_the_error_is_what_is_accepted(padding):
    args = operands(NHWC, (4, 18, 22, 192), (3, 3, 192, 200))
    replaced("winograd", convolution(padding=padding), *args, slack=1.0)


def test_weights_that_are_constants_are_transformed_once(everywhere):
    x, w = operands(NHWC, (2, 9, 10, 6), (3, 3, 6, 11))
    closed = replaced("winograd", lambda x: convolution()(x, w), x)
    assert sorted(c.shape for c in closed.consts) == [(16, 36), (36, 6, 11), (36, 36)]


@pytest.mark.parametrize("layout", [NHWC, NCHW, MIXED], ids=["NHWC", "NCHW", "mixed"])
@pytest.mark.parametrize(
    ("image", "filters", "more"),
    [
        ((2, 19, 23, 3), (7, 5, 3, 4), {}),
        ((1, 12, 31, 4), (4, 11, 4, 2), {"padding": "VALID"}),
        ((2, 21, 40, 2), (11, 9, 2, 3), {"strides": (2, 3)}),
        ((1, 20, 22, 3), (5, 4, 3, 2), {"dilation": (2, 3), "padding": ((5, 3), (0, 9))}),
        ((1, 8, 9, 2), (13, 15, 2, 3), {"padding": ((9, 8), (7, 12))}),
        ((1, 18, 17, 2), (5, 5, 2, 3), {"padding": ((-2, 4), (3, -1)), "strides": (1, 2)}),
        ((2, 5, 6, 3), (1, 4, 3, 3), {}),
    ],
)
def test_transforms_give_what_the_convolution_gives(everywhere, layout, image, filters, more):
    replaced("ffts", convolution(layout, **more), *operands(layout, image, filters))


WIDE = (8, 28, 28, 256)
REFUSED = {
    "TF32 suffices": (convolution(precision=None), WIDE, (3, 3, 256, 256)),
    "strides": (convolution(strides=(2, 2)), WIDE, (3, 3, 256, 256)),
    "dilation": (convolution(dilation=(2, 2)), WIDE, (3, 3, 256, 256)),
    "5x5": (convolution(), WIDE, (5, 5, 256, 256)),
    "few channels": (convolution(), (8, 28, 28, 64), (3, 3, 64, 64)),
    "few tiles": (convolution(), (1, 14, 14, 512), (3, 3, 512, 512)),
    "groups": (convolution(feature_group_count=2), WIDE, (3, 3, 128, 256)),
    "7x7": (convolution(), (8, 56, 56, 64), (7, 7, 64, 64)),
    "11x11 at TF32": (convolution(precision=None), (8, 56, 56, 64), (11, 11, 64, 64)),
    "one channel": (convolution(), (8, 161, 300, 1), (41, 11, 1, 32)),
    "the filter gradient of 3x3": (convolution(padding="VALID"), (64, 58, 58, 64), (56, 56, 64, 64)),
    "strided 11x11": (convolution(strides=(4, 4)), (8, 224, 224, 16), (11, 11, 16, 64)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_a_convolution(name):
    function, image, filters = REFUSED[name]
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in (image, filters)]
    assert not {"winograd", "ffts"} & set(applicable(flat(function, *shapes)))


@pytest.mark.parametrize(
    ("rule", "image", "filters"),
    [
        ("winograd", WIDE, (3, 3, 256, 256)),
        ("winograd", (2, 28, 28, 512), (3, 3, 512, 128)),
        ("ffts", (8, 56, 56, 64), (11, 11, 64, 64)),
        ("ffts", (8, 81, 300, 32), (41, 11, 32, 32)),
    ],
)
def test_what_is_transformed(rule, image, filters):
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in (image, filters)]
    assert {"winograd", "ffts"} & set(applicable(flat(convolution(), *shapes))) == {rule}


def test_very_many_taps_are_transformed_at_tf32_too():
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((8, 81, 300, 32), (41, 11, 32, 32))]
    assert "ffts" in applicable(flat(convolution(precision=None), *shapes))


def test_only_dense_float32_convolutions_of_images_are_seen():
    def of(function, *shapes, dtype=np.float32):
        closed = flat(function, *(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
        return DenseConv.of(closed.jaxpr.eqns[0])

    assert of(convolution(), (2, 9, 9, 4), (3, 3, 4, 4)) is not None
    assert of(convolution(), (2, 9, 9, 4), (3, 3, 4, 4), dtype=jnp.bfloat16) is None
    assert of(convolution(feature_group_count=2), (2, 9, 9, 4), (3, 3, 2, 4)) is None
    assert of(convolution(padding=((1, 1), (1, 1)), lhs_dilation=(2, 1)), (2, 9, 9, 4), (3, 3, 4, 4)) is None
    assert of(lambda x, w: lax.conv(x, w, (1,), "SAME"), (2, 4, 9), (4, 4, 3)) is None
    assert of(lambda x, w: x @ w, (9, 4), (4, 3)) is None
