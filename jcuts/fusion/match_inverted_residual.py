"""Matches inverted residuals (MBConv) in a partition: expand GEMM, depthwise and project GEMM become one region.

    { dot, add, clamp } -> { depthwise, add, clamp } -> { dot, add }     becomes     one subset

or, where the first does not match, the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import NodeSet
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Buffer, Phase, Program
from jcuts.lower.builder import make_buffers
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
    union = frozenset(m for members, _ in parts for m in members)
    results = graph.subset_outputs(union)
    ins, outs, buffers = make_buffers(graph, union, results)
    names = {**ins, **outs}
    for number, (members, _) in enumerate(parts[:-1]):
        made = graph.subset_outputs(members)
        if len(made) != 1 or made[0] in outs:
            return Refusal("block", "a value between the products is needed elsewhere")
        kind = graph.tensors[made[0]].type
        names[made[0]] = f"mid{number}"
        buffers.append(Buffer(f"mid{number}", kind.dtype, kind.shape, "local"))
    phases = []
    for members, program in parts:
        if len(program.phases) != 1:
            return Refusal("block", "a part of several phases")
        mine = {f"in{k}": names[t] for k, t in enumerate(graph.subset_inputs(members))}
        mine.update((f"out{k}", names[t]) for k, t in enumerate(graph.subset_outputs(members)))
        if dict(program.params).get("precision") and program is not parts[-2][1]:
            return Refusal("block", "its products ask for more than the default precision")
        phases.append(_over(program.phases[0], mine))
    program = Program(name, tuple(buffers), (), (), tuple(phases), 1, TEMPLATE)
    found = match_inverted_residual(program)
    return found if isinstance(found, Refusal) else program


def _over(phase: Phase, names: Mapping[str, str]) -> Phase:
    """The phase with its buffers renamed."""

    def graph(old: Graph) -> Graph:
        return Graph([replace(node, buffer=names[node.buffer]) if node.buffer else node for node in old.nodes])

    stores = tuple(replace(s, buffer=names[s.buffer]) for s in phase.stores)
    return replace(phase, body=graph(phase.body), exit=graph(phase.exit), stores=stores)
