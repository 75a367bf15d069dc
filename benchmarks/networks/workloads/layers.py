"""Layers that several networks share: normalisations, convolutions, attention."""

from __future__ import annotations

from typing import Any

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


def dense(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """A dense layer with bias."""
    return x @ p["w"] + p["b"]


def normed(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """Layer normalisation by gain and bias."""
    return layer_norm(x, p["g"], p["b"])


def group_norm(x: jax.Array, p: dict[str, jax.Array], groups: int) -> jax.Array:
    """Group normalisation of images (batch, rows, columns, channels)."""
    n, h, w, c = x.shape
    y = x.reshape(n, h * w, groups, c // groups)
    mean = y.mean((1, 3), keepdims=True)
    variance = jnp.square(y - mean).mean((1, 3), keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * p["g"] + p["b"]


def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: Any = None) -> jax.Array:
    """Scaled dot-product attention of (batch, length, heads, depth); ``bias`` is added to the scores."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def causal_bias(length: int) -> jax.Array:
    """Causal mask as an addend of scores: no position sees a later one."""
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)


def attention_layer(x: jax.Array, p: Any, heads: int, bias: Any = None) -> jax.Array:
    """Multi-head self-attention with one projection to queries, keys and values."""
    n, length, width = x.shape
    q, k, v = jnp.split(dense(x, p["qkv"]).reshape(n, length, 3 * heads, width // heads), 3, 2)
    return dense(softmax_attention(q, k, v, bias).reshape(x.shape), p["out"])


def transformer_block(x: jax.Array, p: Any, heads: int, bias: Any = None, *, exact: bool = True) -> jax.Array:
    """A pre-norm transformer block: self-attention and a GELU network, each with a residual."""
    x = x + attention_layer(normed(x, p["n1"]), p, heads, bias)
    return x + dense(jax.nn.gelu(dense(normed(x, p["n2"]), p["up"]), approximate=not exact), p["down"])


def block_weights(make: Any, width: int, hidden: int) -> dict[str, Any]:
    """Weights of a `transformer_block`. Args: make: an `arrays.Normal`."""
    return {
        "n1": make.norm(width),
        "n2": make.norm(width),
        "qkv": make.dense(width, 3 * width),
        "out": make.dense(width, width),
        "up": make.dense(width, hidden),
        "down": make.dense(hidden, width),
    }
