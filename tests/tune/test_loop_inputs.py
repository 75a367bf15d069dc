"""Inputs that loops are checked on: errors must not grow from step to step, or nothing could be told of a kernel."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jcuts.base.errors import UsageError
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.input_recipes import MOST_DEGREE, degree, input_recipe, reduction_length
from jcuts.tune.problem import Input, Output, Problem
from jcuts.tune.verify.inputs import make_inputs
from tests.lower.recurrence.cells import gru, lstm, minimal_gated_unit, perceptrons
from tests.lower.recurrence.test_program import lowered

LONG = {
    "gru": gru(width=96, steps=150),
    "lstm": lstm(width=64, batch=4, steps=150),
    "minimal gated unit": minimal_gated_unit(width=64, steps=150),
    "perceptrons": perceptrons(width=48, steps=100),
}


def flat(function, arguments):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *arguments)))


@pytest.mark.parametrize("name", LONG)
def test_errors_do_not_grow_over_many_steps(name):
    function, arguments = LONG[name]
    closed = flat(function, arguments)
    inputs = tuple(Input(v.aval.shape, "float32", input_recipe(closed, v)) for v in closed.jaxpr.invars)
    outputs = tuple(Output(v.aval.shape, "float32", 1, False) for v in closed.jaxpr.outvars)
    problem = Problem("loop", inputs, outputs, candidates=(), degree=degree(closed))
    values = make_inputs(problem, "normal", 3)
    with jax.enable_x64(True):
        exact = jax.tree.leaves(jax.jit(function)(*(v.astype(np.float64) for v in values)))
    for mine, theirs in zip(jax.tree.leaves(jax.jit(function)(*values)), exact, strict=True):
        theirs = np.asarray(theirs)
        assert np.linalg.norm(mine - theirs) < 5e-6 * np.linalg.norm(theirs)
        assert theirs.std() > 0.05


def test_what_every_step_multiplies_is_divided():
    function, arguments = gru(width=100)
    closed = flat(function, arguments)
    assert [input_recipe(closed, v) for v in closed.jaxpr.invars] == ["normal", "normal", "normal over 20"]
    assert degree(closed) == MOST_DEGREE
    program, _ = lowered(function, arguments)
    assert reduction_length(program) == 100 * 5


def test_a_divided_recipe_is_one():
    assert Input((3,), "float32", "normal over 20 finite").divisor == 20
    assert Input((3,), "float32", "positive over 4 tf32").divisor == 4
    assert Input((3,), "float32", "normal").divisor == 1
    for wrong in ("normal over", "normal over 0", "over 3", "normal over 3x"):
        with pytest.raises(UsageError, match="recipe"):
            Input((3,), "float32", wrong)
