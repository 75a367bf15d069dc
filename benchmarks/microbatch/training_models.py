"""Training steps of four networks in plain JAX, as `modelled_device.py` lists their convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Weights = dict[str, Any]
Block = tuple[int, int, int]
"""Channels, stride, and channels of the result where they are more (bottlenecks), else 0."""
BLOCKS: tuple[Block, ...] = tuple((64 << k, 2 if k and not n else 1, 0) for k in range(4) for n in range(2))
BOTTLENECKS: tuple[Block, ...] = tuple(
    (64 << k, 2 if k and not n else 1, 256 << k) for k, count in enumerate((3, 4, 6, 3)) for n in range(count)
)


# -- ResNets --------------------------------------------------------------------------------------------------------
def _conv_weights(made: Weights, rng: Any, name: str, inputs: int, outputs: int, window: int) -> None:
    import numpy as np

    scale = (2.0 / (inputs * window * window)) ** 0.5
    made[name] = (scale * rng.standard_normal((outputs, inputs, window, window))).astype(np.float32)


def _norm_weights(made: Weights, name: str, channels: int) -> None:
    import numpy as np

    made[f"{name} scale"] = np.ones((channels, 1, 1), np.float32)
    made[f"{name} shift"] = np.zeros((channels, 1, 1), np.float32)


def _conv(weights: Weights, name: str, x: Any, stride: int, precision: str) -> Any:
    from jax import lax

    pad = weights[name].shape[-1] // 2
    return lax.conv_general_dilated(
        x,
        weights[name],
        (stride, stride),
        ((pad, pad), (pad, pad)),
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        precision=precision,
    )


def _norm(weights: Weights, name: str, y: Any) -> Any:
    """By the statistics of the batch itself."""
    from jax import lax

    mean = y.mean((0, 2, 3), keepdims=True)
    variance = ((y - mean) ** 2).mean((0, 2, 3), keepdims=True)
    return (y - mean) * lax.rsqrt(variance + 1e-5) * weights[f"{name} scale"] + weights[f"{name} shift"]


def resnet_weights(width: int, classes: int, seed: int = 0, blocks: Sequence[Block] = BLOCKS) -> Weights:
    """Weights; ``width`` divides the channels (1 is the network itself)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    made: Weights = {}

    def conv(name: str, inputs: int, outputs: int, window: int) -> None:
        _conv_weights(made, rng, name, inputs, outputs, window)
        _norm_weights(made, name, outputs)

    before = max(1, 64 // width)
    conv("stem", 3, before, 7)
    for k, (channels, stride, wide) in enumerate(blocks):
        channels, after = max(1, channels // width), max(1, (wide or channels) // width)
        if wide:
            conv(f"{k} a", before, channels, 1)
            conv(f"{k} b", channels, channels, 3)
            conv(f"{k} c", channels, after, 1)
        else:
            conv(f"{k} a", before, channels, 3)
            conv(f"{k} b", channels, channels, 3)
        if stride != 1 or before != after:
            conv(f"{k} skip", before, after, 1)
        before = after
    made["out"] = (0.01 * rng.standard_normal((before, classes))).astype(np.float32)
    return made


def resnet_loss(weights: Weights, images: Any, labels: Any, precision: str, blocks: Sequence[Block] = BLOCKS) -> Any:
    """Mean cross entropy of a batch (N C H W), statistics of the batch itself in the normalisations."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def conv(name: str, x: Any, stride: int) -> Any:
        return _norm(weights, name, _conv(weights, name, x, stride, precision))

    x = jax.nn.relu(conv("stem", images, 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for k, (_, stride, wide) in enumerate(blocks):
        y = conv(f"{k} b", jax.nn.relu(conv(f"{k} a", x, stride)), 1)
        if wide:
            y = conv(f"{k} c", jax.nn.relu(y), 1)
        x = jax.nn.relu(y + (conv(f"{k} skip", x, stride) if f"{k} skip" in weights else x))
    scores = jnp.dot(x.mean((2, 3)), weights["out"], precision=precision)
    return _cross_entropy(scores, labels)


# -- DenseNet-40 ----------------------------------------------------------------------------------------------------
def densenet_weights(width: int, classes: int, seed: int = 0, layers: int = 12, growth: int = 40) -> Weights:
    """Weights; ``width`` divides the growth of the channels (1 is DenseNet-40 with 40 more per layer)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    made: Weights = {}
    channels, growth = 16, max(1, growth // width)
    _conv_weights(made, rng, "stem", 3, channels, 3)
    for block in range(3):
        for k in range(layers):
            _norm_weights(made, f"{block} {k}", channels)
            _conv_weights(made, rng, f"{block} {k}", channels, growth, 3)
            channels += growth
        _norm_weights(made, f"{block} end", channels)
        if block < 2:
            _conv_weights(made, rng, f"{block} end", channels, channels, 1)
    made["out"] = (0.01 * rng.standard_normal((channels, classes))).astype(np.float32)
    return made


def densenet_loss(weights: Weights, images: Any, labels: Any, precision: str, layers: int = 12) -> Any:
    """Mean cross entropy of a batch (N C H W) of 32x32 images."""
    import jax
    import jax.numpy as jnp

    x = _conv(weights, "stem", images, 1, precision)
    for block in range(3):
        for k in range(layers):
            name = f"{block} {k}"
            x = jnp.concatenate([x, _conv(weights, name, jax.nn.relu(_norm(weights, name, x)), 1, precision)], 1)
        x = jax.nn.relu(_norm(weights, f"{block} end", x))
        if block < 2:
            x = _conv(weights, f"{block} end", x, 1, precision)
            n, c, h, w = x.shape
            x = x.reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5))
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
            x,
            weights[f"conv{k}"],
            (stride, stride),
            ((pad, pad), (pad, pad)),
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
            precision=precision,
        )
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
    """A network for steps: its weights (width, classes), its loss (weights, images, labels, precision), its images.

    Attributes: extent: of images; tiny: of images of a network that a plain loop can compute, and what that lacks.
    """

    weights: Callable[..., Weights]
    loss: Callable[..., Any]
    extent: int = 224
    tiny: int = 32
    lacks: tuple[tuple[str, Any], ...] = ()

    def made(self, tiny: bool) -> tuple[Callable[..., Weights], Callable[..., Any]]:
        """Weights and loss, of fewer layers where ``tiny``."""
        less = dict(self.lacks) if tiny else {}
        return partial(self.weights, **less), partial(self.loss, **less)


