"""Lowers a region to an unscheduled kernel program (every axis a plain loop): the dispatch over four templates.

- *map*: no reduction; one phase over the points of the outputs.
- *root*: one reduction, window, contraction or convolution with its prologue (element operations pulled into the body
  graph) and its epilogue (pushed onto the accumulator): register-level fusion (thesis 3.2.4).
- *scan*: one cumulative operation (`lower/scan.py`).
- *rows*: several reductions over the same dimensions and element operations between them (softmax, layer norm,
  statistics): one phase per level, joined through local buffers: shared-memory-level fusion
  (`lower/reduction/row_reduction.py`).

What a template cannot express is a `Refusal` with the reason; the partition search then keeps the operations unfused.
"""

from __future__ import annotations

import math

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Acc, Phase, Program, Red, Store
from jcuts.lower.builder import (
    Builder,
    NotLowered,
    acc_node,
    axes_of,
    descendants,
    make_buffers,
    op_rule,
    propagate_indices,
)
from jcuts.lower.reduction.row_reduction import build_rows
from jcuts.lower.region_memo import RegionMemo
from jcuts.lower.scan import build_scan
from jcuts.lower.tensor_graph import OpNode, TensorGraph
from jcuts.ops.layout import regroup
from jcuts.ops.registry import Op

PIECES = 1.0  # cost of a concatenation of pieces that are read from where they are


MAX_RECOMPUTED_OPS = 1.0  # element operations per point that may be recomputed for every use in a contraction or window


MEMO = RegionMemo()
"""Of all that this process lowers."""


def lower_region(
    graph: TensorGraph, subset: frozenset[int], name: str = "kernel", cheap: float = MAX_RECOMPUTED_OPS
) -> Program | Refusal:
    """The unscheduled program of a region, or a refusal with the reason why it cannot be one kernel.

    Operands are ``graph.subset_inputs(subset)``, results ``graph.subset_outputs(subset)``, in that order.

    Args: cheap: cost of one operation up to which a contraction or window may repeat it for every use.
    """
    return MEMO.lowered(graph, subset, (name, cheap), lambda: _lower(graph, subset, name, cheap))


def _lower(graph: TensorGraph, subset: frozenset[int], name: str, cheap: float) -> Program | Refusal:
    for number in sorted(subset):
        refusal = graph.nodes[number].refusal
        if refusal is not None:
            return refusal
    roots = [graph.nodes[n] for n in sorted(subset) if op_rule(graph.nodes[n]).is_root]
    outputs = graph.subset_outputs(subset)
    if not outputs:
        return Refusal("subset", "nothing outside uses its results")
    scans = [graph.nodes[n] for n in sorted(subset) if op_rule(graph.nodes[n]).family == "cumulative"]
    try:
        if scans:
            if len(scans) > 1 or roots:
                return Refusal("subset", "a cumulative operation beside another reduction")
            return build_scan(graph, subset, scans[0], outputs, name)
        if not roots:
            return _build_map(graph, subset, outputs, name)
        if len(roots) == 1 and (rows := lower_reduction(graph, subset, roots[0], outputs, name, cheap)) is not None:
            return rows
        if all(op_rule(r).family == "reduction" for r in roots):
            return build_rows(graph, subset, roots, outputs, name)
        return Refusal("subset", f"{len(roots)} reductions of different kinds")
    except NotLowered as declined:
        return declined.refusal


def _build_map(graph: TensorGraph, subset: frozenset[int], outputs: list[int], name: str) -> Program | Refusal:
    ins, outs, buffers = make_buffers(graph, subset, outputs)
    lead = max(outputs, key=lambda t: (graph.tensors[t].type.size, -t))
    shape = graph.tensors[lead].type.shape
    for tensor in outputs:
        if graph.tensors[tensor].type.size != graph.tensors[lead].type.size:
            return Refusal("subset", "results of different sizes in one element-wise kernel")
    axes, index, ranges = axes_of(shape)
    builder = Builder(graph, subset, ins)
    builder.start(ranges)
    stores = []
    for tensor in outputs:
        target = graph.tensors[tensor].type.shape
        place = index if target == shape else regroup(index, shape, target, ranges)
        stores.append(Store(outs[tensor], flatten(place, target), builder.value(tensor, place)))
    phase = Phase("map", axes, (), (), Graph(), builder.target, tuple(stores))
    return Program(name, tuple(buffers), (), (), (phase,), 1, "map")


