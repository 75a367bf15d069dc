"""Op rules of prefix scans: cumulative sum, product, max, min and log-sum-exp along a dimension."""

from __future__ import annotations

from jcuts.base.errors import Refusal
from jcuts.ops.reduction import accumulator_type
from jcuts.ops.registry import FLOATS, SIGNED, UNSIGNED, Context, Equation, Op, op_rule

COMBINE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min", "cumlogsumexp": "logaddexp"}


@op_rule(*COMBINE)
def cumulative(eqn: Equation) -> Op | Refusal:
    """out[.., i, ..] = in[.., 0, ..] o .. o in[.., i, ..] along ``axis``; from the end with ``reverse``.

    ``info`` has the axis, the direction, the accumulator's type and ``step``, which combines two values of that type.
    """
    dtype = eqn.inputs[0].dtype
    combine = COMBINE[eqn.prim]
    if dtype not in (FLOATS if combine == "logaddexp" else FLOATS | SIGNED | UNSIGNED):
        return Refusal(eqn.prim, f"not implemented for {dtype}")
    acc_type = accumulator_type(dtype)

    def step(ctx: Context, before: int, value: int) -> int:
        if combine == "logaddexp":
            return log_add_exp(ctx, before, value, acc_type)
        return ctx.apply(combine, acc_type, before, value)

    axis = int(eqn.params["axis"])
    info = {
        "axis": axis if axis >= 0 else axis + len(eqn.inputs[0].shape),
        "reverse": bool(eqn.params["reverse"]),
        "acc_type": acc_type,
        "step": step,
    }
    cost = 40 if combine == "logaddexp" else 1
    return Op(eqn.prim, "cumulative", eqn.inputs, eqn.outputs, cost=cost, info=info)


def log_add_exp(ctx: Context, a: int, b: int, dtype: str) -> int:
    """log(e^a + e^b) = max + log1p(e^-|a - b|); of equal infinities, and with NaN, a + b."""
    difference = ctx.apply("sub", dtype, a, b)
    tail = ctx.apply("exp", dtype, ctx.apply("neg", dtype, ctx.apply("abs", dtype, difference)))
    result = ctx.apply("add", dtype, ctx.apply("max", dtype, a, b), ctx.apply("log1p", dtype, tail))
    invalid = ctx.apply("ne", "bool", difference, difference)
    return ctx.apply("select", dtype, invalid, ctx.apply("add", dtype, a, b), result)
