"""Lowers prefix scans (cumsum, cummax, ...): one cumulative operation as a serial loop, with its prologue and epilogue.

This is the *scan* template.

The scanned dimension is a serial loop around two phases: the first combines the next element with what a local buffer
carries (one value per lane), the second computes the results from the carried value.  Lanes run along another
dimension, the last one that is not scanned; different rows are different tasks.
"""

from __future__ import annotations

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph, Guard
from jcuts.kernel_ir.program import Axis, Buffer, Grid, Phase, Program, Store
from jcuts.lower.builder import Builder, NotLowered, descendants, make_buffers, propagate_indices
from jcuts.lower.scan_axes import CARRY, LANE, TIME
from jcuts.lower.tensor_graph import OpNode, TensorGraph
from jcuts.ops.reduction import to_accumulator
from jcuts.ops.registry import FLOATS


def build_scan(
    graph: TensorGraph, subset: frozenset[int], root: OpNode, outputs: list[int], name: str
) -> Program | Refusal:
    """The unscheduled program. May raise `NotLowered`, which `lower.region.lower_region` catches."""
    op = root.op
    assert op is not None
    shape, axis, acc_type = op.inputs[0].shape, op.info["axis"], op.info["acc_type"]
    after = descendants(graph, subset, root.number)
    produced = {*root.outputs, *(t for n in after for t in graph.nodes[n].outputs)}
    if any(t not in produced for t in outputs):
        return Refusal(root.prim, "a value from before the cumulative operation is a result as well")
    lane = max((d for d, e in enumerate(shape) if d != axis and e > 1), default=None)
    names = [TIME if d == axis else LANE if d == lane else f"o{d}" for d in range(len(shape))]
    index = tuple(Index.axis(n) if e > 1 else Index() for n, e in zip(names, shape, strict=True))
    if op.info["reverse"] and shape[axis] > 1:
        index = tuple(shape[axis] - 1 - part if d == axis else part for d, part in enumerate(index))
    outer = [Axis(n, e) for n, e in zip(names, shape, strict=True) if e > 1 and n not in (TIME, LANE)]
    axes = (*outer, Axis(TIME, shape[axis]), *([Axis(LANE, shape[lane])] if lane is not None else []))
    ranges = {a.name: a.extent for a in axes}
    ins, outs, buffers = make_buffers(graph, subset, outputs)
    builder = Builder(graph, subset, ins)
    address = Index.axis(LANE) - Index.axis(f"{LANE}_lo") if lane is not None else Index()

    builder.start(ranges)
    context = builder.context(root)
    value = to_accumulator(context, context.input(0, index), op.inputs[0].dtype, acc_type)  # type: ignore[arg-type]
    later = (Guard(Index.axis(TIME), 1, None),)  # nothing is carried into the first step
    before = builder.target.load(CARRY, address, acc_type, later, 0)
    first = builder.guard_node((Guard(Index.axis(TIME), 0, 0),))
    combined = op.info["step"](context, before, value)
    start = value
    if root.prim == "cumsum" and acc_type in FLOATS:  # XLA's sums start at +0, and +0 + -0 is +0
        start = builder.target.apply("add", acc_type, value, builder.target.const(0.0, acc_type))
    carried = builder.target.apply("select", acc_type, first, start, combined)
    carry = Phase(root.prim, axes, (), (), Graph(), builder.target, (Store(CARRY, address, carried),))

    builder.start(ranges)
    result = builder.target.load(CARRY, address, acc_type)
    if acc_type != op.outputs[0].dtype:
        result = builder.target.apply("convert", op.outputs[0].dtype, result, source=acc_type)
    builder.anchors[root.outputs[0]] = (index, result)
    places = propagate_indices(graph, after, root, index, ranges)
    stores = []
    for tensor in outputs:
        if tensor not in places:
            raise NotLowered(Refusal(root.prim, "a result whose points do not follow the cumulative operation's"))
        place = places[tensor]
        target = flatten(place, graph.tensors[tensor].type.shape)
        stores.append(Store(outs[tensor], target, builder.value(tensor, place)))
    result_phase = Phase("map", axes, (), (), Graph(), builder.target, tuple(stores))
    grid = tuple(Grid(a.name, a.extent, a.extent) for a in axes)
    serial = tuple(a.name for a in axes if a.name != LANE)
    buffers.append(Buffer(CARRY, acc_type, (1 if lane is None else shape[lane],), "local"))
    return Program(name, tuple(buffers), grid, serial, (carry, result_phase), 1, "scan")
