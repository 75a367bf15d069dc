"""Random programs from a seed.

`Program.function` draws its operations while it is traced, from a generator that starts at the same seed each time:
every trace (under jit, grad, vmap, at other precisions) gives the same program, and a seed is all that has to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Imported in this order, by which their operations are registered and drawn.
from benchmarks.random_programs import calls, lookups, loops, networks, steps  # noqa: F401
from benchmarks.random_programs.draw import LARGE_SIZE, MAX_SIZE, NARROW, WIDE, Draw, Kind

WEIGHTS = {
    "elementwise": 7.0,
    "layout": 4.0,
    "reduction": 3.0,
    "pattern": 2.0,
    "window": 1.2,
    "contraction": 1.6,
    "convolution": 1.2,
    "gather": 1.8,
    "special": 0.8,
    "call": 0.8,
    "unsupported": 0.3,
    "control": 0.5,
}
NOT_SMOOTH = ("unsupported", "special")
MORE_FROM = 100_000_000
MORE = {"network": 1.6, "library": 0.5}
"""Families of programs with seeds from `MORE_FROM` on: the smaller seeds keep the programs that they have named."""

LOOPS_FROM = 200_000_000
"""Programs with seeds from here on are loops (`loops`), with few operations around them."""
LOOPS = {"loop": 1.0}


@dataclass(frozen=True)
class Program:
    """A random program: a traceable function of arrays, and the types of its arguments."""

    seed: int
    kind: Kind
    main: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    steps: int
    large: bool

    def function(self, *args: Any) -> tuple[Any, ...]:
        """The program; a tuple of arrays."""
        rng = np.random.default_rng([self.seed, 2])
        draw = Draw(rng, self.kind, self.main, list(args), limit=LARGE_SIZE if self.large else MAX_SIZE)
        weights = WEIGHTS if self.seed < MORE_FROM else {**WEIGHTS, **MORE}
        names = [n for n in weights if not (self.kind.smooth and n in NOT_SMOOTH)]
        count = self.steps
        if self.seed >= LOOPS_FROM:
            draw.grow(draw.number(1, 2), list(LOOPS), list(LOOPS.values()))
            count = draw.number(0, 2)
        draw.grow(count, names, [weights[n] for n in names])
        made = draw.pool[len(args) :]
        if not made:
            return (lax.neg(args[0]) if args[0].dtype != bool else lax.bitwise_not(args[0]),)
        last = made[-1 - rng.integers(0, min(2, len(made))) :]
        others = [made[int(k)] for k in rng.integers(0, len(made), size=int(rng.integers(0, 3)))]
        outputs: list[Any] = []
        for value in (*last, *others):
            if all(value is not o for o in outputs):
                outputs.append(value)
        return tuple(outputs)


def program(seed: int, *, smooth: bool = False, small: bool = False) -> Program:
    """The program of a seed. ``smooth``: one that has derivatives; ``small``: a short one of small arrays."""
    rng = np.random.default_rng([seed, 1])
    kind = Kind(x64=bool(rng.random() < 0.3), smooth=smooth)
    every = WIDE if kind.x64 else NARROW
    if smooth:
        every = ("float64", "float32") if kind.x64 else ("float32",)
    main = every[int(rng.integers(len(every)))]
    draw = Draw(rng, kind, main)
    large = draw.chance(0.06) and not small
    inputs = []
    count = draw.number(1, 3)
    for k in range(count):
        rank = draw.one((1, 2, 2, 3, 3, 4)) if k == 0 else draw.one((0, 1, 2, 2, 3, 4))
        shape = draw.shape(rank)
        if large and k == 0:
            shape = draw.one(((211, 257), (40_003,), (9, 61, 67), (3, 33, 31, 12)))
        elif inputs and draw.chance(0.5):
            shape = inputs[0][0]
            if draw.chance(0.4) and shape:
                shape = shape[1:]
        inputs.append((shape, draw.dtype()))
    return Program(seed, kind, main, tuple(inputs), draw.number(3, 6 if large or small else 15), large)


def signature(of: Program) -> list[jax.ShapeDtypeStruct]:
    """The arguments' types. Call under ``jax.enable_x64`` where ``of.kind.x64``."""
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in of.inputs]
