"""Regions of a partition that can be joined into one kernel, which competes with theirs by measurement.

`fusion.join_regions` has the kinds that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jcuts.fusion.dag import NodeSet
from jcuts.kernel_ir.program import Program
from jcuts.lower.tensor_graph import TensorGraph

Part = tuple[NodeSet, Program]
HasForm = Callable[[Program], bool]
"""Whether a program can be a kernel here."""


@dataclass(frozen=True)
class RegionGroup:
    """Regions of a partition that can be fused into one kernel."""

    program: Program
    parts: tuple[Part, ...]

    @property
    def members(self) -> NodeSet:
        """All operations of the regions."""
        return frozenset(m for members, _ in self.parts for m in members)


def only_reader(graph: TensorGraph, members: NodeSet, cover: Iterable[NodeSet]) -> NodeSet | None:
    """The only region that reads the one result of another."""
    made = graph.subset_outputs(members)
    users = set(graph.tensors[made[0]].users) - members if len(made) == 1 else set()
    if not users or graph.tensors[made[0]].escapes:
        return None
    return next((s for s in cover if users <= s), None)
