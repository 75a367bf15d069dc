"""Random chains of layers: convolutions of every kind, products, pools, with element operations and layouts between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NHWC = ("NHWC", "HWIO", "NHWC")


def random_layers(seed: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """A function of two or three layers, and its arguments (float32, small)."""
    rng = np.random.default_rng(seed)
    arguments: list[np.ndarray] = []
    layers: list[Callable[..., Any]] = []

    def pick(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    def weights(*shape: int) -> int:
        arguments.append((rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]) or 1)).astype(np.float32))
        return len(arguments) - 1

    def element(channels: int) -> Callable[..., Any]:
        kind = pick("relu", "bias", "gelu", "clip", "scale", "none", "residual")
        if kind == "bias":
            place = weights(channels)
            return lambda x, args: x + args[place]
        if kind == "residual":
            return lambda x, args: x + jnp.sin(x)
        return {
            "relu": lambda x, args: jax.nn.relu(x),
            "gelu": lambda x, args: jax.nn.gelu(x),
            "clip": lambda x, args: jnp.clip(x, -1, 1),
            "scale": lambda x, args: x * 0.5 + 1,
            "none": lambda x, args: x,
        }[kind]

    is_image = bool(rng.random() < 0.7)
    batch, channels = pick(1, 2, 3), pick(3, 4, 8, 16, 20)
    shape = (batch, pick(5, 8, 11, 14), pick(6, 9, 12), channels) if is_image else (pick(7, 16, 33, 50), channels)
    weights(*shape)
    arguments[0] *= 3

    def layer(channels: int) -> tuple[Callable[..., Any], int]:
        if not is_image:
            made = pick(4, 8, 17, 32)
            place = weights(channels, made)
            return (lambda x, args: x @ args[place]), made
        kind = pick("conv", "conv", "depthwise", "pool", "1x1", "grouped")
        stride, padding = pick(1, 1, 2), pick("SAME", "SAME", "VALID", ((2, 0), (0, 2)))
        if kind == "pool":
            size = pick(2, 3)
            reduce_, start = pick((lax.max, -jnp.inf), (lax.add, 0.0), (lax.min, jnp.inf))
            window, steps = (1, size, size, 1), (1, stride, stride, 1)
            pads = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
            return (lambda x, args: lax.reduce_window(x, start, reduce_, window, steps, pads)), channels
        size = 1 if kind == "1x1" else pick(2, 3, 5)
        groups = channels if kind == "depthwise" else (2 if kind == "grouped" and channels % 2 == 0 else 1)
        made = channels * pick(1, 2) if groups > 1 else pick(4, 8, 17, 32)
        place, dilation = weights(size, size, channels // groups, made), pick(1, 1, 2)
        params = {"rhs_dilation": (dilation, dilation), "dimension_numbers": NHWC, "feature_group_count": groups}
        if kind == "1x1":
            stride = 1
        return (lambda x, args: lax.conv_general_dilated(x, args[place], (stride, stride), padding, **params)), made

    for _ in range(pick(2, 2, 3)):
        made, channels = layer(channels)
        layers += [made, element(channels)]
        if rng.random() < 0.15:
            moved = pick(lambda x, args: jnp.swapaxes(x, 0, 1), lambda x, args: x.reshape(-1, x.shape[-1]))
            if is_image and rng.random() >= 0.5:
                layers.append(moved)

    def fn(*args: Any) -> Any:
        x = args[0]
        for step in layers:
            x = step(x, args)
        return x

    return fn, arguments
