"""The transformation matrix: programs that use an optimiser (``jax.jit`` or ``jcuts.optimize``) in every way.

Each case is a function of one decorator and returns arrays; the two decorators must give the same ones.  Used by the
tests and by ``benchmarks/differential/transform_matrix.py``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Decorator = Callable[..., Callable[..., Any]]
CASES: dict[str, Callable[[Decorator], Any]] = {}


@functools.cache
def by_jit(name: str) -> Any:
    """What a case returns under ``jax.jit``."""
    return CASES[name](jax.jit)


def case(fn: Callable[[Decorator], Any]) -> Callable[[Decorator], Any]:
    CASES[fn.__name__] = fn
    return fn


def data(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


X, W, B = data(8, 6), data(6, 5, seed=1), data(5, seed=2)
PARAMS = {"w": W, "b": B}


def layer(params, x):
    y = jax.nn.relu(x @ params["w"] + params["b"])
    return jax.nn.softmax(y * jax.nn.sigmoid(y), axis=-1)


def loss(params, x):
    return jnp.mean(jax.nn.logsumexp(layer(params, x) * 3.0, axis=-1)) + jnp.sum(params["w"] ** 2)


# ------------------------------------------------------------ plain and jit


@case
def call_outermost(opt):
    return opt(layer)(PARAMS, X)


@case
def jit_nested(opt):
    return jax.jit(lambda p, x: opt(layer)(p, x) + 1)(PARAMS, X)


@case
def jit_inside(opt):
    return opt(lambda p, x: jax.jit(layer)(p, x) + 1)(PARAMS, X)


@case
def opt_inside_opt(opt):
    inner = opt(layer)
    return opt(lambda p, x: inner(p, x) * inner(p, 2 * x))(PARAMS, X)


@case
def two_shapes(opt):
    f = opt(layer)
    return f(PARAMS, X), f(PARAMS, data(3, 6, seed=4)), f(PARAMS, X), f(PARAMS, X.astype(np.float16))


@case
def pytrees(opt):
    def f(tree, *rest, scale=2.0, **more):
        return {"out": [tree["a"] * scale, (tree["b"], None)], "more": more["z"] * rest[0]}

    return opt(f)({"a": X, "b": (X, [X])}, X, scale=3.0, z=X)


@case
def static_arguments(opt):
    f = opt(lambda x, n, flag=False: x * n if flag else x + n, static_argnums=1, static_argnames="flag")
    return f(X, 3), f(X, 4), f(X, 3, flag=True)


@case
def donated(opt):
    f = opt(lambda x, y: (x * 2 + y, y * 3), donate_argnums=0)
    return f(jnp.asarray(X), X), f(jnp.asarray(X), X)


@case
def scalars_and_integers(opt):
    f = opt(lambda i, x, s: (i // 3 + 1, x * s, i > 2, jnp.argmax(x)))
    return f(np.arange(6), X, 2.5)


@case
def closed_over_values(opt):
    return jax.jit(lambda x, w: opt(lambda v: v @ w * X.sum())(x))(X, W)


@case
def closed_over_tracer_grad(opt):
    return jax.grad(lambda w: opt(lambda v: jnp.tanh(v @ w).sum())(X))(W)


@case
def random_key(opt):
    return opt(lambda key: jax.random.normal(key, (4,)))(jax.random.key(0))


# ------------------------------------------------------------ derivatives


@case
def grad_nested(opt):
    return jax.grad(opt(loss))(PARAMS, X)


@case
def grad_outermost(opt):
    return opt(jax.value_and_grad(loss))(PARAMS, X)


@case
def grad_both(opt):
    return opt(jax.grad(opt(loss)))(PARAMS, X)


@case
def jvp_nested(opt):
    return jax.jvp(functools.partial(opt(layer), PARAMS), (X,), (X * 0.5,))


@case
def jvp_outermost(opt):
    return opt(lambda x, t: jax.jvp(functools.partial(layer, PARAMS), (x,), (t,)))(X, X * 0.5)


@case
def vjp_nested(opt):
    out, pull = jax.vjp(opt(layer), PARAMS, X)
    return out, pull(out)


@case
def vjp_outermost(opt):
    return opt(lambda p, x: jax.vjp(layer, p, x)[1](jnp.ones((8, 5))))(PARAMS, X)


@case
def linearize_nested(opt):
    out, lin = jax.linearize(functools.partial(opt(layer), PARAMS), X)
    return out, lin(X), lin(2 * X)


@case
def hessian_nested(opt):
    return jax.hessian(opt(lambda b: loss({"w": W, "b": b}, X)))(B)


@case
def forward_over_reverse(opt):
    return jax.jvp(jax.grad(opt(loss)), (PARAMS, X), (PARAMS, X))


@case
def jacobians(opt):
    f = opt(lambda b: layer({"w": W, "b": b}, X)[0])
    return jax.jacfwd(f)(B), jax.jacrev(f)(B)


@case
def partial_grad_unused(opt):
    return jax.grad(opt(lambda a, b, c: (a * 2 + c.sum() * 0).sum()), argnums=(0, 1))(X, X, X)


@case
def relu_at_zero(opt):
    return jax.grad(opt(lambda x: jax.nn.relu(x).sum()))(np.zeros(3, np.float32))


@case
def straight_through(opt):
    @jax.custom_vjp
    def quantise(x):
        return jnp.round(x)

    quantise.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    return jax.grad(opt(lambda x: (quantise(x) * x).sum()))(X), opt(jax.grad(lambda x: (quantise(x) * x).sum()))(X)


@case
def custom_jvp_rule(opt):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (jnp.sin(p[0]), 7.0 * t[0]))
    return jax.grad(opt(lambda x: f(x).sum()))(X), jax.jvp(opt(f), (X,), (X,))


@case
def logsumexp_at_infinity(opt):
    x = np.array([[-np.inf, -np.inf], [np.inf, 1.0], [0.0, -np.inf]], np.float32)
    return jax.grad(opt(lambda v: jax.nn.logsumexp(v, axis=-1).sum()))(x), opt(jax.nn.logsumexp)(x)


@case
def stop_gradient(opt):
    return jax.grad(opt(lambda x: (jax.lax.stop_gradient(x) * x).sum()))(X)


# ------------------------------------------------------------ vmap


@case
def vmap_nested(opt):
    return jax.vmap(opt(layer), in_axes=(None, 0))(PARAMS, data(4, 8, 6))


@case
def vmap_outermost(opt):
    return opt(jax.vmap(layer, in_axes=(None, 1), out_axes=1))(PARAMS, data(8, 4, 6))


@case
def vmap_of_grad(opt):
    return jax.vmap(jax.grad(opt(loss)), in_axes=(None, 0))(PARAMS, data(4, 8, 6))


@case
def grad_of_vmap(opt):
    return jax.grad(lambda p: jax.vmap(opt(layer), in_axes=(None, 0))(p, data(4, 8, 6)).max())(PARAMS)


@case
def vmap_collective(opt):
    return jax.vmap(opt(lambda x: x - jax.lax.pmean(x, "i")), axis_name="i")(X)


# ------------------------------------------------------------ control flow


@case
def scan_body(opt):
    step = opt(lambda c, x: (jnp.tanh(c @ W[:5, :] + x), c.sum()))
    return jax.lax.scan(step, np.zeros((2, 5), np.float32), data(7, 2, 5))


@case
def scan_inside(opt):
    def f(c, xs):
        return jax.lax.scan(lambda c, x: (jnp.tanh(c * 0.5 + x), c.sum()), c, xs)

    return opt(f)(np.zeros((2, 5), np.float32), data(7, 2, 5))


@case
def grad_of_scan(opt):
    def f(w):
        step = opt(lambda c, x: (jnp.tanh(c @ w + x), None))
        return jax.lax.scan(step, jnp.zeros((2, 5)), data(7, 2, 5))[0].sum()

    return jax.grad(f)(W[:5, :])


@case
def cond_branches(opt):
    def f(flag, x):
        return jax.lax.cond(flag, opt(lambda a: a * 2), opt(lambda a: jnp.sin(a) * a), x)

    return f(True, X), opt(f)(False, X), jax.grad(lambda x: f(False, x).sum())(X)


@case
def while_body(opt):
    def f(x):
        return jax.lax.while_loop(lambda c: c[0] < 5, opt(lambda c: (c[0] + 1, c[1] * 1.5)), (0, x))

    return f(X), opt(f)(X)


@case
def fori_with_switch(opt):
    def f(x):
        branches = [opt(lambda v: v * 1.1), opt(lambda v: v + 1.0), lambda v: -v]
        return jax.lax.fori_loop(0, 5, lambda i, v: jax.lax.switch(i % 3, branches, v), x)

    return opt(f)(X)


# ------------------------------------------------------------ checkpoint


@case
def checkpoint_around(opt):
    return jax.grad(jax.checkpoint(opt(loss)))(PARAMS, X)


@case
def checkpoint_inside(opt):
    return opt(jax.grad(lambda p, x: jax.checkpoint(layer)(p, x).max()))(PARAMS, X)


@case
def checkpoint_policy(opt):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.grad(jax.checkpoint(opt(loss), policy=policy))(PARAMS, X)


@case
def checkpoint_of_scan(opt):
    def f(w):
        step = jax.checkpoint(opt(lambda c, x: (jnp.tanh(c @ w + x), None)))
        return jax.lax.scan(step, jnp.zeros((2, 5)), data(7, 2, 5))[0].sum()

    return jax.grad(f)(W[:5, :])


# ------------------------------------------------------------ several devices


def mesh(kind: Any, shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("data",)) -> Any:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


@case
def shard_map_inside(opt):
    m = mesh(AxisType.Auto)
    local = jax.shard_map(layer, mesh=m, in_specs=(P(), P("data")), out_specs=P("data"))
    return opt(local)(PARAMS, X)


@case
def shard_map_around(opt):
    m = mesh(AxisType.Auto)
    local = jax.shard_map(opt(layer), mesh=m, in_specs=(P(), P("data")), out_specs=P("data"))
    return jax.jit(local)(PARAMS, X)


@case
def shard_map_grad(opt):
    m = mesh(AxisType.Auto)

    def local(p, x):
        return jax.lax.psum(opt(loss)(p, x), "data")

    return jax.grad(jax.jit(jax.shard_map(local, mesh=m, in_specs=(P(), P("data")), out_specs=P())))(PARAMS, X)


@case
def auto_outermost(opt):
    m = mesh(AxisType.Auto)
    x = jax.device_put(X, NamedSharding(m, P("data")))
    p = jax.device_put(PARAMS, NamedSharding(m, P()))
    return opt(layer)(p, x), opt(jax.value_and_grad(loss))(p, x)


@case
def auto_nested(opt):
    m = mesh(AxisType.Auto)
    x = jax.device_put(X, NamedSharding(m, P("data")))
    p = jax.device_put(PARAMS, NamedSharding(m, P()))
    return jax.jit(lambda p, x: opt(layer)(p, x) * 2)(p, x), jax.grad(opt(loss))(p, x)


@case
def auto_two_axes(opt):
    m = mesh(AxisType.Auto, (2, 2), ("data", "model"))
    x = jax.device_put(X, NamedSharding(m, P("data")))
    w = jax.device_put(data(6, 4, seed=1), NamedSharding(m, P(None, "model")))
    b = jax.device_put(data(4, seed=2), NamedSharding(m, P("model")))
    return opt(layer)({"w": w, "b": b}, x)


@case
def auto_other_sharding_later(opt):
    m = mesh(AxisType.Auto)
    f = opt(lambda x: jnp.tanh(x) * 2)
    y = data(8, 8)
    return (
        f(jax.device_put(y, NamedSharding(m, P("data")))),
        f(jax.device_put(y, NamedSharding(m, P(None, "data")))),
        f(y),
        f(jax.device_put(y, NamedSharding(m, P("data")))),
    )


@case
def explicit_outermost(opt):
    m = mesh(AxisType.Explicit)
    with jax.set_mesh(m):
        x, p = jax.device_put(X, P("data")), jax.device_put(PARAMS, P())
        return opt(layer)(p, x), opt(jax.grad(loss))(p, x)


@case
def explicit_nested(opt):
    m = mesh(AxisType.Explicit)
    with jax.set_mesh(m):
        x, p = jax.device_put(X, P("data")), jax.device_put(PARAMS, P())
        return jax.jit(lambda p, x: opt(layer)(p, x) * 2)(p, x), jax.grad(opt(loss))(p, x)


@case
def vmap_spmd_axis_name(opt):
    m = mesh(AxisType.Auto)
    x = jax.device_put(data(4, 8, 6), NamedSharding(m, P("data")))
    return jax.jit(jax.vmap(opt(layer), in_axes=(None, 0), spmd_axis_name="data"))(PARAMS, x)


# ------------------------------------------------------------ effects


def _collector():
    seen: list[Any] = []
    return seen, lambda v: (seen.append(np.asarray(v).tolist()), np.float32(len(seen)))[1]


@case
def io_callback_outermost(opt):
    seen, note = _collector()
    shape = jax.ShapeDtypeStruct((), np.float32)

    def f(x):
        first = io_callback(note, shape, x[0, 0], ordered=True)
        return first + io_callback(note, shape, x[0, 1], ordered=True), x * 2

    out = opt(f)(X)
    jax.effects_barrier()
    return jax.block_until_ready(out), seen


@case
def io_callback_nested(opt):
    seen, note = _collector()
    shape = jax.ShapeDtypeStruct((), np.float32)
    f = opt(lambda c, x: (c + io_callback(note, shape, x, ordered=True), c))
    out = jax.block_until_ready(jax.jit(lambda xs: jax.lax.scan(f, jnp.float32(0), xs))(data(5)))
    jax.effects_barrier()
    return out, seen


@case
def debug_callback(opt):
    seen, note = _collector()

    def f(x):
        jax.debug.callback(note, x.sum())
        return x * 2

    outs = jax.block_until_ready((opt(f)(X), jax.grad(lambda x: opt(f)(x).sum())(X)))
    jax.effects_barrier()
    return outs, sorted(seen)


@case
def debug_print(opt):
    def f(x):
        jax.debug.print("value {v}", v=x[0, 0])
        return x * 2

    out = jax.block_until_ready(opt(f)(X))
    jax.effects_barrier()
    sys.stdout.flush()
    return out


@case
def pure_callback(opt):
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return opt(lambda x: jax.pure_callback(np.sin, shape, x, vmap_method="sequential") * x)(X)


@case
def mutable_reference_inside(opt):
    def f(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = x * 2
        ref[0] += 1.0
        return ref[...]

    return opt(f)(X), jax.jit(lambda x: opt(f)(x) * 2)(X)


# ------------------------------------------------------------ export


@case
def export_outermost(opt):
    exported = jax.export.export(opt(layer))(PARAMS, X)
    return jax.export.deserialize(exported.serialize()).call(PARAMS, X)


@case
def export_nested(opt):
    exported = jax.export.export(jax.jit(lambda p, x: opt(layer)(p, x) + 1))(PARAMS, X)
    return jax.export.deserialize(exported.serialize()).call(PARAMS, X)


@case
def export_symbolic_shape(opt):
    (rows,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((rows, 6), np.float32)
    p = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), PARAMS)
    exported = jax.export.export(jax.jit(opt(layer)))(p, x)
    return exported.call(PARAMS, X), exported.call(PARAMS, data(3, 6))


# ------------------------------------------------------------ ahead of time, modes of JAX


@case
def ahead_of_time(opt):
    return opt(layer).lower(PARAMS, X).compile()(PARAMS, X)


@case
def abstract_evaluation(opt):
    out = jax.eval_shape(opt(layer), PARAMS, X)
    return out.shape, str(out.dtype)


@case
def disabled_jit(opt):
    with jax.disable_jit():
        return opt(layer)(PARAMS, X), jax.grad(opt(loss))(PARAMS, X)


@case
def double_precision(opt):
    with jax.enable_x64(True):
        return opt(loss)(jax.tree.map(np.float64, PARAMS), np.float64(X)), jax.grad(opt(loss))(PARAMS, np.float64(X))


@case
def method(opt):
    class Model:
        def __init__(self, k):
            self.k = k

        @functools.partial(opt, static_argnums=0)
        def step(self, x):
            return x * self.k

    return Model(2.0).step(X), Model(3.0).step(X), jax.grad(lambda x: Model(2.0).step(x).sum())(X)


def assert_same(want: Any, got: Any) -> None:
    """Same structure and dtypes; floats equal to rounding, everything else exactly."""
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, a.shape, b.dtype, b.shape)
        if a.dtype.kind in "fc":
            np.testing.assert_allclose(b, a, rtol=2e-3 if a.dtype.itemsize == 2 else 1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(b, a)


# Tests of one case run in one process, which then needs `by_jit` once.
each_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(CASES)]
)
