"""Op rule of ``conv_general_dilated``: 1-D to 3-D, any layout, stride, padding, dilation, feature and batch groups."""

from __future__ import annotations

import math

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.ops.reduction import accumulator_type, to_accumulator
from jcuts.ops.registry import FLOATS, AccSpec, Context, Equation, IndexTuple, Op, ReduceSpec, op_rule
from jcuts.trace.precision import asked


@op_rule("conv_general_dilated")
def convolution(eqn: Equation) -> Op | Refusal:
    """Direct convolution: a reduction over the filter's taps and the input channels of the output's group."""
    refusal = _refusal(eqn)
    if refusal is not None:
        return refusal
    conv = _Convolution(eqn)
    info = {
        "depthwise": conv.c_group == 1 and conv.k_group == 1 and conv.groups > 1,
        "groups": conv.groups,
        "precision": asked(eqn.params.get("precision")),
        "taps": conv.taps,
        "strides": conv.strides,
        "roles": {"batch": (conv.o_batch,), "space": tuple(conv.o_space), "feature": (conv.o_feature,)},
    }
    cost = 2 * conv.count
    reds = (*((f"t{i}", tap) for i, tap in enumerate(conv.taps)), ("c", conv.c_group))
    spec = ReduceSpec(reds, (AccSpec("add", conv.acc_type),), conv.term, conv.finish, flop=cost)
    return Op(eqn.prim, "convolution", eqn.inputs, eqn.outputs, reduce=spec, cost=cost, info=info)


def _refusal(eqn: Equation) -> Refusal | None:
    """Why XLA keeps a convolution."""
    params = eqn.params
    lhs, rhs, out = eqn.inputs[0], eqn.inputs[1], eqn.outputs[0]
    precision = params.get("precision")
    if precision is not None and "Algorithm" in type(precision).__name__:
        return Refusal(eqn.prim, f"precision={precision} names an algorithm; only XLA honours it")
    if out.dtype not in FLOATS or lhs.dtype not in FLOATS or rhs.dtype not in FLOATS:
        return Refusal(eqn.prim, f"{lhs.dtype} x {rhs.dtype} -> {out.dtype}")
    if "float64" in (lhs.dtype, rhs.dtype) and accumulator_type(out.dtype) == "float32":
        return Refusal(eqn.prim, f"{lhs.dtype} x {rhs.dtype} accumulated in float32")
    return None


class _Convolution:
    """Sizes and dimension numbers of one equation, and the reduction that computes a result of it.

    Attributes:
        c_group, k_group: input and output channels of a feature group.
        count: products of a result.
    """

    def __init__(self, eqn: Equation) -> None:
        params = eqn.params
        numbers = params["dimension_numbers"]
        self.lhs, self.rhs, self.out = eqn.inputs[0], eqn.inputs[1], eqn.outputs[0]
        self.acc_type = accumulator_type(self.out.dtype)
        self.groups = int(params["feature_group_count"])
        self.batch_groups = int(params.get("batch_group_count", 1))
        self.l_batch, self.l_feature, *self.l_space = numbers.lhs_spec
        self.r_out, self.r_in, *self.r_space = numbers.rhs_spec
        self.o_batch, self.o_feature, *self.o_space = numbers.out_spec
        self.strides = tuple(map(int, params["window_strides"]))
        self.padding = tuple((int(low), int(high)) for low, high in params["padding"])
        self.lhs_dilation, self.rhs_dilation = (tuple(map(int, params[n])) for n in ("lhs_dilation", "rhs_dilation"))
        self.taps = tuple(self.rhs.shape[d] for d in self.r_space)
        self.c_group, self.k_total = self.rhs.shape[self.r_in], self.rhs.shape[self.r_out]
        self.k_group = self.k_total // self.groups
        self.count = self.c_group * math.prod(self.taps)
        # XLA pads with zeros that meet infinite weights (NaN), but for float64 and some stretched inputs: there it
        # leaves taps outside out. For other stretched inputs NaN is a matter of its rewriting, and leaving out is the
        # meaning.
        self.skips = self.acc_type == "float64" or any(d != 1 for d in self.lhs_dilation)

    def term(self, ctx: Context, out_index: IndexTuple, red: IndexTuple) -> list[tuple[int, ...]]:
        """The product of a tap and a channel."""
        acc_type = self.acc_type
        source, live = self._source(ctx, out_index, red)
        a = ctx.input(0, source, live, 0.0)
        weight: list[Index] = [Index()] * len(self.rhs.shape)
        weight[self.r_out], weight[self.r_in] = out_index[self.o_feature], red[len(self.taps)]
        for i, dim in enumerate(self.r_space):
            weight[dim] = red[i]
        b = ctx.input(1, tuple(weight))
        a = to_accumulator(ctx, a, self.lhs.dtype, acc_type)
        b = to_accumulator(ctx, b, self.rhs.dtype, acc_type)
        product = ctx.apply("mul", acc_type, a, b)
        if live and self.skips:
            product = ctx.apply("select", acc_type, ctx.guard_value(live), product, ctx.const(0.0, acc_type))
        return [(product,)]

    def _source(self, ctx: Context, out_index: IndexTuple, red: IndexTuple) -> tuple[IndexTuple, tuple[Guard, ...]]:
        """Where a tap reads the input, and what must hold for that to be inside."""
        feature = out_index[self.o_feature]
        group = Index() if self.groups == 1 else feature.floordiv(self.k_group, ctx.ranges)
        source: list[Index] = [Index()] * len(self.lhs.shape)
        source[self.l_batch] = out_index[self.o_batch]
        if self.batch_groups != 1:  # of the gradient of a filter with groups: a feature reads its group's batch alone
            group_batch = self.lhs.shape[self.l_batch] // self.batch_groups
            batch_group = feature.floordiv(self.k_total // self.batch_groups, ctx.ranges)
            source[self.l_batch] = batch_group * group_batch + out_index[self.o_batch]
        source[self.l_feature] = group * self.c_group + red[len(self.taps)]
        guards: list[Guard] = []
        for i, dim in enumerate(self.l_space):
            extent, dilation = self.lhs.shape[dim], self.lhs_dilation[i]
            place = out_index[self.o_space[i]] * self.strides[i] + red[i] * self.rhs_dilation[i] - self.padding[i][0]
            if dilation != 1:
                guards.append(Guard(place.mod(dilation, ctx.ranges), 0, 0))
                guards.append(Guard(place, 0, (extent - 1) * dilation))
                place = place.floordiv(dilation, ctx.ranges)
            else:
                guards.append(Guard(place, 0, extent - 1))
            source[dim] = place
        return tuple(source), tuple(g for g in guards if not g.always(ctx.ranges))

    def finish(self, ctx: Context, accs: list[int], out_index: IndexTuple) -> list[int]:
        """The result of the sum."""
        if self.count == 1:  # XLA's sum of this one product starts from 0: no negative zero
            accs = [ctx.apply("add", self.acc_type, accs[0], ctx.const(0.0, self.acc_type))]
        if self.acc_type != self.out.dtype:
            return [ctx.apply("convert", self.out.dtype, accs[0], source=self.acc_type)]
        return accs
