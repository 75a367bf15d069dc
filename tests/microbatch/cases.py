"""Random tables and networks, the same for a seed: times fall and rise without order, so that nothing is convex."""

from __future__ import annotations

import numpy as np

from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.timings import MicroConfig, Table

ALGORITHMS = ("IMPLICIT_GEMM", "GEMM", "FFT", "WINOGRAD")
UNIT = 4096
"""Workspaces are multiples of it, as those of libraries are of some size: an inexact solver can tell them apart."""


def convolution(kind: str = "forward", dtype: str = "float32", channels: int = 8) -> Convolution:
    """A small convolution."""
    return Convolution(kind, channels, 16, (14, 14), (3, 3), padding=((1, 1), (1, 1)), dtype=dtype)


def random_table(
    rng: np.random.Generator, batch: int, *, algorithms: int = 3, missing: float = 0.1, dtype: str = "float32"
) -> Table:
    """Sizes 1 ... batch; some (size, algorithm) pairs do not run; times and workspaces grow with noise and steps."""
    maths = ("float16", "float32") if dtype == "float16" else ("float32",)
    micros = []
    for algorithm in ALGORITHMS[:algorithms]:
        for math in maths:
            speed, space, start = rng.uniform(0.2, 3.0), int(rng.integers(0, 300)), rng.uniform(0.0, 2.0)
            for size in range(1, batch + 1):
                if rng.random() < missing:
                    continue
                ns = int(1000 * (start + speed * size * rng.uniform(0.5, 1.5))) + 1
                used = UNIT * int(space * size * rng.choice((0, 0.5, 1, 1, 2)))
                micros.append(MicroConfig(size, algorithm, math, ns * 1e-9, used))
    if not micros:
        micros.append(MicroConfig(1, ALGORITHMS[0], maths[-1], 1e-6, 0))
    return Table(convolution(dtype=dtype), tuple(micros))


def random_limit(rng: np.random.Generator, table: Table) -> int:
    """A limit somewhere among the table's workspaces, sometimes below all of them."""
    spaces = sorted({micro.workspace for micro in table.micros})
    return max(0, int(rng.choice(spaces)) + UNIT * int(rng.integers(-1, 2)))


def random_sets(
    rng: np.random.Generator, kernels: int, variables: int, kind: str
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Fronts of a knapsack with so many items in all: (costs [ps], weights [B]) per class.

    uncorrelated: time says nothing about workspace.  weak: a byte buys about the same everywhere, with noise.
    strong: exactly the same everywhere, so that every choice that fills the limit is optimal.
    """
    counts = np.ones(kernels, int)
    np.add.at(counts, rng.integers(0, kernels, variables - kernels), 1)
    costs, weights = [], []
    for count in counts:
        weight = np.sort(rng.choice(1 << 14, count, replace=False)) * UNIT
        if kind == "uncorrelated":
            cost = np.sort(rng.integers(10**7, 10**10, count))[::-1]
        elif kind == "weak":
            cost = 10**10 - weight * 100 + rng.integers(0, 10**8, count)
        else:
            cost = 10**10 - weight * 100
        costs.append(cost.astype(np.int64))
        weights.append(weight.astype(np.int64))
    return costs, weights
