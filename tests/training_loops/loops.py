"""Training loops as users of flax, optax, equinox and keras write them: functions of one step, with their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CLASSES = 5
SIZE = 8


@dataclass(frozen=True)
class Loop:
    """A step, its first state, and where batches of it come from.

    ``step(state, images, labels)`` gives the next state and the loss.
    """

    step: Callable[..., Any]
    state: Any


def batches(count: int, batch: int = 6, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """Random images and labels; the last batch is smaller, as that of an epoch is."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        size = batch if number + 1 < count else batch - 2
        yield (
            jnp.asarray(rng.standard_normal((size, SIZE, SIZE, 3)), jnp.float32),
            jnp.asarray(rng.integers(0, CLASSES, size), jnp.int32),
        )


def cross_entropy(logits: Any, labels: Any) -> Any:
    """As optax has it."""
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen() -> Loop:
    """A convolutional network of flax.linen with batch norm statistics; AdamW by optax with a schedule, clipping by the
    global norm and a mask that spares vectors from decay; an average of the parameters beside.
    """
    import optax
    from flax import linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.Conv(8, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x.reshape(len(x), -1))))
            return nn.Dense(CLASSES)(x)

    network = Network()
    variables = network.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)), train=False)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    rule = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate, weight_decay=0.1, mask=mask))
    average = optax.ema(0.9)

    def step(state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        params, statistics, optimiser, averaged = state

        def loss(params: Any) -> tuple[Any, Any]:
            collections = {"params": params, "batch_stats": statistics}
            logits, changed = network.apply(collections, images, train=True, mutable=["batch_stats"])
            return cross_entropy(logits, labels), changed["batch_stats"]

        (value, changed), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, optimiser = rule.update(gradients, optimiser, params)
        params = optax.apply_updates(params, updates)
        _, averaged = average.update(params, averaged)
        return (params, changed, optimiser, averaged), value

    params = variables["params"]
    return Loop(step, (params, variables["batch_stats"], rule.init(params), average.init(params)))


def nnx() -> Loop:
    """A network of flax.nnx, split into a definition and its state; SGD with momentum, whose rate is part of the state
    (`optax.inject_hyperparams`); four micro-batches per step, whose gradients a `scan` adds.
    """
    import optax
    from flax import nnx as nn

    class Network(nn.Module):
        def __init__(self, rngs: nn.Rngs) -> None:
            self.conv = nn.Conv(3, 8, (3, 3), strides=(2, 2), rngs=rngs)
            self.norm = nn.RMSNorm(8, rngs=rngs)
            self.dense = nn.Linear(8, CLASSES, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dense(nn.silu(self.norm(self.conv(x))).mean((1, 2)))

    definition, params = nn.split(Network(nn.Rngs(1)))
    rule = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)

    def step(state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        params, optimiser = state

        def loss(params: Any, images: Any, labels: Any) -> Any:
            return cross_entropy(nn.merge(definition, params)(images), labels)

        def micro(total: Any, part: Any) -> tuple[Any, Any]:
            value, gradients = jax.value_and_grad(loss)(params, *part)
            return jax.tree.map(jnp.add, total, gradients), value

        parts = jax.tree.map(lambda x: x.reshape(2, len(x) // 2, *x.shape[1:]), (images, labels))
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, values = jax.lax.scan(micro, zeros, parts)
        updates, optimiser = rule.update(jax.tree.map(lambda g: g / 2, total), optimiser, params)
        return (optax.apply_updates(params, updates), optimiser), values.mean()

    return Loop(step, (params, rule.init(params)))


def equinox() -> Loop:
    """An MLP with attention of equinox, its arrays apart from the rest; Lion, and a loss scale for gradients."""
    import equinox as eqx
    import optax

    class Network(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        head: eqx.nn.MLP

        def __init__(self, key: Any) -> None:
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(2, 24, key=first)
            self.norm = eqx.nn.LayerNorm(24)
            self.head = eqx.nn.MLP(24, CLASSES, 16, 1, key=second)

        def __call__(self, image: Any) -> Any:
            rows = image.reshape(SIZE, -1)
            rows = jax.vmap(self.norm)(rows + self.attention(rows, rows, rows))
            return self.head(rows.mean(0))

    params, static = eqx.partition(Network(jax.random.key(2)), eqx.is_inexact_array)
    rule = optax.lion(3e-3, weight_decay=0.01)
    scale = 128.0

    def step(state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        params, optimiser = state

        def loss(params: Any) -> Any:
            return scale * cross_entropy(jax.vmap(eqx.combine(params, static))(images), labels)

        value, gradients = jax.value_and_grad(loss)(params)
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        updates, optimiser = rule.update(gradients, optimiser, params)
        return (eqx.apply_updates(params, updates), optimiser), value / scale

    return Loop(step, (params, rule.init(params)))


def keras() -> Loop:
    """A model of keras by `stateless_call`, with its own optimiser by `stateless_apply`."""
    import os

    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras as k

    k.utils.set_random_seed(3)
    layers = [
        k.layers.Input((SIZE, SIZE, 3)),
        k.layers.SeparableConv2D(8, 3, padding="same", use_bias=False),
        k.layers.BatchNormalization(),
        k.layers.ReLU(),
        k.layers.AveragePooling2D(2),
        k.layers.Flatten(),
        k.layers.Dense(CLASSES),
    ]
    model, rule = k.Sequential(layers), k.optimizers.Adam(1e-2)
    rule.build(model.trainable_variables)
    loss_of = k.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        trainable, others, optimiser = state

        def loss(trainable: Any) -> tuple[Any, Any]:
            logits, changed = model.stateless_call(trainable, others, images, training=True)
            return loss_of(labels, logits), changed

        (value, changed), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        trainable, optimiser = rule.stateless_apply(optimiser, gradients, trainable)
        return (trainable, changed, optimiser), value

    values = [
        [v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables, rule.variables)
    ]
    return Loop(step, tuple(values))


LOOPS: dict[str, Callable[[], Loop]] = {"linen": linen, "nnx": nnx, "equinox": equinox, "keras": keras}
