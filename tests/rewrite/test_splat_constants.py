"""Constant arrays of one number become numbers; everything else stays, and no value changes by a bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from jcuts.base.settings import Settings, Variant
from jcuts.jit import decision_cache, end_to_end_benchmark, variant_benchmark, variant_planning, variant_selection
from jcuts.pipeline import computation
from jcuts.pipeline import passes as pipeline_passes
from jcuts.report.report_data import NOT_MEASURED
from jcuts.rewrite.simplify import simplify
from jcuts.rewrite.splat_constants import MOST, numbers_of, splat_constants
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(3)
OPERATIONS = {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "max": lax.max, "min": lax.min}
TAKEN, LEFT = (0.0, 1.0), (-0.0, -1.0, 0.1, 1e-7, 6e4)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def same_bits(closed, made, *args):
    before, after = (jax.jit(jax.extend.core.jaxpr_as_fun(c))(*args) for c in (closed, made))
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("number", TAKEN + LEFT)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_vector_of_one_number_becomes_the_number_on_either_side(dtype, name, number):
    vector, x = jnp.full((1, 7), number, dtype), jnp.asarray(RNG.standard_normal((5, 7)), dtype)
    x = x.at[0, :3].set(jnp.asarray([0.0, -0.0, np.inf], dtype))
    closed = flat(
        lambda x: (
            OPERATIONS[name](x, jnp.broadcast_to(vector, x.shape)),
            OPERATIONS[name](jnp.broadcast_to(vector, x.shape), x),
        ),
        x,
    )
    made = splat_constants(closed)
    assert closed.consts and (not made.consts if number in TAKEN and np.signbit(number) == 0 else made is closed)
    assert same_bits(closed, made, x)


def test_integers_too():
    x, vector = jnp.arange(12, dtype=jnp.int32).reshape(3, 4), np.full((3, 4), 1, np.int32)
    closed = flat(lambda x: x * vector + vector, x)
    made = splat_constants(closed)
    assert not made.consts and same_bits(closed, made, x)


@pytest.mark.parametrize(
    "values",
    [
        np.float32([1, 1, 2]),
        np.float32([2, 1, 2]),
        np.float32([0.0, -0.0, 0.0]),
        np.float32([np.nan] * 3),
        np.float32([np.inf] * 3),
        np.float32([1]),
        np.complex64([1, 1]),
    ],
)
def test_what_is_not_one_such_number_stays(values):
    x = jnp.asarray(RNG.standard_normal((4, len(values))), jnp.float32)
    closed = flat(lambda x: x + values, x)
    assert splat_constants(closed) is closed


def test_large_arrays_are_not_looked_at():
    x = jnp.ones((MOST + 1,), jnp.float32)
    closed = flat(lambda x: x + np.ones((MOST + 1,), np.float32), x)
    assert splat_constants(closed) is closed


def test_an_array_that_is_needed_as_one_stays_for_that():
    ones, x = jnp.ones((6,), jnp.float32), jnp.asarray(RNG.standard_normal((4, 6)), jnp.float32)
    closed = flat(lambda x: (x + ones, lax.dot(x, ones), ones), x)
    made = splat_constants(closed)
    assert len(made.consts) == 1 and same_bits(closed, made, x)
    total = next(e for e in made.jaxpr.eqns if jaxapi.primitive_name(e) == "add")
    assert any(jaxapi.is_literal(a) for a in total.invars)


def test_both_operands_of_one_number_leave_an_array():
    closed = jaxapi.closed_jaxpr_of(lambda x: (jnp.ones((3, 3)) + jnp.ones((3, 3))) * x, jnp.ones((3, 3)))
    made = splat_constants(inline(closed))
    assert same_bits(inline(closed), made, jnp.full((3, 3), 2.0))


def test_kernels_take_the_number():
    bias, w = jnp.zeros((24,), jnp.float32), jnp.asarray(RNG.standard_normal((16, 24)), jnp.float32)
    x = jnp.asarray(RNG.standard_normal((9, 16)), jnp.float32)

    def layer(x):
        return jnp.maximum(x @ w + bias, 0.0) * jnp.ones((24,), jnp.float32)

    got = jcuts.optimize(layer)(x)
    np.testing.assert_allclose(
        got, np.maximum(np.asarray(x, np.float64) @ np.asarray(w, np.float64), 0), rtol=2e-5, atol=1e-5
    )


def test_weak_types_stay_weak_and_shardings_stay():
    closed = jaxapi.closed_jaxpr_of(lambda x: x + 1.0, jnp.ones((4,)))
    var = jaxapi.new_var(jaxapi.ShapedArray((4,), np.dtype("float32"), weak_type=True))
    eqn = closed.jaxpr.eqns[0].replace(invars=[closed.jaxpr.invars[0], var])
    weak = jaxapi.make_closed([var], closed.jaxpr.invars, closed.jaxpr.outvars, [eqn], [jnp.ones((4,))], like=closed)
    literal = splat_constants(weak).jaxpr.eqns[0].invars[1]
    assert jaxapi.is_literal(literal) and literal.aval.weak_type

    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spread = jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a")))
        closed = jaxapi.closed_jaxpr_of(lambda x: x + spread, jnp.ones((4, 8)))
        assert splat_constants(inline(closed)).consts


def test_which_constants_hold_which_number():
    x, values = jnp.ones((5, 3)), [np.zeros(3, np.float32), np.float32([1, 2, 1]), np.ones((5, 3), np.float32)]
    closed = jaxapi.closed_jaxpr_of(lambda x: (x + values[0]) * values[1] - values[2], x)
    found = numbers_of(closed)
    assert found.count(":") == 2 and "0.0" in found and "1.0" in found
    assert numbers_of(jaxapi.closed_jaxpr_of(lambda x: x * values[1], x)) == ""


def layer(bias, gain):
    w = jnp.asarray(np.random.default_rng(5).standard_normal((96, 128)), jnp.float32)
    bias, gain = jnp.asarray(bias), jnp.asarray(gain)

    def layer(x):
        y = jnp.tanh((x @ w) * gain + bias)
        return y - jnp.max(y, axis=-1, keepdims=True)

    return layer


@pytest.mark.parametrize("alike", [False, True], ids=["by their keys", "by what was measured"])
def test_a_decision_for_fresh_weights_is_not_taken_for_trained_ones(monkeypatch, tmp_path, alike):
    """As on a GPU, where a stored decision is taken before anything is planned."""
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")  # which kernels there are is not what is asked
    for module in (variant_selection, variant_planning):
        monkeypatch.setattr(module, "has_variants", lambda traced: True)
    monkeypatch.setattr(end_to_end_benchmark.Decision, "is_final", property(lambda self: True))
    jcuts_wins = end_to_end_benchmark.Decision(end_to_end_benchmark.JCUTS, "as if it were faster than plain XLA")
    monkeypatch.setattr(variant_benchmark, "time_programs", lambda *args: jcuts_wins)
    if alike:
        monkeypatch.setattr(decision_cache, "numbers_of", lambda closed: "")
    x = jnp.asarray(RNG.standard_normal((64, 96)), jnp.float32)
    trained = [RNG.standard_normal(128).astype(np.float32) for _ in range(2)]
    for bias, gain in ((np.zeros(128, np.float32), np.ones(128, np.float32)), trained):
        ours = jcuts.optimize(layer(bias, gain))
        ours(x)
        assert all(s.why != NOT_MEASURED for s in ours.explain(x).subsets)


def test_forms_share_their_graph(monkeypatch):
    built, real = [], computation.build_graph
    monkeypatch.setattr(computation, "build_graph", lambda *args, **more: built.append(1) or real(*args, **more))
    closed = jaxapi.closed_jaxpr_of(lambda x: jnp.tanh(x @ jnp.ones((8, 8)) + jnp.zeros(8)).sum(-1), jnp.ones((8, 8)))
    for regions in ("all", "anchored", "none", "absorbing"):
        settings = dataclasses.replace(Settings(tune="off"), form=Variant((), regions))
        pipeline_passes.optimize_jaxpr(closed, settings, platform="cpu", may_measure=False)
    assert len(built) == 1
