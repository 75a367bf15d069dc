"""A decoder as users write it in `jax.numpy`: one step over caches, layers in a list or under `lax.scan`, generation.

Weights, caches and the position are arguments. A step appends its key and value to the caches by
`dynamic_update_slice`, so that donated caches are updated in place, and attends to all positions up to its own.
Everything is computed in the type of the weights, norms, scores and softmax at least in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder.

    Args: shared: heads of keys and values; length: positions of the caches; joined: one array for the projections to
    queries, keys and values, else three.
    """

    layers: int
    width: int
    heads: int
    shared: int
    hidden: int
    vocabulary: int
    length: int = 2048
    joined: bool = True

    @property
    def depth(self) -> int:
        """Features of a head."""
        return self.width // self.heads


WIDE = Sizes(layers=8, width=2048, heads=16, shared=16, hidden=5376, vocabulary=4096)
"""49.8 M parameters a layer."""
LLAMA = Sizes(layers=16, width=2048, heads=32, shared=8, hidden=8192, vocabulary=128256, joined=False)
"""Llama 3.2 1B."""


def small(s: Sizes) -> Sizes:
    """Tiny sizes of the same proportions, for a run on a CPU."""
    heads, shared = s.heads // 4, s.shared // 4
    return replace(s, layers=2, width=8 * heads, heads=heads, shared=shared, hidden=48, vocabulary=50, length=16)


# -- arrays -----------------------------------------------------------------------------------------------------------
def weights(s: Sizes, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Random weights; the head is the embedding."""
    make, kv = _random(seed, dtype), s.shared * s.depth
    shapes = {"q": (s.width, s.width), "k": (s.width, kv), "v": (s.width, kv)}
    if s.joined:
        shapes = {"qkv": (s.width, s.width + 2 * kv)}
    shapes |= {"out": (s.width, s.width), "gate": (s.width, s.hidden), "up": (s.width, s.hidden)}
    shapes |= {"down": (s.hidden, s.width)}

    def layer() -> dict[str, jax.Array]:
        made = {name: make(shape, shape[0] ** -0.5) for name, shape in shapes.items()}
        return made | {"n1": 1 + make((s.width,), 0.1), "n2": 1 + make((s.width,), 0.1)}

    return {
        "words": make((s.vocabulary, s.width), s.width**-0.5),
        "layers": [layer() for _ in range(s.layers)],
        "norm": 1 + make((s.width,), 0.1),
    }


def caches(s: Sizes, batch: int, dtype: str, seed: int = 1) -> list[tuple[jax.Array, jax.Array]]:
    """Random keys and values of every layer: (batch, length, shared heads, features)."""
    make, shape = _random(seed, dtype), (batch, s.length, s.shared, s.depth)
    return [(make(shape, 1.0), make(shape, 1.0)) for _ in range(s.layers)]


def stacked(layers: list[Any]) -> Any:
    """What layers have in a list as arrays whose first dimension is the layer, for `lax.scan`."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def _random(seed: int, dtype: str) -> Callable[[tuple[int, ...], float], jax.Array]:
    """Normal values: a key for each array, so that equal seeds are equal arrays wherever they are made."""
    keys = iter(jax.random.split(jax.random.key(seed), 1024))
    draw = jax.jit(lambda key, shape, scale: (jax.random.normal(key, shape) * scale).astype(dtype), static_argnums=1)
    return lambda shape, scale: draw(next(keys), shape, scale)


# -- the model --------------------------------------------------------------------------------------------------------
def wide(x: jax.Array) -> jax.Array:
    """At least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Root-mean-square normalisation."""
    y = wide(x)
    return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of (batch, length, heads, features)."""
    half = x.shape[-1] // 2
    frequencies = 500000.0 ** (-np.arange(half, dtype=np.float32) / half)
    angles = positions[:, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Grouped-query attention of queries to the keys that are seen."""
    n, length, heads, depth = q.shape
    q = q.reshape(n, length, k.shape[2], -1, depth)
    scores = wide(jnp.einsum("bqhgd,bkhd->bhgqk", q, k)) * depth**-0.5
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(v.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", shares, v).reshape(n, length, heads * depth)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """The same of queries at positions to all keys up to there."""
    return masked_attention(q, k, v, jnp.arange(k.shape[1]) <= positions[:, None])


def layer(s: Sizes, p: Any, x: jax.Array, cache: Any, positions: jax.Array) -> tuple[jax.Array, Any]:
    """One layer: its result, and its caches with the keys and values of ``x`` from the first position on."""
    n, length, _ = x.shape
    h, kv = rms_norm(x, p["n1"]), s.shared * s.depth
    parts = jnp.split(h @ p["qkv"], (s.width, s.width + kv), -1) if s.joined else [h @ p[name] for name in "qkv"]
    q, k, v = (y.reshape(n, length, -1, s.depth) for y in parts)
    at, new = (0, positions[0], 0, 0), (rotary(k, positions), v)
    keys, values = (jax.lax.dynamic_update_slice(c, y, at) for c, y in zip(cache, new, strict=True))
    x = x + attention(rotary(q, positions), keys, values, positions) @ p["out"]
    h = rms_norm(x, p["n2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], (keys, values)


def apply(s: Sizes, w: Any, caches: Any, tokens: jax.Array, positions: jax.Array) -> tuple[Any, jax.Array]:
    """Caches behind tokens (batch, length) at positions (length,), and the logits (batch, length, vocabulary).

    Layers and caches are lists, or both are stacked and scanned over.
    """
    x = w["words"][tokens]
    if isinstance(w["layers"], list):
        written = []
        for p, cache in zip(w["layers"], caches, strict=True):
            x, new = layer(s, p, x, cache, positions)
            written.append(new)
    else:

        def body(x: jax.Array, of: Any) -> tuple[jax.Array, Any]:
            return layer(s, of[0], x, of[1], positions)

        x, written = jax.lax.scan(body, x, (w["layers"], caches))
    return written, wide(rms_norm(x, w["norm"]) @ w["words"].T)


def decoding_step(s: Sizes) -> Callable[..., Any]:
    """(caches, weights, tokens (batch,), position) -> (caches, greedy next tokens, logits)."""

    def step(caches: Any, w: Any, tokens: jax.Array, position: jax.Array) -> Any:
        caches, logits = apply(s, w, caches, tokens[:, None], position[None])
        logits = logits[:, 0]
        return caches, jnp.argmax(logits, -1).astype(jnp.int32), logits

    return step


def generation(s: Sizes, count: int) -> Callable[..., Any]:
    """As a step, but ``count`` tokens (batch, count) in one call: each is the next step's argument."""
    step = decoding_step(s)

    def generate(caches: Any, w: Any, tokens: jax.Array, position: jax.Array) -> Any:
        def body(i: jax.Array, carried: Any) -> Any:
            caches, tokens, made = carried
            caches, tokens, _ = step(caches, w, tokens, position + i)
            return caches, tokens, made.at[:, i].set(tokens)

        made = jnp.zeros((*tokens.shape, count), jnp.int32)
        caches, _, made = jax.lax.fori_loop(0, count, body, (caches, tokens, made))
        return caches, made

    return generate
