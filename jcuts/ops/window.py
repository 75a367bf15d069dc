"""Op rules of windowed reductions (pooling), and of the gradient of max and min pooling."""

from __future__ import annotations

import itertools
import math

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard, Scalar
from jcuts.ops.reduction import accumulator_type, to_accumulator
from jcuts.ops.registry import FLOATS, AccSpec, Context, Equation, IndexTuple, Op, ReduceSpec, op_rule

COMBINE = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}


def identity(combine: str, dtype: str) -> Scalar:
    """The neutral element: what padding and accumulators start from."""
    if combine in ("add", "or", "xor"):
        return 0.0 if dtype in FLOATS else (False if dtype == "bool" else 0)
    if combine in ("mul",):
        return 1.0 if dtype in FLOATS else 1
    if combine == "and":
        return True if dtype == "bool" else -1 if dtype.startswith("int") else 2 ** int(dtype[4:]) - 1
    largest = combine in ("min", "argmin")
    if dtype in FLOATS:
        return math.inf if largest else -math.inf
    if dtype == "bool":
        return largest
    if dtype.startswith("u"):
        return 2 ** int(dtype[4:]) - 1 if largest else 0
    bits = int(dtype[3:])
    return 2 ** (bits - 1) - 1 if largest else -(2 ** (bits - 1))


@op_rule(*COMBINE)
def reduce_window(eqn: Equation) -> Op | Refusal:
    """Sum, maximum or minimum over a sliding window (strides, padding, window dilation)."""
    params = eqn.params
    source = eqn.inputs[0]
    dtype = source.dtype
    combine = COMBINE[eqn.prim]
    if dtype == "bool":
        return Refusal(eqn.prim, "bool")
    window = tuple(map(int, params["window_dimensions"]))
    strides = tuple(map(int, params["window_strides"]))
    padding = tuple((int(low), int(high)) for low, high in params["padding"])
    base = tuple(params.get("base_dilation") or (1,) * len(window))
    dilation = tuple(map(int, params.get("window_dilation") or (1,) * len(window)))
    if any(b != 1 for b in base):
        return Refusal(eqn.prim, "base dilation")
    count = math.prod(window)
    if count > 4096:
        return Refusal(eqn.prim, f"a window of {count} points (cumulative sums have their own rule)")
    acc_type = accumulator_type(dtype)
    dims = [d for d in range(len(window)) if window[d] > 1]
    fill = identity(combine, dtype)

    def term(ctx: Context, out_index: IndexTuple, red: IndexTuple) -> list[tuple[int, ...]]:
        place: list[Index] = []
        guards: list[Guard] = []
        tap = iter(red)
        for d, part in enumerate(out_index):
            where = part * strides[d] - padding[d][0]
            if d in dims:
                where = where + next(tap) * dilation[d]
            guards.append(Guard(where, 0, source.shape[d] - 1))
            place.append(where)
        live = tuple(g for g in guards if not g.always(ctx.ranges))
        value = ctx.input(0, tuple(place), live, fill)
        return [(to_accumulator(ctx, value, dtype, acc_type),)]

    def finish(ctx: Context, accs: list[int], out_index: IndexTuple) -> list[int]:
        if acc_type != dtype:
            return [ctx.apply("convert", dtype, accs[0], source=acc_type)]
        return accs

    reds = tuple((f"t{d}", window[d]) for d in dims) or (("t0", 1),)
    if not dims:
        return Refusal(eqn.prim, "a window of one point")
    spec = ReduceSpec(reds, (AccSpec(combine, acc_type),), term, finish, flop=count)
    return Op(eqn.prim, "window", eqn.inputs, eqn.outputs, reduce=spec, cost=count, info={"window": window})


