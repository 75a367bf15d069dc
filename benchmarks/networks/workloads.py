"""The programs that benchmarks run: keras.applications networks and plain-JAX programs, random weights, no downloads.

A workload is (function, arguments); ``closed=True`` gives the form with weights closed over.  Nothing here knows jcuts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

Workload = tuple[Callable[..., Any], tuple[Any, ...]]

DEPTHWISE = ("MobileNetV2", "MobileNet", "NASNetMobile")
CNN = ("ResNet50", "DenseNet121", "InceptionV3", "VGG16")
PROGRAMS = ("encoder", "gru", "mlp_step")


def array(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = jnp.float32) -> jax.Array:
    """Normal values."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def network(
    name: str,
    batch: int,
    *,
    closed: bool = True,
    dtype: str = "float32",
    size: int | None = None,
    statistics: str = "trained",
) -> Workload:
    """A ``keras.applications`` network's inference.

    Args:
        size: height and width of its images, where not the network's own.
        statistics: "trained": batch norms have varied means, variances and offsets, as after training; "fresh": as
            keras makes them, all equal, so that XLA folds most of a batch norm away.
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
        if statistics == "fresh":
            return jnp.asarray(value, dtype)
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


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalisation over the last dimension."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * gain + bias


def encoder(
    batch: int = 4, length: int = 128, width: int = 512, heads: int = 8, hidden: int = 2048, dtype: Any = jnp.float32
) -> Workload:
    """One transformer encoder layer, weights as arguments."""
    names = dict.fromkeys("qkvo", (width, width)) | {"up": (width, hidden), "down": (hidden, width)}
    weights = {n: array(*s, seed=i, scale=s[0] ** -0.5, dtype=dtype) for i, (n, s) in enumerate(names.items())}
    weights |= dict.fromkeys(("g1", "g2"), jnp.ones(width, dtype))
    weights |= dict.fromkeys(("c1", "c2", "b2"), jnp.zeros(width, dtype))
    weights["b1"] = jnp.zeros(hidden, dtype)

    def apply(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        depth = width // heads
        h = layer_norm(x, w["g1"], w["c1"])
        q, k, v = ((h @ w[n]).reshape(*x.shape[:2], heads, depth) for n in "qkv")
        attention = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * depth**-0.5, -1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", attention, v).reshape(x.shape) @ w["o"]
        h = layer_norm(x, w["g2"], w["c2"])
        return x + jax.nn.gelu(h @ w["up"] + w["b1"]) @ w["down"] + w["b2"]

    return apply, (weights, array(batch, length, width, dtype=dtype))


def bert(
    batch: int = 1,
    length: int = 384,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    *,
    closed: bool = False,
) -> Workload:
    """BERT's encoder (post-norm, exact GELU) with its embeddings; the defaults are BERT-base."""
    hidden, depth = 4 * width, width // heads
    names = dict.fromkeys("qkvo", (width, width)) | {"up": (width, hidden), "down": (hidden, width)}
    ones, zeros = jnp.ones(width), jnp.zeros(width)

    def layer(seed: int) -> dict[str, jax.Array]:
        made = {n: array(*s, seed=seed + i, scale=0.02) for i, (n, s) in enumerate(names.items())}
        made |= {f"b{n}": array(s[1], seed=seed + 20 + i, scale=0.02) for i, (n, s) in enumerate(names.items())}
        return made | {"g1": ones, "c1": zeros, "g2": ones, "c2": zeros}

    weights = {
        "words": array(vocabulary, width, scale=0.02),
        "places": array(length, width, seed=1, scale=0.02),
        "norm": (ones, zeros),
        "layers": [layer(100 * k) for k in range(layers)],
    }
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, vocabulary, (batch, length)), jnp.int32)

    def apply(w: Any, tokens: jax.Array) -> jax.Array:
        x = layer_norm(w["words"][tokens] + w["places"], *w["norm"])
        for p in w["layers"]:
            q, k, v = ((x @ p[n] + p[f"b{n}"]).reshape(*x.shape[:2], heads, depth) for n in "qkv")
            attention = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * depth**-0.5, -1)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", attention, v).reshape(x.shape) @ p["o"] + p["bo"]
            x = layer_norm(x + mixed, p["g1"], p["c1"])
            up = jax.nn.gelu(x @ p["up"] + p["bup"], approximate=False)
            x = layer_norm(x + up @ p["down"] + p["bdown"], p["g2"], p["c2"])
        return x

    if closed:
        return (lambda tokens: apply(weights, tokens)), (tokens,)
    return apply, (weights, tokens)


NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x: jax.Array, weights: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of images (batch, rows, columns, channels) that keeps their size, or divides it by the stride."""
    return jax.lax.conv_general_dilated(x, weights, (stride, stride), "SAME", dimension_numbers=NHWC)


def halved(x: jax.Array) -> jax.Array:
    """Means over 2x2 points."""
    total = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return total * 0.25


def doubled(x: jax.Array) -> jax.Array:
    """Every point four times: the nearest neighbour at twice the size."""
    n, h, w, c = x.shape
    return jnp.broadcast_to(x[:, :, None, :, None, :], (n, h, 2, w, 2, c)).reshape(n, 2 * h, 2 * w, c)


def octave(
    batch: int = 1,
    size: int = 56,
    channels: int = 128,
    share: float = 0.5,
    *,
    closed: bool = True,
    dtype: Any = jnp.float32,
) -> Workload:
    """One Octave convolution (3x3, with bias and ReLU) between maps of two resolutions.

        high' = relu(conv(high) + double(conv(low)) + b)      low' = relu(conv(low) + conv(halve(high)) + b)

    Args: size: of the high-frequency maps; share: of the channels that are of low frequency, in and out.
    """
    low = int(channels * share)
    high = channels - low
    sizes = {"hh": (high, high), "hl": (high, low), "lh": (low, high), "ll": (low, low)}
    weights = {
        k: array(3, 3, *s, seed=i, scale=(9 * channels) ** -0.5, dtype=dtype) for i, (k, s) in enumerate(sizes.items())
    }
    weights |= {"bh": array(high, seed=9, dtype=dtype), "bl": array(low, seed=10, dtype=dtype)}
    maps = (
        array(batch, size, size, high, seed=11, dtype=dtype),
        array(batch, size // 2, size // 2, low, seed=12, dtype=dtype),
    )

    def apply(w: dict[str, jax.Array], high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
        up, down = doubled(conv(low, w["lh"])), conv(halved(high), w["hl"])
        return jax.nn.relu(conv(high, w["hh"]) + up + w["bh"]), jax.nn.relu(conv(low, w["ll"]) + down + w["bl"])

    if closed:
        return (lambda high, low: apply(weights, high, low)), maps
    return apply, (weights, *maps)


def shifted(x: jax.Array) -> jax.Array:
    """Channels in nine groups, each moved by at most one point along rows and columns; zeros come in at the edges."""
    _, h, w, c = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    ends = [c * k // 9 for k in range(10)]
    parts = [padded[:, k // 3 : k // 3 + h, k % 3 : k % 3 + w, ends[k] : ends[k + 1]] for k in range(9)]
    return jnp.concatenate(parts, -1)


def shift_conv(
    batch: int = 1,
    size: int = 28,
    channels: int = 288,
    expansion: int = 2,
    *,
    closed: bool = True,
    dtype: Any = jnp.float32,
) -> Workload:
    """A Shift-Conv-Shift-Conv module: shifts and 1x1 convolutions in turns, each normalised, with a residual."""
    hidden = channels * expansion
    sizes = ((channels, hidden), (hidden, channels))
    weights = [
        (
            array(1, 1, *s, seed=i, scale=s[0] ** -0.5, dtype=dtype),
            1 + array(s[1], seed=i + 4, scale=0.1, dtype=dtype),
            array(s[1], seed=i + 8, scale=0.1, dtype=dtype),
        )
        for i, s in enumerate(sizes)
    ]

    def apply(weights: Any, x: jax.Array) -> jax.Array:
        y = x
        for w, scale, bias in weights:
            y = jax.nn.relu(conv(shifted(y), w) * scale + bias)
        return x + y

    x = array(batch, size, size, channels, seed=12, dtype=dtype)
    if closed:
        return (lambda x: apply(weights, x)), (x,)
    return apply, (weights, x)


def gru(steps: int = 100, batch: int = 16, width: int = 256) -> Workload:
    """A GRU scanned over time."""
    weights = {
        "i": array(width, 3 * width, scale=0.05),
        "h": array(width, 3 * width, seed=1, scale=0.05),
        "b": array(3 * width, scale=0.1),
    }

    def apply(w: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            gates, state = x @ w["i"] + w["b"], h @ w["h"]
            r, z, n = (slice(k * width, (k + 1) * width) for k in range(3))
            reset = jax.nn.sigmoid(gates[:, r] + state[:, r])
            update = jax.nn.sigmoid(gates[:, z] + state[:, z])
            new = jnp.tanh(gates[:, n] + reset * state[:, n])
            h = (1 - update) * new + update * h
            return h, h

        return jax.lax.scan(step, jnp.zeros((batch, width)), xs)[1]

    return apply, (weights, array(steps, batch, width))


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


def by_name(name: str, batch: int = 1, *, closed: bool = True, dtype: str = "float32") -> Workload:
    """A workload by its name; plain-JAX programs have their own sizes."""
    if name == "encoder":
        return encoder(dtype=dtype)
    if name == "gru":
        return gru()
    if name == "mlp_step":
        return mlp_step()
    if name == "bert":
        return bert(batch, closed=closed)
    return network(name, batch, closed=closed, dtype=dtype)
