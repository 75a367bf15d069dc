"""Small functions that the tests save, with their arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jcuts


class Scores(NamedTuple):
    best: Any
    all: Any


def array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 4, dtype)


def convolutions() -> tuple[Any, tuple[Any, ...], Any]:
    """A small network of convolutions: function, arguments, weights."""
    w = {"a": array(3, 3, 4, 8, seed=1), "b": array(3, 3, 8, 8, seed=2), "out": array(8, 5, seed=3)}

    def conv(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def net(x):
        y = jax.nn.relu(conv(x, w["a"]))
        return jax.nn.softmax((y + jax.nn.relu(conv(y, w["b"]))).mean((1, 2)) @ w["out"])

    return fused(net), (array(2, 8, 8, 4, seed=4),), w


def mlp(dtype: Any = np.float32) -> tuple[Any, tuple[Any, ...], Any]:
    """An MLP whose arguments and results are dicts, lists, tuples and None: function, arguments, weights."""
    w = {"in": array(16, 32, seed=5, dtype=dtype), "out": array(32, 8, seed=6, dtype=dtype)}

    def net(batch, *, scale):
        h = jax.nn.gelu(batch["x"] @ w["in"] + batch["more"][0])
        y = jax.nn.softmax(h @ w["out"] * scale)
        return {"y": y, "parts": (h.sum(), [None, y.max(-1)])}

    batch = {"x": array(4, 16, seed=7, dtype=dtype), "more": [array(32, seed=8, dtype=dtype), None]}
    return fused(net), (batch,), w


def fused(fn: Any, **options: Any) -> Any:
    """Kernels wherever there are some, and nothing is measured."""
    return jcuts.optimize(fn, mode="fusion", tune="off", **options)


def same(a: Any, b: Any) -> bool:
    """Whether two results have one structure and the same bits."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