@op_rule("select_and_scatter_add")
def select_and_scatter_add(eqn: Equation) -> Op | Refusal:
    """Gradient of max (or min) pooling: each window's value goes to the point that the window selects.

    As a gather: a point p sums the values of the windows ``p // stride``, one earlier, .. that cover it and select it.
    A window takes its points in row-major order and keeps the selected one while ``select(selected, point)`` holds, so
    the first of equals wins; points of the padding take part with the neutral element of the pooling, as XLA has it.
    """
    params = eqn.params
    source, operand = eqn.inputs
    dtype = operand.dtype
    select = str(getattr(params["select_prim"], "name", params["select_prim"]))
    if select not in ("ge", "le") or dtype not in FLOATS:
        return Refusal(eqn.prim, f"selects by {select} in {dtype}")
    window = tuple(map(int, params["window_dimensions"]))
    strides = tuple(map(int, params["window_strides"]))
    padding = tuple((int(low), int(high)) for low, high in params["padding"])
    taps = list(itertools.product(*(range(k) for k in window)))
    if not 1 < len(taps) <= 64:
        return Refusal(eqn.prim, f"a window of {len(taps)} points")
    dims = [d for d, k in enumerate(window) if k > 1]
    if any(strides[d] != 1 for d in range(len(window)) if d not in dims):
        return Refusal(eqn.prim, "strides that skip points")
    acc_type = accumulator_type(dtype)
    fill = identity("max" if select == "ge" else "min", dtype)

    def selected(ctx: Context, place: IndexTuple) -> int:
        """Number of the point that the window at ``place`` selects."""
        best = number = -1
        for k, tap in enumerate(taps):
            where = tuple(p * s + t - low for p, s, t, (low, _) in zip(place, strides, tap, padding, strict=True))
            guards = tuple(Guard(w, 0, e - 1) for w, e in zip(where, operand.shape, strict=True))
            value = ctx.input(1, where, tuple(g for g in guards if not g.always(ctx.ranges)), fill)
            if acc_type != dtype:  # rounded: what decides are values as they are stored
                value = ctx.apply("convert", acc_type, value, source=dtype)
            if k == 0:
                best, number = value, ctx.const(0, "int32")
                continue
            stays = ctx.apply(select, "bool", best, value)
            best = ctx.apply("select", acc_type, stays, best, value)
            number = ctx.apply("select", "int32", stays, number, ctx.const(k, "int32"))
        return number

    def term(ctx: Context, out_index: IndexTuple, red: IndexTuple) -> list[tuple[int, ...]]:
        place: list[Index] = []
        reached: list[Guard] = []  # the window exists
        covered: list[Guard] = []  # and covers the point
        mine = Index()
        for d, part in enumerate(out_index):
            padded = part + padding[d][0]
            back = red[dims.index(d)] if d in dims else Index()
            place.append(padded.floordiv(strides[d], ctx.ranges) - back)
            tap = padded.mod(strides[d], ctx.ranges) + back * strides[d]
            reached.append(Guard(place[-1], 0, source.shape[d] - 1))
            covered.append(Guard(tap, 0, window[d] - 1))
            mine = mine * window[d] + tap
        live = tuple(g for g in reached if not g.always(ctx.ranges))
        found = ctx.apply("eq", "bool", selected(ctx, tuple(place)), ctx.index_value(mine, "int32"))
        inside = tuple(g for g in covered if not g.always(ctx.ranges))
        if inside:
            found = ctx.apply("select", "bool", ctx.guard_value(inside), found, ctx.const(False, "bool"))
        value = to_accumulator(ctx, ctx.input(0, tuple(place), live, 0.0), dtype, acc_type)
        return [(ctx.apply("select", acc_type, found, value, ctx.const(0.0, acc_type)),)]

    reds = tuple((f"t{d}", -(-window[d] // strides[d])) for d in dims)
    alone = all(extent == 1 for _, extent in reds)

    def finish(ctx: Context, accs: list[int], out_index: IndexTuple) -> list[int]:
        found = accs[0]
        if alone:  # a sum of one value as well starts from 0: it is never -0
            found = ctx.apply("add", acc_type, found, ctx.const(0.0, acc_type))
        return [found if acc_type == dtype else ctx.apply("convert", dtype, found, source=acc_type)]

    count = math.prod(e for _, e in reds) * 3 * len(taps)
    spec = ReduceSpec(reds, (AccSpec("add", acc_type),), term, finish, flop=count)
    info = {"window": window}
    return Op(eqn.prim, "window", eqn.inputs, eqn.outputs, reduce=spec, cost=count, info=info)
