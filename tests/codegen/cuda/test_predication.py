"""Phases reduced over the points at which a guard holds: points beyond the end change no result."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.codegen.cuda.graph.predication import drop_guard, restrict_to_guard
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.node import Guard
from tests import programs

X = np.random.default_rng(3).uniform(1.0, 2.0, (6, 5)).astype(np.float32)
REDUCTIONS = [jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda f: f.__name__)
def test_points_beyond_the_end_change_nothing(reduction, sign):
    x = sign * X
    program = programs.trace(lambda x: reduction(x, 0), x).program()
    (phase,) = program.phases
    (red,) = phase.reds
    guard = Guard(Index.axis(red.name), None, red.extent - 1)
    longer = replace(restrict_to_guard(phase, guard), reds=(replace(red, extent=red.extent + 2),))
    (got,) = interpret(replace(program, phases=(longer,)), [x])
    np.testing.assert_allclose(got, reduction(x, 0), rtol=1e-6)
    (got,) = interpret(replace(program, phases=(replace(drop_guard(longer, guard), reds=(red,)),)), [x])
    np.testing.assert_allclose(got, reduction(x, 0), rtol=1e-6)
