"""Random steps with functions inside: loops, branches, derivatives of one's own, and barriers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.random_programs.draw import FLOATS, Draw, Unsuitable, step

BODY = ("elementwise", "layout", "reduction", "contraction", "control")
BODY_WEIGHTS = (5.0, 1.0, 1.0, 0.7, 0.5)
DEEPEST = 2


def _body(d: Draw, seed: int, values: list[Any], like: Any) -> Any:
    """A value of the type of ``like`` made of ``values`` in a few operations."""
    inner = Draw(np.random.default_rng([seed, 3]), d.kind, like.dtype.name, list(values), d.depth + 1)
    inner.grow(inner.number(1, 4), BODY, BODY_WEIGHTS)
    out = inner.fresh(like.shape, like.dtype.name)
    return inner.tame(out) if like.dtype.name in FLOATS else out


def _seed(d: Draw) -> int:
    if d.depth >= DEEPEST:
        raise Unsuitable
    return int(d.rng.integers(2**31))


@step("control")
def scan(d: Draw) -> None:
    """A loop over rows with a carry."""
    seed = _seed(d)
    xs = d.any(rank=(2, 4), size=2_000)
    if xs.shape[0] > 20:
        raise Unsuitable
    init = d.fresh(xs.shape[1:], d.dtype())

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        new = _body(d, seed, [x, carry], carry)
        return new, _body(d, seed + 1, [new, x], x)

    carry, ys = lax.scan(body, init, xs, reverse=bool(seed % 2))
    d.add(carry)
    d.add(ys)


@step("control")
def while_(d: Draw) -> None:
    """A loop with a counter."""
    seed = _seed(d)
    if d.kind.smooth:
        raise Unsuitable
    x = d.any(rank=(1, 3), size=2_000)

    def body(state: tuple[Any, Any]) -> tuple[Any, Any]:
        return state[0] + np.int32(1), _body(d, seed, [state[1]], state[1])

    d.add(lax.while_loop(lambda s: s[0] < np.int32(2 + seed % 3), body, (np.int32(0), x))[1])


@step("control")
def cond(d: Draw) -> None:
    """Two or three branches, chosen at run time."""
    seed = _seed(d)
    x = d.any(rank=(1, 3), size=2_000)
    pick = d.any(rank=(0, 3))
    scalar = lax.reshape(lax.slice(lax.reshape(pick, (pick.size,)), (0,), (1,)), ()) if pick.ndim else pick
    which = lax.gt(scalar, jnp.asarray(0, scalar.dtype))
    branches = [lambda v, s=s: _body(d, s, [v], v) for s in (seed, seed + 1, seed + 2)]
    if seed % 3:
        d.add(lax.cond(which, *branches[:2], x))
    else:
        d.add(lax.switch(lax.convert_element_type(which, np.int32) + np.int32(seed % 2), branches, x))


@step("call", 0.7)
def custom_jvp(d: Draw) -> None:
    """A function with a forward rule of its own."""
    x = d.float(rank=(0, 4))

    @jax.custom_jvp
    def gate(v: Any) -> Any:
        return v * jax.nn.sigmoid(v * 2)

    @gate.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (v,), (t,) = primals, tangents
        s = jax.nn.sigmoid(v * 2)
        return gate(v), t * (s + 2 * v * s * (1 - s))

    d.add(gate(x))


@step("call", 0.7)
def custom_vjp(d: Draw) -> None:
    """A function with a backward rule of its own that is not its derivative."""
    x = d.float(rank=(0, 4))

    @jax.custom_vjp
    def squash(v: Any) -> Any:
        return jnp.tanh(v) * jnp.asarray(1.5, v.dtype)

    squash.defvjp(lambda v: (squash(v), v), lambda v, g: (jnp.where(jnp.abs(v) < 1, g, g * 0.25),))
    d.add(squash(x))


@step("call", 0.7)
def checkpointed(d: Draw) -> None:
    """A function whose intermediates are computed again for the derivative; a jitted one."""
    x = d.float(rank=(1, 3))

    def block(v: Any) -> Any:
        return jnp.tanh(v) * jnp.cos(v) + jnp.mean(v, axis=-1, keepdims=True)

    d.add((jax.checkpoint(block) if d.chance(0.5) else jax.jit(block))(x))


@step("call", 0.5)
def barrier(d: Draw) -> None:
    """optimization_barrier around one or two values."""
    x = d.any(rank=(0, 4))
    if d.chance(0.5):
        d.add(lax.optimization_barrier(x))
        return
    for value in lax.optimization_barrier((x, d.any())):
        d.add(value)


@step("call", 0.4)
def stopped(d: Draw) -> None:
    """stop_gradient, and a jitted sum with it."""
    x = d.float(rank=(1, 3))
    d.add(x - lax.stop_gradient(jnp.mean(x, axis=-1, keepdims=True)))
