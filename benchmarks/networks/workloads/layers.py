"""Layers that several networks share: normalisations, convolutions, attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalisation over the last dimension."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * gain + bias


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
