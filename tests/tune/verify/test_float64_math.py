"""Float64 functions of the reference against numbers from multiple-precision arithmetic, and grouped convolutions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.trace import jaxapi
from jcuts.tune.baseline import xla_export
from jcuts.tune.verify import float64_math
from jcuts.tune.verify.float64_eval import evaluate
from jcuts.tune.verify.reference import CONVOLUTION
from jcuts.tune.verify.rounding_traits import is_wide

pytestmark = pytest.mark.usefixtures("xla_as_shipped")

POINTS = {
    "atanh": (
        (0.4140625, "0.4405044588647576531211616"),
        (-0.41420796, "-0.4406800308661610486444671"),
        (0.37, "0.3884230997182961085643924"),
        (0.999, "3.800201167250199587464602"),
        (1e-05, "0.00001000000000033333415138387"),
        (-0.6, "-0.6931471805599452747227626"),
    ),
    "log1p": (
        (-0.41357244, "-0.5337061308783530487026285"),
        (-0.4140625, "-0.5345421503833067253238609"),
        (-0.2928, "-0.3464417676587033793390977"),
        (-0.97, "-3.506557897319980788462318"),
        (0.3, "0.2623642644674910434953189"),
        (1e-08, "9.999999950000000542558937e-9"),
        (7.5, "2.140066163496270770832302"),
    ),
    "exp2": (
        (-19.358935, "0.000001487235970814836208507234"),
        (10.3, "1260.691879265194896231611"),
        (-0.5, "0.7071067811865475244008444"),
        (1023.7, "1.460180556705115405442121e+308"),
        (0.001, "1.000693387462580632552008"),
    ),
    "erfc": (
        (17.523345, "1.410362692838385178586876e-135"),
        (9.7, "7.936107563214511746056012e-43"),
        (1.1, "0.1197949304259182703427405"),
        (-0.3, "1.328626759459127416189618"),
        (26.1, "3.081217493314593339681348e-298"),
        (0.64, "0.3654141708778586761596285"),
    ),
    "erf_inv": (
        (0.6427576, "0.6509853865574883419881062"),
        (-0.55, "-0.5341590877497024221811214"),
        (0.2, "0.1791434546212916866527257"),
        (0.999, "2.326753765513524493866434"),
        (0.9999999, "3.766562581638470888714756"),
        (1e-08, "8.862269254527580553925872e-9"),
    ),
}
"""Arguments where XLA is off by many ulp, ordinary ones, and the exact values to 25 digits."""
LIMIT_ULP = 2.5


@pytest.fixture(autouse=True)
def _sixty_four_bits():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", sorted(POINTS))
def test_values(name):
    x = np.array([point for point, _ in POINTS[name]])
    (got,) = evaluate(jaxapi.closed_jaxpr_of(getattr(lax, name), x), [x])
    for argument, value, (_, exact) in zip(x, np.asarray(got), POINTS[name], strict=True):
        error = abs((np.longdouble(value) - np.longdouble(exact)) / np.spacing(float(exact)))
        assert error <= LIMIT_ULP, (name, argument, float(error))


@pytest.mark.parametrize("name", sorted(POINTS))
def test_special_values_are_those_of_xla(name):
    x = jnp.array([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, jnp.inf, -jnp.inf, jnp.nan, 1e-310, 5e-324, 1e300, -1e300, 1e-12])
    got, xla = float64_math.RULES[name].function(None, x), getattr(lax, name)(x)
    np.testing.assert_allclose(got, xla, rtol=1e-14)
    np.testing.assert_array_equal(np.signbit(got)[xla == 0], np.signbit(xla)[xla == 0])


def test_float32_functions_stay_xlas():
    assert not any(
        rule.applies(_unary(np.float32, name)) for name, rule in float64_math.RULES.items() if name in POINTS
    )
    assert all(rule.applies(_unary(np.float64, name)) for name, rule in float64_math.RULES.items() if name in POINTS)


def _unary(dtype, name):
    return jaxapi.closed_jaxpr_of(getattr(lax, name), np.zeros(3, dtype)).jaxpr.eqns[0]


CONVOLUTIONS = {
    "one dimension": ((2, 8, 4), (3, 2, 6), "NWC WIO NWC", 2, {"padding": ((1, 1),)}),
    "depthwise": ((1, 7, 6, 5), (3, 2, 1, 5), "NHWC HWIO NHWC", 5, {"padding": ((2, 0), (-1, 1))}),
    "channels first": ((2, 6, 9, 4), (4, 2, 2, 3), "NCHW OIHW NCHW", 3, {"strides": (2, 1), "order": 1}),
    "stretched": ((1, 5, 4, 4), (2, 3, 2, 4), "NHWC HWIO NHWC", 2, {"lhs": (2, 3), "rhs": (1, 2)}),
    "three dimensions": ((2, 4, 3, 5, 4), (2, 2, 3, 2, 2), "NDHWC DHWIO NDHWC", 2, {"strides": (1, 2, 2)}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_grouped_convolution(name):
    shape, kernel, layout, groups, options = CONVOLUTIONS[name]
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal(shape), rng.standard_normal(kernel)
    layout = tuple(layout.split())
    if name == "channels first":
        w = rng.standard_normal((6, 2, 2, 3))
    space = len(shape) - 2

    def convolution(a, b):
        return lax.conv_general_dilated(
            a,
            b,
            options.get("strides", (1,) * space),
            options.get("padding", ((1, 1),) * space),
            options.get("lhs"),
            options.get("rhs"),
            layout,
            groups,
        )

    (got,) = evaluate(jaxapi.closed_jaxpr_of(convolution, x, w), [x, w])
    np.testing.assert_allclose(got, convolution(x, w), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "kernel", "layout", "strides"),
    [
        ((2, 5, 7, 4), (1, 1, 4, 6), "NHWC HWIO NHWC", (1, 1)),
        ((2, 4, 5, 8), (6, 4, 1, 1), "NCHW OIHW NCHW", (2, 3)),
        ((5, 4, 2, 7), (1, 6, 4, 1), "HCNW HOIW WNHC", (2, 1)),
        ((3, 9, 2), (1, 2, 5), "NWC WIO CNW", (4,)),
    ],
)
def test_a_convolution_with_one_tap_is_a_product(shape, kernel, layout, strides):
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal(shape), rng.standard_normal(kernel)
    x.flat[3] = np.inf

    def convolution(a, b):
        return lax.conv_general_dilated(a, b, strides, "VALID", dimension_numbers=tuple(layout.split()))

    closed = jaxapi.closed_jaxpr_of(convolution, x, w)
    (got,) = evaluate(closed, [x, w])
    np.testing.assert_allclose(got, convolution(x, w), rtol=1e-13, atol=1e-13)
    text = jax.jit(lambda a, b: evaluate(closed, [a, b])).lower(x, w).as_text()
    assert "convolution" not in text and "dot_general" in text


@pytest.mark.parametrize("options", [{"padding": ((1, 0), (0, 0))}, {"lhs_dilation": (2, 1)}, {"batch_group_count": 2}])
def test_a_convolution_that_pads_or_stretches_is_none(options):
    x, w = np.ones((2, 5, 7, 4)), np.ones((1, 1, 4, 6))
    more = {"padding": ((0, 0), (0, 0)), **options}
    layout = ("NHWC", "HWIO", "NHWC")
    closed = jaxapi.closed_jaxpr_of(
        lambda a, b: lax.conv_general_dilated(a, b, (1, 1), dimension_numbers=layout, **more), x, w
    )
    assert not float64_math.RULES["conv_general_dilated"].applies(closed.jaxpr.eqns[0])


DENSE = {
    "same": ((2, 6, 5, 4), (3, 3, 4, 6), "NHWC HWIO NHWC", {"padding": ((1, 1), (1, 1))}),
    "one row": ((2, 4, 9, 3), (5, 1, 7, 3), "NHWC OHWI NHWC", {"padding": ((0, 0), (3, 3)), "window_strides": (1, 2)}),
    "channels first": ((2, 3, 9, 8), (5, 3, 2, 4), "NCHW OIHW NCHW", {"padding": ((1, 0), (-1, 2))}),
    "stretched": (
        (4, 5, 2, 7),
        (3, 6, 4, 2),
        "HCNW HOIW WNHC",
        {
            "dimension_numbers": ("CNHW", "HIOW", "WNHC"),
            "lhs_dilation": (2, 3),
            "rhs_dilation": (1, 2),
            "padding": ((2, 1), (0, 3)),
        },
    ),
    "three dimensions": ((2, 4, 5, 6, 3), (2, 2, 3, 3, 2), "NDHWC DHWIO NDHWC", {"window_strides": (2, 1, 3)}),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_convolution_of_few_taps_is_a_sum_of_products_for_a_gpu(name):
    shape, kernel, layout, options = DENSE[name]
    space = len(shape) - 2
    more = {
        "window_strides": (1,) * space,
        "padding": ((0, 0),) * space,
        "dimension_numbers": tuple(layout.split()),
        **options,
    }
    if name == "stretched":
        shape, kernel = (5, 2, 4, 7), (3, 5, 6, 2)
    rng = np.random.default_rng(6)
    x, w = rng.standard_normal(shape), rng.standard_normal(kernel)
    x.flat[7], x.flat[30] = np.inf, np.nan

    def convolution(a, b):
        return lax.conv_general_dilated(a, b, **more)

    closed = jaxapi.closed_jaxpr_of(convolution, x, w)
    (got,) = evaluate(closed, [x, w], taps=True)
    np.testing.assert_allclose(got, convolution(x, w), rtol=1e-12, atol=1e-12)
    lowered = [jax.jit(lambda a, b, t=t: evaluate(closed, [a, b], taps=t)).lower(x, w).as_text() for t in (True, False)]
    assert [CONVOLUTION in text for text in lowered] == [False, True] and "dot_general" in lowered[0]
    exports = xla_export.export_subset(closed, platform="cuda")
    assert CONVOLUTION not in jax.export.deserialize(bytearray(exports.reference)).mlir_module()


def test_groups_do_not_meet():
    x, w = np.ones((1, 6, 4)), np.ones((3, 2, 4))
    x[0, 2, 0] = np.inf
    w[1] = -1.0

    def convolution(a, b):
        return lax.conv_general_dilated(a, b, (1,), ((1, 1),), None, None, ("NWC", "WIO", "NWC"), 2)

    (got,) = evaluate(jaxapi.closed_jaxpr_of(convolution, x, w), [x, w])
    assert np.isfinite(np.asarray(got)[..., 2:]).all()
    assert not np.isfinite(np.asarray(got)[0, 1:4, :2]).any()


def test_which_functions_are_wide():
    narrow, wide = np.zeros(3, np.float32), np.zeros(3)

    def inside(x):
        return lax.fori_loop(0, 3, lambda _, c: (c.astype(np.float64) * 3.0).astype(np.float32), x)

    assert is_wide(jaxapi.closed_jaxpr_of(lambda x: x + 1, wide))
    assert is_wide(jaxapi.closed_jaxpr_of(inside, narrow))
    assert not is_wide(jaxapi.closed_jaxpr_of(jnp.tanh, narrow))


def test_noise_of_float64_operations_alone():
    def function(x):
        return x * np.float32(3.3), x.astype(np.float64) * 3.3

    x = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    closed = jaxapi.closed_jaxpr_of(function, x)
    exact = evaluate(closed, [x.astype(np.float64)])
    moved = evaluate(closed, [x.astype(np.float64)], noise=(np.uint64(3), np.array([0.0, 1.0])))
    np.testing.assert_array_equal(moved[0], exact[0])
    distance = np.abs(moved[1] / exact[1] - 1)
    assert 0 < distance.max() <= 1.5 * np.finfo(np.float64).eps


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
def test_a_number_divided_by_itself_is_not_always_one(dtype):
    with jax.enable_x64(True):
        x = np.array([0, 1, 5, np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
        closed = jaxapi.closed_jaxpr_of(
            lambda v: (lax.div(v, v), lax.rem(v, v), lax.div(v, v - v), lax.rem(v, v - v)), x
        )
        div, rem, none, rest = (np.asarray(v) for v in jax.jit(lambda v: evaluate(closed, [v]))(x))
    ones = ~np.zeros((), dtype)
    np.testing.assert_array_equal(div, np.where(x == 0, ones, 1))
    np.testing.assert_array_equal(rem, np.zeros(5))
    np.testing.assert_array_equal(none, np.full(5, ones))
    np.testing.assert_array_equal(rest, x)


def test_integer_division_keeps_its_edge():
    low = np.iinfo(np.int32).min
    x, y = np.array([low, low, -7, 7], np.int32), np.array([-1, 1, 2, -2], np.int32)
    closed = jaxapi.closed_jaxpr_of(lambda a, b: (lax.div(a, b), lax.rem(a, b)), x, y)
    with jax.enable_x64(True):
        div, rem = (np.asarray(v) for v in evaluate(closed, [x, y]))
    np.testing.assert_array_equal(div, np.array([low, low, -3, -3]))
    np.testing.assert_array_equal(rem, np.array([0, 0, -1, 1]))
