"""Op rule of ``conv_general_dilated``: 1-D to 3-D, any layout, stride, padding, dilation, groups, depthwise
gradients.
"""

from __future__ import annotations

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.ops.precision import asked
from jcuts.ops.reduction import accumulator_type, to_accumulator
from jcuts.ops.registry import FLOATS, AccSpec, Context, Equation, IndexTuple, Op, ReduceSpec, op_rule


@op_rule("conv_general_dilated")
def convolution(eqn: Equation) -> Op | Refusal:
    """Direct convolution: a reduction over the filter's taps and the input channels of the output's group."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    lhs, rhs, out = eqn.inputs[0], eqn.inputs[1], eqn.outputs[0]
    precision = params.get("precision")
    if precision is not None and "Algorithm" in type(precision).__name__:
        return Refusal(eqn.prim, f"precision={precision} names an algorithm; only XLA honours it")
    acc_type = accumulator_type(out.dtype)
    if out.dtype not in FLOATS or lhs.dtype not in FLOATS or rhs.dtype not in FLOATS:
        return Refusal(eqn.prim, f"{lhs.dtype} x {rhs.dtype} -> {out.dtype}")
    if "float64" in (lhs.dtype, rhs.dtype) and acc_type == "float32":
        return Refusal(eqn.prim, f"{lhs.dtype} x {rhs.dtype} accumulated in float32")
    groups = int(params["feature_group_count"])
    batch_groups = int(params.get("batch_group_count", 1))
    l_batch, l_feature, *l_space = numbers.lhs_spec
    r_out, r_in, *r_space = numbers.rhs_spec
    o_batch, o_feature, *o_space = numbers.out_spec
    strides = tuple(map(int, params["window_strides"]))
    padding = tuple((int(low), int(high)) for low, high in params["padding"])
    dil_l, dil_r = (tuple(map(int, params[name])) for name in ("lhs_dilation", "rhs_dilation"))
    taps = tuple(rhs.shape[d] for d in r_space)
    c_group, k_total = rhs.shape[r_in], rhs.shape[r_out]
    k_group = k_total // groups
    if batch_groups != 1 and lhs.shape[l_batch] != batch_groups:
        return Refusal(eqn.prim, f"batch_group_count {batch_groups} in a batch of {lhs.shape[l_batch]}")
    depthwise = c_group == 1 and k_group == 1 and groups > 1
    n_space = len(taps)
    reds = [(f"t{i}", taps[i]) for i in range(n_space)] + [("c", c_group)]
    extents = [lhs.shape[d] for d in l_space]
    # XLA pads with zeros that meet infinite weights (NaN), but for float64 and some stretched inputs: there it leaves
    # taps outside out. For other stretched inputs NaN is a matter of its rewriting, and leaving out is the meaning.
    skips = acc_type == "float64" or any(d != 1 for d in dil_l)

    def term(ctx: Context, out_index: IndexTuple, red: IndexTuple) -> list[tuple[int, ...]]:
        feature = out_index[o_feature]
        group = Index() if groups == 1 else feature.floordiv(k_group, ctx.ranges)
        source: list[Index] = [Index()] * len(lhs.shape)
        # Of the gradient of a depthwise filter: every feature has a "batch" element, its channel, to itself.
        alone = batch_groups != 1
        source[l_batch] = feature.floordiv(k_total // batch_groups, ctx.ranges) if alone else out_index[o_batch]
        source[l_feature] = group * c_group + red[n_space]
        guards: list[Guard] = []
        for i in range(n_space):
            place = out_index[o_space[i]] * strides[i] + red[i] * dil_r[i] - padding[i][0]
            if dil_l[i] != 1:
                guards.append(Guard(place.mod(dil_l[i], ctx.ranges), 0, 0))
                guards.append(Guard(place, 0, (extents[i] - 1) * dil_l[i]))
                place = place.floordiv(dil_l[i], ctx.ranges)
            else:
                guards.append(Guard(place, 0, extents[i] - 1))
            source[l_space[i]] = place
        live = tuple(g for g in guards if not g.always(ctx.ranges))
        a = ctx.input(0, tuple(source), live, 0.0)
        weight: list[Index] = [Index()] * len(rhs.shape)
        weight[r_out], weight[r_in] = feature, red[n_space]
        for i in range(n_space):
            weight[r_space[i]] = red[i]
        b = ctx.input(1, tuple(weight))
        a = to_accumulator(ctx, a, lhs.dtype, acc_type)
        b = to_accumulator(ctx, b, rhs.dtype, acc_type)
        product = ctx.apply("mul", acc_type, a, b)
        if live and skips:
            product = ctx.apply("select", acc_type, ctx.guard_value(live), product, ctx.const(0.0, acc_type))
        return [(product,)]

    count = c_group
    for tap in taps:
        count *= tap

    def finish(ctx: Context, accs: list[int], out_index: IndexTuple) -> list[int]:
        if count == 1:  # XLA's sum of this one product starts from 0: no negative zero
            accs = [ctx.apply("add", acc_type, accs[0], ctx.const(0.0, acc_type))]
        if acc_type != out.dtype:
            return [ctx.apply("convert", out.dtype, accs[0], source=acc_type)]
        return accs

    info = {
        "depthwise": depthwise,
        "groups": groups,
        "precision": asked(precision),
        "taps": taps,
        "strides": strides,
        "roles": {"batch": (o_batch,), "space": tuple(o_space), "feature": (o_feature,)},
    }
    spec = ReduceSpec(tuple(reds), (AccSpec("add", acc_type),), term, finish, flop=2 * count)
    return Op(eqn.prim, "convolution", eqn.inputs, eqn.outputs, reduce=spec, cost=2 * count, info=info)
