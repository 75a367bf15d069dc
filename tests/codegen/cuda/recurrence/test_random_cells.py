"""Random cells of one stage on the PTX machine: several carried values, read whole or by their own points, exchanged
with flags, weights in registers or in shared memory, on tensor cores; more with ``RANDOM_CELLS=N``.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.schedule.gpu.recurrence.parameters import EXCHANGE, MMA
from jcuts.schedule.gpu.recurrence.schedules import recurrence_schedules
from tests.codegen.cuda.recurrence.test_recurrence import SM90, compiled
from tests.lower.recurrence.test_program import lowered
from tests.ptx import machine as ptx_machine

COUNT = int(os.environ.get("RANDOM_CELLS", "12"))
UNARY = (jnp.tanh, jax.nn.sigmoid, jnp.sin, lambda x: 0.5 * x)
EXACT, TF32 = 2e-5, 1e-2


def random_cell(seed):
    """A loop whose carried values are updated from products of their old values, and of their own points."""
    rng = np.random.default_rng(seed)
    rows, steps, count = int(rng.choice([1, 1, 2, 3, 17])), int(rng.integers(2, 5)), int(rng.integers(1, 4))
    widths = (
        [int(rng.choice([33, 40, 48, 70]))] * count if rng.integers(2) else rng.choice([34, 40, 64], count).tolist()
    )
    reads = [[int(j) for j in range(count) if rng.integers(2)] for _ in range(count)]
    reads[0] = reads[0] or [0]
    kinds, stacked = rng.integers(len(UNARY), size=(count, 2)), bool(rng.integers(2))
    reverse = bool(rng.integers(2))

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    used = [w if rng.integers(3) else w - 1 for w in widths]  # some products read a part of what is carried
    weights = [[0.5 * normal(used[j], widths[i]) / widths[j] ** 0.5 for j in reads[i]] for i in range(count)]
    carries = [normal(rows, w) for w in widths]
    xs = [0.5 * normal(steps, rows, w) for w in widths]

    def run(xs, carries, weights):
        def step(carry, x):
            new = []
            for i, own in enumerate(carry):
                total = x[i]
                for j, weight in zip(reads[i], weights[i], strict=True):
                    total = total + carry[j][:, : weight.shape[0]] @ weight
                new.append(UNARY[kinds[i][0]](total) * UNARY[kinds[i][1]](own) + 0.25 * own)
            return tuple(new), (new[0] * 2 if stacked else None)

        return jax.lax.scan(step, tuple(carries), tuple(xs), reverse=reverse)

    flat, tree = jax.tree.flatten((xs, carries, weights))
    return lambda *leaves: run(*jax.tree.unflatten(tree, leaves)), flat


def check(seed):
    """Results of a few schedules of a random cell; how many of them ran, and exchange with flags."""
    rng = np.random.default_rng(seed + 1)
    program, (operands, wanted) = lowered(*random_cell(seed))
    assert not isinstance(program, Refusal)
    machine = GpuMachine(int(rng.choice([4, 8, 16])), capability=(9, 0))
    found = [made for made, _ in recurrence_schedules(program, machine)]
    flagged = [made for made in found if EXCHANGE in dict(made.params)]
    chosen = [some[int(rng.integers(len(some)))] for some in (found, flagged, flagged) if some]
    ran = 0
    for made in chosen:
        late = int(rng.integers(int(str(dict(made.params).get("split", 1))))) if rng.integers(2) else None
        try:
            kernel = compiler.compile_program(made, SM90)
        except CompileRejected:
            continue
        results = ptx_machine.run_kernel(compiler.ptx_of(made, SM90), kernel, operands, limit=2_000_000, late=late)
        tolerance = TF32 if MMA in dict(made.params) else EXACT
        for mine, theirs in zip(results, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance, err_msg=str(made.params))
        ran += EXCHANGE in dict(made.params)
    return ran


@compiled
@pytest.mark.parametrize("block", range(4))
def test_random_cells(block):
    flagged = [check(seed) for seed in range(block, COUNT, 4)]
    assert sum(flagged)
