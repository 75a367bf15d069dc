"""Matches column reductions of a contraction's result in a tensor graph: the sums of a batch norm and of its gradients.

    y = convolution(x, w) + b;                     sum(y), sum((y - mean)**2)
    z = select(mask, convolution(dy, w'), 0);      sum(z), sum(z * y)

A `Cone` is one reduction with the operations between it and the latest contraction before it.  `fusion.greedy` merges
cones into the regions of their contractions before all else, so that other regions do not take their parts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from jcuts.lower.tensor_graph import OpNode, TensorGraph

MOST_VISITED = 96
"""Equations before a reduction that are looked at."""
PER_POINT = ("elementwise", "layout")
"""Families of operations that may stand between a contraction and a reduction."""


MOST_STATISTICS = 24
"""Equations of a mean and a variance together, at most."""


@dataclass(frozen=True)
class Cone:
    """A reduction of what a contraction makes.

    Attributes:
        contraction, reduction: their equations.
        before: equations between them that depend on no reduction, in order.
        behind: those that do (a deviation from the mean).
    """

    contraction: int
    reduction: int
    before: tuple[int, ...]
    behind: tuple[int, ...]


def column_sum_cones(graph: TensorGraph) -> list[Cone]:
    """All cones of a graph, in the order of their reductions."""
    sums = [node for node in graph.nodes if _is_column_sum(node)]
    return [cone for node in sums if (cone := _cone(graph, node)) is not None]


def statistics(graph: TensorGraph) -> list[tuple[int, ...]]:
    """Equations of sums of squared deviations from a mean with those of the mean, in order: one pass gives both."""
    found = []
    sums = {node.number for node in graph.nodes if _is_column_sum(node)}
    for last in sorted(sums):
        group, todo = {last}, [last]
        while todo and len(group) < MOST_STATISTICS:
            for tensor in graph.nodes[todo.pop()].inputs:
                made = graph.tensors[tensor].producer
                op = None if made is None else graph.nodes[made].op
                if made is None or op is None or made in group or not (made in sums or op.family in PER_POINT):
                    continue
                group.add(made)
                if made not in sums:
                    todo.append(made)
        if len(group & sums) == 2 and len(group) < MOST_STATISTICS:
            found.append(tuple(sorted(group)))
    return found


def _is_column_sum(node: OpNode) -> bool:
    """Whether an equation sums over all dimensions but the last one."""
    op = node.op
    if op is None or op.family != "reduction" or op.reduce is None or len(op.outputs) != 1:
        return False
    shape = op.inputs[0].shape
    reduced = {d for d in op.info["axes"] if shape[d] != 1}
    rows = {d for d, extent in enumerate(shape[:-1]) if extent != 1}
    return bool(rows) and reduced == rows and [a.combine for a in op.reduce.accs] == ["add"]


def _cone(graph: TensorGraph, sums: OpNode) -> Cone | None:
    """What lies between a reduction and the latest contraction before it; None where a kernel could not take it."""
    visited: list[int] = []
    todo = [-made for t in sums.inputs if (made := graph.tensors[t].producer) is not None]
    heapq.heapify(todo)
    contraction: OpNode | None = None
    while todo and contraction is None and len(visited) < MOST_VISITED:
        number = -heapq.heappop(todo)
        if visited and visited[-1] == number:
            continue
        node = graph.nodes[number]
        if node.op is not None and node.op.is_complex:
            contraction = node
            break
        visited.append(number)
        for tensor in node.inputs:
            if (made := graph.tensors[tensor].producer) is not None:
                heapq.heappush(todo, -made)
    if contraction is None or contraction.op is None or sums.op is None:
        return None
    if contraction.op.outputs[0].size != sums.op.inputs[0].size:
        return None
    return _between(graph, contraction, sums, visited[::-1])


def _between(graph: TensorGraph, contraction: OpNode, sums: OpNode, visited: list[int]) -> Cone | None:
    """The cone of equations that depend on the contraction. Args: visited: of which, in order."""
    before: list[int] = []
    behind: list[int] = []
    size = graph.tensors[contraction.outputs[0]].type.size
    for number in visited:
        node = graph.nodes[number]
        makers = {graph.tensors[t].producer for t in node.inputs}
        depends = bool(makers & {contraction.number, *before, *behind})
        if not depends:
            continue
        if node.op is None or (node.op.family not in PER_POINT and not _is_column_sum(node)):
            return None
        (behind if node.op.is_root or makers & {*behind} else before).append(number)
    inside = {*before, *behind, sums.number}
    for number in behind:
        for tensor in graph.nodes[number].outputs:
            info = graph.tensors[tensor]
            if info.type.size >= size and (info.escapes or not inside.issuperset(info.users)):
                return None  # needed at every point once the sums are known: by another kernel
    if contraction.number not in {graph.tensors[t].producer for n in inside for t in graph.nodes[n].inputs}:
        return None
    return Cone(contraction.number, sums.number, tuple(before), tuple(behind))
