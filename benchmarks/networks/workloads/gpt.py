"""GPT training step: next-token cross-entropy, AdamW with global-norm clipping."""

from __future__ import annotations

from typing import Any

import jax

from .arrays import Normal
from .layers import block_weights, causal_bias, normed, transformer_block
from .optimizers import adamw, cross_entropy, training
from .spec import Program

Sizes = tuple[int, int, int, int, int]
"""Layers, width, heads, length of a sequence, vocabulary."""
FULL: Sizes = (6, 768, 12, 512, 32000)
TINY: Sizes = (1, 16, 2, 8, 40)


def gpt_training(batch: int, dtype: str, tiny: bool = False, sizes: Sizes = FULL) -> Program:
    """A training step of a GPT: 6 layers, width 768, 12 heads, sequence 512, vocabulary 32000."""
    layers, width, heads, length, vocabulary = TINY if tiny else sizes
    make = Normal("float64" if dtype == "float64" else "float32")
    params = {
        "words": make(vocabulary, width, scale=0.02),
        "places": make(length, width, scale=0.02),
        "layers": [block_weights(make, width, 4 * width) for _ in range(layers)],
        "norm": make.norm(width),
    }

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["words"][tokens[:, :-1]] + p["places"]
        bias = causal_bias(length)
        for q in p["layers"]:
            x = transformer_block(x, q, heads, bias, exact=False)
        return cross_entropy(normed(x, p["norm"]) @ p["words"].T, tokens[:, 1:])

    return training(loss, params, (make.integers(vocabulary, batch, length + 1),), adamw(), dtype)
