"""Inputs from seeds: recipes, special values, reproducibility, files."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jcuts.base.errors import UsageError
from jcuts.tune import input_recipes
from jcuts.tune.problem import Input, Output, Problem
from jcuts.tune.verify import inputs as verify_inputs
from jcuts.tune.verify import reference
from jcuts.tune.verify.inputs import (
    HUGE,
    NORMAL,
    SCALARS,
    SPECIAL,
    dtype_of,
    flushed,
    load,
    make_inputs,
    save,
    seed_kinds,
)
from tests import programs


def make(*inputs, outputs=None, degree=1):
    return Problem("id", inputs, outputs or (Output((100,), "float32"),), degree=degree)


def test_recipes_and_reproducibility():
    problem = make(
        Input((50, 4), "float32"),
        Input((500,), "float32", "positive"),
        Input((500,), "int32", "integers 2..5"),
        Input((30,), "bool", "bool"),
        Input((500,), "int8", "integers -128..127"),
        Input((64,), "complex64"),
    )
    one, again, other = (make_inputs(problem, NORMAL, seed) for seed in (3, 3, 4))
    for a, b, spec in zip(one, again, problem.inputs, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.shape, a.dtype) == (spec.shape, dtype_of(spec.dtype))
    assert (one[0] != other[0]).any()
    assert (one[1] > 0).all()
    assert set(one[2]) == {2, 3, 4, 5}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_special_values_occur(dtype):
    (x,) = make_inputs(make(Input((2000,), dtype)), SPECIAL, 0)
    wide = x.astype(np.float64)
    assert np.isnan(wide).any() and np.isposinf(wide).any() and np.isneginf(wide).any()
    assert ((wide == 0) & np.signbit(wide)).any()
    assert ((wide != 0) & (np.abs(wide) < float(ml_dtypes.finfo(dtype_of(dtype)).smallest_normal))).any()


def test_special_values_keep_the_recipe():
    specs = (Input((900,), "float32", "positive"), Input((900,), "int32", "integers 0..9"))
    floats, integers = make_inputs(make(*specs), SPECIAL, 0)
    assert not (floats < 0).any() and not np.signbit(floats[~np.isnan(floats)]).any()
    assert integers.min() == 0 and integers.max() == 9


def test_divisors_have_no_tiny_values():
    (x,) = make_inputs(make(Input((2000,), "bfloat16", "normal divisor")), SPECIAL, 0)
    wide = x.astype(np.float64)
    assert np.isnan(wide).any() and np.isinf(wide).any() and (wide == 0).any()
    assert np.nanmin(np.abs(wide[wide != 0])) > 1e-9


def test_divisors_may_be_finite_and_of_tf32():
    (x,) = make_inputs(make(Input((2000,), "float32", "normal finite divisor tf32")), SPECIAL, 0)
    wide = x.astype(np.float64)
    assert np.isfinite(wide).all() and np.abs(wide[wide != 0]).min() > 1e-9
    assert not (x.view(np.uint32) & 0x1FFF).any()


def test_a_filter_that_also_divides_is_both():
    def function(x, w, s):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers), s / w * s

    args = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2)), jnp.ones((3, 3, 2, 2))
    closed = jax.make_jaxpr(function)(*args)
    made = input_recipes.input_recipe(closed, closed.jaxpr.invars[1])
    assert made == Input((3, 3, 2, 2), "float32", made).recipe == "normal finite divisor"


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, c, s: x / c.astype(jnp.float32) * s, ["normal", "normal divisor", "normal"]),
        (lambda x, c, s: x / c.astype(jnp.float32) + s, ["normal"] * 3),
        (lambda x, c, s: x * c.astype(jnp.float32) / 3.0 * s, ["normal"] * 3),
    ],
)
def test_what_divides_before_a_product_is_known(function, found):
    args = jnp.ones((3, 4)), jnp.ones((1, 4), jnp.bfloat16), jnp.ones((4,))
    closed = jax.make_jaxpr(function)(*args)
    assert [input_recipes.input_recipe(closed, v) for v in closed.jaxpr.invars] == found


def batch_statistics(x, n, fallback, which):
    centred = x - x.mean(0)
    variance = jnp.where(which, (centred * centred).sum(0) / n, fallback)
    return centred * jax.lax.rsqrt(variance + 1e-3)


@pytest.mark.parametrize(
    ("function", "recipe"),
    [
        (batch_statistics, "integers 1..1"),
        (lambda x, n, fallback, which: jnp.where(which, jnp.nan, x * n), "integers 0..0"),
        (lambda x, n, fallback, which: jnp.where(which, x + n, x * fallback), "bool"),
        (lambda x, n, fallback, which: x + jnp.where(which, n, fallback), "bool"),
        (lambda x, n, fallback, which: (jnp.where(which, x, n), jnp.where(which, n, x)), "bool"),
    ],
)
def test_boolean_scalars_select_what_is_computed(function, recipe):
    closed = programs.trace(function, jnp.ones((40, 6)), jnp.float32(1), jnp.float32(1), np.bool_(True)).closed
    assert input_recipes.input_recipe(closed, closed.jaxpr.invars[-1]) == recipe


def test_one_special_scalar_does_not_hide_what_the_other_operands_do():
    """Of a batch norm every result was NaN or one number where the count of terms was infinite, or the variance of no
    terms was selected.
    """
    problem = make(
        Input((40, 64), "float32", "positive"),
        Input((), "float32", "positive"),
        Input((), "float32", "positive"),
        Input((), "bool", "integers 1..1"),
        outputs=(Output((40, 64), "float32", 40),),
    )
    kinds = seed_kinds(problem)
    assert kinds == [NORMAL] * 3 + [SPECIAL, HUGE, SCALARS]
    seen = set()
    for seed, kind in enumerate([*kinds, *[SCALARS] * 8]):
        x, n, fallback, which = made = make_inputs(problem, kind, seed)
        assert which == (kind != SCALARS) and which.dtype == bool and which.shape == ()
        found = np.asarray(jax.jit(batch_statistics)(*made))
        if kind != SCALARS:
            assert np.isfinite([n, fallback]).all() and len(np.unique(found[np.isfinite(found)])) > 40
        else:
            assert np.isfinite(x).all()
            seen |= {repr(float(n)), repr(float(fallback))}
    assert len(seen) > 4 and seen & {"inf", "nan"}  # not always the first of the special values
    assert SCALARS not in seed_kinds(make(Input((), "float32"), Input((9,), "int32", "integers 0..9")))


def test_integers_of_the_whole_range_reach_its_ends():
    for dtype in ("int32", "uint8", "int64", "uint64"):
        (x,) = make_inputs(make(Input((400,), dtype, "integers")), SPECIAL, 0)
        assert x.min() == np.iinfo(dtype).min and x.max() == np.iinfo(dtype).max


def test_huge_terms_of_a_sum_do_not_cancel():
    """Terms of one size leave what a fused multiply-add rounds off, which a clip makes 0 or 6."""
    problem = make(Input((64, 64), "float32"), outputs=(Output((100,), "float32", 9),), degree=3)
    (x,) = make_inputs(problem, HUGE, 0)
    huge = np.abs(x[np.abs(x) > 1e3])
    assert huge.size > 32 and np.unique(huge).size > 0.9 * huge.size
    assert (x[np.abs(x) > 1e3] > 0).any() and (x[np.abs(x) > 1e3] < 0).any()


@pytest.mark.parametrize(("reduction", "degree"), [(1, 1), (100, 1), (100, 2), (1, 3)])
def test_huge_values_do_not_overflow_on_the_way(reduction, degree):
    problem = make(Input((1000,), "float32"), outputs=(Output((1,), "float32", reduction),), degree=degree)
    (x,) = make_inputs(problem, HUGE, 0)
    most = float(np.finfo(np.float32).max)
    top = float(np.abs(x.astype(np.float64)).max())
    assert np.isfinite(x).all() and top > 1e10
    assert top**degree * reduction <= most * (1 + 1e-6)


def test_number_of_sets():
    assert seed_kinds(make(Input((9,), "float32"))) == [NORMAL] * 3 + [SPECIAL, HUGE]
    scalar = make(Input((9,), "float32"), outputs=(Output((), "float32", 9),))
    assert seed_kinds(scalar).count(NORMAL) == 16
    large = make(Input((9,), "float32"), outputs=(Output((2048, 2048), "float32"),))
    assert seed_kinds(large) == [NORMAL, SPECIAL, HUGE]
    for size, sets in ((96, 1), (32, 3)):  # of channels, beside a large result
        both = replace(large, outputs=(*large.outputs, Output((size,), "float32")))
        assert seed_kinds(both).count(NORMAL) == sets


def test_given_values_and_files(tmp_path):
    path = tmp_path / "x.npy"
    values = np.arange(6, dtype=np.int32)
    np.save(path, values)
    problem = make(Input((2, 3), "int32", "given", str(path)))
    assert seed_kinds(problem) == [NORMAL]
    np.testing.assert_array_equal(make_inputs(problem, NORMAL, 9)[0], values.reshape(2, 3))
    with pytest.raises(UsageError):
        make_inputs(make(Input((7,), "int32", "given", str(path))), NORMAL, 0)
    with pytest.raises(UsageError):
        make_inputs(make(Input((6,), "int64", "given", str(path))), NORMAL, 0)
    with pytest.raises(UsageError):
        dtype_of("float33")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_files_keep_every_dtype_and_shape(tmp_path, dtype, shape):
    array = np.ones(shape).astype(dtype_of(dtype))
    save(tmp_path / "a.npy", array)
    back = load(tmp_path / "a.npy", shape, dtype)
    assert (back.shape, back.dtype) == (shape, array.dtype)
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_flushed(dtype):
    kind = dtype_of(dtype)
    tiny = float(ml_dtypes.finfo(kind).smallest_normal)
    x = np.array([tiny / 2, -tiny / 4, tiny, -tiny, 0.0, -0.0, 1.5, np.inf, np.nan]).astype(kind)
    got = flushed(x)
    assert got.dtype == kind
    np.testing.assert_array_equal(
        got.astype(np.float64), [0.0, -0.0, tiny, -tiny, 0.0, -0.0, 1.5, np.inf, np.nan], strict=True
    )
    np.testing.assert_array_equal(np.signbit(got.astype(np.float64))[:6], [False, True, False, True, False, True])
    np.testing.assert_array_equal(flushed(np.arange(3)), np.arange(3))
    plain = np.array([0.0, -0.0, 1.0, np.inf]).astype(dtype_of(dtype))
    assert flushed(plain) is plain  # one set of operands serves every run with noise


def test_a_large_input_travels_as_the_values_that_it_repeats(tmp_path, monkeypatch):
    monkeypatch.setattr(verify_inputs, "PERIOD", 101)
    spec = Input((7, 60), "float32")
    (few,), (all_,) = (make_inputs(make(spec), SPECIAL, 2, short=short) for short in (True, False))
    assert few.shape == (101,) and all_.shape == spec.shape
    save(tmp_path / "x.npy", few)
    for read in (load(tmp_path / "x.npy", spec.shape, "float32"), verify_inputs.whole(few, spec.shape)):
        np.testing.assert_array_equal(read, all_)
    np.testing.assert_array_equal(load(tmp_path / "x.npy", spec.shape, "float32", short=True), few)
    (placed,) = reference._operands(jax, replace(make(spec), device="some GPU"), [few])
    np.testing.assert_array_equal(np.asarray(placed), all_)
    two = reference._operands(
        jax, replace(make(spec, Input((5,), "float32"), spec), device="some GPU"), [few, few[:5], few]
    )
    assert [x.shape for x in two] == [spec.shape, (5,), spec.shape]
    with pytest.raises(UsageError):
        load(tmp_path / "x.npy", (100,), "float32")
