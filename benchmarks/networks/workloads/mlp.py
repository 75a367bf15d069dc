"""Multi-layer perceptrons: a training step of two dense layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .arrays import Workload, array


def mlp_step(batch: int = 800, hidden: int = 1000) -> Workload:
    """One training step of a 784-hidden-10 network: loss, gradients, SGD update."""
    first, second = array(784, hidden, scale=0.03), array(hidden, 10, seed=1, scale=0.03)
    params = [(first, jnp.zeros(hidden)), (second, jnp.zeros(10))]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jax.nn.sigmoid(x @ params[0][0] + params[0][1])
        logits = h @ params[1][0] + params[1][1]
        return -(jax.nn.log_softmax(logits) * y).sum(-1).mean() + 1e-4 * sum((w**2).sum() for w, _ in params)

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return step, (params, array(batch, 784), jax.nn.one_hot(jnp.arange(batch) % 10, 10))
