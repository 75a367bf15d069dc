"""U-Net block of a diffusion model: a residual block (GroupNorm, SiLU, convolution) and self-attention."""

from __future__ import annotations

from typing import Any

import jax

from .arrays import Normal
from .layers import attention_layer, conv, dense, group_norm
from .spec import Program


def unet_block(batch: int, dtype: str, tiny: bool = False) -> Program:
    """A residual block with a time embedding, then self-attention; 32x32 points, 640 channels, 8 heads."""
    size, channels, heads, groups = (4, 16, 2, 4) if tiny else (32, 640, 8, 32)
    make = Normal(dtype)
    weights = {f"norm{k}": make.norm(channels) for k in (1, 2, 3)}
    scale = (9 * channels) ** -0.5
    weights |= {f"conv{k}": {"w": make(3, 3, channels, channels, scale=scale), **make.norm(channels)} for k in (1, 2)}
    weights |= {"time": make.dense(2 * channels, channels)}
    weights |= {"attention": {"qkv": make.dense(channels, 3 * channels), "out": make.dense(channels, channels)}}

    def apply(w: Any, x: jax.Array, time: jax.Array) -> jax.Array:
        h = conv(jax.nn.silu(group_norm(x, w["norm1"], groups)), w["conv1"]["w"]) + w["conv1"]["b"]
        h = h + dense(jax.nn.silu(time), w["time"])[:, None, None, :]
        h = conv(jax.nn.silu(group_norm(h, w["norm2"], groups)), w["conv2"]["w"]) + w["conv2"]["b"]
        x = x + h
        flat = group_norm(x, w["norm3"], groups).reshape(x.shape[0], -1, channels)
        return x + attention_layer(flat, w["attention"], heads).reshape(x.shape)

    return Program(apply, weights, (make(batch, size, size, channels), make(batch, 2 * channels)))
