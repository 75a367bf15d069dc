"""Llama-style decoder: prefill of a prompt, and a decoding step whose key and value caches are donated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .arrays import Normal
from .layers import causal_bias
from .spec import Program


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama-style decoder; the defaults are Llama 3.2 1B, ``length`` the prompt and the cache."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    shared: int = 8  # heads of keys and values
    hidden: int = 8192
    vocabulary: int = 128256
    length: int = 2048

    @property
    def depth(self) -> int:
        """Width of a head."""
        return self.width // self.heads


TINY = Sizes(layers=1, width=32, heads=4, shared=2, hidden=64, vocabulary=50, length=8)


def weights_of(s: Sizes, make: Normal) -> dict[str, Any]:
    """Random weights; the output projection is the embedding."""
    kv = s.shared * s.depth
    shapes = {
        "q": (s.width, s.width),
        "k": (s.width, kv),
        "v": (s.width, kv),
        "o": (s.width, s.width),
        "gate": (s.width, s.hidden),
        "up": (s.width, s.hidden),
        "down": (s.hidden, s.width),
    }

    def layer() -> dict[str, jax.Array]:
        made = {name: make(*shape, scale=shape[0] ** -0.5) for name, shape in shapes.items()}
        return made | {"n1": 1 + make(s.width, scale=0.1), "n2": 1 + make(s.width, scale=0.1)}

    return {
        "words": make(s.vocabulary, s.width, scale=s.width**-0.5),
        "layers": [layer() for _ in range(s.layers)],
        "norm": 1 + make(s.width, scale=0.1),
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Root-mean-square normalisation, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def rotated(x: jax.Array, positions: jax.Array, base: float = 500000.0) -> jax.Array:
    """Rotary position embedding of (batch, length, heads, depth)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """Grouped-query attention; ``bias`` is added to the scores."""
    n, length, heads, depth = q.shape
    q = q.reshape(n, length, k.shape[2], -1, depth)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(jnp.float32) * depth**-0.5 + bias
    mixed = jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores, -1).astype(v.dtype), v)
    return mixed.reshape(n, length, heads * depth)


def forward(s: Sizes, w: Any, x: jax.Array, positions: jax.Array, keep: Any, bias: jax.Array) -> jax.Array:
    """All layers. Args: keep: takes (layer, keys, values), gives those that attention reads."""
    n, length, _ = x.shape
    for i, p in enumerate(w["layers"]):
        h = rms_norm(x, p["n1"])
        q, k, v = ((h @ p[name]).reshape(n, length, -1, s.depth) for name in "qkv")
        k, v = keep(i, rotated(k, positions), v)
        x = x + grouped_attention(rotated(q, positions), k, v, bias) @ p["o"]
        h = rms_norm(x, p["n2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return rms_norm(x, w["norm"])


def prefill(batch: int, dtype: str, tiny: bool = False) -> Program:
    """Prefill: logits of the last position and the caches of a prompt of 2048 tokens."""
    s, make = (TINY if tiny else Sizes()), Normal(dtype)

    def apply(w: Any, tokens: jax.Array) -> Any:
        caches = []

        def keep(_: int, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            caches.append((k, v))
            return k, v

        x = forward(s, w, w["words"][tokens], jnp.arange(s.length), keep, causal_bias(s.length))
        return x[:, -1] @ w["words"].T, caches

    return Program(apply, weights_of(s, make), (make.integers(s.vocabulary, batch, s.length),))


def decode(batch: int, dtype: str, tiny: bool = False) -> Program:
    """Decoding step: one token by donated caches of 2048 positions; caches, next token and position are carried."""
    s, make = (TINY if tiny else Sizes()), Normal(dtype)
    shape = (batch, s.length, s.shared, s.depth)
    caches = [(make(*shape), make(*shape)) for _ in range(s.layers)]

    def step(w: Any, caches: Any, token: jax.Array, position: jax.Array) -> Any:
        written = []

        def keep(i: int, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            at = (0, position, 0, 0)
            new = tuple(jax.lax.dynamic_update_slice(c, x, at) for c, x in zip(caches[i], (k, v), strict=True))
            written.append(new)
            return new[0], new[1]

        bias = jnp.where(jnp.arange(s.length) <= position, 0.0, -1e9)
        x = forward(s, w, w["words"][token][:, None], position[None], keep, bias)
        logits = x[:, 0] @ w["words"].T
        following = jnp.argmax(logits, -1).astype(jnp.int32)
        return written, following, (position + 1) % s.length, logits

    start = jnp.asarray(s.length // 2, jnp.int32)
    return Program(step, weights_of(s, make), (caches, make.integers(s.vocabulary, batch), start), carried=3)
