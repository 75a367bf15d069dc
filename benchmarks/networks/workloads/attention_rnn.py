"""Luong attention RNN (translation): stacked LSTMs, global attention, input feeding; greedy decoding and training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .arrays import Normal
from .optimizers import cross_entropy, sgd, training
from .spec import Program


def lstm_step(p: Any, state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of an LSTM: the new output and cell."""
    h, c = state
    i, f, g, o = jnp.split(x @ p["i"] + h @ p["h"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def stacked(layers: Any, states: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """One step of all LSTM layers: new states and the output of the last."""
    new = []
    for p, state in zip(layers, states, strict=True):
        new.append(lstm_step(p, state, x))
        x = new[-1][0]
    return new, x


def encode(w: Any, source: jax.Array) -> tuple[Any, jax.Array]:
    """Final states and outputs (batch, length, width) of source tokens (batch, length)."""
    words = w["source"][source].transpose(1, 0, 2)
    zeros = jnp.zeros(words.shape[1:], words.dtype)
    states = [(zeros, zeros)] * len(w["encoder"])
    states, outputs = jax.lax.scan(lambda s, x: stacked(w["encoder"], s, x), states, words)
    return states, outputs.transpose(1, 0, 2)


def attend(w: Any, memory: jax.Array, keys: jax.Array, h: jax.Array) -> jax.Array:
    """Global attention: a softmax over the source by h . W . memory, and the attentional output."""
    weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", h, keys), -1)
    context = jnp.einsum("bt,btd->bd", weights, memory)
    return jnp.tanh(jnp.concatenate([context, h], -1) @ w["mix"])


def decoder_step(w: Any, memory: jax.Array, keys: jax.Array, carry: Any, token: jax.Array) -> tuple[Any, jax.Array]:
    """One step of the decoder: (states, attentional output) and that output."""
    states, fed = carry
    states, h = stacked(w["decoder"], states, jnp.concatenate([w["target"][token], fed], -1))
    fed = attend(w, memory, keys, h)
    return (states, fed), fed


def weights_of(make: Normal, tiny: bool) -> tuple[Any, int, int]:
    """(weights, vocabulary, length): 4 layers, width 1000, vocabulary 50000, sentences of 50 words."""
    layers, width, vocabulary, length = (2, 8, 20, 4) if tiny else (4, 1000, 50000, 50)

    def lstm(inputs: int) -> dict[str, jax.Array]:
        return {
            "i": make(inputs, 4 * width, scale=inputs**-0.5),
            "h": make(width, 4 * width, scale=width**-0.5),
            "b": make(4 * width, scale=0.02),
        }

    weights = {
        "source": make(vocabulary, width, scale=0.1),
        "target": make(vocabulary, width, scale=0.1),
        "encoder": [lstm(width) for _ in range(layers)],
        "decoder": [lstm(width if k else 2 * width) for k in range(layers)],
        "score": make(width, width, scale=width**-0.5),
        "mix": make(2 * width, width, scale=(2 * width) ** -0.5),
        "out": make(width, vocabulary, scale=width**-0.5),
    }
    return weights, vocabulary, length


def attention_rnn(batch: int, dtype: str, tiny: bool = False) -> Program:
    """Luong attention RNN inference: greedy translation of 50 words."""
    make = Normal(dtype)
    weights, vocabulary, length = weights_of(make, tiny)

    def translate(w: Any, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        states, memory = encode(w, source)
        keys = memory @ w["score"].T

        def step(carry: Any, _: None) -> tuple[Any, Any]:
            inner, token = carry
            inner, fed = decoder_step(w, memory, keys, inner, token)
            logits = fed @ w["out"]
            token = jnp.argmax(logits, -1).astype(jnp.int32)
            return (inner, token), (token, logits.max(-1))

        start = ((states, jnp.zeros_like(memory[:, 0])), jnp.zeros(source.shape[0], jnp.int32))
        return jax.lax.scan(step, start, None, length=length)[1]

    return Program(translate, weights, (make.integers(vocabulary, batch, length),))


def attention_rnn_training(batch: int, dtype: str, tiny: bool = False) -> Program:
    """Luong attention RNN training step: teacher forcing, cross-entropy, SGD with clipping at 5."""
    make = Normal()
    params, vocabulary, length = weights_of(make, tiny)
    texts = (make.integers(vocabulary, batch, length), make.integers(vocabulary, batch, length + 1))

    def loss(w: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        states, memory = encode(w, source)
        keys = memory @ w["score"].T
        start = (states, jnp.zeros_like(memory[:, 0]))
        inputs = target[:, :-1].T
        outputs = jax.lax.scan(lambda c, t: decoder_step(w, memory, keys, c, t), start, inputs)[1]
        return cross_entropy(outputs @ w["out"], target[:, 1:].T)

    return training(loss, params, texts, sgd(1.0, 0.0, 5.0), dtype)
