"""Six recurrent cells that no part of jcuts was written for: is each one kernel, and if not, why?

Written after the kernels of recurrences were done.  `benchmarks/gpu_kernels/recurrences.py` times them (names with
"unseen:"), `tests/benchmarks/test_unseen_cells.py` says which are one kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu_kernels.loops import Case, normal


def peephole_lstm(units: int, batch: int, steps: int) -> Case:
    """LSTM whose gates see the cell's state (Gers and Schmidhuber, 2000)."""

    def run(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any, peep: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(row @ w + h @ u + b, 4, -1)
            new = jax.nn.sigmoid(f + peep[1] * c) * c + jax.nn.sigmoid(i + peep[0] * c) * jnp.tanh(g)
            h = jax.nn.sigmoid(o + peep[2] * new) * jnp.tanh(new)
            return (h, new), h

        return jax.lax.scan(step, (h, c), x)

    w, u = (normal(units, 4 * units, scale=units**-0.5) for _ in range(2))
    return run, (
        normal(steps, batch, units),
        *(normal(batch, units) for _ in range(2)),
        w,
        u,
        normal(4 * units),
        normal(3, units),
    )


def normed_coupled_lstm(units: int, batch: int, steps: int) -> Case:
    """LSTM with coupled input and forget gates and a layer norm of its state (Greff et al., 2017; Ba et al., 2016)."""

    def run(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any, gain: Any) -> Any:
        def norm(v: Any) -> Any:
            centred = v - v.mean(-1, keepdims=True)
            return gain * centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)

        def step(state: Any, row: Any) -> Any:
            h, c = state
            f, g, o = jnp.split(row @ w + h @ u + b, 3, -1)
            f = jax.nn.sigmoid(f)
            c = f * c + (1 - f) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(norm(c))
            return (h, c), h

        return jax.lax.scan(step, (h, c), x)

    w, u = (normal(units, 3 * units, scale=units**-0.5) for _ in range(2))
    return run, (
        normal(steps, batch, units),
        *(normal(batch, units) for _ in range(2)),
        w,
        u,
        normal(3 * units),
        1 + normal(units),
    )


def state_space(channels: int, states: int, steps: int) -> Case:
    """Diagonal state space with an input-dependent step (as Mamba's, Gu and Dao, 2023): a state per channel."""

    def run(x: Any, a: Any, w_step: Any, w_in: Any, w_out: Any, skip: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            delta = jax.nn.softplus(row @ w_step)
            gain, read = row @ w_in, row @ w_out
            h = jnp.exp(-delta[:, None] * jnp.exp(a)) * h + (delta * row)[:, None] * gain[None]
            return h, h @ read + skip * row

        return jax.lax.scan(step, jnp.zeros((channels, states), x.dtype), x)

    scale = channels**-0.5
    weights = (normal(channels, n, scale=scale) for n in (channels, states, states))
    return run, (normal(steps, channels), normal(channels, states), *weights, normal(channels))


def delta_rule(width: int, batch: int, steps: int) -> Case:
    """Fast weights by the delta rule (Schlag et al., 2021): the state is a matrix per row of the batch."""

    def run(k: Any, v: Any, q: Any, beta: Any) -> Any:
        def step(s: Any, item: Any) -> Any:
            k, v, q, beta = item
            k = k * jax.lax.rsqrt(jnp.square(k).sum(-1, keepdims=True) + 1e-5)
            old = jnp.einsum("bij,bj->bi", s, k)
            s = s + jax.nn.sigmoid(beta) * (v - old)[:, :, None] * k[:, None, :]
            return s, jnp.einsum("bij,bj->bi", s, q)

        return jax.lax.scan(step, jnp.zeros((batch, width, width), k.dtype), (k, v, q, beta))

    return run, (*(normal(steps, batch, width) for _ in range(3)), normal(steps, batch, 1, 1))


def runge_kutta(units: int, batch: int, steps: int) -> Case:
    """A neural differential equation of two layers by the classic Runge-Kutta method: eight products a step."""

    def run(y: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        def slope(y: Any) -> Any:
            return jnp.tanh(y @ w1 + b1) @ w2 + b2

        def step(_: Any, y: Any) -> Any:
            a = slope(y)
            b = slope(y + 0.05 * a)
            c = slope(y + 0.05 * b)
            d = slope(y + 0.1 * c)
            return y + (0.1 / 6) * (a + 2 * b + 2 * c + d)

        return jax.lax.fori_loop(0, steps, step, y)

    w1, w2 = normal(units, 2 * units, scale=units**-0.5), normal(2 * units, units, scale=(2 * units) ** -0.5)
    return run, (normal(batch, units), w1, normal(2 * units), w2, normal(units))


def clockwork(units: int, batch: int, steps: int) -> Case:
    """Clockwork recurrence (Koutnik et al., 2014): groups of units that move at every, second, fourth, eighth step."""

    def run(x: Any, h: Any, w: Any, u: Any, b: Any) -> Any:
        periods = jnp.asarray(np.repeat(2 ** np.arange(4), units // 4), jnp.int32)

        def step(h: Any, item: Any) -> Any:
            t, row = item
            new = jnp.tanh(row @ w + h @ u + b)
            h = jnp.where(t % periods == 0, new, h)
            return h, h

        return jax.lax.scan(step, h, (jnp.arange(x.shape[0], dtype=jnp.int32), x))

    return run, (
        normal(steps, batch, units),
        normal(batch, units),
        *(normal(units, units, scale=units**-0.5) for _ in range(2)),
        normal(units),
    )


CELLS: dict[str, Callable[[], Case]] = {
    "unseen: peephole LSTM, 512 units, b4, 200 steps": lambda: peephole_lstm(512, 4, 200),
    "unseen: coupled LSTM with layer norm, 512 units, b4, 200 steps": lambda: normed_coupled_lstm(512, 4, 200),
    "unseen: state space, 256 channels of 16 states, 500 steps": lambda: state_space(256, 16, 500),
    "unseen: delta rule, 64 x 64, b4, 300 steps": lambda: delta_rule(64, 4, 300),
    "unseen: Runge-Kutta of two layers, 256 units, b1, 100 steps": lambda: runge_kutta(256, 1, 100),
    "unseen: clockwork, 512 units, b1, 200 steps": lambda: clockwork(512, 1, 200),
}
"""Sizes for a GPU."""
SMALL: dict[str, Callable[[], Case]] = {
    "peephole LSTM": lambda: peephole_lstm(16, 3, 5),
    "coupled LSTM with layer norm": lambda: normed_coupled_lstm(16, 3, 5),
    "state space": lambda: state_space(8, 4, 5),
    "delta rule": lambda: delta_rule(8, 2, 5),
    "Runge-Kutta": lambda: runge_kutta(8, 2, 4),
    "clockwork": lambda: clockwork(16, 2, 9),
}
"""The same cells, tiny."""
