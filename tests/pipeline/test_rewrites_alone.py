"""Rewrites that XLA's own code gains by: the program stays rewritten where no kernel wins."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks.known_issues.slow_convolutions import CASES, functions
from benchmarks.networks import modes
from jcuts.base.settings import Settings
from jcuts.pipeline import passes
from jcuts.trace import jaxapi


def planned(function, *args):
    """The outcome for a GPU on which no kernel is faster than XLA."""
    with modes.pretended({}, lambda problem, _: [2.0] * len(problem.candidates) + [1.0]):
        closed = jaxapi.closed_jaxpr_of(function, *args)
        return closed, passes.optimize_jaxpr(closed, Settings(), platform="cuda", may_measure=True)


def arguments(case):
    layer, shape, filters = CASES[case](True)
    made = [np.zeros(s, np.float32) for s in (shape, filters)]
    return layer, (*made, np.zeros(jax.eval_shape(layer, *made).shape, np.float32))


@pytest.mark.parametrize("case", ["transposed", "large_filter"])
def test_gradients_that_xla_is_slow_at_are_rewritten_without_kernels(case):
    layer, args = arguments(case)
    closed, outcome = planned(functions(layer)["gradients"], *args)
    assert outcome.gains_alone
    assert outcome.closed is not closed


@pytest.mark.parametrize("case", ["grouped", "depthwise"])
def test_other_gradients_stay_the_users_program(case):
    layer, args = arguments(case)
    closed, outcome = planned(functions(layer)["gradients"], *args)
    assert not outcome.gains_alone
    assert outcome.closed is closed