MODELS = {
    "ResNet-18": Model(resnet_weights, resnet_loss),
    "AlexNet": Model(alexnet_weights, alexnet_loss, tiny=63),
    "ResNet-50": Model(
        partial(resnet_weights, blocks=BOTTLENECKS),
        partial(resnet_loss, blocks=BOTTLENECKS),
        lacks=(("blocks", BOTTLENECKS[:4]),),
    ),
    "DenseNet-40": Model(densenet_weights, densenet_loss, extent=32, tiny=8, lacks=(("layers", 2),)),
}


def inputs_of(name: str, batch: int, *, tiny: bool, seed: int = 1) -> tuple[Weights, Any, Any]:
    """Weights, images and labels; of a network that a plain loop can compute where ``tiny``."""
    import numpy as np

    model = MODELS[name]
    extent = model.tiny if tiny else model.extent
    width, classes = (32, 10) if tiny else (1, 10 if name == "DenseNet-40" else 1000)
    more = {"extent": extent} if name == "AlexNet" else {}
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((batch, 3, extent, extent)).astype(np.float32)
    weights, _ = model.made(tiny)
    return weights(width, classes, **more), images, rng.integers(0, classes, batch).astype(np.int32)


def gradients(name: str, precision: str, *, tiny: bool = False) -> Callable[[Weights, Any, Any], tuple[Any, Weights]]:
    """The loss and its gradient: (weights, images, labels) -> (loss, like weights)."""
    import jax

    _, loss = MODELS[name].made(tiny)
    return jax.value_and_grad(lambda w, x, y: loss(w, x, y, precision))
