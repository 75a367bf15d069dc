"""BERT and a single transformer encoder layer, in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Workload, array
from .layers import layer_norm
from .optimizers import adamw, training
from .spec import Program


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


def bert_large(batch: int, dtype: str, tiny: bool = False) -> Program:
    """BERT-large inference: 24 layers, width 1024, 16 heads, 384 tokens; start and end of the answer (SQuAD)."""
    sizes = {"length": 8, "layers": 1, "width": 16, "heads": 2, "vocabulary": 30}
    large = {"length": 384, "layers": 24, "width": 1024, "heads": 16}
    apply, (weights, tokens) = bert(batch, **(sizes if tiny else large))
    head = array(weights["words"].shape[1], 2, seed=5, scale=0.02)
    weights = jax.tree.map(lambda x: x.astype(dtype), {"encoder": weights, "head": head})
    return Program(lambda w, tokens: apply(w["encoder"], tokens) @ w["head"], weights, (tokens,))


def bert_large_training(batch: int, dtype: str, tiny: bool = False) -> Program:
    """BERT-large fine-tuning step on SQuAD: cross-entropy of start and end, AdamW with clipping."""
    program = bert_large(batch, "float32", tiny)
    (tokens,) = program.arguments
    length = tokens.shape[1]
    spans = jnp.stack([jnp.arange(batch) % length, (jnp.arange(batch) + 2) % length], 1)

    def loss(w: Any, tokens: jax.Array, spans: jax.Array) -> jax.Array:
        logits = program.function(w, tokens).astype(jnp.float32).transpose(0, 2, 1)
        scores = jax.nn.log_softmax(logits, -1)
        return -jnp.take_along_axis(scores, spans[..., None], -1).mean()

    return training(loss, program.weights, (tokens, spans), adamw(3e-5, 0.01), dtype)
