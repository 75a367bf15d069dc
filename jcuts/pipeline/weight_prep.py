"""Fuses a program's argument preparation (weight transposes, hoisted vectors), the sums of a global norm and the
optimiser's updates into one kernel each, not one per layer.

For the calls that `rewrite.tf32_weight_args`, `rewrite.hoist_vectors`, `rewrite.backward.multi_tensor_norm` and
`rewrite.backward.multi_tensor_update` make.  Transposed weights need no tolerance: each is an operand rounded to TF32,
bit by bit what XLA computes.  Vectors and updates are element-wise operations, whose errors are stated
(`docs/vecmath.md`); sums are blocked.  Whether a program with these kernels is accurate and faster is checked with the
whole program.
"""

from __future__ import annotations

from typing import Any

from jcuts.base.errors import Refusal
from jcuts.base.identity_memo import IdentityMemo
from jcuts.fusion import greedy
from jcuts.kernel_ir.program import Program
from jcuts.lower import horizontal, weight_transpose
from jcuts.lower.reduction.multi_tensor_sums import ArraySum, multi_tensor_sums
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import build_graph
from jcuts.pipeline.computation import Computation
from jcuts.rewrite import hoist_vectors, tf32_weight_args
from jcuts.rewrite.backward import multi_tensor_norm, multi_tensor_update

MOST = 64
"""Calls whose program is kept."""
_programs: IdentityMemo[Program] = IdentityMemo(MOST)
"""Programs of calls: the variants of a function with the same rewrites share their equations."""


def programs(level: Computation) -> list[Program]:
    """The programs that `add_weight_prep_kernels` gives to calls: known before anything is tuned."""
    return [program for eqn in level.closed.jaxpr.eqns if (program := _program(eqn)) is not None]


def add_weight_prep_kernels(level: Computation, *, donates: bool = False) -> int:
    """Gives a kernel to every such call of a level that can have one; gives how many there are.

    Where no kernel of the level is chosen there is nobody to prepare anything for, and only norms and updates have one.

    Args: donates: whether the function's arguments are donated: its updates then overwrite them.
    """
    found = 0
    serves = any(subset.chosen for subset in level.subsets)
    for number, eqn in enumerate(level.closed.jaxpr.eqns):
        is_norm = multi_tensor_norm.is_norm(eqn)
        program = _program(eqn) if serves or is_norm or multi_tensor_update.is_update(eqn) else None
        if program is None:
            continue
        subset = level.subset(frozenset({number}), program)
        if subset.inputs != list(eqn.invars) or subset.outputs != list(eqn.outvars):
            continue  # an argument twice, or a result that nothing reads
        subset.chosen, subset.origin = program, "estimated"
        if donates and not is_norm:
            function = level.closed.jaxpr
            subset.aliases = multi_tensor_update.in_place(eqn, function.invars, function.outvars)
        level.merge_into(subset)
        found += 1
    return found


def _program(eqn: Any) -> Program | None:
    if (known := _programs.get(eqn)) is not None:
        return known
    made = _made(eqn)
    return made if made is None else _programs.keep(made, eqn)


def _made(eqn: Any) -> Program | None:
    shapes = tf32_weight_args.turned_shapes(eqn)
    if shapes is not None:
        return weight_transpose.transpose_program(shapes)
    leaves = multi_tensor_norm.leaf_sums(eqn)
    if leaves is not None:
        return _sums_program(eqn, leaves)
    inside = hoist_vectors.body(eqn)
    if inside is None:
        return None
    graph = build_graph(inside.jaxpr)
    grouping = greedy.group(graph)
    covered = frozenset[int]().union(*(members for members, _ in grouping.subsets))
    if len(covered) < len(graph.nodes):
        return None
    operands = {graph.of_var[v]: k for k, v in enumerate(inside.jaxpr.invars)}
    results = {graph.of_var[v]: k for k, v in enumerate(inside.jaxpr.outvars)}
    reads = [graph.subset_inputs(members) for members, _ in grouping.subsets]
    makes = [graph.subset_outputs(members) for members, _ in grouping.subsets]
    if not all(t in operands for ts in reads for t in ts) or not all(t in results for ts in makes for t in ts):
        return None  # one needs what another makes
    return horizontal.horizontal_fuse(
        [program for _, program in grouping.subsets],
        [[operands[t] for t in ts] for ts in reads],
        [[results[t] for t in ts] for ts in makes],
    )


def _sums_program(eqn: Any, leaves: list[multi_tensor_norm.LeafSums]) -> Program | None:
    """The program of a call of partial sums."""
    sums = []
    for leaf in leaves:
        program, operands = None, leaf.operands
        if leaf.function.jaxpr.eqns:
            graph = build_graph(leaf.function.jaxpr)
            members = frozenset(node.number for node in graph.nodes)
            program = lower_region(graph, members)
            if isinstance(program, Refusal):
                return None
            place = {graph.of_var[v]: k for v, k in zip(leaf.function.jaxpr.invars, leaf.operands, strict=True)}
            operands = tuple(place[tensor] for tensor in graph.subset_inputs(members))
        sums.append(ArraySum(program, operands, leaf.blocks, leaf.chunk))
    return multi_tensor_sums([(tuple(v.aval.shape), v.aval.dtype.name) for v in eqn.invars], sums)
