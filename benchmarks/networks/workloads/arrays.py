"""Random arrays: what weights and inputs are made of, and what a workload is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Workload = tuple[Callable[..., Any], tuple[Any, ...]]
BLOCK = 1 << 20
"""Values that one thread draws at a time, each block from a generator of its own."""


def array(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = jnp.float32) -> jax.Array:
    """Normal values."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


class Normal:
    """Random weights and inputs from one seed, drawn in float32."""

    def __init__(self, dtype: Any = jnp.float32, seed: int = 0) -> None:
        self.dtype = dtype
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """Normal values."""
        values = np.empty(shape, np.float32)
        flat = values.reshape(-1)
        blocks = [flat[at : at + BLOCK] for at in range(0, flat.size, BLOCK)]

        def draw(rng: np.random.Generator, block: np.ndarray) -> None:
            rng.standard_normal(dtype=np.float32, out=block)
            block *= np.float32(scale)

        with ThreadPoolExecutor() as threads:
            list(threads.map(draw, self.rng.spawn(len(blocks)), blocks))
        return jnp.asarray(values, self.dtype)

    def dense(self, fan_in: int, width: int) -> dict[str, jax.Array]:
        """Weights and bias of a dense layer."""
        return {"w": self(fan_in, width, scale=fan_in**-0.5), "b": self(width, scale=0.02)}

    def norm(self, width: int) -> dict[str, jax.Array]:
        """Gain and bias of a normalisation."""
        return {"g": 1 + self(width, scale=0.1), "b": self(width, scale=0.1)}

    def integers(self, limit: int, *shape: int) -> jax.Array:
        """Token or row numbers below a limit."""
        return jnp.asarray(self.rng.integers(0, limit, shape), jnp.int32)
