"""Training steps of ResNet-18 and of AlexNet in plain JAX, as `microbatch_networks.py` lists their convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Weights = dict[str, Any]
BLOCKS = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))


# -- ResNet-18 ------------------------------------------------------------------------------------------------------
def resnet_weights(width: int, classes: int, seed: int = 0) -> Weights:
    """Weights; ``width`` divides the channels (1 is ResNet-18)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    made: Weights = {}

    def conv(name: str, inputs: int, outputs: int, window: int) -> None:
        scale = (2.0 / (inputs * window * window)) ** 0.5
        made[name] = (scale * rng.standard_normal((outputs, inputs, window, window))).astype(np.float32)
        made[f"{name} scale"] = np.ones((outputs, 1, 1), np.float32)
        made[f"{name} shift"] = np.zeros((outputs, 1, 1), np.float32)

    before = max(1, 64 // width)
    conv("stem", 3, before, 7)
    for k, (channels, stride) in enumerate(BLOCKS):
        channels = max(1, channels // width)
        conv(f"{k} a", before, channels, 3)
        conv(f"{k} b", channels, channels, 3)
        if stride != 1 or before != channels:
            conv(f"{k} skip", before, channels, 1)
        before = channels
    made["out"] = (0.01 * rng.standard_normal((before, classes))).astype(np.float32)
    return made


def resnet_loss(weights: Weights, images: Any, labels: Any, precision: str) -> Any:
    """Mean cross entropy of a batch (N C H W), statistics of the batch itself in the normalisations."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def conv(name: str, x: Any, stride: int) -> Any:
        w = weights[name]
        pad = w.shape[-1] // 2
        y = lax.conv_general_dilated(
            x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NCHW", "OIHW", "NCHW"),
            precision=precision,
        )  # fmt: skip
        mean = y.mean((0, 2, 3), keepdims=True)
        variance = ((y - mean) ** 2).mean((0, 2, 3), keepdims=True)
        return (y - mean) * lax.rsqrt(variance + 1e-5) * weights[f"{name} scale"] + weights[f"{name} shift"]

    x = jax.nn.relu(conv("stem", images, 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for k, (_, stride) in enumerate(BLOCKS):
        y = jax.nn.relu(conv(f"{k} a", x, stride))
        y = conv(f"{k} b", y, 1)
        x = jax.nn.relu(y + (conv(f"{k} skip", x, stride) if f"{k} skip" in weights else x))
    scores = jnp.dot(x.mean((2, 3)), weights["out"], precision=precision)
    return _cross_entropy(scores, labels)


# -- AlexNet --------------------------------------------------------------------------------------------------------
KERNELS = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
"""Channels, outputs, window, stride and padding of the one-column AlexNet (2014)."""


def alexnet_weights(width: int, classes: int, seed: int = 0, extent: int = 224) -> Weights:
    """Weights; ``width`` divides channels and units (1 is AlexNet)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    made: Weights = {}
    for k, (inputs, outputs, window, stride, pad) in enumerate(KERNELS):
        inputs, outputs = (inputs if k == 0 else max(1, inputs // width)), max(1, outputs // width)
        scale = (2.0 / (inputs * window * window)) ** 0.5
        made[f"conv{k}"] = (scale * rng.standard_normal((outputs, inputs, window, window))).astype(np.float32)
        made[f"conv{k} shift"] = np.zeros((outputs, 1, 1), np.float32)
        extent = (extent + 2 * pad - window) // stride + 1
        extent = (extent - 3) // 2 + 1 if k in (0, 1, 4) else extent
    before = outputs * extent * extent
    for k, units in enumerate((max(1, 4096 // width), max(1, 4096 // width), classes)):
        made[f"dense{k}"] = ((2.0 / before) ** 0.5 * rng.standard_normal((before, units))).astype(np.float32)
        before = units
    return made


def alexnet_loss(weights: Weights, images: Any, labels: Any, precision: str) -> Any:
    """Mean cross entropy of a batch (N C H W), without dropout and without normalisation."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    x = images
    for k, (_, _, _, stride, pad) in enumerate(KERNELS):
        x = lax.conv_general_dilated(
            x, weights[f"conv{k}"], (stride, stride), ((pad, pad), (pad, pad)),
            dimension_numbers=("NCHW", "OIHW", "NCHW"), precision=precision,
        )  # fmt: skip
        x = jax.nn.relu(x + weights[f"conv{k} shift"])
        if k in (0, 1, 4):
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "VALID")
    x = x.reshape(x.shape[0], -1)
    for k in range(3):
        x = jnp.dot(x, weights[f"dense{k}"], precision=precision)
        x = jax.nn.relu(x) if k < 2 else x
    return _cross_entropy(x, labels)


def _cross_entropy(scores: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1).mean()


@dataclass(frozen=True)
class Model:
    """A network for steps: its weights (width, classes), and its loss (weights, images, labels, precision)."""

    weights: Callable[..., Weights]
    loss: Callable[..., Any]


MODELS = {"ResNet-18": Model(resnet_weights, resnet_loss), "AlexNet": Model(alexnet_weights, alexnet_loss)}


def inputs_of(name: str, batch: int, *, tiny: bool, seed: int = 1) -> tuple[Weights, Any, Any]:
    """Weights, images and labels; of a network that a plain loop can compute where ``tiny``."""
    import numpy as np

    extent = {"ResNet-18": 32, "AlexNet": 63}[name] if tiny else 224
    width, classes = (32, 10) if tiny else (1, 1000)
    more = {"extent": extent} if name == "AlexNet" else {}
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((batch, 3, extent, extent)).astype(np.float32)
    return MODELS[name].weights(width, classes, **more), images, rng.integers(0, classes, batch).astype(np.int32)


def gradients(name: str, precision: str) -> Callable[[Weights, Any, Any], tuple[Any, Weights]]:
    """The loss and its gradient: (weights, images, labels) -> (loss, like weights)."""
    import jax

    return jax.value_and_grad(lambda w, x, y: MODELS[name].loss(w, x, y, precision))
