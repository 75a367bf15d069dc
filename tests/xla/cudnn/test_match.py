"""Convolution equations, also those that autodiff makes, as kernels of cuDNN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import Refusal
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.timings import Division, MicroConfig
from jcuts.trace import jaxapi
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.match import PRIMITIVE, Site, call_site, library_function, recognise, scratch_bytes

FORMATS = {"NCHW": ("NCHW", "OIHW", "NCHW"), "NHWC": ("NHWC", "HWIO", "NHWC")}
LAYERS = [
    {},
    {"window_strides": (2, 1)},
    {"window_strides": (2, 3), "padding": ((1, 1), (0, 0))},
    {"rhs_dilation": (2, 1), "padding": ((2, 2), (1, 1))},
    {"feature_group_count": 2},
    {"feature_group_count": 4, "window_strides": (2, 2), "padding": ((1, 1), (1, 1))},
    {"padding": ((1, 1), (2, 2))},
]


def layer(formats: str, **more):
    params = {"window_strides": (1, 1), "padding": ((0, 0), (0, 0)), "precision": "highest", **more}

    def apply(x, w):
        return jax.lax.conv_general_dilated(x, w, dimension_numbers=FORMATS[formats], **params)

    groups = more.get("feature_group_count", 1)
    rng = np.random.default_rng(1)
    x = rng.integers(-3, 4, (5, 4, 9, 8)).astype(np.float32)
    w = rng.integers(-3, 4, (8, 4 // groups, 3, 2)).astype(np.float32)
    return (apply, x, w) if formats == "NCHW" else (apply, x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0))


def sites(closed) -> list[tuple[object, object]]:
    made = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    found = []
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == PRIMITIVE:
            found.append((eqn, recognise(eqn, made.get)))
    return found


def by_cudnn(closed, *args):
    """The program with every convolution by cuDNN, in pieces."""
    values = dict(zip(closed.jaxpr.invars, args, strict=True)) | dict(
        zip(closed.jaxpr.constvars, closed.consts, strict=True)
    )
    chosen = {id(eqn): site for eqn, site in sites(closed)}
    for eqn in closed.jaxpr.eqns:
        site = chosen.get(id(eqn))
        if site is not None:
            assert isinstance(site, Site), site
            sizes = (2, site.batch - 2) if site.batch > 2 else (site.batch,)
            algorithm = cudnn_call.algorithms(site.convolution.kind)[0]
            division = Division.of(MicroConfig(n, algorithm, "float32", 1e-3, 0) for n in sizes)
            a, b = (values[v] for v in site.operands)
            out = call_site(site, division, eqn.outvars[0].aval, a, b, layer="l", platform="cpu")
            values[eqn.outvars[0]] = out
            continue
        ins = [v.val if jaxapi.is_literal(v) else values[v] for v in eqn.invars]
        values.update(zip(eqn.outvars, jaxapi.bind_eqn(eqn, ins), strict=True))
    return [values[v] for v in closed.jaxpr.outvars]


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("more", LAYERS, ids=str)
def test_a_layer_and_its_gradients(host_cudnn, formats, more):
    apply, x, w = layer(formats, **more)
    y = apply(x, w)
    dy = np.random.default_rng(2).integers(-3, 4, y.shape).astype(np.float32)

    def step(x, w, dy):
        y, back = jax.vjp(apply, x, w)
        return y, *back(dy)

    closed = jax.make_jaxpr(step)(x, w, dy)
    flat = jax.make_jaxpr(lambda *xs: jaxapi.eval_closed(closed, *xs))(x, w, dy)
    kinds = [site.convolution.kind if isinstance(site, Site) else site for _, site in sites(flat)]
    assert sorted(kinds) == ["backward_data", "backward_filter", "forward"], kinds
    layers = {
        (
            s.convolution.spatial,
            s.convolution.window,
            s.convolution.strides,
            s.convolution.groups,
            s.convolution.layout,
            s.batch,
            s.precision,
        )
        for _, s in sites(flat)
    }
    assert len(layers) == 1  # all three are of one layer
    for found, expected in zip(by_cudnn(flat, x, w, dy), step(x, w, dy), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_autodiff_reverses_no_window_in_the_end(host_cudnn):
    apply, x, w = layer("NCHW", window_strides=(2, 1))
    closed = jax.make_jaxpr(jax.grad(lambda x, w: apply(x, w).sum()))(x, w)
    site = next(s for _, s in sites(closed) if isinstance(s, Site) and s.convolution.kind == "backward_data")
    assert not site.flipped and site.operands[1] in closed.jaxpr.invars


def test_a_stretched_input_alone_is_a_gradient_with_the_window_reversed(host_cudnn):
    def up(x, w):
        return jax.lax.conv_transpose(
            x, w, (2, 2), ((2, 2), (2, 2)), dimension_numbers=("NCHW", "OIHW", "NCHW"), precision="highest"
        )

    x = np.random.default_rng(0).integers(-3, 4, (3, 4, 5, 5)).astype(np.float32)
    w = np.random.default_rng(1).integers(-3, 4, (6, 4, 3, 3)).astype(np.float32)
    closed = jax.make_jaxpr(up)(x, w)
    ((_, site),) = sites(closed)
    assert isinstance(site, Site) and site.convolution.kind == "backward_data" and site.flipped
    np.testing.assert_array_equal(by_cudnn(closed, x, w)[0], up(x, w))


@pytest.mark.parametrize(
    "change",
    [
        {"padding": ((0, 1), (0, 0))},
        {"padding": ((-1, -1), (0, 0))},
        {"preferred_element_type": jnp.float64},
        {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32},
    ],
)
def test_what_cudnn_cannot_do_has_a_reason(change):
    apply, x, w = layer("NCHW", **{"window_strides": (1, 1), **change})
    with jax.enable_x64(True):
        ((_, site),) = sites(jax.make_jaxpr(apply)(x, w))
    assert isinstance(site, Refusal) and site.reason


def test_integers_are_left_alone():
    closed = jax.make_jaxpr(lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"))(
        np.ones((1, 1, 4, 4), np.int32), np.ones((1, 1, 2, 2), np.int32)
    )
    ((_, site),) = sites(closed)
    assert isinstance(site, Refusal) and "int32" in site.reason


def test_padding_that_makes_no_difference_is_one_side_s():
    apply, x, w = layer("NCHW", window_strides=(3, 3), padding=((1, 0), (1, 0)))
    ((_, site),) = sites(jax.make_jaxpr(apply)(x, w))
    assert isinstance(site, Site) and site.convolution.padding == ((1, 1), (1, 1))


def test_the_precision_that_is_asked_for():
    apply, x, w = layer("NCHW", precision=None)
    ((_, site),) = sites(jax.make_jaxpr(apply)(x, w))
    assert isinstance(site, Site) and site.precision == "tf32"
    ((_, site),) = sites(jax.make_jaxpr(apply)(x.astype(np.float16), w.astype(np.float16)))
    assert isinstance(site, Site) and site.precision == "float32" and site.convolution.dtype == "float16"


@pytest.mark.parametrize("kind", ["forward", "backward_data", "backward_filter"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_library_s_function_of_a_kernel_is_that_kernel(kind, layout):
    c = Convolution(kind, 4, 6, (9, 8), (3, 3), strides=(2, 1), padding=((1, 1), (1, 1)), groups=2, layout=layout)
    function, avals = library_function(c, 5, jax.lax.Precision.HIGHEST)
    (site,) = [s for _, s in sites(jax.make_jaxpr(function)(*avals))]
    assert isinstance(site, Site) and site.convolution == c and site.batch == 5


def test_the_workspace_of_xla_s_own_convolution_is_read_from_the_program():
    text = """
  %transpose.3 = f32[256,27,27,192]{3,2,1,0} fusion(%copy), kind=kInput, calls=%fused_transpose
  %cudnn-conv.2 = (f32[4,3,5,5]{3,2,1,0}, u8[1024]{0}) custom-call(%a, %b), custom_call_target="__cudnn$convForward"
  %cudnn-conv.3 = (f32[4,3,5,5]{3,2,1,0}, u8[70000]{0}) custom-call(%a, %u), target="__cudnn$convBackwardInput"
  %mask = u8[999999]{0} fusion(%cudnn-conv.3), kind=kLoop, calls=%compare
"""
    assert scratch_bytes(text) == 70000
    assert scratch_bytes(text.replace("u8[70000]", "u8[0]")) == 1024
    assert scratch_bytes("\n".join(text.splitlines()[:2])) is None
    assert scratch_bytes('%c = f32[4]{0} custom-call(%a), custom_call_target="__cudnn$convForward"') == 0
