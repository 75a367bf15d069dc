"""Programs over four devices: what is planned per shard, what is left to XLA, and that nothing is gathered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jcuts
from jcuts.primitive import shard_local
from jcuts.primitive.sharding import Placement
from jcuts.trace import jaxapi
from jcuts.trace.shard_rules import shard_rule
from tests.primitive.conftest import MARK
from tests.primitive.transform_cases import PARAMS, assert_same, data, layer, loss

off = functools.partial(jcuts.optimize, tune="off")
X = data(8, 6)


def auto(shape=(4,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def split_of(fn, *args):
    closed = jaxapi.closed_jaxpr_of(fn, *args)
    return shard_local.split(closed, Placement.of(jax.tree.leaves(args)))


def test_data_parallel_forward_is_planned_per_shard(toy):
    mesh = auto()
    p, x = put(PARAMS, mesh), put(X, mesh, "data")
    lowered = off(layer).lower(p, x)
    assert MARK in lowered.as_text()
    assert "all-gather" not in lowered.compile().as_text()
    assert any("float32[2,6]" in c["types"] for c in toy.calls)
    assert_same(layer(PARAMS, X), off(layer)(p, x))


def test_training_step_keeps_its_reductions_with_xla(toy):
    mesh = auto()
    p, x = put(PARAMS, mesh), put(X, mesh, "data")
    f = off(jax.value_and_grad(loss))
    lowered = f.lower(p, x)
    text = lowered.compile().as_text()
    assert MARK in lowered.as_text()
    assert "all-gather" not in text and "all-reduce" in text
    assert_same(jax.value_and_grad(loss)(PARAMS, X), f(p, x))


def test_local_parts_are_tuned_at_a_concrete_call(toy):
    mesh = auto()
    f = jcuts.optimize(lambda params, x: layer(params, x))  # `layer` itself may have been planned before
    f(put(PARAMS, mesh), put(X, mesh, "data"))
    assert any(c["may_measure"] and "float32[2,6]" in c["types"] for c in toy.calls)


def test_program_follows_the_shardings_of_each_call(toy):
    mesh = auto()
    f = off(lambda x: jnp.tanh(x) * 2)
    y = data(8, 8)
    for spec in (("data",), (None, "data"), (), ("data",)):
        out = f(put(y, mesh, *spec))
        np.testing.assert_allclose(out, np.tanh(y) * 2, rtol=1e-5)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), 2)
    np.testing.assert_allclose(f(y), np.tanh(y) * 2, rtol=1e-5)
    assert {tuple(c["types"]) for c in toy.calls} >= {("float32[2,8]",), ("float32[8,2]",), ("float32[8,8]",)}


def test_tensor_parallel_layer(toy):
    mesh = auto((2, 2), ("data", "model"))
    x, w = put(X, mesh, "data"), put(data(6, 4, seed=1), mesh, None, "model")
    f = off(lambda x, w: jax.nn.relu(x @ w) * 2)
    text = f.lower(x, w).compile().as_text()
    assert "all-gather" not in text and any("float32[4,6]" in c["types"] for c in toy.calls)
    np.testing.assert_allclose(f(x, w), jax.nn.relu(X @ data(6, 4, seed=1)) * 2, rtol=1e-5, atol=1e-6)


def test_contraction_over_a_split_dimension_stays_with_xla():
    mesh = auto()
    x = put(data(8, 8), mesh, None, "data")
    found = split_of(lambda x, w: jnp.tanh(x * 2) @ w, x, put(data(8, 3), mesh))
    assert isinstance(found, shard_local.Split)
    left = [jaxapi.primitive_name(s) for s in found.steps if not isinstance(s, shard_local.Part)]
    assert left == ["dot_general"]


def test_one_axis_twice_in_a_value_stays_with_xla():
    mesh = auto()
    x = put(data(8, 3), mesh, "data")
    found = split_of(lambda x: x @ x.T, x)
    left = [jaxapi.primitive_name(s) for s in found.steps if not isinstance(s, shard_local.Part)]
    assert "dot_general" in left


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda m: (lambda x: (jax.debug.callback(print, x), x)[1], put(X, m, "data")), "effects"),
        (lambda m: (jnp.sort, put(X, m, "data")), "local"),
    ],
)
def test_reasons(make, reason):
    fn, x = make(auto())
    assert reason in split_of(fn, x)


def test_explicit_axes_are_left_to_xla(toy):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data"))
        assert "Explicit" in split_of(lambda x: x * 2, x)
        text = off(lambda x: x * 2).lower(x)
        assert MARK not in text.as_text() and "all-gather" not in text.compile().as_text()


LOCAL = [
    (lambda x: jnp.exp(x) + 1.0, "data", None, None),
    (lambda x: jnp.broadcast_to(x.max(axis=2)[:, :, None], x.shape) - x, "data", None, None),
    (lambda x: x.reshape(8, -1) * 2, "data", None, None),
    (lambda x: jnp.transpose(x, (2, 0, 1)) * 2, None, "data", None),
    (lambda x: x[:, 1:3] * jnp.cumsum(x, axis=1)[:, ::-1][:, :2], "data", None, None),
    (lambda x: jnp.concatenate([x, x * 2], axis=1), "data", None, None),
    (lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))) * 3, "data", None, None),
    (lambda x: jnp.einsum("bij,bkj->bik", x, x), "data", None, None),
    (lambda x: jnp.argmax(x, axis=2) + jnp.arange(4), "data", None, None),
    (
        lambda x: jax.lax.conv_general_dilated(
            x, jnp.ones((3, 4, 5)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        "data",
        None,
        None,
    ),
    (lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "VALID"), "data", None, None),
    (lambda x: jax.nn.softmax(x, axis=-1) * jnp.mean(x, axis=1, keepdims=True), "data", None, None),
    (lambda x: jnp.squeeze(x[:, :, None, :], 2) + x, "data", None, None),
    (lambda x: (lambda a, b: a[..., :1] * b)(*jnp.split(x, [1], axis=2)), "data", None, None),
]


@pytest.mark.parametrize("number", range(len(LOCAL)))
def test_operation_is_local_and_right(number, toy):
    fn, *spec = LOCAL[number]
    mesh, x = auto(), data(8, 4, 4)
    sharded = put(x, mesh, *spec)
    found = split_of(fn, sharded)
    assert isinstance(found, shard_local.Split) and len(found.steps) == 1, found
    closed = shard_local.assemble(found, lambda part, args: jaxapi.eval_closed(part, *args))
    run = jax.jit(lambda v: jaxapi.eval_closed(closed, v)[0])
    np.testing.assert_allclose(run(sharded), fn(x), rtol=1e-5, atol=1e-6)
    text = run.lower(sharded).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text


def test_equations_without_a_rule_say_nothing():
    (eqn,) = jaxapi.closed_jaxpr_of(jax.lax.cumlogsumexp, X).jaxpr.eqns
    assert shard_rule(eqn) is not None
    (eqn,) = jaxapi.closed_jaxpr_of(lambda x: jax.lax.top_k(x, 2), X).jaxpr.eqns
    assert shard_rule(eqn) is None
