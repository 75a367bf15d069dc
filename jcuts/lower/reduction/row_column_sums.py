"""Lowers row reductions with column reductions of values at their points: gradients of layer norm and RMS norm.

The row phases are those of `lower.reduction.row_reduction`, which keep every summed value in a local buffer; one more
phase sums the columns of these buffers and of operands.  Rows are the last dimension, columns are summed over all
others; nothing at the rows' points may depend on a column sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.buffer_renaming import renamed, with_kept
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.builder import NotLowered, built_or_refused, descendants, make_buffers
from jcuts.lower.patterns.row_column_sums import TEMPLATE, split_phases, sums_columns
from jcuts.lower.reduction.column_sums import lower_region_or_column_sums
from jcuts.lower.reduction.row_reduction import build_rows
from jcuts.lower.region import MAX_RECOMPUTED_OPS, MEMO
from jcuts.lower.tensor_graph import OpNode, TensorGraph


def lower_region_or_sums(
    graph: TensorGraph, subset: frozenset[int], name: str = "kernel", cheap: float = MAX_RECOMPUTED_OPS
) -> Program | Refusal:
    """The program of a region, also where column reductions stand beside a contraction or beside row reductions."""
    found = lower_region_or_column_sums(graph, subset, name, cheap)
    return found if isinstance(found, Program) else lower_row_column_sums(graph, subset, name)


def lower_row_column_sums(graph: TensorGraph, subset: frozenset[int], name: str = "kernel") -> Program | Refusal:
    """The program of row reductions with column reductions beside them, or why the region is none."""
    return MEMO.lowered(
        graph, subset, (name, TEMPLATE), lambda: built_or_refused(graph, subset, lambda: _lower(graph, subset, name))
    )


def sums_columns_of(node: OpNode) -> bool:
    """Whether an equation sums over all dimensions but the last one."""
    if not _is_reduction(node) or (op := node.op) is None or op.reduce is None:
        return False
    return _reduced(node) == _long(node)[:-1] and [a.combine for a in op.reduce.accs] == ["add"]


def reduces_rows_of(node: OpNode) -> bool:
    """Whether an equation reduces the last dimension alone."""
    return _is_reduction(node) and _reduced(node) == _long(node)[-1:]


def _is_reduction(node: OpNode) -> bool:
    op = node.op
    return op is not None and op.family == "reduction" and op.reduce is not None and len(_long(node)) > 1


def _long(node: OpNode) -> list[int]:
    """Dimensions of a reduction's operand that are longer than 1."""
    assert node.op is not None
    return [d for d, extent in enumerate(node.op.inputs[0].shape) if extent != 1]


def _reduced(node: OpNode) -> list[int]:
    assert node.op is not None
    return [d for d in _long(node) if d in node.op.info["axes"]]


@dataclass(frozen=True)
class _Parts:
    """Equations of a region: at the rows' points, and those behind the column sums with what feeds them beside rows."""

    points: frozenset[int]
    columns: frozenset[int]
    fed: frozenset[int]
    rows: list[OpNode]
    sums: list[OpNode]


def _parts(graph: TensorGraph, subset: frozenset[int]) -> _Parts:
    nodes = [graph.nodes[n] for n in sorted(subset)]
    roots = [node for node in nodes if node.op is not None and node.op.is_root]
    sums = [root for root in roots if sums_columns_of(root)]
    rows = [root for root in roots if reduces_rows_of(root)]
    shapes = {root.op.inputs[0].shape for root in roots if root.op is not None}
    if not sums or not rows or len(sums) + len(rows) != len(roots) or len(shapes) != 1:
        raise NotLowered(Refusal("subset", "no sums of columns beside reductions of the same rows"))
    behind = frozenset(s.number for s in sums).union(*(descendants(graph, subset, s.number) for s in sums))
    if any(root.number in behind for root in rows):
        raise NotLowered(Refusal("subset", "a row reduction of what depends on column sums"))
    after = frozenset(r.number for r in rows).union(*(descendants(graph, subset, r.number) for r in rows))
    fed = after - behind
    points = subset - behind
    columns = behind.union(*(graph.ancestors(subset - fed, number) for number in behind))
    return _Parts(points, columns, fed, rows, sums)


def _lower(graph: TensorGraph, subset: frozenset[int], name: str) -> Program | Refusal:
    parts = _parts(graph, subset)
    outputs = graph.subset_outputs(subset)
    of_points = [t for t in outputs if graph.tensors[t].producer in parts.points]
    of_columns = [t for t in outputs if t not in of_points]
    kept = [t for t in graph.subset_inputs(parts.columns) if graph.tensors[t].producer in parts.fed]
    wanted = [*of_points, *(t for t in kept if t not in of_points)]
    if not wanted:
        return Refusal("subset", "no result of the rows")
    points = build_rows(graph, parts.points, parts.rows, wanted, name)
    columns = build_rows(graph, parts.columns, parts.sums, of_columns, name)
    for made in (points, columns):
        if isinstance(made, Refusal):
            return made
    assert isinstance(points, Program) and isinstance(columns, Program)
    if columns.template != "reduction" or columns.locals:
        return Refusal("subset", "column reductions that depend on each other")
    made = _composed(graph, subset, parts, (points, wanted), (columns, of_columns), kept)
    return made if sums_columns(made) else Refusal("subset", "column sums that a block's registers cannot hold")


def _composed(
    graph: TensorGraph,
    subset: frozenset[int],
    parts: _Parts,
    rows: tuple[Program, list[int]],
    sums: tuple[Program, list[int]],
    kept: list[int],
) -> Program:
    """One program of the row phases and the phase of column sums. Args: rows, sums: programs and their results."""
    points, wanted = rows
    columns, of_columns = sums
    outputs = graph.subset_outputs(subset)
    ins, outs, buffers = make_buffers(graph, subset, outputs)
    locals_ = {t: f"kept{k}" for k, t in enumerate(kept)}
    both = {outs[t]: locals_[t] for t in kept if t in outs}
    own_ins, own_outs, _ = make_buffers(graph, parts.points, wanted)
    names = {name: ins[t] for t, name in own_ins.items() if t in ins}
    names |= {name: outs.get(t, locals_.get(t, "")) for t, name in own_outs.items()}
    at = split_phases(replace(points, phases=(*points.phases, columns.phases[0])))
    places = {b.name: at.row * b.size for b in points.locals}  # of all rows: phases follow each other, not row by row
    of_rows = [with_kept(renamed(phase, names, places), both) for phase in points.phases]
    own_ins, own_outs, _ = make_buffers(graph, parts.columns, of_columns)
    names = {name: ins.get(t, locals_.get(t, "")) for t, name in own_ins.items()}
    names |= {name: outs[t] for t, name in own_outs.items()}
    of_sums = renamed(columns.phases[0], names)
    types = {t: graph.tensors[t].type for t in kept}
    held = (
        *(replace(b, shape=(at.row_count, *b.shape)) for b in points.locals),
        *(Buffer(locals_[t], types[t].dtype, types[t].shape, "local") for t in kept),
    )
    return Program(points.name, (*buffers, *held), (), (), (*of_rows, of_sums), 1, TEMPLATE)
