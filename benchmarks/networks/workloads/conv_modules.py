"""Convolution modules of the literature: Octave convolution, Shift-Conv-Shift-Conv."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .arrays import Workload, array
from .layers import conv, doubled, halved


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