def lower_reduction(
    graph: TensorGraph, subset: frozenset[int], root: OpNode, outputs: list[int], name: str, cheap: float
) -> Program | Refusal | None:
    """One reduction with its prologue and epilogue; None where the rows form should be tried instead."""
    op = op_rule(root)
    spec = op.reduce
    assert spec is not None
    after = descendants(graph, subset, root.number)
    before = subset - after - {root.number}
    feeders = graph.ancestors(subset, root.number)
    reduction = op.family == "reduction"
    if not reduction and not _window_reads_once(op):
        for number in sorted(before & feeders):
            feeder = op_rule(graph.nodes[number])
            by_number = feeder.prim == "div" and graph.tensors[graph.nodes[number].inputs[1]].scalar is not None
            pieces = graph.nodes[number].pieces
            past = op.is_complex and pieces is not None and pieces.slices <= subset
            cost = PIECES if past else feeder.cost
            if cost > cheap and not by_number:  # gradients of averages divide by a known number
                return Refusal(
                    graph.nodes[number].prim,
                    f"{cost:g} operations would be repeated for every use by {root.prim}",
                )
    produced = set(root.outputs) | {t for n in after for t in graph.nodes[n].outputs}
    if any(t not in produced for t in outputs):
        if reduction:
            return None
        return Refusal(root.prim, "a value from before the reduction is a result as well")
    out_shape = op.outputs[0].shape
    axes, index, ranges = axes_of(out_shape)
    reds = tuple(Red(n, extent) for n, extent in spec.reds if extent != 1)
    if not reds:  # accumulators live in reduction loops: one that runs once
        reds = (Red(spec.reds[0][0] if spec.reds else "r0", 1),)
    red_ranges = {r.name: r.extent for r in reds}
    red_index = tuple(Index.axis(n) if extent != 1 else Index() for n, extent in spec.reds)
    ins, outs, buffers = make_buffers(graph, subset, outputs)
    builder = Builder(graph, subset, ins, past_pieces=op.is_complex)
    builder.start({**ranges, **red_ranges})
    terms = spec.term(builder.context(root), index, red_index)  # type: ignore[arg-type]
    body = builder.target
    accs = tuple(Acc(a.combine, a.dtype, tuple(t), a.index_dtype) for a, t in zip(spec.accs, terms, strict=True))
    builder.start(ranges)
    values = [builder.target.add(acc_node(k, a)) for k, a in enumerate(accs)]
    results = spec.finish(builder.context(root), values, index)  # type: ignore[arg-type]
    for tensor, value in zip(root.outputs, results, strict=True):
        builder.anchors[tensor] = (index, value)
    try:
        places = propagate_indices(graph, after, root, index, ranges)
        stores = []
        for tensor in outputs:
            place = places.get(tensor)
            if place is None:
                return None if reduction else Refusal(root.prim, "a result whose points do not follow the reduction's")
            value = builder.value(tensor, place)
            stores.append(Store(outs[tensor], flatten(place, graph.tensors[tensor].type.shape), value))
    except NotLowered as declined:
        return None if reduction else declined.refusal
    phase = Phase(root.prim, axes, reds, accs, body, builder.target, tuple(stores))
    asked = op.info.get("precision")
    params = (("precision", asked),) if asked else ()
    return Program(name, tuple(buffers), (), (), (phase,), 1, op.family, params)


def _window_reads_once(op: Op) -> bool:
    """Whether windows read no more than their operand has: what comes before is computed no more often than alone."""
    assert op.reduce is not None
    read = math.prod(op.outputs[0].shape) * math.prod(extent for _, extent in op.reduce.reds)
    return op.family == "window" and read <= math.prod(op.inputs[0].shape)
