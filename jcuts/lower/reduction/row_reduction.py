"""Lowers row reductions (softmax, layer norm, statistics): several reductions of one row, a phase per reduction level.

This is the *rows* template.  A task takes one row (all reduced dimensions of one output point) and runs phase after
phase over it, so that the row stays in cache.  Reduced values, and expensive row values that several phases need, live
in local buffers: shared-memory-level fusion (thesis 3.2.4) on a CPU.

Where the last dimension is not reduced (statistics over batch and space), the lanes run along it and a task takes a
block of it; local buffers then hold one value per lane position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Grid, Phase, Program, Red, Store
from jcuts.lower.builder import Builder, NotLowered, acc_node, local_dtype, make_buffers
from jcuts.lower.tensor_graph import OpNode, TensorGraph
from jcuts.ops.layout import regroup
from jcuts.ops.registry import IndexTuple

KEEP_COST = 8.0
"""Cost of an element operation (`ops.registry.Op.cost`) from which on a value of a row with several uses is stored for
the next phase instead of computed again: what a store and a load from cache cost."""
KEEP_BYTES = 256 << 10
"""Largest row that is kept so: two phases find it in the L2 cache."""


@dataclass
class _Rows:
    """Names and axes of a program under construction."""

    graph: TensorGraph
    subset: frozenset[int]
    roots: list[OpNode]
    shape: tuple[int, ...]
    reduced: tuple[int, ...]
    index: IndexTuple
    outer: IndexTuple
    axes: tuple[Axis, ...]
    reds: tuple[Red, ...]
    lane: str
    builder: Builder
    outs: dict[int, str]
    buffers: list[Buffer]
    phases: list[Phase] = field(default_factory=list)
    level: dict[int, int] = field(default_factory=dict)

    @property
    def outer_shape(self) -> tuple[int, ...]:
        return tuple(e for d, e in enumerate(self.shape) if d not in self.reduced)


def build_rows(
    graph: TensorGraph, subset: frozenset[int], roots: list[OpNode], outputs: list[int], name: str
) -> Program | Refusal:
    """The unscheduled program. May raise `NotLowered`, which `lower.region.lower_region` catches."""
    first = roots[0]
    assert first.op is not None
    shape, reduced = first.op.inputs[0].shape, tuple(sorted(first.op.info["axes"]))
    for root in roots:
        assert root.op is not None
        if root.op.inputs[0].shape != shape or tuple(sorted(root.op.info["axes"])) != reduced:
            return Refusal("subset", "reductions over different dimensions")
    rows = _start(graph, subset, roots, shape, reduced, outputs)
    size, outer_size = math.prod(shape), math.prod(rows.outer_shape)
    for tensor in outputs:
        if graph.tensors[tensor].type.size not in (size, outer_size):
            return Refusal("subset", "a result is neither as large as the rows nor one value per row")
    _reduction_depth(rows)
    kept = _cached_row_values(rows, outputs, size)
    deepest = max(rows.level.values())
    for level in range(deepest + 1):
        for tensor in [t for t in kept if rows.level[t] == level]:
            _keep_phase(rows, tensor)
        members = [r for r in roots if rows.level[r.outputs[0]] == level + 1]
        if members:
            _reduce_phase(rows, members, level + 1, outputs, size, outer_size)
    _final_phase(rows, outputs, size, outer_size)
    serial = tuple(a.name for a in rows.axes if a.name != rows.lane)
    grid = tuple(Grid(a.name, a.extent, a.extent) for a in rows.axes)
    if not rows.phases:
        return Refusal("subset", "no phase")
    phases, buffers = _drop_dead_locals(rows)
    if len(phases) == 1:  # several accumulators in one loop, or reductions that no one reads: nothing is passed on
        return Program(name, buffers, (), (), phases, 1, "reduction" if phases[0].reds else "map")
    return Program(name, buffers, grid, serial, phases, 1, "rows")


def _drop_dead_locals(rows: _Rows) -> tuple[tuple[Phase, ...], tuple[Buffer, ...]]:
    """Phases and buffers without the local values that no phase reads (their users took them from registers)."""
    read = {n.buffer for p in rows.phases for graph in (p.body, p.exit) for n in graph.nodes if n.op == "load"}
    dead = {b.name for b in rows.buffers if b.role == "local" and b.name not in read}
    phases = [replace(p, stores=tuple(s for s in p.stores if s.buffer not in dead)) for p in rows.phases]
    return tuple(p for p in phases if p.stores), tuple(b for b in rows.buffers if b.name not in dead)


def _start(
    graph: TensorGraph,
    subset: frozenset[int],
    roots: list[OpNode],
    shape: tuple[int, ...],
    reduced: tuple[int, ...],
    outputs: list[int],
) -> _Rows:
    index = tuple(Index() if e == 1 else Index.axis(f"r{d}" if d in reduced else f"o{d}") for d, e in enumerate(shape))
    outer = tuple(index[d] for d in range(len(shape)) if d not in reduced)
    axes = tuple(Axis(f"o{d}", e) for d, e in enumerate(shape) if d not in reduced and e != 1)
    reds = tuple(Red(f"r{d}", e) for d, e in enumerate(shape) if d in reduced and e != 1)
    if not reds:
        raise NotLowered(Refusal("subset", "reductions over dimensions of extent 1"))
    last = max(d for d, e in enumerate(shape) if e != 1)
    lane = f"o{last}" if last not in reduced else ""
    ins, outs, buffers = make_buffers(graph, subset, outputs)
    return _Rows(
        graph, subset, roots, shape, reduced, index, outer, axes, reds, lane, Builder(graph, subset, ins), outs, buffers
    )


def _reduction_depth(rows: _Rows) -> None:
    """Reduction level of each tensor: reductions on the longest path to it."""
    for number in sorted(rows.subset):
        node = rows.graph.nodes[number]
        below = max((rows.level.get(t, 0) for t in node.inputs), default=0)
        for tensor in node.outputs:
            rows.level[tensor] = below + (node.op is not None and node.op.is_root)


def _cached_row_values(rows: _Rows, outputs: list[int], size: int) -> list[int]:
    """Row values that are stored in a local buffer: expensive, used by several operations, small enough."""
    found = []
    if rows.lane:
        return found
    length = math.prod(r.extent for r in rows.reds)
    for number in sorted(rows.subset):
        node = rows.graph.nodes[number]
        assert node.op is not None
        for tensor in node.outputs:
            info = rows.graph.tensors[tensor]
            uses = sum(u in rows.subset for u in info.users) + (tensor in outputs)
            if (
                info.type.size == size
                and node.op.cost >= KEEP_COST
                and uses > 1
                and length * 8 <= KEEP_BYTES
                and not node.op.is_root
            ):
                found.append(tensor)
    return found


def _ranges(rows: _Rows, with_reds: bool) -> dict[str, int]:
    ranges = {a.name: a.extent for a in rows.axes}
    if with_reds:
        ranges.update({r.name: r.extent for r in rows.reds})
    return ranges


def _place(rows: _Rows, tensor: int, size: int) -> IndexTuple:
    """Index of the current point in a tensor as large as the rows, or with one value per row."""
    target = rows.graph.tensors[tensor].type.shape
    if rows.graph.tensors[tensor].type.size == size and size != math.prod(rows.outer_shape):
        return rows.index if target == rows.shape else regroup(rows.index, rows.shape, target, _ranges(rows, True))
    return (
        rows.outer
        if target == rows.outer_shape
        else regroup(rows.outer, rows.outer_shape, target, _ranges(rows, False))
    )


def _lane_address(rows: _Rows) -> Index:
    """Address of a per-row value in its local buffer."""
    return Index.axis(rows.lane) - Index.axis(f"{rows.lane}_lo") if rows.lane else Index()


def _local(rows: _Rows, tensor: int, shape: tuple[int, ...], index: IndexTuple, address: Index) -> str:
    name = f"local{len(rows.builder.locals)}"
    dtype = local_dtype(rows.graph.tensors[tensor].type.dtype)
    rows.buffers.append(Buffer(name, dtype, shape, "local"))
    rows.builder.locals[tensor] = (name, index, address)
    return name


def _keep_phase(rows: _Rows, tensor: int) -> None:
    builder = rows.builder
    builder.start(_ranges(rows, True))
    place = _place(rows, tensor, math.prod(rows.shape))
    value = builder.value(tensor, place)
    extents = tuple(r.extent for r in rows.reds)
    address = flatten(tuple(Index.axis(r.name) for r in rows.reds), extents)
    name = _local(rows, tensor, extents, place, address)
    axes = (*rows.axes, *(Axis(r.name, r.extent) for r in rows.reds))
    rows.phases.append(
        Phase("keep", axes, (), (), Graph(), builder.target, (Store(name, address, builder.to_local_dtype(value)),))
    )


def _reduce_phase(
    rows: _Rows, members: list[OpNode], level: int, outputs: list[int], size: int, outer_size: int
) -> None:
    builder = rows.builder
    builder.start(_ranges(rows, True))
    accs: list[Acc] = []
    spans: list[tuple[OpNode, int, int]] = []
    for root in members:
        assert root.op is not None and root.op.reduce is not None
        spec = root.op.reduce
        red_index = tuple(rows.index[d] for d in root.op.info["axes"])
        terms = spec.term(builder.context(root), rows.outer, red_index)  # type: ignore[arg-type]
        spans.append((root, len(accs), len(terms)))
        accs.extend(Acc(a.combine, a.dtype, tuple(t), a.index_dtype) for a, t in zip(spec.accs, terms, strict=True))
    body = builder.target
    builder.start(_ranges(rows, False))
    nodes = [builder.target.add(acc_node(k, a)) for k, a in enumerate(accs)]
    stores: list[Store] = []
    fresh: list[tuple[int, int]] = []
    for root, begin, count in spans:
        assert root.op is not None and root.op.reduce is not None
        results = root.op.reduce.finish(builder.context(root), nodes[begin : begin + count], rows.outer)  # type: ignore[arg-type]
        for tensor, value in zip(root.outputs, results, strict=True):
            builder.anchors[tensor] = (rows.outer, value)
            fresh.append((tensor, value))
    for tensor in _row_values(rows, level, outputs, size):
        place = _place(rows, tensor, size)
        value = builder.value(tensor, place)
        builder.anchors[tensor] = (place, value)
        fresh.append((tensor, value))
    target = builder.target
    for tensor, value in fresh:
        place = _place(rows, tensor, size)
        if tensor in outputs:
            stores.append(Store(rows.outs[tensor], flatten(place, rows.graph.tensors[tensor].type.shape), value))
        if any(u in rows.subset for u in rows.graph.tensors[tensor].users):
            extents = (_lane_extent(rows),) if rows.lane else (1,)
            address = _lane_address(rows)
            stores.append(Store(_local(rows, tensor, extents, place, address), address, builder.to_local_dtype(value)))
    if stores:
        rows.phases.append(Phase("reduce", rows.axes, rows.reds, tuple(accs), body, target, tuple(stores)))


def _lane_extent(rows: _Rows) -> int:
    return next(a.extent for a in rows.axes if a.name == rows.lane)


def _row_values(rows: _Rows, level: int, outputs: list[int], size: int) -> list[int]:
    """One-per-row tensors of this level that later phases or the caller need, in program order."""
    found = []
    outer_size = math.prod(rows.outer_shape)
    for number in sorted(rows.subset):
        node = rows.graph.nodes[number]
        assert node.op is not None
        if node.op.is_root or node.op.pull is None:
            continue
        for tensor in node.outputs:
            info = rows.graph.tensors[tensor]
            if info.type.size != outer_size or rows.level[tensor] != level or outer_size == size:
                continue
            bigger = any(
                u in rows.subset and rows.graph.tensors[rows.graph.nodes[u].outputs[0]].type.size != outer_size
                for u in info.users
            )
            later = any(u in rows.subset and rows.level[rows.graph.nodes[u].outputs[0]] > level for u in info.users)
            if tensor in outputs or bigger or later:
                found.append(tensor)
    return found


def _final_phase(rows: _Rows, outputs: list[int], size: int, outer_size: int) -> None:
    wanted = [t for t in outputs if rows.graph.tensors[t].type.size == size and size != outer_size]
    zero_level = [t for t in outputs if rows.graph.tensors[t].type.size == outer_size != size and rows.level[t] == 0]
    if zero_level:
        raise NotLowered(Refusal("subset", "a value per row that needs no reduction is a result"))
    if not wanted:
        return
    builder = rows.builder
    builder.start(_ranges(rows, True))
    stores = []
    for tensor in wanted:
        place = _place(rows, tensor, size)
        value = builder.value(tensor, place)
        stores.append(Store(rows.outs[tensor], flatten(place, rows.graph.tensors[tensor].type.shape), value))
    axes = (*rows.axes, *(Axis(r.name, r.extent) for r in rows.reds))
    rows.phases.append(Phase("map", axes, (), (), Graph(), builder.target, tuple(stores)))
