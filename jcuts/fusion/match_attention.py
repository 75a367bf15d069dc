"""Matches attention in a def-use graph: batched matmul, score modification and softmax, second batched matmul.

No sequence of greedy merges reaches this region, because its intermediate unions are no kernels: the whole pattern is
looked for in a finished partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import Dag, NodeSet, is_acyclic_cover, is_convex
from jcuts.kernel_ir.program import Program
from jcuts.lower.attention.forward import AttentionMatch, build_attention
from jcuts.lower.builder import descendants
from jcuts.lower.patterns.attention import match
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import OpNode, TensorGraph

log = logging.getLogger("jcuts.region")

Cover = list[tuple[NodeSet, Program]]
BETWEEN = ("elementwise", "layout", "reduction", "constant")
"""Families of operations that may lie between the two products."""
MOST_BETWEEN = 48
VIEWS = ("reshape", "convert_element_type")
"""What XLA fuses into the operation that reads it."""


def fuse_attention(
    graph: TensorGraph, cover: Sequence[tuple[NodeSet, Program]], fuel: Callable[[], bool] = lambda: True
) -> Cover:
    """The partition with every attention that a GPU kernel supports fused into one region.

    What is left of a subset that gave operations away becomes a subset of its own, or several.
    """

    def fusion(node: OpNode) -> ProductFusion | Refusal | None:
        pair = find(graph, node)
        if not isinstance(pair, AttentionMatch):
            return pair
        core = pair.between | {pair.first, pair.second}
        return ProductFusion(core, (pair.second,), lambda members: build_attention(graph, members, pair), match)

    return fuse_products(graph, cover, fusion, 2, "attention", fuel)


@dataclass(frozen=True)
class ProductFusion:
    """Several contractions that may be one region.

    Attributes:
        core: their equations and those between them; ends: contractions whose epilogues may join.
        build: makes the program of a region; match: why no kernel supports a program, as a `Refusal`.
    """

    core: NodeSet
    ends: tuple[int, ...]
    build: Callable[[NodeSet], Program | Refusal]
    match: Callable[[Program], object]

    def lowered(self, members: NodeSet) -> Program | Refusal:
        """The program of a region, if a kernel supports it."""
        made = self.build(members)
        known = self.match(made) if isinstance(made, Program) else made
        return known if isinstance(known, Refusal) else made


def fuse_products(
    graph: TensorGraph,
    cover: Sequence[tuple[NodeSet, Program]],
    fusion: Callable[[OpNode], ProductFusion | Refusal | None],
    fewest: int,
    what: str,
    fuel: Callable[[], bool],
) -> Cover:
    """The partition with every fusion of contractions that is found and supported as one region.

    Args:
        fusion: the one that a contraction ends; fewest: contractions of one; what: its name in the log.
    """
    products = [n for n in graph.nodes if n.op is not None and n.op.family == "contraction"]
    found, dag = dict(cover), None
    for node in products if len(products) >= fewest else []:
        one = fusion(node)
        if isinstance(one, Refusal):
            log.info("no %s: %s", what, one)
        if not isinstance(one, ProductFusion):
            continue
        dag = dag or Dag.of((n.number for n in graph.nodes), graph.edges())
        made = replace_in_partition(graph, found, one.core, one.ends, one.lowered, dag)
        if isinstance(made, Refusal):
            log.info("no %s: %s", what, made)
        elif fuel():
            found = made
    return sorted(found.items(), key=lambda item: max(item[0]))


def find(graph: TensorGraph, second: OpNode) -> AttentionMatch | Refusal | None:
    """The contraction and the softmax that feed a contraction; None where no operand is one."""
    for tensor in second.inputs:
        made = graph.producer(tensor)
        if made is None or made.op is None or made.op.family == "contraction":
            continue
        between, firsts = _walk(graph, tensor)
        if len(firsts) != 1 or not {"reduce_max", "reduce_sum"} <= {graph.nodes[n].prim for n in between}:
            continue
        if len(between) > MOST_BETWEEN:
            return Refusal(second.prim, f"more than {MOST_BETWEEN} operations between two products")
        first = next(iter(firsts))
        inner = between | {first}
        behind = {n for n in between if first in graph.ancestors(inner, n)}
        kept = frozenset(behind | exclusive_producers(graph, between - behind, behind))
        row = graph.tensors[tensor].type.size // graph.tensors[tensor].type.shape[-1]
        for number in (first, *sorted(behind)):
            if number != first and graph.tensors[graph.nodes[number].outputs[0]].type.size == row:
                continue  # statistics of the rows may be results (`_row_statistics`)
            users = {u for t in graph.nodes[number].outputs for u in graph.tensors[t].users}
            escapes = any(graph.tensors[t].escapes for t in graph.nodes[number].outputs)
            if escapes or not users <= kept | {second.number}:
                return Refusal(graph.nodes[number].prim, "scores or weights of an attention are needed elsewhere")
        return AttentionMatch(first, second.number, tensor, frozenset(kept | _row_statistics(graph, kept, row)))
    return None


def _walk(graph: TensorGraph, tensor: int) -> tuple[NodeSet, set[int]]:
    """Backward walk from a tensor to contractions: operations of its size, and those with one value per row."""
    found: set[int] = set()
    firsts: set[int] = set()
    like = graph.tensors[tensor].type
    sizes = (like.size, like.size // like.shape[-1]) if like.shape and like.size else ()
    stack = [tensor]
    while stack and len(found) <= MOST_BETWEEN:
        made = graph.producer(stack.pop())
        if made is None or made.op is None or made.number in found:
            continue
        if made.op.family == "contraction":
            firsts.add(made.number)
        elif made.op.family in BETWEEN:
            found.add(made.number)
            stack += [t for t in made.inputs if graph.tensors[t].type.size in sizes]
    return frozenset(found), firsts


def _row_statistics(graph: TensorGraph, kept: NodeSet, row: int) -> set[int]:
    """Element-wise operations on the maximum and the sum of a row: the logsumexp that a backward pass reads."""
    found: set[int] = set()
    inside = [graph.nodes[n] for n in kept if graph.tensors[graph.nodes[n].outputs[0]].type.size == row]
    stack = [u for node in inside for t in node.outputs for u in graph.tensors[t].users]
    while stack:
        node = graph.nodes[stack.pop()]
        if node.number in kept | found or node.op is None or node.op.family not in ("elementwise", "layout"):
            continue
        made = [graph.tensors[t].producer for t in node.inputs if graph.tensors[t].scalar is None]
        sizes = {graph.tensors[t].type.size for t in (*node.inputs, *node.outputs) if graph.tensors[t].scalar is None}
        if sizes == {row} and all(number in kept | found for number in made):
            found.add(node.number)
            stack += [u for t in node.outputs for u in graph.tensors[t].users]
    return found


def exclusive_producers(graph: TensorGraph, others: NodeSet, behind: set[int]) -> set[int]:
    """Operations independent of the scores that nothing else uses: masks, broadcasts."""
    found: set[int] = set()
    for number in sorted(others, reverse=True):
        outputs = graph.nodes[number].outputs
        users = {u for t in outputs for u in graph.tensors[t].users}
        if users <= behind | found and not any(graph.tensors[t].escapes for t in outputs):
            found.add(number)
    return found


def replace_in_partition(
    graph: TensorGraph,
    cover: dict[NodeSet, Program],
    core: NodeSet,
    ends: Sequence[int],
    build: Callable[[NodeSet], Program | Refusal],
    dag: Dag,
) -> dict[NodeSet, Program] | Refusal:
    """The partition with a fused region in place of the regions that held its operations.

    Args: core: its operations; ends: those whose results leave it, with what follows them in their regions, or at
        least with changes of layout; build: makes the program of a region that a kernel supports, or refuses.
    """
    tail = frozenset[int]().union(
        *(descendants(graph, next((s for s in cover if n in s), frozenset()), n) for n in ends)
    )
    moved = _moved_results(graph, ends)
    tries = (_with_layout(graph, core | tail, cover), core | tail, _with_layout(graph, core | moved, cover), core)
    made: Program | Refusal = Refusal("subset", "no program")
    members = core
    for members in dict.fromkeys(_without_views(graph, tried) for tried in tries):
        made = build(members)
        if isinstance(made, Program):
            break
    if isinstance(made, Refusal):
        return made
    found = {s: p for s, p in cover.items() if not s & members}
    for owner in cover:
        rest = owner - members
        if owner & members and rest:
            left = lower_region(graph, rest)
            parts = [rest] if isinstance(left, Program) else [frozenset({n}) for n in rest]
            parts = [part for part in parts if {graph.nodes[n].prim for n in part} - {*VIEWS}]
            found.update((s, p) for s in parts if isinstance(p := lower_region(graph, s), Program))
    found[members] = made
    alone = [frozenset({n}) for n in dag.nodes - {n for s in found for n in s}]
    if not is_convex(dag, members) or not is_acyclic_cover(dag, [*found, *alone]):
        return Refusal("subset", "an attention and what else its operations feed need each other")
    return found


def _without_views(graph: TensorGraph, members: NodeSet) -> NodeSet:
    """The operations without views of a result that leaves the region anyway, which would be written, too."""
    kept = members
    for number in sorted(members, reverse=True):
        node = graph.nodes[number]
        if node.prim not in VIEWS or any(u in kept for t in node.outputs for u in graph.tensors[t].users):
            continue
        made: OpNode | None = node
        while made is not None and made.number in members and made.prim in VIEWS:
            base = graph.tensors[made.inputs[0]]
            made = graph.producer(base.number)
            if base.producer in members and (base.escapes or not {*base.users} <= members):
                kept = kept - {number}
                break
    return kept


def _moved_results(graph: TensorGraph, ends: Sequence[int]) -> NodeSet:
    """Changes of layout and type that alone use the results of some equations."""
    found: set[int] = set()
    for number in ends:
        node = graph.nodes[number]
        while len(node.outputs) == 1 and not graph.tensors[node.outputs[0]].escapes:
            users = set(graph.tensors[node.outputs[0]].users)
            node = graph.nodes[min(users)] if len(users) == 1 else node
            if node.number in {number, *found} or node.op is None or len(node.inputs) != 1:
                break
            if node.op.family != "layout" and node.prim != "convert_element_type":
                break
            found.add(node.number)
    return frozenset(found)


def _with_layout(graph: TensorGraph, members: NodeSet, cover: dict[NodeSet, Program]) -> NodeSet:
    """The operations plus the slices, reshapes and literals that produce their operands and have no other use."""
    free = {n for s in cover for n in s}
    grown = set(members)
    while True:
        more = set()
        for tensor in graph.subset_inputs(frozenset(grown)):
            made = graph.producer(tensor)
            if made is None or made.op is None or made.number not in free or made.op.is_root:
                continue
            if made.op.family not in ("layout", "constant") and graph.tensors[tensor].type.size > 1:
                continue
            users = {u for t in made.outputs for u in graph.tensors[t].users}
            if users <= grown and not any(graph.tensors[t].escapes for t in made.outputs):
                more.add(made.number)
        if not more:
            return frozenset(grown)
        grown |= more
