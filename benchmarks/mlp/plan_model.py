"""The course report's MLP as a model of one's own for `jcuts plan`: `net` gives the loss and its arguments as shapes.

jcuts plan --model benchmarks/mlp/plan_model.py:net --cluster h200-x4-measured --gpus 4
jcuts plan --model benchmarks/mlp/plan_model.py:net --cluster h200-x4-measured --gpus 4 --fix tensor=4
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

BATCH = 800
HIDDEN = 1000


def net() -> tuple[Any, ...]:
    """784 - 1000 - 10 at batch 800, float32 (the planner's formats)."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jax.nn.sigmoid(x @ params["w0"] + params["b0"])
        return -(jax.nn.log_softmax(h @ params["w1"] + params["b1"]) * y).sum(-1).mean()

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = {"w0": shape(784, HIDDEN), "b0": shape(HIDDEN), "w1": shape(HIDDEN, 10), "b1": shape(10)}
    return loss, params, shape(BATCH, 784), shape(BATCH, 10)
