"""Loops that people write, as functions of arrays: small ones for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(*shape: int, seed: int = 0, scale: float = 0.5) -> np.ndarray:
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def gru(width: int = 24, batch: int = 1, steps: int = 5) -> Case:
    def run(x: Any, h: Any, u: Any) -> Any:
        def step(h: Any, mine: Any) -> Any:
            mine, own = jnp.split(mine, 3, -1), jnp.split(h @ u, 3, -1)
            r, z = jax.nn.sigmoid(mine[0] + own[0]), jax.nn.sigmoid(mine[1] + own[1])
            h = (1 - z) * jnp.tanh(mine[2] + r * own[2]) + z * h
            return h, h

        return jax.lax.scan(step, h, x)

    return run, (normal(steps, batch, 3 * width), normal(batch, width, seed=1), normal(width, 3 * width, scale=0.2))


def lstm(width: int = 20, batch: int = 3, steps: int = 4, reverse: bool = False) -> Case:
    def run(x: Any, h: Any, c: Any, u: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row + h @ u, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return jax.lax.scan(step, (h, c), x, reverse=reverse)

    states = normal(batch, width, seed=1), normal(batch, width, seed=2)
    return run, (normal(steps, batch, 4 * width), *states, normal(width, 4 * width, scale=0.2))


def minimal_gated_unit(width: int = 16, batch: int = 2, steps: int = 5) -> Case:
    """The forget gate's product feeds another: two stages a step."""

    def run(x: Any, h: Any, u: Any, v: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            f = jax.nn.sigmoid(row + h @ u)
            h = (1 - f) * h + f * jnp.tanh(row + (f * h) @ v)
            return h, f.sum(-1)

        return jax.lax.scan(step, h, x)

    return run, (
        normal(steps, batch, width),
        normal(batch, width, seed=1),
        normal(width, width),
        normal(width, width, seed=3),
    )


def kalman(states: int = 4, steps: int = 6) -> Case:
    def run(z: Any, x: Any, p: Any, f: Any, h: Any, q: Any) -> Any:
        def step(carry: Any, z: Any) -> Any:
            x, p = carry
            x, p = f @ x, f @ p @ f.T + q
            gain = p @ h / (h @ p @ h + 0.1)
            x = x + gain * (z - h @ x)
            p = p - jnp.outer(gain, h @ p)
            return (x, p), x

        return jax.lax.scan(step, (x, p), z)

    eye = np.eye(states, dtype=np.float32)
    return run, (normal(steps), normal(states), eye, 0.9 * eye, normal(states, seed=4), np.float32(0.01) * eye)


def two_layers(width: int = 12, batch: int = 2, steps: int = 4) -> Case:
    """Products over different extents meet in one value."""

    def run(x: Any, a: Any, b: Any, u: Any, w: Any, v: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            a, b = carry
            a = jnp.tanh(row + a @ u)
            b = jnp.tanh(a @ w + b @ v)
            return (a, b), b

        return jax.lax.scan(step, (a, b), x)

    states = normal(batch, width, seed=1), normal(batch, 2 * width, seed=2)
    return run, (
        normal(steps, batch, width),
        *states,
        normal(width, width),
        normal(width, 2 * width),
        normal(2 * width, 2 * width),
    )


def both_directions(width: int = 24, batch: int = 1, steps: int = 5) -> Case:
    """Two loops that know nothing of each other in one, as `rewrite.loops.horizontal` merges them."""
    _, (x, h, u) = gru(width, batch, steps)

    def cell(h: Any, row: Any, u: Any) -> Any:
        mine, own = jnp.split(row, 3, -1), jnp.split(h @ u, 3, -1)
        r, z = jax.nn.sigmoid(mine[0] + own[0]), jax.nn.sigmoid(mine[1] + own[1])
        return (1 - z) * jnp.tanh(mine[2] + r * own[2]) + z * h

    def run(x: Any, y: Any, h: Any, g: Any, u: Any, w: Any) -> Any:
        def step(carry: Any, rows: Any) -> Any:
            carry = cell(carry[0], rows[0], u), cell(carry[1], rows[1], w)
            return carry, carry

        return jax.lax.scan(step, (h, g), (x, y[::-1]))

    return run, (x, normal(*x.shape, seed=3), h, normal(*h.shape, seed=4), u, normal(*u.shape, seed=5, scale=0.2))


def perceptrons(width: int = 16, batch: int = 2, steps: int = 3) -> Case:
    def run(h: Any, w1: Any, w2: Any, b1: Any) -> Any:
        def step(h: Any, _: Any) -> Any:
            return jnp.tanh(h + jax.nn.gelu(h @ w1 + b1) @ w2), None

        return jax.lax.scan(step, h, None, length=steps)[0]

    return run, (normal(batch, width), normal(width, 3 * width), normal(3 * width, width), normal(3 * width))


def scalar(steps: int = 50) -> Case:
    return lambda x: jax.lax.fori_loop(0, steps, lambda _, v: v * 0.999 + jnp.sin(v) * 0.01, x), (np.float32(1),)


def diagonal_ssm(width: int = 8, steps: int = 7) -> Case:
    """A state-space model with a diagonal transition: no product over the state but the read-out."""

    def run(x: Any, s: Any, a: Any, b: Any, c: Any) -> Any:
        def step(s: Any, x: Any) -> Any:
            s = a * s + b * x
            return s, (c * s).sum()

        return jax.lax.scan(step, s, x)

    return run, (
        normal(steps),
        normal(width),
        0.9 * np.ones(width, np.float32),
        normal(width, seed=5),
        normal(width, seed=6),
    )


def masked(width: int = 40, batch: int = 3, steps: int = 6) -> Case:
    """Rows of different lengths keep their last state: a counter is carried."""

    def run(x: Any, h: Any, u: Any, lengths: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            h, t = carry
            h = jnp.where((t < lengths)[:, None], jnp.tanh(row + h @ u), h)
            return (h, t + 1), h

        return jax.lax.scan(step, (h, 0), x)

    lengths = np.arange(1, batch + 1, dtype=np.int32) * 2
    return run, (normal(steps, batch, width), normal(batch, width), normal(width, width, scale=0.2), lengths)


def layer_norm(width: int = 40, batch: int = 2, steps: int = 4) -> Case:
    def run(x: Any, h: Any, u: Any, g: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            z = row + h @ u
            z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + 1e-3) * g
            h = jnp.tanh(z)
            return h, h

        return jax.lax.scan(step, h, x)

    return run, (normal(steps, batch, width), normal(batch, width), normal(width, width, scale=0.2), normal(width))


def attention_decoder(width: int = 40, keys: int = 9, batch: int = 2, steps: int = 3) -> Case:
    def run(q: Any, k: Any, w: Any) -> Any:
        def step(q: Any, _: Any) -> Any:
            weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", q, k))
            q = jnp.tanh(jnp.einsum("bt,btd->bd", weights, k) @ w + q)
            return q, q

        return jax.lax.scan(step, q, None, length=steps)

    return run, (normal(batch, width), normal(batch, keys, width), normal(width, width, scale=0.2))


def gru_gradient(width: int = 40, batch: int = 2, steps: int = 4) -> Case:
    """The backward loop is the last one of the program."""
    function, arguments = gru(width, batch, steps)

    def loss(*args: Any) -> Any:
        return sum((x**2).sum() for x in jax.tree.leaves(function(*args)))

    return jax.grad(loss, argnums=(0, 1)), arguments


def short_floats(case: Case) -> Case:
    function, arguments = case
    return function, tuple(np.asarray(jnp.asarray(a, jnp.bfloat16)) for a in arguments)


CASES: dict[str, Callable[[], Case]] = {
    "gru": gru,
    "gru, 5 rows": lambda: gru(batch=5),
    "lstm": lstm,
    "lstm, reverse": lambda: lstm(reverse=True),
    "minimal gated unit": minimal_gated_unit,
    "kalman": kalman,
    "two layers": two_layers,
    "both directions": both_directions,
    "both directions, 3 rows": lambda: both_directions(width=40, batch=3),
    "perceptrons": perceptrons,
    "scalar": scalar,
    "diagonal ssm": diagonal_ssm,
    "masked": masked,
    "layer norm": layer_norm,
    "attention decoder": attention_decoder,
    "gru, gradient": gru_gradient,
    "lstm, bfloat16": lambda: short_floats(lstm(width=36)),
}
