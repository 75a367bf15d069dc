"""Training steps that a CPU makes in milliseconds: convolutional networks of tutorials, ResNet-18, an LSTM, an MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import Normal, array
from .keras_cnn import cnn_training, stateless_training, variables
from .layers import NHWC
from .mlp import mlp_step
from .optimizers import adamw, cross_entropy, sgd, training
from .spec import Program, WorkloadSpec

CLASSES = 10
DIGITS = (28, 28, 1)
"""Images of MNIST."""


def _conv(w: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(lax.conv_general_dilated(x, w["w"], (1, 1), "SAME", dimension_numbers=NHWC) + w["b"])


def _average(x: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, window, "VALID") / 4


def flax_cnn_training(batch: int, dtype: str = "float32", tiny: bool = False) -> Program:
    """The network of flax's MNIST example, in plain JAX: two convolutions, average pools, two dense layers; SGD with
    momentum.
    """
    made, width = Normal(), 2 if tiny else 32

    def kernel(inputs: int, outputs: int) -> dict[str, jax.Array]:
        return {"w": made(3, 3, inputs, outputs, scale=(9 * inputs) ** -0.5), "b": jnp.zeros(outputs)}

    params = [
        kernel(1, width),
        kernel(width, 2 * width),
        made.dense(49 * 2 * width, 8 * width),
        made.dense(8 * width, CLASSES),
    ]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        first, second, third, last = params
        x = _average(_conv(second, _average(_conv(first, images.astype(first["w"].dtype)))))
        x = jax.nn.relu(x.reshape(len(x), -1) @ third["w"] + third["b"])
        return cross_entropy(x @ last["w"] + last["b"], labels)

    return training(loss, params, (made(batch, *DIGITS), made.integers(CLASSES, batch)), sgd(), dtype)


def keras_cnn_training(batch: int, dtype: str = "float32", tiny: bool = False) -> Program:
    """The "simple MNIST convnet" of keras' documentation by ``stateless_call``, without dropout; Adam's rule."""
    import keras

    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(dtype if dtype == "float32" else f"mixed_{dtype}")
    width = 2 if tiny else 32
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input(DIGITS),
            layers.Conv2D(width, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(2 * width, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    made = Normal()
    data = made(batch, *DIGITS), made.integers(CLASSES, batch)
    return stateless_training(model, variables(model, "float32", fresh=True), adamw(1e-3, decay=0.0), data)


def lstm_training(batch: int, dtype: str = "float32", tiny: bool = False) -> Program:
    """A language model of characters: embedding, one LSTM layer scanned over 64 steps, logits; SGD with clipping."""
    steps, width, symbols = (4, 8, 16) if tiny else (64, 256, 128)
    made = Normal()
    params = {
        "embedding": made(symbols, width, scale=0.1),
        "input": made(width, 4 * width, scale=width**-0.5),
        "state": made(width, 4 * width, scale=width**-0.5),
        "bias": jnp.zeros(4 * width),
        "logits": made.dense(width, symbols),
    }

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        gates = (p["embedding"][tokens[:, :-1]] @ p["input"] + p["bias"]).swapaxes(0, 1)

        def cell(carry: Any, gates: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(gates + h @ p["state"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((len(tokens), width), gates.dtype)
        _, hidden = lax.scan(cell, (zero, zero), gates)
        return cross_entropy(hidden @ p["logits"]["w"] + p["logits"]["b"], tokens[:, 1:].swapaxes(0, 1))

    return training(loss, params, (made.integers(symbols, batch, steps + 1),), sgd(clip=1.0), dtype)


def mlp_training(batch: int, dtype: str = "float32", tiny: bool = False) -> Program:
    """The step of `mlp_step`: 784, 1000 and 10 units. Its type is float32."""
    step, (params, *data) = mlp_step(batch, 16 if tiny else 1000)
    return Program(step, None, (params, *data), carried=1)


def resnet18_training(
    batch: int, dtype: str = "float32", tiny: bool = False, divisor: int = 1, size: int = 64
) -> Program:
    """A training step of a ResNet-18, channels first; SGD with momentum. Args: divisor: of the channels; size: of its
    images.
    """
    from benchmarks.microbatch.training_models import resnet_loss, resnet_weights

    divisor, size = (32, 16) if tiny else (divisor, size)
    params = {k: jnp.asarray(w, dtype) for k, w in resnet_weights(divisor, CLASSES).items()}
    images = array(batch, 3, size, size, dtype=dtype)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return resnet_loss(params, images, labels, "default")

    return training(loss, params, (images, jnp.arange(batch) % CLASSES), sgd(), dtype)


SMALL_TRAINING = {
    spec.name: spec
    for spec in (
        WorkloadSpec("FlaxCNN_training", "cnn", (128,), "training", flax_cnn_training),
        WorkloadSpec("KerasCNN_training", "cnn", (128,), "training", keras_cnn_training),
        WorkloadSpec(
            "MobileNetV2_96px_training", "cnn", (16,), "training", partial(cnn_training, "MobileNetV2", size=96)
        ),
        WorkloadSpec("ResNet18_training", "cnn", (16,), "training", resnet18_training),
        WorkloadSpec("LSTM_training", "rnn", (32,), "training", lstm_training, ("float32",)),
        WorkloadSpec("MLP_training", "mlp", (800,), "training", mlp_training, ("float32",)),
    )
}
"""By name; of CPUs alone."""
