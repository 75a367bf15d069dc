"""State of a random program that is being drawn, and the registry of operations that extend it, by family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS = (*FLOATS, *INTEGERS)
NARROW = (
    *("float32",) * 4,
    "bfloat16",
    "float16",
    "int32",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "uint32",
    "bool",
)
WIDE = (*NARROW, "float64", "float64", "float64", "int64", "int64", "uint64")
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 19, 24, 31, 33)
MAX_SIZE = 3_000
LARGE_SIZE = 60_000

Step = Callable[["Draw"], None]
_STEPS: dict[str, list[tuple[float, Step]]] = {}


def step(family: str, weight: float = 1.0) -> Callable[[Step], Step]:
    """Registers a way to extend a program by an operation of a family."""

    def register(function: Step) -> Step:
        _STEPS.setdefault(family, []).append((weight, function))
        return function

    return register


def families() -> list[str]:
    """Names of the op families."""
    return sorted(_STEPS)


class Unsuitable(Exception):
    """This step does not fit the values at hand; another one is drawn."""


@dataclass(frozen=True)
class Kind:
    """What may occur in a program: ``smooth`` programs have derivatives in float32 or float64 everywhere."""

    x64: bool = False
    smooth: bool = False


@dataclass
class Draw:
    """The program so far: the random generator and all values that later operations may use."""

    rng: np.random.Generator
    kind: Kind
    main: str
    pool: list[Any] = field(default_factory=list)
    depth: int = 0
    limit: int = MAX_SIZE

    # -- chance -------------------------------------------------------------------------------------------------------
    def chance(self, share: float) -> bool:
        """True in this share of cases."""
        return bool(self.rng.random() < share)

    def one(self, options: Sequence[Any]) -> Any:
        """One of several."""
        return options[int(self.rng.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return int(self.rng.integers(low, high, endpoint=True))

    def dtype(self, among: Sequence[str] | None = None) -> str:
        """An element type: the program's main one more often than others."""
        every = WIDE if self.kind.x64 else NARROW
        if self.kind.smooth:
            every = ("float64", "float32") if self.kind.x64 else ("float32",)
        fitting = [d for d in every if among is None or d in among]
        if not fitting:
            raise Unsuitable
        return self.main if self.main in fitting and self.chance(0.6) else self.one(fitting)

    def shape(self, rank: int, size: int | None = None) -> tuple[int, ...]:
        """A shape of at most ``size`` elements."""
        size = size or self.limit
        while True:
            found = tuple(self.one(EXTENTS) for _ in range(rank))
            if np.prod(found, dtype=int) <= size:
                return found

    # -- values -------------------------------------------------------------------------------------------------------
    def add(self, value: Any) -> Any:
        """Puts a result into the pool."""
        if value.size == 0:
            raise Unsuitable
        self.pool.append(value)
        return value

    def any(self, dtypes: Sequence[str] | None = None, rank: tuple[int, int] = (0, 9), size: int | None = None) -> Any:
        """A value of the pool, recent ones first; converted where none has a wanted type."""
        shaped = [v for v in self.pool if rank[0] <= v.ndim <= rank[1] and v.size <= (size or LARGE_SIZE)]
        if not shaped:
            raise Unsuitable
        fitting = [v for v in shaped if dtypes is None or v.dtype.name in dtypes]
        if fitting and not self.chance(0.1):
            place = min(int(self.rng.geometric(0.35)) - 1, len(fitting) - 1)
            return fitting[-1 - place]
        assert dtypes is None or dtypes
        return self.cast(self.one(shaped), self.dtype(dtypes))

    def float(self, rank: tuple[int, int] = (0, 9), size: int | None = None) -> Any:
        """A floating value."""
        return self.any(FLOATS, rank, size)

    def cast(self, value: Any, dtype: str) -> Any:
        """A value in another type."""
        return value if value.dtype.name == dtype else lax.convert_element_type(value, dtype)

    def fresh(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A value of a given shape: one of the pool reshaped or broadcast, a constant pattern otherwise."""
        size = int(np.prod(shape, dtype=int))
        same = [v for v in self.pool if v.shape == shape]
        if same and self.chance(0.8):
            return self.cast(same[-1 - self.number(0, min(2, len(same) - 1))], dtype)
        fits = [v for v in self.pool if v.size == size and v.ndim]
        if fits and self.chance(0.7):
            return self.cast(lax.reshape(self.one(fits), shape), dtype)
        broad = [v for v in self.pool if v.ndim <= len(shape) and v.shape == shape[len(shape) - v.ndim :]]
        if broad and self.chance(0.7):
            value = self.one(broad)
            dims = tuple(range(len(shape) - value.ndim, len(shape)))
            return self.cast(lax.broadcast_in_dim(value, shape, dims), dtype)
        larger = [v for v in self.pool if v.size >= size and v.ndim]
        if larger and self.chance(0.8):
            value = self.one(larger)
            return self.cast(lax.reshape(lax.slice(lax.reshape(value, (value.size,)), (0,), (size,)), shape), dtype)
        counts = lax.iota(np.int32, size)
        value = lax.reshape(lax.sub(lax.rem(lax.mul(counts, np.int32(7)), np.int32(11)), np.int32(5)), shape)
        value = self.cast(value, dtype)
        return lax.mul(value, jnp.asarray(0.25, dtype)) if dtype in FLOATS else value

    def weights(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A closed-over constant: small random weights."""
        if dtype == "bool":
            return jnp.asarray(self.rng.random(shape) < 0.5)
        if dtype not in FLOATS:
            low = 0 if dtype.startswith("u") else -6
            return jnp.asarray(self.rng.integers(low, 7, size=shape)).astype(dtype)
        return jnp.asarray(self.rng.standard_normal(shape) * 0.5, dtype)

    def tame(self, value: Any) -> Any:
        """Most of the time, a bounded form of a floating value: chains of exponentials hide everything else."""
        if value.dtype.name not in FLOATS or self.chance(0.3):
            return value
        how = self.number(0, 2)
        if how == 0:
            return lax.tanh(value)
        if how == 1:
            return lax.clamp(jnp.asarray(-2, value.dtype), value, jnp.asarray(2.5, value.dtype))
        return lax.mul(value, jnp.asarray(0.125, value.dtype))

    def positive(self, value: Any) -> Any:
        """Most of the time, a value away from zero and negative numbers."""
        if self.chance(0.25):
            return value
        return lax.add(lax.abs(value), jnp.asarray(self.one((0.5, 1.0, 0.25)), value.dtype))

    def grow(self, steps: int, names: Sequence[str], weights: Sequence[float]) -> None:
        """Adds operations."""
        share = np.asarray(weights) / np.sum(weights)
        done = tries = 0
        while done < steps and tries < 20 * steps + 20:
            tries += 1
            rules = _STEPS[names[int(self.rng.choice(len(names), p=share))]]
            odds = np.array([w for w, _ in rules])
            rule = rules[int(self.rng.choice(len(rules), p=odds / odds.sum()))][1]
            before = len(self.pool)
            try:
                rule(self)
            except Unsuitable:
                del self.pool[before:]
                continue
            done += 1
