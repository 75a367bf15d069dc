"""The float64 evaluation of jaxprs: values against NumPy, loops, branches, opaque operations, simulated rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import AccuracyRejected
from jcuts.trace import jaxapi
from jcuts.tune.baseline.xla_export import export_subset
from jcuts.tune.problem import Output
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.expected import OutputReference
from jcuts.tune.verify.float64_eval import evaluate
from jcuts.tune.verify.inputs import NORMAL, SPECIAL
from jcuts.tune.verify.rounding_traits import is_amplified, is_discrete

pytestmark = pytest.mark.usefixtures("xla_as_shipped")

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


def widened(function, *args, noise=None):
    closed = jaxapi.closed_jaxpr_of(function, *args)
    with jax.enable_x64(True):
        wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in map(np.asarray, args)]
        return [np.asarray(x) for x in evaluate(closed, wide, noise=noise)]


def scan_sum(x):
    return lax.scan(lambda c, row: (c * 0.5 + row, c.sum()), jnp.zeros(x.shape[1], x.dtype), x)


CASES = {
    "chain": (lambda x: jnp.tanh(x @ x.T) * 3, lambda x: np.tanh(x @ x.T) * 3),
    "bfloat16 inside": (lambda x: (x.astype(jnp.bfloat16) * 1).astype(jnp.float32), lambda x: x),
    "relu": (lambda x: jax.nn.relu(x), lambda x: np.maximum(x, 0)),
    "softmax": (lambda x: jax.nn.softmax(x), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), lambda x: (np.sin if x[0, 0] > 0 else np.cos)(x)),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.1), (0, x))[1],
        lambda x: x * np.float64(np.float32(1.1)) ** 3,
    ),
    "scatter add": (
        lambda x: x.at[jnp.array([0, 0, 2])].add(1.5),
        lambda x: x + np.array([3, 0, 1.5, 0, 0, 0])[:, None],
    ),
    "generic reduce": (
        lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b, (1,)),
        lambda x: np.prod(x, axis=1),
    ),
    "gradient": (jax.grad(lambda x: (x**3).sum()), lambda x: 3 * x**2),
    "checkpoint": (jax.checkpoint(lambda x: jnp.exp(jnp.sin(x))), lambda x: np.exp(np.sin(x))),
    "mean": (lambda x: x.mean(0), lambda x: x.mean(0)),
    "top": (lambda x: lax.top_k(x, 2)[0], lambda x: -np.sort(-x, axis=1)[:, :2]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_have_float64_accuracy(name):
    function, expected = CASES[name]
    (got,) = widened(function, X)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected(X.astype(np.float64)), rtol=1e-13, atol=1e-14)


def test_scan_with_carry_and_outputs():
    carry, sums = widened(scan_sum, X)
    c = np.zeros(8)
    for row, total in zip(X.astype(np.float64), sums, strict=True):
        assert total == pytest.approx(c.sum(), rel=1e-13, abs=1e-14)
        c = c * 0.5 + row
    np.testing.assert_allclose(carry, c, rtol=1e-13)


def test_bit_casts_see_the_original_width():
    (got,) = widened(lambda x: lax.bitcast_convert_type(x, jnp.int32), X)
    np.testing.assert_array_equal(got, X.view(np.int32))


def test_integers_and_custom_gradients():
    @jax.custom_vjp
    def straight(x):
        return jnp.round(x)

    straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g * 2,))
    (value,) = widened(lambda x: jax.grad(lambda y: straight(y).sum())(x), X)
    np.testing.assert_array_equal(value, np.full_like(X, 2, np.float64))
    (index,) = widened(lambda x: jnp.argmax(x, 1), X)
    np.testing.assert_array_equal(index, X.argmax(1))
    assert index.dtype == np.int32


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x @ x.T, False),
        (lambda x: jnp.maximum(x, 0), False),
        (lambda x: jnp.argmax(x), True),
        (lambda x: x > 0.5, True),
        (lambda x: x.astype(jnp.int32), True),
        (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.floor(c), x), True),
        (lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x), False),
    ],
)
def test_which_functions_are_discrete(function, expected):
    assert is_discrete(jaxapi.closed_jaxpr_of(function, X)) is expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jnp.exp(x @ x.T), True),
        (lambda x: jnp.expm1(jnp.tanh(x @ x.T) * 3), True),
        (lambda x: jnp.exp(x) @ x.T, False),
        (lambda x: jax.nn.softmax(x), False),
        (lambda x: jnp.tanh(x @ x.T), False),
        (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.exp2(c @ c.T), x[:3, :3]), True),
        (lambda x: jnp.exp((x > 0).astype(jnp.int32).sum(1).astype(jnp.float32)), False),
    ],
)
def test_which_functions_exponentiate_sums(function, expected):
    assert is_amplified(jaxapi.closed_jaxpr_of(function, X)) is expected


def test_noise_is_rounding_sized_reproducible_and_spares_exact_operations():
    def function(x):
        return x * 3.3, jnp.max(x, 1), x[:, ::-1]

    exact = widened(function, X)
    silent = widened(function, X, noise=(7, 0.0))
    one, again, other = (widened(function, X, noise=(seed, 4.0)) for seed in (7, 7, 8))
    for a, b in zip(exact, silent, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one[0], again[0])
    assert (one[0] != other[0]).any()
    relative = np.abs(one[0] / exact[0] - 1)
    assert 0 < relative.max() <= 4 * np.finfo(np.float32).eps
    np.testing.assert_array_equal(one[1], exact[1])
    np.testing.assert_array_equal(one[2], exact[2])


def test_noise_breaks_sums_that_only_tie_in_exact_arithmetic():
    x = np.stack([X[0], X[0][::-1]])  # the same numbers in another order
    votes = {int(widened(lambda v: jnp.argmax(v.sum(1)), x, noise=(seed, 4.0))[0]) for seed in range(12)}
    assert votes == {0, 1}


def test_export_runs_and_agrees():
    closed = jaxapi.closed_jaxpr_of(lambda x: jnp.tanh(x).sum(1), X)
    exports = export_subset(closed)
    library = jax.export.deserialize(bytearray(exports.library))
    (got,) = library.call(X)
    with jax.enable_x64(True):
        (wide,) = jax.export.deserialize(bytearray(exports.reference)).call(
            np.uint64(0), np.zeros(3), X.astype(np.float64)
        )
    np.testing.assert_allclose(wide, np.tanh(X.astype(np.float64)).sum(1), rtol=1e-13)
    np.testing.assert_allclose(got, wide, rtol=1e-5)
    assert not exports.perturb


@pytest.mark.parametrize("extent", [24, 40_003])
@pytest.mark.parametrize(("how", "init"), [(lax.max, -np.inf), (lax.min, np.inf)])
def test_windows_keep_nans(extent, how, init):
    x = np.random.default_rng(1).standard_normal(extent).astype(np.float32)
    x[::11] = np.nan
    (got,) = widened(lambda v: lax.reduce_window(v, np.float32(init), how, (3,), (2,), ((1, 0),)), x)
    padded = np.concatenate([[init], x])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 3)[::2]
    wanted = windows.max(1) if how is lax.max else windows.min(1)
    np.testing.assert_array_equal(got, wanted)
    assert np.isnan(wanted).any()


def test_a_kernel_that_keeps_the_nans_of_windows_passes_and_one_that_makes_some_does_not():
    """XLA:CPU loses them in arrays of this size, and the exported reference is XLA's too."""
    extent = 40_003
    x = np.random.default_rng(2).standard_normal(extent).astype(np.float32)
    broken = x.copy()
    broken[::11] = np.nan
    closed = jaxapi.closed_jaxpr_of(
        lambda v: lax.reduce_window(v, np.float32(np.inf), lax.min, (2,), (2,), "VALID") * np.float32(3), x
    )
    exports = export_subset(closed)
    library, reference = (jax.export.deserialize(bytearray(e)) for e in (exports.library, exports.reference))
    expected, right = [], []
    for kind, values in ((NORMAL, x), (SPECIAL, broken)):
        (xla,) = library.call(values)
        with jax.enable_x64(True):
            (wide,) = reference.call(np.uint64(0), np.zeros(3), values.astype(np.float64))
        expected.append(OutputReference(kind, np.asarray(xla), np.asarray(wide)))
        pairs = values[: extent // 2 * 2].reshape(-1, 2)
        right.append(np.minimum(pairs[:, 0], pairs[:, 1]) * np.float32(3))
    spec = Output(right[0].shape, "float32", reduction=2)
    check_output(0, spec, expected, right, 2.0)
    np.testing.assert_array_equal(np.isnan(expected[1].reference), np.isnan(right[1]))
    wrong = right[1].copy()
    wrong[np.flatnonzero(~np.isnan(wrong))[5]] = np.nan
    with pytest.raises(AccuracyRejected):
        check_output(0, spec, expected, [right[0], wrong], 2.0)
