"""Vision transformers: ViT-B/16 and Swin-T, inference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Normal
from .layers import NHWC, attention_layer, block_weights, dense, normed, transformer_block
from .spec import Program


def patches(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    """Patch embedding: a convolution whose stride is its size."""
    stride = weights.shape[:2]
    return jax.lax.conv_general_dilated(x, weights, stride, "VALID", dimension_numbers=NHWC) + bias


def vit(batch: int, dtype: str, tiny: bool = False) -> Program:
    """ViT-B/16: 224x224 images, 12 layers, width 768, 12 heads, 1000 classes."""
    size, patch, layers, width, heads, classes = (32, 16, 1, 32, 2, 10) if tiny else (224, 16, 12, 768, 12, 1000)
    make = Normal(dtype)
    weights = {
        "patch": make(patch, patch, 3, width, scale=(3 * patch**2) ** -0.5),
        "bias": make(width, scale=0.02),
        "class": make(1, 1, width, scale=0.02),
        "places": make(1, (size // patch) ** 2 + 1, width, scale=0.02),
        "layers": [block_weights(make, width, 4 * width) for _ in range(layers)],
        "norm": make.norm(width),
        "head": make.dense(width, classes),
    }

    def apply(w: Any, x: jax.Array) -> jax.Array:
        x = patches(x, w["patch"], w["bias"]).reshape(x.shape[0], -1, width)
        first = jnp.broadcast_to(w["class"], (x.shape[0], 1, width))
        x = jnp.concatenate([first, x], 1) + w["places"]
        for p in w["layers"]:
            x = transformer_block(x, p, heads)
        return dense(normed(x, w["norm"])[:, 0], w["head"])

    return Program(apply, weights, (make(batch, size, size, 3),))


def relative_index(window: int) -> np.ndarray:
    """Row of the table of relative position biases for every pair of points of a window."""
    at = np.stack(np.meshgrid(range(window), range(window), indexing="ij")).reshape(2, -1)
    apart = at[:, :, None] - at[:, None, :] + window - 1
    return apart[0] * (2 * window - 1) + apart[1]


def shift_mask(size: int, window: int, shift: int) -> np.ndarray:
    """Mask of shifted windows, (windows, points, points): points that were no neighbours do not see each other."""
    region = np.zeros((size, size), np.int32)
    ends = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for i, rows in enumerate(ends):
        for j, columns in enumerate(ends):
            region[rows, columns] = 3 * i + j
    count = size // window
    cut = region.reshape(count, window, count, window).transpose(0, 2, 1, 3).reshape(count**2, -1)
    return np.where(cut[:, :, None] == cut[:, None, :], 0.0, -100.0).astype(np.float32)


def swin_block(x: jax.Array, p: Any, heads: int, window: int, shift: int) -> jax.Array:
    """A Swin block: attention in windows, shifted in every other block, and a GELU network."""
    n, size, _, width = x.shape
    count, points = size // window, window**2
    y = normed(x, p["n1"])
    if shift:
        y = jnp.roll(y, (-shift, -shift), (1, 2))
    y = y.reshape(n, count, window, count, window, width).transpose(0, 1, 3, 2, 4, 5).reshape(-1, points, width)
    bias = p["relative"][relative_index(window)].transpose(2, 0, 1)[None]
    if shift:
        mask = jnp.asarray(shift_mask(size, window, shift), x.dtype)[:, None]
        bias = jnp.tile(bias + mask, (n, 1, 1, 1))
    y = attention_layer(y, p, heads, bias)
    y = y.reshape(n, count, count, window, window, width).transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)
    x = x + (jnp.roll(y, (shift, shift), (1, 2)) if shift else y)
    return x + dense(jax.nn.gelu(dense(normed(x, p["n2"]), p["up"]), approximate=False), p["down"])


def merged(x: jax.Array, p: Any) -> jax.Array:
    """Patch merging: 2x2 points become one of twice the channels."""
    n, h, w, c = x.shape
    x = x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 4, 2, 5).reshape(n, h // 2, w // 2, 4 * c)
    return normed(x, p["norm"]) @ p["w"]


def swin(batch: int, dtype: str, tiny: bool = False) -> Program:
    """Swin-T: 224x224 images, windows of 7x7, blocks 2, 2, 6, 2, width 96, heads 3, 6, 12, 24."""
    size, window, depths, width, heads = (
        (16, 2, (2, 2), 8, (1, 2)) if tiny else (224, 7, (2, 2, 6, 2), 96, (3, 6, 12, 24))
    )
    classes = 10 if tiny else 1000
    make = Normal(dtype)
    widths = [width << k for k in range(len(depths))]

    def block(channels: int, count: int) -> dict[str, Any]:
        table = make((2 * window - 1) ** 2, count, scale=0.02)
        return block_weights(make, channels, 4 * channels) | {"relative": table}

    weights = {
        "patch": make(4, 4, 3, width, scale=48**-0.5),
        "bias": make(width, scale=0.02),
        "first": make.norm(width),
        "stages": [[block(c, h) for _ in range(d)] for c, h, d in zip(widths, heads, depths, strict=True)],
        "merges": [{"norm": make.norm(4 * c), "w": make(4 * c, 2 * c, scale=(4 * c) ** -0.5)} for c in widths[:-1]],
        "norm": make.norm(widths[-1]),
        "head": make.dense(widths[-1], classes),
    }

    def apply(w: Any, x: jax.Array) -> jax.Array:
        x = normed(patches(x, w["patch"], w["bias"]), w["first"])
        for stage, blocks in enumerate(w["stages"]):
            for k, p in enumerate(blocks):
                shift = window // 2 if k % 2 and x.shape[1] > window else 0
                x = swin_block(x, p, heads[stage], window, shift)
            if stage < len(w["merges"]):
                x = merged(x, w["merges"][stage])
        return dense(normed(x, w["norm"]).mean((1, 2)), w["head"])

    return Program(apply, weights, (make(batch, size, size, 3),))
