"""The MLP of the course report in JAX: `make_step` gives one training step, under `jax.jit` or `jcuts.optimize`.

Rows of a batch have weights: 1 / n for the n samples of a mini-batch, 0 for rows that pad it.  So a batch that does not
divide by the number of processes has equal shards, and its gradient is that of its n samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from benchmarks.mlp.network import Params, Training, batches, initial

AXIS = "data"
Step = Callable[..., Any]
SHARDED = Params(PartitionSpec(AXIS, None), PartitionSpec(AXIS), PartitionSpec(None, AXIS), PartitionSpec())
"""Parameters under model parallelism: hidden units are divided."""


def forward(params: Params, x: jax.Array) -> jax.Array:
    """Logits."""
    return jax.nn.sigmoid(x @ params.w0.T + params.b0) @ params.w1.T + params.b1


def data_loss(params: Params, x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
    """Cross-entropy of rows times their weights, summed."""
    return -((jax.nn.log_softmax(forward(params, x)) * y).sum(1) * weight).sum()


def update(params: Params, grads: Params, how: Training) -> Params:
    """Gradient descent with L2 regularisation of the weights."""
    regs = (how.reg, 0.0, how.reg, 0.0)
    rate = how.learning_rate
    return Params(*(p - rate * (g + r * p) for p, g, r in zip(params, grads, regs, strict=True)))


def one_device_step(how: Training) -> Step:
    """(params, x, y, weight) -> params."""

    def step(params: Params, x: jax.Array, y: jax.Array, weight: jax.Array) -> Params:
        return update(params, jax.grad(data_loss)(params, x, y, weight), how)

    return step


def data_parallel_step(how: Training, mesh: Any) -> Step:
    """`one_device_step` with rows divided among the devices of a mesh.

    Gradients are summed by one all-reduce of all of them: between processes (gloo) one takes 4 ms, whatever its size.
    """

    def local(params: Params, x: jax.Array, y: jax.Array, weight: jax.Array) -> Params:
        grads = jax.grad(data_loss)(params, x, y, weight)
        if mesh.size > 1:
            flat, restored = ravel_pytree(grads)
            grads = restored(jax.lax.psum(flat, AXIS))
        return update(params, grads, how)

    rows, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=(whole, rows, rows, rows), out_specs=whole, check_vma=False)


def model_parallel_step(how: Training, mesh: Any) -> Step:
    """`one_device_step` with hidden units divided among the devices: logits are summed by an all-reduce.

    Every device sees all rows; W[0], b[0] and W[1] are divided as `SHARDED` says.
    """

    def local(params: Params, x: jax.Array, y: jax.Array, weight: jax.Array) -> Params:
        def loss(p: Params) -> jax.Array:
            hidden = jax.nn.sigmoid(x @ p.w0.T + p.b0)
            logits = jax.lax.psum(hidden @ p.w1.T, AXIS) + p.b1
            return -((jax.nn.log_softmax(logits) * y).sum(1) * weight).sum()

        return update(params, jax.grad(loss)(params), how)

    whole = PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=(SHARDED, whole, whole, whole), out_specs=SHARDED)


STEPS = {"data": data_parallel_step, "model": model_parallel_step}


def make_step(
    how: Training, engine: str = "jit", mesh: Mesh | None = None, parallelism: str = "data", **options: Any
) -> Step:
    """The compiled training step; parameters are donated.

    jcuts gets `one_device_step` as it is: JAX partitions it by the shardings of its arguments, and jcuts makes kernels
    of what is local to a shard.  A step that is one ``shard_map`` it leaves to XLA where several processes run it.

    Args: options: of `jcuts.optimize`.
    """
    step = one_device_step(how) if mesh is None or engine == "jcuts" else STEPS[parallelism](how, mesh)
    if engine == "jit":
        return jax.jit(step, donate_argnums=0)
    import jcuts

    return jcuts.optimize(step, donate_argnums=0, **options)


def padded(part: np.ndarray, rows: int) -> np.ndarray:
    """Rows of zeros behind ``part``, ``rows`` in all."""
    return np.concatenate([part, np.zeros((rows - len(part), *part.shape[1:]), part.dtype)])


def weighted_batches(x: np.ndarray, y: np.ndarray, batch: int, shards: int) -> list[tuple[np.ndarray, ...]]:
    """Mini-batches (x, y, weight), each padded to a multiple of ``shards`` rows."""
    found = []
    for part in batches(len(x), batch):
        count = part.stop - part.start
        rows = -(-count // shards) * shards
        found.append(tuple(padded(a, rows) for a in (x[part], y[part], np.full(count, 1 / count, x.dtype))))
    return found


def train(x: np.ndarray, y: np.ndarray, how: Training, engine: str = "jit", **options: Any) -> Params:
    """Trained weights; batches are put on the device once, before the first epoch."""
    params = Params(*map(jnp.asarray, initial(how.hidden, x.shape[1])))
    step = make_step(how, engine, **options)
    data = jax.device_put(weighted_batches(x, y, how.batch, 1))
    for _ in range(how.epochs):
        for part in data:
            params = step(params, *part)
    return Params(*map(np.asarray, params))
