"""Random arrays: what weights and inputs are made of, and what a workload is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Workload = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = jnp.float32) -> jax.Array:
    """Normal values."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)
