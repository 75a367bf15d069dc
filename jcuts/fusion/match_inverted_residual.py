"""Matches inverted residuals (MBConv) in a partition: expand GEMM, depthwise and project GEMM become one region.

    { dot, add, clamp } -> { depthwise, add, clamp } -> { dot, add }     becomes     one subset

or, where the first does not match, the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import NodeSet
from jcuts.kernel_ir.program import Program
from jcuts.lower.layer_fusion import join_stages
from jcuts.lower.patterns.inverted_residual import TEMPLATE, match_inverted_residual
from jcuts.lower.tensor_graph import TensorGraph

Part = tuple[NodeSet, Program]


@dataclass(frozen=True)
class InvertedResidualGroup:
    """Regions of a partition that can be fused into one inverted-residual kernel."""

    program: Program
    parts: tuple[Part, ...]

    @property
    def members(self) -> NodeSet:
        """All operations of the regions."""
        return frozenset(m for members, _ in self.parts for m in members)


def inverted_residual_groups(
    graph: TensorGraph, cover: Sequence[Part], has_form: Callable[[Program], bool]
) -> list[InvertedResidualGroup]:
    """The inverted residuals in a partition; no region is in two of them.

    Args: has_form: whether a program can be a kernel here.
    """
    programs = dict(cover)
    maker = {t: members for members in programs for t in graph.subset_outputs(members)}
    found: list[InvertedResidualGroup] = []
    taken: set[NodeSet] = set()
    for members in sorted(programs, key=max):
        reads = [maker[t] for t in graph.subset_inputs(members) if t in maker]
        reader = _reader(graph, members, programs)
        if reader is None:
            continue
        for subsets in (*((before, members, reader) for before in reads), (members, reader)):
            if taken & set(subsets) or len(set(subsets)) < len(subsets):
                continue
            parts = tuple((part, programs[part]) for part in subsets)
            program = concatenate_programs(graph, parts)
            if isinstance(program, Program) and has_form(program):
                found.append(InvertedResidualGroup(program, parts))
                taken |= set(subsets)
                break
    return found


def _reader(graph: TensorGraph, members: NodeSet, cover: Mapping[NodeSet, Program]) -> NodeSet | None:
    """The only region that reads the one result of another."""
    made = graph.subset_outputs(members)
    users = set(graph.tensors[made[0]].users) - members if len(made) == 1 else set()
    if not users or graph.tensors[made[0]].escapes:
        return None
    return next((s for s in cover if users <= s), None)


def concatenate_programs(graph: TensorGraph, parts: Sequence[Part], name: str = "kernel") -> Program | Refusal:
    """One program of several regions, each of which produces the one tensor that only the next one reads."""
    if any(dict(program.params).get("precision") for k, (_, program) in enumerate(parts) if k != len(parts) - 2):
        return Refusal("block", "its products ask for more than the default precision")
    program = join_stages(graph, parts, TEMPLATE, name)
    if isinstance(program, Refusal):
        return program
    found = match_inverted_residual(program)
    return found if isinstance(found, Refusal) else program
