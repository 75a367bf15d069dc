"""DLRM (recommendation): embedding tables, bottom and top networks, dot interaction; Criteo Kaggle sizes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Normal
from .layers import dense
from .optimizers import sgd, training
from .spec import Program

TABLES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the 26 embedding tables of Criteo's Kaggle data."""


def stack(x: jax.Array, layers: Any) -> jax.Array:
    """Dense layers with ReLU."""
    for p in layers:
        x = jax.nn.relu(dense(x, p))
    return x


def logits(w: Any, numbers: jax.Array, rows: jax.Array) -> jax.Array:
    """Bottom network, look-ups, pairwise dot products, top network."""
    bottom = stack(numbers, w["bottom"])
    looked = [table[rows[:, i]] for i, table in enumerate(w["tables"])]
    features = jnp.stack([bottom, *looked], 1)
    pairs = jnp.einsum("bid,bjd->bij", features, features)
    i, j = np.tril_indices(features.shape[1], -1)
    top = stack(jnp.concatenate([bottom, pairs[:, i, j]], 1), w["top"])
    return dense(top, w["last"])[:, 0]


def made(batch: int, dtype: str, tiny: bool) -> tuple[Any, jax.Array, jax.Array]:
    """Weights, dense features, rows of the tables."""
    tables, depth = ((5, 7, 9), 4) if tiny else (TABLES, 16)
    bottom, top = ((13, 8, depth), (8,)) if tiny else ((13, 512, 256, 64, depth), (512, 256))
    make = Normal(dtype)
    count = len(tables) + 1
    top = (depth + count * (count - 1) // 2, *top)
    weights = {
        "tables": [make(n, depth, scale=n**-0.5) for n in tables],
        "bottom": [make.dense(a, b) for a, b in pairwise(bottom)],
        "top": [make.dense(a, b) for a, b in pairwise(top)],
        "last": make.dense(top[-1], 1),
    }
    return weights, make(batch, 13), jnp.stack([make.integers(n, batch) for n in tables], 1)


def dlrm(batch: int, dtype: str, tiny: bool = False) -> Program:
    """DLRM inference: probabilities of a click."""
    weights, numbers, rows = made(batch, dtype, tiny)
    return Program(lambda w, x, rows: jax.nn.sigmoid(logits(w, x, rows)), weights, (numbers, rows))


def dlrm_training(batch: int, dtype: str, tiny: bool = False) -> Program:
    """DLRM training step: binary cross-entropy, SGD over dense gradients of the tables."""
    weights, numbers, rows = made(batch, "float32", tiny)
    clicks = jnp.arange(batch) % 2

    def loss(w: Any, numbers: jax.Array, rows: jax.Array, clicks: jax.Array) -> jax.Array:
        z = logits(w, numbers.astype(dtype), rows).astype(jnp.float32)
        return (jax.nn.softplus(z) - clicks * z).mean()

    return training(loss, weights, (numbers, rows, clicks), sgd(0.1, 0.0), dtype)
