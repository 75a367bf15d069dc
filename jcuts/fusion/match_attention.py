"""Matches attention in a def-use graph: batched matmul, score modification and softmax, second batched matmul.

No sequence of greedy merges reaches this region, because its intermediate unions are no kernels: the whole pattern is
looked for in a finished partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import Dag, NodeSet, is_acyclic_cover, is_convex
from jcuts.kernel_ir.program import Program
from jcuts.lower.attention import AttentionMatch, build_attention
from jcuts.lower.builder import descendants
from jcuts.lower.patterns.attention import match
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import OpNode, TensorGraph

log = logging.getLogger("jcuts.region")

Cover = list[tuple[NodeSet, Program]]
BETWEEN = ("elementwise", "layout", "reduction", "constant")
"""Families of operations that may lie between the two products."""
MOST_BETWEEN = 48


def fuse_attention(
    graph: TensorGraph, cover: Sequence[tuple[NodeSet, Program]], fuel: Callable[[], bool] = lambda: True
) -> Cover:
    """The partition with every attention that a GPU kernel supports fused into one region.

    What is left of a subset that gave operations away becomes a subset of its own, or several.
    """
    seconds = [n for n in graph.nodes if n.op is not None and n.op.family == "contraction"]
    found, dag = dict(cover), None
    for node in seconds if len(seconds) > 1 else []:
        pair = find(graph, node)
        if isinstance(pair, Refusal):
            log.info("no attention: %s", pair)
        if not isinstance(pair, AttentionMatch):
            continue
        dag = dag or Dag.of((n.number for n in graph.nodes), graph.edges())
        made = _replace_in_partition(graph, found, pair, dag)
        if isinstance(made, Refusal):
            log.info("no attention: %s", made)
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
        kept = behind | _exclusive_producers(graph, between - behind, behind)
        for number in (first, *sorted(behind)):
            users = {u for t in graph.nodes[number].outputs for u in graph.tensors[t].users}
            escapes = any(graph.tensors[t].escapes for t in graph.nodes[number].outputs)
            if escapes or not users <= kept | {second.number}:
                return Refusal(graph.nodes[number].prim, "scores or weights of an attention are needed elsewhere")
        return AttentionMatch(first, second.number, tensor, frozenset(kept))
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


def _exclusive_producers(graph: TensorGraph, others: NodeSet, behind: set[int]) -> set[int]:
    """Operations independent of the scores that nothing else uses: masks, broadcasts."""
    found: set[int] = set()
    for number in sorted(others, reverse=True):
        outputs = graph.nodes[number].outputs
        users = {u for t in outputs for u in graph.tensors[t].users}
        if users <= behind | found and not any(graph.tensors[t].escapes for t in outputs):
            found.add(number)
    return found


def _replace_in_partition(
    graph: TensorGraph, cover: dict[NodeSet, Program], pair: AttentionMatch, dag: Dag
) -> dict[NodeSet, Program] | Refusal:
    """The partition with the attention region in place of the regions that held its operations."""
    last = next((s for s in cover if pair.second in s), frozenset())
    tail = descendants(graph, last, pair.second)
    core = pair.between | {pair.first, pair.second}
    made: Program | Refusal = Refusal("subset", "no program")
    for members in dict.fromkeys((_with_layout(graph, core | tail, cover), core | tail, core)):
        made = build_attention(graph, members, pair)
        if isinstance(made, Program):
            known = match(made)
            if not isinstance(known, Refusal):
                break
            made = known
    if isinstance(made, Refusal):
        return made
    found = {s: p for s, p in cover.items() if not s & members}
    for owner in cover:
        rest = owner - members
        if owner & members and rest:
            left = lower_region(graph, rest)
            parts = [rest] if isinstance(left, Program) else [frozenset({n}) for n in rest]
            found.update((s, p) for s in parts if isinstance(p := lower_region(graph, s), Program))
    found[members] = made
    alone = [frozenset({n}) for n in dag.nodes - {n for s in found for n in s}]
    if not is_convex(dag, members) or not is_acyclic_cover(dag, [*found, *alone]):
        return Refusal("subset", "an attention and what else its operations feed need each other")
    return found


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
