"""Lowers a contraction or convolution with column reductions of its result: one program, the sums in its epilogue.

The contraction and all element operations at its points are one phase, which keeps every summed value in a local
buffer; the reductions, and what is computed per column from them, are the phases of `lower.reduction.row_reduction` on
these buffers.  Reductions must be over all rows of the GEMM (batch and space of a convolution) and their values
functions of the contraction's point; what is computed of a sum and again at every point belongs to another region.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.buffer_renaming import renamed, with_kept
from jcuts.kernel_ir.program import Buffer, Grid, Program
from jcuts.lower.builder import NotLowered, built_or_refused, descendants, make_buffers, op_rule
from jcuts.lower.patterns.column_sums import TEMPLATE, is_row_major_gemm, match_column_sums, sums_all_rows
from jcuts.lower.reduction.row_reduction import build_rows
from jcuts.lower.region import MAX_RECOMPUTED_OPS, MEMO, lower_reduction, lower_region
from jcuts.lower.tensor_graph import OpNode, TensorGraph


def lower_region_or_column_sums(
    graph: TensorGraph, subset: frozenset[int], name: str = "kernel", cheap: float = MAX_RECOMPUTED_OPS
) -> Program | Refusal:
    """The program of a region (`lower.region.lower_region`), also where it is a contraction with column reductions."""
    found = lower_region(graph, subset, name, cheap)
    if isinstance(found, Program) or not _has_reductions_of_contraction(graph, subset):
        return found
    return MEMO.lowered(graph, subset, (name, cheap, TEMPLATE), lambda: _lower(graph, subset, name, cheap))


def _has_reductions_of_contraction(graph: TensorGraph, subset: frozenset[int]) -> bool:
    """Whether a region has one contraction or convolution, and reductions besides."""
    ops = [op for n in subset if (op := graph.nodes[n].op) is not None]
    roots = [op for op in ops if op.is_root]
    contractions = [op for op in roots if op.is_complex]
    others = [op for op in roots if not op.is_complex]
    if len(ops) != len(subset) or len(contractions) != 1 or not others:
        return False
    return all(op.family == "reduction" for op in others) and not any(op.family == "cumulative" for op in ops)


@dataclass(frozen=True)
class _Parts:
    """Equations of a region: those at the contraction's points, and those behind the reductions.

    Equations that neither the contraction nor a reduction feeds are in both: each part computes what it needs of them.
    """

    root: OpNode
    points: frozenset[int]
    columns: frozenset[int]
    reductions: list[OpNode]


def _parts(graph: TensorGraph, subset: frozenset[int]) -> _Parts:
    roots = [graph.nodes[n] for n in sorted(subset) if op_rule(graph.nodes[n]).is_root]
    root = next(r for r in roots if op_rule(r).is_complex)
    reductions = [r for r in roots if r is not root]
    behind = frozenset(r.number for r in reductions).union(*(descendants(graph, subset, r.number) for r in reductions))
    if root.number in behind:
        raise NotLowered(Refusal(root.prim, "a reduction before the contraction"))
    fed = (descendants(graph, subset, root.number) | {root.number}) - behind
    points = fed.union(*(graph.ancestors(subset, number) for number in fed))
    return _Parts(root, points, subset - fed, reductions)


def _lower(graph: TensorGraph, subset: frozenset[int], name: str, cheap: float) -> Program | Refusal:
    try:
        return _composed(graph, subset, _parts(graph, subset), name, cheap)
    except NotLowered as declined:
        return declined.refusal


def _composed(graph: TensorGraph, subset: frozenset[int], parts: _Parts, name: str, cheap: float) -> Program | Refusal:
    outputs = graph.subset_outputs(subset)
    of_columns = [t for t in outputs if graph.tensors[t].producer not in parts.points]
    of_points = [t for t in outputs if t not in of_columns]
    first = op_rule(parts.reductions[0])
    if any(graph.tensors[t].type.size >= first.inputs[0].size for t in of_columns):
        return Refusal("subset", "a result as large as the contraction's that depends on its column sums")
    fed = parts.points - parts.columns
    kept = [t for t in graph.subset_inputs(parts.columns) if graph.tensors[t].producer in fed]
    wanted = [*of_points, *(t for t in kept if t not in of_points)]
    points = _lowered_points(graph, parts, wanted, name, cheap)
    if isinstance(points, Refusal):
        return points
    columns = _lowered_columns(graph, parts, of_columns, name)
    if isinstance(columns, Refusal):
        return columns
    ins, outs, buffers = make_buffers(graph, subset, outputs)
    locals_ = {t: f"kept{k}" for k, t in enumerate(kept)}
    own_ins, own_outs, _ = make_buffers(graph, parts.points, wanted)
    names = {name: ins[t] for t, name in own_ins.items() if t in ins}
    names |= {name: outs.get(t, locals_.get(t, "")) for t, name in own_outs.items()}
    both = {outs[t]: locals_[t] for t in kept if t in outs}
    contraction = with_kept(renamed(points.phases[0], names), both)
    own_ins, own_outs, _ = make_buffers(graph, parts.columns, of_columns)
    names = {name: ins.get(t, locals_.get(t, "")) for t, name in own_ins.items()}
    names |= {name: outs[t] for t, name in own_outs.items()}
    types = {t: graph.tensors[t].type for t in kept}
    made = Program(
        name,
        (*buffers, *(Buffer(locals_[t], types[t].dtype, types[t].shape, "local") for t in kept), *columns.locals),
        tuple(Grid(g.axis, g.extent, g.block) for g in columns.grid),
        (),
        (contraction, *(renamed(phase, names) for phase in columns.phases)),
        1,
        TEMPLATE,
        points.params,
    )
    if columns.serial or match_column_sums(made) is None or not sums_all_rows(made):
        return Refusal("subset", "reductions that are no sums of a contraction's rows")
    return made


def _lowered_points(graph: TensorGraph, parts: _Parts, wanted: list[int], name: str, cheap: float) -> Program | Refusal:
    """The contraction with its epilogue; a refusal where kernels with column sums cannot be made of it."""

    def lower() -> Program | Refusal:
        made = lower_reduction(graph, parts.points, parts.root, wanted, name, cheap)
        if made is None or isinstance(made, Refusal):
            return made or Refusal(parts.root.prim, "no contraction")
        if not is_row_major_gemm(made, {b.name for b in made.outputs}):
            return Refusal(parts.root.prim, "no GEMM of the default precision whose columns are contiguous")
        return made

    return MEMO.lowered(graph, parts.points, (name, cheap, TEMPLATE, _ranks(graph, parts.points, wanted)), lower)


def _lowered_columns(graph: TensorGraph, parts: _Parts, wanted: list[int], name: str) -> Program | Refusal:
    """The column reductions and what is computed of them: a region that grows at its points has the same ones."""

    def lower() -> Program | Refusal:
        return build_rows(graph, parts.columns, parts.reductions, wanted, name)

    options = (name, TEMPLATE, _ranks(graph, parts.columns, wanted))
    return MEMO.lowered(graph, parts.columns, options, lambda: built_or_refused(graph, parts.columns, lower))


def _ranks(graph: TensorGraph, subset: frozenset[int], wanted: list[int]) -> tuple[int, ...]:
    """Results as numbers of the region's own."""
    touched = {t for n in subset for t in graph.touched[n]}
    rank = {tensor: place for place, tensor in enumerate(sorted(touched))}
    return tuple(rank[t] for t in wanted)
