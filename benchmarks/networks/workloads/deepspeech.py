"""DeepSpeech2 (speech recognition): convolutions over a spectrogram, bidirectional GRUs, CTC loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .arrays import Normal
from .layers import NHWC
from .optimizers import sgd, training
from .spec import Program

KERNELS = ((41, 11), (21, 11))
STRIDES = ((2, 2), (2, 1))
CHARACTERS = 29


def batch_norm(x: jax.Array, p: Any, *, train: bool) -> jax.Array:
    """Batch normalisation over all but the last dimension, by the batch's statistics in training."""
    axes = tuple(range(x.ndim - 1))
    mean, variance = (x.mean(axes), x.var(axes)) if train else (p["mean"], p["var"])
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["g"] + p["b"]


def gru_pass(p: Any, xs: jax.Array, *, reverse: bool) -> jax.Array:
    """One direction of a GRU over (time, batch, width); the product with the inputs is done before the scan."""
    width = p["h"].shape[0]
    gates = xs @ p["i"] + p["b"]

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        s = h @ p["h"]
        r = jax.nn.sigmoid(x[:, :width] + s[:, :width])
        z = jax.nn.sigmoid(x[:, width : 2 * width] + s[:, width : 2 * width])
        new = jnp.tanh(x[:, 2 * width :] + r * s[:, 2 * width :])
        h = (1 - z) * new + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros((xs.shape[1], width), xs.dtype), gates, reverse=reverse)[1]


def forward(w: Any, x: jax.Array, *, train: bool) -> jax.Array:
    """Logits (time, batch, characters) of spectrograms (batch, frequencies, frames, 1)."""
    for p, stride in zip(w["convs"], STRIDES, strict=True):
        x = jax.lax.conv_general_dilated(x, p["w"], stride, "SAME", dimension_numbers=NHWC)
        x = jnp.clip(batch_norm(x, p, train=train), 0, 20)
    n, bands, frames, channels = x.shape
    x = x.transpose(2, 0, 1, 3).reshape(frames, n, bands * channels)
    for p in w["layers"]:
        x = batch_norm(x, p["norm"], train=train)
        x = gru_pass(p["forward"], x, reverse=False) + gru_pass(p["backward"], x, reverse=True)
    return batch_norm(x, w["norm"], train=train) @ w["out"]


def ctc(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Connectionist temporal classification: mean negative log-likelihood; blank is 0, labels are all of one length."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    n, length = labels.shape
    extended = jnp.zeros((n, 2 * length + 1), labels.dtype).at[:, 1::2].set(labels)
    before = jnp.pad(extended, ((0, 0), (2, 0)))[:, :-2]
    skip = (extended != 0) & (extended != before)
    low = -1e30
    first = jnp.full(extended.shape, low).at[:, :2].set(jnp.take_along_axis(scores[0], extended[:, :2], 1))

    def step(alpha: jax.Array, score: jax.Array) -> tuple[jax.Array, None]:
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=low)[:, :-1]
        two = jnp.where(skip, jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=low)[:, :-2], low)
        total = jax.nn.logsumexp(jnp.stack([alpha, one, two]), 0)
        return total + jnp.take_along_axis(score, extended, 1), None

    last = jax.lax.scan(step, first, scores[1:])[0]
    return -jax.nn.logsumexp(last[:, -2:], -1).mean()


def weights_of(make: Normal, tiny: bool, fresh: bool) -> tuple[Any, int, int]:
    """(weights, frequencies, frames): 5 bidirectional GRUs of width 800, 161 frequencies, 4 seconds."""
    bands, frames, channels, width, layers = (16, 16, 2, 8, 1) if tiny else (161, 400, 32, 800, 5)

    def norm(size: int) -> dict[str, jax.Array]:
        if fresh:
            ones, zeros = jnp.ones(size, make.dtype), jnp.zeros(size, make.dtype)
            return {"g": ones, "b": zeros, "mean": zeros, "var": ones}
        return make.norm(size) | {"mean": make(size, scale=0.1), "var": 0.5 + jnp.abs(make(size))}

    convs, fan = [], 1
    for kernel in KERNELS:
        scale = (kernel[0] * kernel[1] * fan) ** -0.5
        convs.append({"w": make(*kernel, fan, channels, scale=scale)} | norm(channels))
        fan = channels
    size = (bands + 3) // 4 * channels
    stack = []
    for k in range(layers):
        inputs = width if k else size
        pair = {}
        for name in ("forward", "backward"):
            pair[name] = {
                "i": make(inputs, 3 * width, scale=inputs**-0.5),
                "h": make(width, 3 * width, scale=width**-0.5),
                "b": make(3 * width, scale=0.02),
            }
        stack.append(pair | {"norm": norm(inputs)})
    weights = {"convs": convs, "layers": stack, "norm": norm(width), "out": make(width, CHARACTERS, scale=width**-0.5)}
    return weights, bands, frames


def deepspeech2(batch: int, dtype: str, tiny: bool = False, fresh: bool = False) -> Program:
    """DeepSpeech2 inference: log-probabilities of characters per frame."""
    make = Normal(dtype)
    weights, bands, frames = weights_of(make, tiny, fresh)
    x = make(batch, bands, frames, 1)
    return Program(lambda w, x: jax.nn.log_softmax(forward(w, x, train=False), -1), weights, (x,))


def deepspeech2_training(batch: int, dtype: str, tiny: bool = False, fresh: bool = False) -> Program:
    """DeepSpeech2 training step: CTC loss, SGD with momentum and clipping."""
    make = Normal()
    params, bands, frames = weights_of(make, tiny, fresh)
    labels = 1 + make.integers(CHARACTERS - 1, batch, 3 if tiny else 40)

    def loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return ctc(forward(p, x.astype(dtype), train=True), labels)

    return training(loss, params, (make(batch, bands, frames, 1), labels), sgd(3e-4, 0.9, 400.0), dtype)
