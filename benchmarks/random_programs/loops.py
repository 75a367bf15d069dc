"""Random loops for persistent recurrences: cells of products, gates, norms and masks under `scan` and `fori_loop`.

`cell` draws a body as a user's own cell would have it: pre-activations (products of the step's row and of carried
values with weights, sums, reductions of a row), then new carried values of gates and of whatever operations the
generator draws besides.  Programs with seeds from `generator.LOOPS_FROM` on begin with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.random_programs.draw import FLOATS, Draw, Unsuitable, step

ACTIVATIONS = (jnp.tanh, jax.nn.sigmoid, jax.nn.relu, jax.nn.softplus, jax.nn.silu, lambda x: x)
EXTRA = ("elementwise", "reduction")
EXTRA_WEIGHTS = (5.0, 1.0)


@dataclass
class _Cell:
    """One trace of a body: its own generator, and the values of a step by their number of columns."""

    d: Draw
    batch: int
    dtype: str

    def product(self, source: Any, columns: int) -> Any:
        """The value times weights [columns of the value, columns]."""
        return source @ self.d.weights((source.shape[-1], columns), self.dtype)

    def preactivation(self, sources: list[Any], columns: int) -> Any:
        """A sum of one or two products, with a bias or not."""
        total = self.product(self.d.one(sources), columns)
        if self.d.chance(0.5):
            total = total + self.product(self.d.one(sources), columns)
        return total + self.d.weights((columns,), self.dtype) if self.d.chance(0.6) else total

    def norm(self, value: Any) -> Any:
        """A norm over the columns, or a softmax."""
        if self.d.chance(0.3):
            return jax.nn.softmax(value, axis=-1)
        centred = value - jnp.mean(value, axis=-1, keepdims=True) if self.d.chance(0.5) else value
        return centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + jnp.asarray(0.1, self.dtype))

    def new(self, old: Any, sources: list[Any]) -> Any:
        """A carried value's successor."""
        d, columns, one = self.d, old.shape[-1], jnp.asarray(1, self.dtype)
        candidate = d.one(ACTIVATIONS)(self.preactivation(sources, columns))
        if d.chance(0.25):
            candidate = self.norm(candidate)
        how = d.number(0, 4)
        if how == 0:
            return jnp.tanh(candidate)
        gate = jax.nn.sigmoid(self.preactivation(sources, columns))
        if how == 1:
            return gate * old + (one - gate) * jnp.tanh(candidate)
        if how == 2:
            forget = jax.nn.sigmoid(self.preactivation(sources, columns))
            return jnp.clip(forget * old + gate * candidate, jnp.asarray(-3, self.dtype), jnp.asarray(3, self.dtype))
        inner = Draw(d.rng, d.kind, self.dtype, [candidate, gate, old], d.depth + 1)
        inner.grow(inner.number(1, 4), EXTRA, EXTRA_WEIGHTS)
        made = jnp.tanh(inner.fresh(old.shape, self.dtype))
        return made if how == 3 else gate * made + (one - gate) * old


@step("loop")
def cell(d: Draw) -> None:
    """A recurrent cell: up to three carried values, a row of the step, masks, stacked results."""
    if d.depth:
        raise Unsuitable
    steps, batch, width = d.number(1, 7), d.one((1, 1, 2, 3, 8, 9, 17)), d.one((1, 3, 8, 16))
    dtype = d.dtype(FLOATS)
    rows = jnp.tanh(d.fresh((steps, batch, width), dtype))
    units = d.one((3, 8, 11, 16, 24))
    sizes = [units if d.chance(0.7) else d.one((3, 8, 16)) for _ in range(d.number(1, 3))]
    start = tuple(jnp.tanh(d.fresh((batch, size), dtype)) for size in sizes)
    seed, reverse, stacked = int(d.rng.integers(2**31)), d.chance(0.3), d.number(0, 2)
    lengths = d.rng.integers(0, steps + 1, size=(batch, 1)) if d.chance(0.25) else None

    def body(state: tuple[Any, ...], item: tuple[Any, Any]) -> tuple[tuple[Any, ...], Any]:
        now, row = item
        made = _Cell(Draw(np.random.default_rng([seed, 5]), d.kind, dtype, depth=d.depth + 1), batch, dtype)
        sources, new = [row, *state], []
        for old in state:
            new.append(made.new(old, sources).astype(dtype))
            if made.d.chance(0.4):  # the next value reads this one's successor
                sources.append(new[-1])
        if lengths is not None:
            new = [jnp.where(now < jnp.asarray(lengths), a, b) for a, b in zip(new, state, strict=True)]
        return tuple(new), (None, new[-1], (new[0], made.norm(row)))[stacked]

    counter = jnp.arange(steps)
    last, stack = lax.scan(body, start, (counter, rows), reverse=reverse)
    for value in (*last, *jax.tree.leaves(stack)):
        d.add(value)


@step("loop", 0.4)
def iterated(d: Draw) -> None:
    """A `fori_loop` that improves a value: power iteration with a norm, or a fixed point."""
    if d.depth:
        raise Unsuitable
    batch, units, dtype = d.one((1, 2, 5, 8)), d.one((4, 8, 15, 16)), d.dtype(FLOATS)
    start = jnp.tanh(d.fresh((batch, units), dtype))
    weights, seed = d.weights((units, units), dtype), int(d.rng.integers(2**31))

    def turn(_: Any, value: Any) -> Any:
        made = _Cell(Draw(np.random.default_rng([seed, 6]), d.kind, dtype, depth=d.depth + 1), batch, dtype)
        return (made.norm(value @ weights) if made.d.chance(0.6) else jnp.tanh(value @ weights + start)).astype(dtype)

    d.add(lax.fori_loop(0, d.number(1, 6), turn, start))
