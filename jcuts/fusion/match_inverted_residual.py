"""Matches inverted residuals (MBConv) in a partition: expand GEMM, depthwise and project GEMM become one region.

    { dot, add, clamp } -> { depthwise, add, clamp } -> { dot, add }     becomes     one subset

or, where the first does not match, the last two.
"""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import NodeSet
from jcuts.fusion.region_group import HasForm, Part, RegionGroup, only_reader
from jcuts.kernel_ir.program import Program
from jcuts.lower.layer_fusion import join_stages
from jcuts.lower.patterns.inverted_residual import TEMPLATE, match_inverted_residual
from jcuts.lower.tensor_graph import TensorGraph


def inverted_residual_groups(graph: TensorGraph, cover: Sequence[Part], has_form: HasForm) -> list[RegionGroup]:
    """The inverted residuals in a partition; no region is in two of them.

    Args: has_form: whether a program can be a kernel here.
    """
    programs = dict(cover)
    maker = {t: members for members in programs for t in graph.subset_outputs(members)}
    found: list[RegionGroup] = []
    taken: set[NodeSet] = set()
    for members in sorted(programs, key=max):
        reads = [maker[t] for t in graph.subset_inputs(members) if t in maker]
        reader = only_reader(graph, members, programs)
        if reader is None:
            continue
        for subsets in (*((before, members, reader) for before in reads), (members, reader)):
            if taken & set(subsets) or len(set(subsets)) < len(subsets):
                continue
            parts = tuple((part, programs[part]) for part in subsets)
            program = concatenate_programs(graph, parts)
            if isinstance(program, Program) and has_form(program):
                found.append(RegionGroup(program, parts))
                taken |= set(subsets)
                break
    return found


def concatenate_programs(graph: TensorGraph, parts: Sequence[Part], name: str = "kernel") -> Program | Refusal:
    """One program of several regions, each of which produces the one tensor that only the next one reads."""
    if any(dict(program.params).get("precision") for k, (_, program) in enumerate(parts) if k != len(parts) - 2):
        return Refusal("block", "its products ask for more than the default precision")
    program = join_stages(graph, parts, TEMPLATE, name)
    if isinstance(program, Refusal):
        return program
    found = match_inverted_residual(program)
    return found if isinstance(found, Refusal) else program
