"""Convolutional networks of keras.applications: random weights, no downloads."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Workload, array
from .optimizers import cross_entropy, sgd
from .spec import Program

DEPTHWISE = ("MobileNetV2", "MobileNet", "NASNetMobile")
CNN = ("ResNet50", "DenseNet121", "InceptionV3", "VGG16")
SMALLEST = {"InceptionV3": 75}
"""Height and width of the smallest images, where not 32."""


def fans(shape: Sequence[int], mode: str) -> float:
    """Inputs and outputs of one weight (``fan_in``, ``fan_out``, or the mean ``fan_avg``), counted as keras does."""
    window = math.prod(shape[:-2])
    fan_in, fan_out = (shape[-2] * window, shape[-1] * window) if len(shape) > 1 else (shape[0], shape[0])
    return {"fan_in": fan_in, "fan_out": fan_out}.get(mode, (fan_in + fan_out) / 2)


def initializers() -> dict[str, type]:
    """Keras' initializers of convolutions and Dense layers, drawn by NumPy: nothing is compiled per shape of weights.

    ``jax.random`` compiles a program for every shape, which is most of the time that a keras network takes to build.
    """
    import keras

    class OnHost:
        """Variance scaling (uniform, or normal and clipped at twice its deviation) on the host."""

        scale: float
        mode: str
        distribution: str
        seed: Any

        def __call__(self, shape: Sequence[int], dtype: Any = None) -> jax.Array:
            """Weights of a shape."""
            rng, variance = np.random.default_rng(self.seed), self.scale / max(1.0, fans(shape, self.mode))
            if self.distribution == "uniform":
                return jnp.asarray(math.sqrt(3 * variance) * rng.uniform(-1, 1, shape), dtype)
            return jnp.asarray(math.sqrt(variance) * np.clip(rng.standard_normal(shape), -2, 2), dtype)

    class GlorotUniform(OnHost, keras.initializers.GlorotUniform):
        """The default of keras' layers."""

    class VarianceScaling(OnHost, keras.initializers.VarianceScaling):
        """What EfficientNet asks for."""

    return {"glorot_uniform": GlorotUniform, "GlorotUniform": GlorotUniform, "VarianceScaling": VarianceScaling}


def keras_model(name: str, dtype: str, size: int | None, **options: Any) -> Any:
    """A ``keras.applications`` network with random weights. Args: size: of its images, where not the network's own."""
    import keras

    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(dtype)
    shape = {} if size is None else {"input_shape": (size, size, 3)}
    with keras.saving.custom_object_scope(initializers()):
        return getattr(keras.applications, name)(weights=None, **shape, **options)


def variables(model: Any, dtype: str, *, fresh: bool = False) -> tuple[list[jax.Array], list[jax.Array]]:
    """Trainable and other variables; batch-norm statistics as a trained network's, unless they are to be ``fresh``."""
    rng = np.random.default_rng(7)

    def varied(variable: Any) -> jax.Array:
        value = np.asarray(variable.value)
        if "moving_variance" in variable.path and not fresh:
            value = 0.5 + rng.random(value.shape)
        elif ("moving_mean" in variable.path or "beta" in variable.path) and not fresh:
            value = 0.1 * rng.standard_normal(value.shape)
        return jnp.asarray(value, dtype)

    return [varied(v) for v in model.trainable_variables], [varied(v) for v in model.non_trainable_variables]


def cnn(
    name: str, batch: int, dtype: str = "float32", tiny: bool = False, size: int | None = None, fresh: bool = False
) -> Program:
    """Inference of a ``keras.applications`` network."""
    model = keras_model(name, dtype, size or (SMALLEST.get(name, 32) if tiny else None))
    x = array(batch, *model.input_shape[1:], dtype=dtype)

    def apply(weights: Any, x: jax.Array) -> jax.Array:
        return model.stateless_call(*weights, x, training=False)[0]

    return Program(apply, variables(model, dtype, fresh=fresh), (x,))


def cnn_training(
    name: str,
    batch: int,
    dtype: str = "float32",
    tiny: bool = False,
    fresh: bool = False,
    size: int | None = None,
    **options: Any,
) -> Program:
    """Training step of a ``keras.applications`` network: cross-entropy, SGD with momentum, batch-norm statistics.

    Args: size: of its images, where not the network's own; options: of the model.
    """
    policy = dtype if dtype == "float32" else f"mixed_{dtype}"
    size = SMALLEST.get(name, 32) if tiny else size
    model = keras_model(name, policy, size, classifier_activation=None, **options)
    x = array(batch, *model.input_shape[1:])
    labels = jnp.arange(batch) % model.output_shape[-1]
    return stateless_training(model, variables(model, "float32", fresh=fresh), sgd(), (x, labels))


def stateless_training(
    model: Any, weights: tuple[list[jax.Array], list[jax.Array]], rule: tuple, data: tuple[jax.Array, jax.Array]
) -> Program:
    """Training step of a keras model by ``stateless_call``: cross-entropy, an optimiser's rule, new statistics.

    Args: weights: trainable and other variables; rule: of `optimizers`; data: images and labels.
    """
    (trainable, other), (initial, update) = weights, rule

    def step(trainable: Any, other: Any, state: Any, x: jax.Array, labels: jax.Array) -> Any:
        def loss(trainable: Any) -> tuple[jax.Array, Any]:
            logits, new = model.stateless_call(trainable, other, x, training=True)
            return cross_entropy(logits, labels), new

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        return (*interleaved(update(trainable, state, gradients), new), value)

    return Program(step, None, (trainable, other, initial(trainable), *data), carried=3)


def interleaved(updated: tuple[Any, Any], other: Any) -> tuple[Any, Any, Any]:
    """Carried results in the order of the arguments: parameters, other variables, the optimiser's state."""
    return updated[0], other, updated[1]


def network(
    name: str,
    batch: int,
    *,
    closed: bool = True,
    dtype: str = "float32",
    size: int | None = None,
    fresh: bool = False,
) -> Workload:
    """A ``keras.applications`` network's inference.

    Args:
        size: height and width of its images, where not the network's own.
        fresh: batch norms as keras makes them, all equal, so that XLA folds most of them away; else as after training.
    """
    program = cnn(name, batch, dtype, size=size, fresh=fresh)
    if closed:
        form = program.form(closed=True)
        return form.function, form.arguments
    trainable, other = program.weights
    apply = program.function
    return (lambda trainable, other, x: apply((trainable, other), x)), (trainable, other, *program.arguments)
