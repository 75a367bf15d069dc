"""Whisper's audio encoder: two convolutions over a log-mel spectrogram and pre-norm transformer blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Normal
from .layers import block_weights, normed, transformer_block
from .spec import Program


def sinusoids(length: int, width: int) -> np.ndarray:
    """Sinusoidal position embedding."""
    rates = np.exp(-np.log(10000.0) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)


def conv1d(x: jax.Array, p: dict[str, jax.Array], stride: int) -> jax.Array:
    """A convolution over time of (batch, time, channels), 3 frames wide."""
    y = jax.lax.conv_general_dilated(x, p["w"], (stride,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC"))
    return y + p["b"]


def whisper_encoder(batch: int, dtype: str, tiny: bool = False) -> Program:
    """Whisper-tiny's encoder: 30 seconds (3000 frames of 80 mel bands), 4 layers, width 384, 6 heads."""
    frames, bands, layers, width, heads = (16, 8, 1, 16, 2) if tiny else (3000, 80, 4, 384, 6)
    make = Normal(dtype)
    weights = {
        "conv1": {"w": make(3, bands, width, scale=(3 * bands) ** -0.5), "b": make(width, scale=0.02)},
        "conv2": {"w": make(3, width, width, scale=(3 * width) ** -0.5), "b": make(width, scale=0.02)},
        "layers": [block_weights(make, width, 4 * width) for _ in range(layers)],
        "norm": make.norm(width),
    }
    places = sinusoids(frames // 2, width)

    def apply(w: Any, mel: jax.Array) -> jax.Array:
        x = jax.nn.gelu(conv1d(mel, w["conv1"], 1), approximate=False)
        x = jax.nn.gelu(conv1d(x, w["conv2"], 2), approximate=False) + jnp.asarray(places, mel.dtype)
        for p in w["layers"]:
            x = transformer_block(x, p, heads)
        return normed(x, w["norm"])

    return Program(apply, weights, (make(batch, frames, bands),))
