"""Random loops on the PTX machine, on grids and blocks of random sizes, with and without resident operands."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jcuts.base.errors import Refusal
from jcuts.schedule.gpu.machine import scheduled
from jcuts.schedule.gpu.recurrence.schedules import FORM
from tests.codegen.cuda.recurrence.test_recurrence import check, compiled
from tests.lower.recurrence.test_program import lowered
from tests.lower.recurrence.test_random_loops import RandomLoop


@compiled
@pytest.mark.parametrize("seed", range(12))
def test_random_loops(seed):
    loop = RandomLoop(2_000_000 + seed)
    run = loop.function()
    flat, tree = jax.tree.flatten((loop.xs, loop.carries, loop.weights))
    program, (operands, wanted) = lowered(lambda *xs: run(*jax.tree.unflatten(tree, xs)), flat)
    if isinstance(program, Refusal):
        pytest.skip(str(program))
    rng = np.random.default_rng(seed)
    blocks, resident = int(rng.choice([1, 2, 5])), int(rng.integers(4))
    more = [("split", blocks)] if blocks > 1 else []
    made = scheduled(program, FORM, 256, ("flight", int(rng.choice([1, 3, 8]))), *more, ("resident", resident))
    check(made, operands, wanted)
