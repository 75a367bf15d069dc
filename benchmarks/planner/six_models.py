"""Six models of one's own for `jcuts plan`, as a user writes them: flax, equinox, a scan over layers, MoE, DLRM, U-Net.

    jcuts plan --model benchmarks/planner/six_models.py:scan_over_layers --cluster dgx-h100 --gpus 8

Each function returns (loss, parameters, *inputs), as shapes.  flax and equinox must be installed for the first two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Example = tuple[Callable[..., Any], Any, *tuple[Any, ...]]


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array of which nothing but the shape exists."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def flax_transformer() -> Example:
    """Twelve blocks of flax's attention in a Python loop."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=8)(y, y)
            return x + nn.Dense(512)(nn.gelu(nn.Dense(2048)(nn.LayerNorm()(x))))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(8000, 512)(tokens)
            for _ in range(12):
                x = Block()(x)
            return nn.Dense(8000)(x)

    net, tokens = Net(), shape(32, 128, dtype=jnp.int32)
    parameters = jax.eval_shape(net.init, jax.random.key(0), tokens)

    def loss(parameters: Any, tokens: Any, wanted: Any) -> Any:
        found = jax.nn.log_softmax(net.apply(parameters, tokens))
        return -jnp.mean(jnp.take_along_axis(found, wanted[..., None], -1))

    return loss, parameters, tokens, tokens


def equinox_mlp() -> Example:
    """An equinox module given as it is: functions and flags among its leaves."""
    import equinox as eqx

    net = eqx.filter_eval_shape(lambda: eqx.nn.MLP(784, 10, 1024, 8, key=jax.random.key(0)))
    loss = lambda net, x, y: jnp.mean((jax.vmap(net)(x) - y) ** 2)  # noqa: E731
    return loss, net, shape(256, 784), shape(256, 10)


def scan_over_layers() -> Example:
    """24 layers under ``lax.scan`` and ``jax.checkpoint``, an embedding before them and logits behind."""
    layers, h, words = 24, 1024, 32000
    weights = {"qkv": shape(layers, h, 3 * h), "out": shape(layers, h, h)}
    weights |= {"up": shape(layers, h, 4 * h), "down": shape(layers, 4 * h, h)}
    parameters = {"embed": shape(words, h), "layers": weights, "head": shape(h, words)}

    def layer(x: Any, w: Any) -> Any:
        batch, sequence, _ = x.shape
        q, k, v = jnp.split((x @ w["qkv"]).reshape(batch, sequence, 16, -1), 3, -1)
        mixed = jax.nn.softmax(jnp.einsum("bqnd,bknd->bnqk", q, k) / 8, -1)
        x = x + jnp.einsum("bnqk,bknd->bqnd", mixed, v).reshape(batch, sequence, -1) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(parameters: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer), parameters["embed"][tokens], parameters["layers"])
        return jnp.mean(jax.nn.logsumexp(x @ parameters["head"], -1))

    return loss, parameters, shape(64, 512, dtype=jnp.int32)


def mixture_of_experts() -> Example:
    """Eight layers of eight experts, two chosen, every expert computed (the dense form)."""
    h, wide, experts = 512, 2048, 8
    one = {"router": shape(h, experts), "up": shape(experts, h, wide), "down": shape(experts, wide, h)}

    def loss(parameters: Any, x: Any) -> Any:
        for w in parameters:
            best, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"], -1), 2)
            gates = jnp.sum(jax.nn.one_hot(chosen, experts) * best[..., None], -2)
            inside = jax.nn.gelu(jnp.einsum("bsh,ehf->ebsf", x, w["up"]))
            x = x + jnp.einsum("ebsh,bse->bsh", jnp.einsum("ebsf,efh->ebsh", inside, w["down"]), gates)
        return jnp.mean(x**2)

    return loss, [one] * 8, shape(32, 128, h)


def dlrm() -> Example:
    """26 tables of a million rows, two perceptrons, dot interaction."""
    width, tables = 128, 26
    parameters = {
        "tables": [shape(1_000_000, width)] * tables,
        "bottom": [shape(13, 512), shape(512, 256), shape(256, width)],
        "top": [shape(width + 27 * 26 // 2, 1024), shape(1024, 512), shape(512, 1)],
    }

    def loss(parameters: Any, dense: Any, ids: Any, wanted: Any) -> Any:
        x = dense
        for w in parameters["bottom"]:
            x = jax.nn.relu(x @ w)
        vectors = jnp.stack([x] + [table[ids[:, i]] for i, table in enumerate(parameters["tables"])], 1)
        dots = jnp.einsum("bih,bjh->bij", vectors, vectors)
        rows, columns = np.tril_indices(tables + 1, -1)
        x = jnp.concatenate([x, dots[:, rows, columns]], -1)
        for w in parameters["top"]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x[:, 0] - wanted) ** 2)

    return loss, parameters, shape(2048, 13), shape(2048, tables, dtype=jnp.int32), shape(2048)


def u_net() -> Example:
    """Four levels of two convolutions down and up, with skip connections."""
    levels = [64, 128, 256, 512]
    down = [[shape(3, 3, i, o), shape(3, 3, o, o)] for i, o in zip([3, *levels[:-1]], levels, strict=True)]
    up = [[shape(3, 3, i + o, o), shape(3, 3, o, o)] for i, o in zip(levels[:0:-1], levels[-2::-1], strict=True)]

    def convolve(x: Any, w: Any) -> Any:
        form = ("NHWC", "HWIO", "NHWC")
        return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=form))

    def loss(parameters: Any, x: Any, wanted: Any) -> Any:
        kept = []
        for level, (first, second) in enumerate(parameters["down"]):
            x = convolve(convolve(x, first), second)
            if level < 3:
                kept.append(x)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        for first, second in parameters["up"]:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = convolve(convolve(jnp.concatenate([x, kept.pop()], -1), first), second)
        return jnp.mean((convolve(x, parameters["out"]) - wanted) ** 2)

    parameters = {"down": down, "up": up, "out": shape(1, 1, 64, 2)}
    return loss, parameters, shape(16, 128, 128, 3), shape(16, 128, 128, 2)
