"""The primitive's seam: what reaches the pipeline, and what comes back from it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jcuts
from jcuts.base.settings import Settings
from jcuts.primitive import lowering, planned_outcomes
from jcuts.primitive.call import NAME, jcuts_call
from jcuts.trace import jaxapi
from tests.primitive.conftest import MARK
from tests.primitive.transform_cases import CASES, PARAMS, X, assert_same, by_jit, each_case, layer, loss

off = functools.partial(jcuts.optimize, tune="off")


@each_case
def test_planned_programs_compose(name, toy):
    want = by_jit(name)
    jax.clear_caches()
    toy.calls.clear()
    assert_same(want, CASES[name](off))


def test_pipeline_rewrites_what_runs(toy):
    text = off(layer).lower(PARAMS, X).as_text()
    assert MARK in text
    assert toy.calls[-1]["may_measure"] is False and toy.calls[-1]["platform"] == "cpu"


def test_gradient_reaches_the_pipeline_as_its_own_jaxpr(toy):
    jax.grad(off(loss))(PARAMS, X)
    assert len(toy.calls) >= 2  # forward with residuals, and backward
    jaxpr = str(jax.make_jaxpr(jax.grad(off(loss)))(PARAMS, X))
    assert jaxpr.count(NAME + "[") >= 2 and "toy_mul" not in jaxpr


def test_batched_program_is_planned_at_its_own_shape(toy):
    jax.vmap(off(lambda x: x * x))(np.ones((7, 3), np.float32))
    assert toy.calls[-1]["types"] == ["float32[7,3]"]


def test_shard_map_plans_local_shapes(toy):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    f = jax.jit(jax.shard_map(off(lambda x: x * x), mesh=mesh, in_specs=spec, out_specs=spec))
    assert MARK in f.lower(X).as_text()
    assert [t.split("{")[0] for t in toy.calls[-1]["types"]] == ["float32[2,6]"]


def test_dead_outputs_are_not_planned(toy):
    f = off(lambda x: (x * 2, jnp.sin(x) * 3))
    closed = jaxapi.dce(jaxapi.closed_jaxpr_of(lambda x: f(x)[0], X))
    text = str(closed)
    assert "sin" not in text and NAME in text


def test_nested_calls_are_flattened_before_planning(toy):
    inner = off(lambda x: x * 2)
    off(lambda x: inner(x) + inner(x * 3)).lower(X)
    assert [c["types"] for c in toy.calls] == [["float32[8,6]"]]


def test_export_holds_no_planned_code(toy):
    exported = jax.export.export(jax.jit(off(layer)))(PARAMS, X)
    assert MARK not in exported.mlir_module()


def test_disable_leaves_everything_to_xla(toy, monkeypatch):
    monkeypatch.setenv("JCUTS_DISABLE", "1")
    assert MARK not in jax.jit(off(layer)).lower(PARAMS, X).as_text()
    assert not toy.calls


def test_residuals_are_not_returned_twice(toy):
    f = off(lambda x, w: jnp.tanh(x @ w))
    closed = jax.make_jaxpr(lambda x, w: jax.vjp(f, x, w)[1])(X, PARAMS["w"])
    call = next(iter(_calls(closed)))
    # x and w are residuals of the product, but they are arguments already.
    types = sorted(v.aval.str_short() for v in call.params["jaxpr"].jaxpr.outvars)
    assert "float32[6,5]" not in types and "float32[8,6]" not in types


def _calls(closed):
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == NAME:
            yield eqn
        else:
            for _, _, body in jaxapi.inner_jaxprs(eqn):
                yield from _calls(body)


def test_calls_helper_finds_nested_ones():
    assert len(list(_calls(jax.make_jaxpr(jax.jit(off(layer)))(PARAMS, X)))) == 1


def test_impl_runs_outside_any_trace():
    closed = jax.make_jaxpr(jax.jit(off(layer)))(PARAMS, X)
    call = next(iter(_calls(closed)))
    outs = call.primitive.bind(*jax.tree.leaves((PARAMS, X)), **call.params)
    np.testing.assert_allclose(outs[0], layer(PARAMS, X), rtol=1e-5, atol=1e-6)


def test_checkpoint_keeps_peak_memory():
    def block(x):
        for _ in range(6):
            x = jnp.tanh(x @ x) * jnp.sin(x)
        return x

    def total(opt):
        step = jax.checkpoint(block)
        f = opt(jax.grad(lambda x: step(step(step(x))).sum()))
        return f.lower(np.ones((96, 96), np.float32)).compile().memory_analysis().temp_size_in_bytes

    # Kernels need a little scratch of their own; a lost barrier costs far more.
    assert total(off) <= total(jax.jit) * 1.1


def test_lowering_takes_over_what_was_planned_for_an_equal_jaxpr(toy):
    closed, settings = jaxapi.closed_jaxpr_of(layer, PARAMS, X), Settings(tune="off")
    leaves = jax.tree.leaves((PARAMS, X))

    def lowered():
        call = lambda *xs: jcuts_call(closed, xs, settings, name="layer", placement=None)  # noqa: E731
        return jax.jit(call).trace(*leaves).lower().as_text()

    outcome = lowering.plan(closed, settings, "cpu", may_measure=False)
    before = len(toy.calls)
    with planned_outcomes.reusing(closed, {settings: outcome}):
        assert MARK in lowered() and len(toy.calls) == before
        other = dataclasses.replace(settings, tolerance=settings.tolerance + 1)
        assert planned_outcomes.find(closed, other) is None
        assert planned_outcomes.find(jaxapi.closed_jaxpr_of(jnp.sin, X), settings) is None
    assert planned_outcomes.find(closed, settings) is None
    assert MARK in lowered() and len(toy.calls) == before + 1
