"""Cumulative sums, products, maxima and minima along a dimension."""

from __future__ import annotations

from jcuts.base.errors import Refusal
from jcuts.ops.registry import Equation, Op, op_rule

COMBINE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}


@op_rule(*COMBINE, "cumlogsumexp")
def cumulative(eqn: Equation) -> Op | Refusal:
    """Not yet a kernel: needs a phase that carries its accumulator from point to point."""
    return Refusal(eqn.prim, "cumulative operations are left to XLA in this version")
