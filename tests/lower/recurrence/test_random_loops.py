"""Random loops as one program: the interpreter against JAX in float64 on the same operands.

RANDOM_LOOPS=3000 pytest tests/lower/recurrence/test_random_loops.py
"""

from __future__ import annotations

import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.verify import verify
from jcuts.lower.recurrence import stages
from tests.lower.recurrence.test_program import lowered

COUNT = int(os.environ.get("RANDOM_LOOPS", "60"))
UNARY = (jnp.tanh, jax.nn.sigmoid, jnp.sin, lambda x: jnp.maximum(x, 0), lambda x: 0.5 * x + 0.1, jnp.abs)
BINARY = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, lambda a, b: jnp.where(a > b, a, 0.3 * b))


class RandomLoop:
    """A loop of random cells. Args: seed: of all choices."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.batch = int(rng.integers(1, 4))
        self.widths = [int(w) for w in rng.integers(2, 40, size=rng.integers(1, 4))]
        self.steps = int(rng.integers(1, 6))
        self.plan = rng.integers(0, 2**31, size=int(rng.integers(2, 7)))
        self.reverse, self.is_stacked = bool(rng.integers(2)), bool(rng.integers(4))
        self.weights: list[np.ndarray] = []
        self.xs = self.normal(self.steps, self.batch, self.widths[0])
        self.carries = [self.normal(self.batch, w) for w in self.widths]

    def normal(self, *shape: int) -> np.ndarray:
        return (0.5 * self.rng.standard_normal(shape)).astype(np.float32)

    def weight(self, rows: int, columns: int) -> int:
        self.weights.append(self.normal(rows, columns) / rows**0.5)
        return len(self.weights) - 1

    def body(self):
        """The step, by a recipe that does not change between traces."""
        choices = []
        for number in self.plan:
            rng = np.random.default_rng(number)
            kind, source, target = rng.integers(6), rng.integers(len(self.widths)), rng.integers(len(self.widths))
            matrix = self.weight(self.widths[source], self.widths[target])
            choices.append((kind, source, target, matrix, rng.integers(len(UNARY)), rng.integers(len(BINARY))))

        def step(carry, x, weights):
            values = list(carry)
            values[0] = values[0] + x
            for kind, source, target, matrix, unary, binary in choices:
                a, b = values[source], values[target]
                if kind <= 2:  # a product, the value itself, and what stands there
                    made = UNARY[unary](a @ weights[matrix]) if kind else a @ weights[matrix] + b
                elif kind == 3:
                    made = b * jax.nn.softmax(b, -1)
                elif kind == 4:
                    made = b - b.mean(-1, keepdims=True) * (UNARY[unary](a).sum(-1, keepdims=True) * 0.1)
                else:
                    made = jnp.concatenate([b[:, 1:], b[:, :1]], -1) * 0.7
                values[target] = BINARY[binary](jnp.tanh(made), b)
            return tuple(values), values[-1].sum(-1) if self.is_stacked else None

        return step

    def function(self):
        step = self.body()

        def run(xs, carries, weights):
            return jax.lax.scan(lambda c, x: step(c, x, weights), tuple(carries), xs, reverse=self.reverse)

        return run


def check(seed: int) -> bool:
    """Whether a random loop has a program, whose results are right."""
    loop = RandomLoop(seed)
    run = loop.function()
    flat, tree = jax.tree.flatten((loop.xs, loop.carries, loop.weights))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program, (operands, wanted) = lowered(lambda *xs: run(*jax.tree.unflatten(tree, xs)), flat)
    if isinstance(program, Refusal):
        return False
    verify(program, all_addresses=True)
    for mine, theirs in zip(interpret(program, operands), wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    return True


@pytest.mark.parametrize("kept_from", [stages.KEPT_FROM, 1], ids=["recomputed", "kept"])
@pytest.mark.parametrize("block", range(4))
def test_random_loops(block, kept_from, monkeypatch):
    monkeypatch.setattr(stages, "KEPT_FROM", kept_from)
    seeds = range(block, COUNT, 4)
    made = [check(1_000_000 + seed) for seed in seeds]
    assert sum(made) > 0.9 * len(made)
