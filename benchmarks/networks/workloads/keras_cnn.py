"""Convolutional networks of keras.applications: random weights, no downloads."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Workload, array

DEPTHWISE = ("MobileNetV2", "MobileNet", "NASNetMobile")
CNN = ("ResNet50", "DenseNet121", "InceptionV3", "VGG16")


def network(name: str, batch: int, *, closed: bool = True, dtype: str = "float32", size: int | None = None) -> Workload:
    """A ``keras.applications`` network's inference. Batch-norm statistics are made non-trivial.

    ``size`` is the height and width of its images, where not the network's own.
    """
    import keras

    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(dtype)
    shape = {} if size is None else {"input_shape": (size, size, 3)}
    model = getattr(keras.applications, name)(weights=None, **shape)
    x = array(batch, *model.input_shape[1:], dtype=dtype)
    rng = np.random.default_rng(7)

    def varied(variable: Any) -> jax.Array:
        value = np.asarray(variable.value)
        if "moving_variance" in variable.path:
            value = 0.5 + rng.random(value.shape)
        elif "moving_mean" in variable.path or "beta" in variable.path:
            value = 0.1 * rng.standard_normal(value.shape)
        return jnp.asarray(value, dtype)

    trainable = [varied(v) for v in model.trainable_variables]
    other = [varied(v) for v in model.non_trainable_variables]

    def apply(trainable: Any, other: Any, x: jax.Array) -> jax.Array:
        return model.stateless_call(trainable, other, x, training=False)[0]

    if closed:
        return (lambda x: apply(trainable, other, x)), (x,)
    return apply, (trainable, other, x)
