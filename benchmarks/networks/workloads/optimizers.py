"""Optimisers of training steps: SGD with momentum, AdamW with global-norm clipping, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .spec import Program


def at_least_float32(x: jax.Array) -> jax.Array:
    """Accumulation type: float32, for narrower numbers too; float64 stays float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def global_norm(tree: Any) -> jax.Array:
    """L2 norm of all leaves together."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(at_least_float32(x))) for x in jax.tree.leaves(tree)))


def clipped(gradients: Any, limit: float) -> Any:
    """Global-norm clipping: gradients scaled down where their common norm is above a limit."""
    factor = jnp.minimum(1.0, limit / (global_norm(gradients) + 1e-6))
    return jax.tree.map(lambda g: g * factor, gradients)


def sgd(rate: float = 0.01, momentum: float = 0.9, clip: float | None = None) -> tuple[Callable, Callable]:
    """SGD with momentum: (state of parameters, update of parameters and state by gradients)."""

    def initial(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params) if momentum else ()

    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        gradients = gradients if clip is None else clipped(gradients, clip)
        if not momentum:
            return jax.tree.map(lambda p, g: p - rate * g, params, gradients), ()
        state = jax.tree.map(lambda v, g: momentum * v + g, state, gradients)
        return jax.tree.map(lambda p, v: p - rate * v, params, state), state

    return initial, update


def adamw(
    rate: float = 3e-4, decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), clip: float = 1.0
) -> tuple[Callable, Callable]:
    """AdamW with global-norm clipping: (state of parameters, update of parameters and state by gradients)."""

    def initial(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"m": zeros, "v": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), jnp.int32)}

    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        gradients = clipped(gradients, clip)
        count = state["count"] + 1
        m = jax.tree.map(lambda m, g: betas[0] * m + (1 - betas[0]) * g, state["m"], gradients)
        v = jax.tree.map(lambda v, g: betas[1] * v + (1 - betas[1]) * g * g, state["v"], gradients)
        first, second = 1 - betas[0] ** count, 1 - betas[1] ** count

        def changed(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - rate * ((m / first) / (jnp.sqrt(v / second) + 1e-8) + decay * p)

        return jax.tree.map(changed, params, m, v), {"m": m, "v": v, "count": count}

    return initial, update


def cast(tree: Any, dtype: Any) -> Any:
    """Mixed precision: floating-point leaves in the type of the computation, master weights stay as they are."""
    floating = jnp.floating
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, floating) else x, tree)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of integer labels."""
    logits = at_least_float32(logits)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def training(loss: Callable[..., Any], params: Any, batch: tuple[Any, ...], rule: tuple, dtype: Any) -> Program:
    """A training step: loss, gradients, update. Parameters and the optimiser's state are carried (donated).

    Args: loss: of parameters in the type of the computation and of the batch; params: float32 (float64) master weights.
    """
    initial, update = rule

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda p: at_least_float32(loss(cast(p, dtype), *batch)))(params)
        return (*update(params, state, gradients), value)

    return Program(step, None, (params, initial(params), *batch), carried=2)
