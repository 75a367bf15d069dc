"""Op rules of data-dependent indexing: dynamic slices and gathers of rows."""

from __future__ import annotations

from typing import Any

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.ops.registry import Context, Equation, IndexTuple, Op, op_rule

INDEX = "int64"
UPDATE = "dynamic_update_slice"
IN_PLACE = "XLA updates in place; a kernel would copy the whole operand"


def clamped_index(ctx: Context, value: int, source_dtype: str, limit: int) -> Index:
    """The run-time index ``clip(value, 0, limit)``."""
    if limit == 0:
        return Index()
    wide = value if source_dtype == INDEX else ctx.apply("convert", INDEX, value, source=source_dtype)
    if source_dtype == "uint64":  # above 2**63 the conversion wraps to negative: such an index is past the end
        big = ctx.apply("gt", "bool", value, ctx.const(limit, "uint64"))
        wide = ctx.apply("select", INDEX, big, ctx.const(limit, INDEX), wide)
    low = ctx.apply("max", INDEX, wide, ctx.const(0, INDEX))
    return Index.value(ctx.apply("min", INDEX, low, ctx.const(limit, INDEX)))


@op_rule("dynamic_slice")
def dynamic_slice(eqn: Equation) -> Op | Refusal:
    """A window whose start is clamped so that it fits."""
    shape, sizes = eqn.inputs[0].shape, eqn.outputs[0].shape

    def pull(ctx: Context, index: IndexTuple) -> int:
        place = []
        for k, part in enumerate(index):
            start = clamped_index(ctx, ctx.input(1 + k, ()), eqn.inputs[1 + k].dtype, shape[k] - sizes[k])
            place.append(start + part)
        return ctx.input(0, tuple(place))

    return Op(eqn.prim, "gather", eqn.inputs, eqn.outputs, pull=pull, cost=1)


@op_rule(UPDATE)
def dynamic_update_slice(eqn: Equation) -> Op | Refusal:
    """The operand with a window replaced.

    XLA updates in place where the operand dies; a kernel would copy it.  It is worth a kernel only when the copy is
    needed anyway, which is not known here.
    """
    return Refusal(eqn.prim, IN_PLACE)


@op_rule("gather")
def gather(eqn: Equation) -> Op | Refusal:
    """Gathers slices that are contiguous rows along the collapsed dimensions.

    Covered: no operand batching dimensions, slice sizes 1 on every indexed dimension and full on the others (``x[i]``,
    ``take`` along axes, embedding look-ups), modes clip, fill_or_drop and promise_in_bounds.
    """
    numbers = eqn.params["dimension_numbers"]
    operand, indices = eqn.inputs
    sizes = tuple(eqn.params["slice_sizes"])
    mode = str(eqn.params["mode"]).rsplit(".", 1)[-1].lower()
    if getattr(numbers, "operand_batching_dims", ()) or getattr(numbers, "start_indices_batching_dims", ()):
        return Refusal(eqn.prim, "batching dimensions")
    offset_dims, collapsed = tuple(numbers.offset_dims), tuple(numbers.collapsed_slice_dims)
    mapped = tuple(numbers.start_index_map)
    if set(collapsed) != set(mapped):
        return Refusal(eqn.prim, "an indexed dimension is kept as a window")
    for k, size in enumerate(sizes):
        if size != (1 if k in mapped else operand.shape[k]):
            return Refusal(eqn.prim, f"slice size {size} of dimension {k} is neither 1 nor the whole")
    if indices.dtype == "bool":
        return Refusal(eqn.prim, "bool indices")
    fill: Any = eqn.params.get("fill_value")
    is_float = operand.dtype in ("float64", "float32", "bfloat16", "float16")
    if mode in ("fill", "fill_or_drop", "1") and fill is None:
        if is_float:
            fill = float("nan")
        elif operand.dtype == "bool":
            fill = True
        elif operand.dtype.startswith("u"):
            fill = 2 ** int(operand.dtype[4:]) - 1
        else:
            fill = -(2 ** (int(operand.dtype[3:]) - 1))
    rank = len(eqn.outputs[0].shape)
    batch_dims = [d for d in range(rank) if d not in offset_dims]
    kept = [k for k in range(len(operand.shape)) if k not in collapsed]

    def pull(ctx: Context, index: IndexTuple) -> int:
        batch = tuple(index[d] for d in batch_dims)
        place: list[Index] = [Index()] * len(operand.shape)
        guards: list[Guard] = []
        inside: list[int] = []
        for column, dim in enumerate(mapped):
            start = ctx.input(1, (*batch, Index(column)))
            limit = operand.shape[dim] - 1
            place[dim] = clamped_index(ctx, start, indices.dtype, limit)
            if mode.startswith("fill"):
                zero, top = ctx.const(0, indices.dtype), ctx.const(min(limit, _top(indices.dtype)), indices.dtype)
                inside.append(ctx.apply("ge", "bool", start, zero))
                inside.append(ctx.apply("le", "bool", start, top))
        for position, dim in enumerate(kept):
            place[dim] = index[offset_dims[position]]
        value = ctx.input(0, tuple(place), tuple(guards), 0)
        for condition in inside:
            value = ctx.apply("select", operand.dtype, condition, value, ctx.const(fill, operand.dtype))
        return value

    if not (mode.startswith("fill") or mode in ("clip", "promise_in_bounds")):
        return Refusal(eqn.prim, f"mode {mode}")
    return Op(eqn.prim, "gather", eqn.inputs, eqn.outputs, pull=pull, cost=2)


def _top(dtype: str) -> int:
    bits = int(dtype[4:]) if dtype.startswith("u") else int(dtype[3:]) - 1
    return 2**bits - 1
