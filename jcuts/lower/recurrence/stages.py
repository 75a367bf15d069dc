"""Stages of a scan's body: which values must be complete before others can be computed, and are kept in memory.

Element-wise operations are recomputed where they are needed; what a product or a sum reads as a whole, and what crosses
a stage, is kept.  So is an operand of products that every block would compute for itself, from inputs and carried
values (the gates' derivatives of a backward loop), where that is more work than a grid barrier takes: `KEPT_FROM`.  A
stage ends where every value that it keeps is there: on a GPU a grid barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jcuts.base.errors import Refusal
from jcuts.lower.builder import op_rule
from jcuts.lower.tensor_graph import OpNode, TensorGraph

KEPT_FROM = 1 << 16
"""Element-wise operations, from which on an operand is kept: 128 lanes take a microsecond for as many of three to four
instructions each, as long as a grid barrier."""
REDUCED = ("contraction", "reduction")
"""Families of operations that collect many elements, which a stage may end with."""


@dataclass(frozen=True)
class Stages:
    """Attributes:
    of: number of the stage in which a tensor is computed; 0 for what needs no product or sum of this step.
    kept: tensors that a stage keeps in memory for later ones.
    """

    of: dict[int, int]
    kept: frozenset[int]


def stages_of(graph: TensorGraph, outputs: Sequence[int]) -> Stages | Refusal:
    """The stages of a body. Args: outputs: tensors that the step gives on."""
    for node in graph.nodes:
        if node.refusal is not None:
            return node.refusal
        if op_rule(node).is_root and op_rule(node).family not in REDUCED:
            return Refusal(node.prim, "has no form in a loop's step")
        if not op_rule(node).is_root and op_rule(node).pull is None:
            return Refusal(node.prim, "has no form in a loop's step")
    apart: frozenset[int] = frozenset()
    operands = frozenset(t for node in graph.nodes if op_rule(node).family == "contraction" for t in node.inputs)
    kept = frozenset(t for t in operands if _work(graph, t) >= KEPT_FROM)
    while True:
        found = _stages(graph, apart, kept)
        mixed = _mixed(graph, found, outputs)
        if not mixed:
            return found
        apart |= mixed


def _work(graph: TensorGraph, tensor: int) -> int:
    """Element-wise operations that compute a value from inputs, carried values and products."""
    total, stack, seen = 0, [tensor], set[int]()
    while stack:
        one = stack.pop()
        node = graph.producer(one)
        if one in seen or node is None or op_rule(node).is_root:
            continue
        seen.add(one)
        total += graph.tensors[one].type.size
        stack += node.inputs
    return total


def _stages(graph: TensorGraph, apart: frozenset[int], large: frozenset[int]) -> Stages:
    """Args: apart: results of products that a later stage reads, whatever that costs. large: operands of products that
    take much work, which are kept if no product of the step precedes them.
    """
    of: dict[int, int] = {}
    kept: set[int] = set(apart)
    for node in graph.nodes:
        inputs = [t for t in node.inputs if graph.tensors[t].scalar is None]
        if op_rule(node).is_root:
            stage = max((of.get(t, 0) for t in inputs), default=0) + 1
            kept |= {t for t in inputs if of.get(t, 0) or t in large}
        else:
            stage = max((of.get(t, 0) + (t in apart) for t in inputs), default=0)
            kept |= {t for t in inputs if 0 < of.get(t, 0) < stage}
        of.update(dict.fromkeys(node.outputs, stage))
    return Stages(of, frozenset(kept))


def _mixed(graph: TensorGraph, stages: Stages, outputs: Sequence[int]) -> frozenset[int]:
    """Results of products that meet in one value and do not run over the same extents."""
    for tensor in sorted({*outputs, *stages.kept}):
        roots = fresh_roots(graph, stages, tensor)
        if len({extents_of(root) for root in roots}) > 1:
            return frozenset(t for root in roots for t in root.outputs)
    return frozenset()


def fresh_roots(graph: TensorGraph, stages: Stages, tensor: int) -> list[OpNode]:
    """Products and sums of a value's own stage that it is computed from."""
    stage, found, stack, seen = stages.of.get(tensor, 0), dict[int, OpNode](), [tensor], set[int]()
    while stack:
        one = stack.pop()
        node = graph.producer(one)
        if one in seen or node is None or stages.of[one] < stage:
            continue
        seen.add(one)
        if op_rule(node).is_root:
            found[node.number] = node
        else:
            stack += node.inputs
    return [found[number] for number in sorted(found)]


def extents_of(root: OpNode) -> tuple[int, ...]:
    """Extents of what a product or sum runs over."""
    spec = op_rule(root).reduce
    assert spec is not None
    return tuple(extent for _, extent in spec.reds)
