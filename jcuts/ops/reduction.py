"""Op rules of reductions over whole dimensions: sum, product, max, min, argmax, argmin, and, or, xor."""

from __future__ import annotations

from jcuts.base.errors import Refusal
from jcuts.ops.registry import (
    FLOATS,
    SIGNED,
    UNSIGNED,
    AccSpec,
    Context,
    Equation,
    IndexTuple,
    Op,
    ReduceSpec,
    op_rule,
)

COMBINE = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


def accumulator_type(dtype: str) -> str:
    """Sums of 16-bit floats are carried in float32; everything else in its own type."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def to_accumulator(ctx: Context, value: int, dtype: str, acc_type: str) -> int:
    """A contribution in the accumulator's type.

    16-bit floats contribute as they are carried in registers, unrounded: whatever else uses the same value in the
    kernel uses it unrounded too, and the maximum of a row must be one of its values to the last bit (softmax subtracts
    it and takes the exponential).
    """
    if dtype == acc_type:
        return value
    if dtype in ("bfloat16", "float16") and acc_type == "float32":
        return ctx.apply("widen", acc_type, value)
    return ctx.apply("convert", acc_type, value, source=dtype)


def merge_index(axes: tuple[int, ...], rank: int, out_index: IndexTuple, red_index: IndexTuple) -> IndexTuple:
    """The operand index: reduced dimensions from ``red_index`` (in order of ``axes``), others from ``out_index``."""
    where = {axis: red_index[k] for k, axis in enumerate(axes)}
    kept = iter(out_index)
    return tuple(where[d] if d in where else next(kept) for d in range(rank))


@op_rule(*COMBINE)
def reduce(eqn: Equation) -> Op | Refusal:
    """Sum, product, maximum, minimum, and, or, xor over ``axes``."""
    source = eqn.inputs[0]
    axes = tuple(sorted(eqn.params["axes"]))
    combine = COMBINE[eqn.prim]
    dtype = source.dtype
    if combine in ("and", "or", "xor") and dtype in FLOATS:
        return Refusal(eqn.prim, f"not defined for {dtype}")
    if dtype == "bool" and combine in ("add", "mul"):
        return Refusal(eqn.prim, "sum of bool")
    if not axes:
        return Refusal(eqn.prim, "no reduced dimension")
    acc_type = accumulator_type(dtype)
    rank = len(source.shape)
    extents = tuple((f"r{k}", source.shape[a]) for k, a in enumerate(axes))
    count = 1
    for _, extent in extents:
        count *= extent

    def term(ctx: Context, out_index: IndexTuple, red_index: IndexTuple) -> list[tuple[int, ...]]:
        value = ctx.input(0, merge_index(axes, rank, out_index, red_index))
        return [(to_accumulator(ctx, value, dtype, acc_type),)]

    def finish(ctx: Context, accs: list[int], out_index: IndexTuple) -> list[int]:
        if acc_type != dtype:
            return [ctx.apply("convert", dtype, accs[0], source=acc_type)]
        return accs

    spec = ReduceSpec(extents, (AccSpec(combine, acc_type),), term, finish, flop=count)
    return Op(eqn.prim, "reduction", eqn.inputs, eqn.outputs, reduce=spec, cost=count, info={"axes": axes})


@op_rule("argmax", "argmin")
def argreduce(eqn: Equation) -> Op | Refusal:
    """Position of the largest or smallest element: the first of equals; NaN counts as the extreme."""
    source = eqn.inputs[0]
    axes = tuple(eqn.params["axes"])
    dtype, index_dtype = source.dtype, eqn.outputs[0].dtype
    if dtype not in FLOATS | SIGNED | UNSIGNED:
        return Refusal(eqn.prim, f"not implemented for {dtype}")
    if len(axes) != 1:
        return Refusal(eqn.prim, "several dimensions")
    if index_dtype not in SIGNED | UNSIGNED:
        return Refusal(eqn.prim, f"index type {index_dtype}")
    extent = source.shape[axes[0]]
    rank = len(source.shape)
    acc_type = accumulator_type(dtype)

    def term(ctx: Context, out_index: IndexTuple, red_index: IndexTuple) -> list[tuple[int, ...]]:
        value = ctx.input(0, merge_index(axes, rank, out_index, red_index))
        if acc_type != dtype:
            value = ctx.apply("convert", acc_type, value, source=dtype)
        return [(value, ctx.index_value(red_index[0], index_dtype))]

    def finish(ctx: Context, accs: list[int], out_index: IndexTuple) -> list[int]:
        return accs

    spec = ReduceSpec((("r0", extent),), (AccSpec(eqn.prim, acc_type, index_dtype),), term, finish, flop=2 * extent)
    return Op(eqn.prim, "reduction", eqn.inputs, eqn.outputs, reduce=spec, cost=2 * extent, info={"axes": axes})
