"""Recurrent networks: a GRU scanned over time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .arrays import Workload, array


def gru(steps: int = 100, batch: int = 16, width: int = 256) -> Workload:
    """A GRU scanned over time."""
    weights = {
        "i": array(width, 3 * width, scale=0.05),
        "h": array(width, 3 * width, seed=1, scale=0.05),
        "b": array(3 * width, scale=0.1),
    }

    def apply(w: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            gates, state = x @ w["i"] + w["b"], h @ w["h"]
            r, z, n = (slice(k * width, (k + 1) * width) for k in range(3))
            reset = jax.nn.sigmoid(gates[:, r] + state[:, r])
            update = jax.nn.sigmoid(gates[:, z] + state[:, z])
            new = jnp.tanh(gates[:, n] + reset * state[:, n])
            h = (1 - update) * new + update * h
            return h, h

        return jax.lax.scan(step, jnp.zeros((batch, width)), xs)[1]

    return apply, (weights, array(steps, batch, width))
