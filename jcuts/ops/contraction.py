"""Op rule of ``dot_general``: batched tensor contraction in any dimension order."""

from __future__ import annotations

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.ops.reduction import accumulator_type, to_accumulator
from jcuts.ops.registry import FLOATS, AccSpec, Context, Equation, IndexTuple, Op, ReduceSpec, op_rule
from jcuts.trace.precision import asked, rounded_type


@op_rule("dot_general")
def dot_general(eqn: Equation) -> Op | Refusal:
    """Output dimensions: batch, then the free dimensions of lhs, then those of rhs.

    Every precision is computed with at least the operands' own precision on a CPU, where no reduced-precision matrix
    unit is in use; on a GPU ``precision`` decides whether one may be.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = eqn.inputs
    out = eqn.outputs[0]
    precision = eqn.params.get("precision")
    exact = rounded_type(precision) or None  # what is done with such operands anyway
    if "Algorithm" in type(precision).__name__ and {lhs.dtype, rhs.dtype} != {exact}:
        return Refusal(eqn.prim, f"precision={precision} names an algorithm; only XLA honours it")
    if eqn.params.get("out_sharding") is not None:
        return Refusal(eqn.prim, "out_sharding")
    if lhs.dtype == "bool" or rhs.dtype == "bool":
        return Refusal(eqn.prim, "bool operands")
    acc_type = accumulator_type(out.dtype)
    if out.dtype in FLOATS:
        for tensor in (lhs, rhs):
            if tensor.dtype not in FLOATS or (tensor.dtype == "float64" and acc_type == "float32"):
                return Refusal(eqn.prim, f"{lhs.dtype} x {rhs.dtype} accumulated in {out.dtype}")
    elif lhs.dtype in FLOATS or rhs.dtype in FLOATS:
        return Refusal(eqn.prim, f"{lhs.dtype} x {rhs.dtype} accumulated in {out.dtype}")
    contract = tuple(lhs.shape[d] for d in lhs_contract)
    batch, rank_l, rank_r = len(lhs_batch), len(lhs.shape), len(rhs.shape)
    free_l = [d for d in range(rank_l) if d not in lhs_batch and d not in lhs_contract]
    free_r = [d for d in range(rank_r) if d not in rhs_batch and d not in rhs_contract]
    depth = 1
    for extent in contract:
        depth *= extent

    def place(
        rank: int,
        batched: tuple[int, ...],
        free: list[int],
        contracted: tuple[int, ...],
        out_index: IndexTuple,
        first: int,
        red: IndexTuple,
    ) -> IndexTuple:
        index: list[Index] = [Index()] * rank
        for k, d in enumerate(batched):
            index[d] = out_index[k]
        for k, d in enumerate(free):
            index[d] = out_index[first + k]
        for k, d in enumerate(contracted):
            index[d] = red[k]
        return tuple(index)

    def term(ctx: Context, out_index: IndexTuple, red: IndexTuple) -> list[tuple[int, ...]]:
        a = ctx.input(0, place(rank_l, lhs_batch, free_l, lhs_contract, out_index, batch, red))
        b = ctx.input(1, place(rank_r, rhs_batch, free_r, rhs_contract, out_index, batch + len(free_l), red))
        a = to_accumulator(ctx, a, lhs.dtype, acc_type)
        b = to_accumulator(ctx, b, rhs.dtype, acc_type)
        return [(ctx.apply("mul", acc_type, a, b),)]

    def finish(ctx: Context, accs: list[int], out_index: IndexTuple) -> list[int]:
        if acc_type != out.dtype:
            return [ctx.apply("convert", out.dtype, accs[0], source=acc_type)]
        return accs

    reds = tuple((f"k{i}", extent) for i, extent in enumerate(contract))
    spec = ReduceSpec(reds, (AccSpec("add", acc_type),), term, finish, flop=2 * depth)
    roles = {
        "batch": tuple(range(batch)),
        "m": tuple(range(batch, batch + len(free_l))),
        "n": tuple(range(batch + len(free_l), len(out.shape))),
    }
    info = {"roles": roles, "precision": asked(precision)}
    return Op(eqn.prim, "contraction", eqn.inputs, eqn.outputs, reduce=spec, cost=2 * depth, info=info)
