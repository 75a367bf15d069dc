"""Matches the backward pass of attention with recomputed weights: dQ of every query, or dK and dV of every key.

`rewrite/attention/backward.py` writes it so.  Two products, of Q K^T and dO V^T, meet in element-wise operations behind
an exponential; what these give is an operand of one product (dQ), or, with the exponential itself in another one, of
two (dK and dV).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import NodeSet
from jcuts.fusion.match_attention import (
    BETWEEN,
    MOST_BETWEEN,
    Cover,
    ProductFusion,
    exclusive_producers,
    fuse_products,
)
from jcuts.kernel_ir.program import Program
from jcuts.lower.attention.backward import BackwardMatch, build_attention_backward
from jcuts.lower.patterns.attention_backward import match_backward
from jcuts.lower.tensor_graph import OpNode, TensorGraph

log = logging.getLogger("jcuts.region")


def fuse_attention_backward(
    graph: TensorGraph, cover: Sequence[tuple[NodeSet, Program]], fuel: Callable[[], bool] = lambda: True
) -> Cover:
    """The partition with every recomputing backward pass of an attention that a GPU kernel supports as one region."""

    def fusion(node: OpNode) -> ProductFusion | Refusal | None:
        pair = find_backward(graph, node)
        if not isinstance(pair, BackwardMatch):
            return pair
        ends = tuple(number for number, _ in pair.products)
        return ProductFusion(
            pair.core, ends, lambda members: build_attention_backward(graph, members, pair), match_backward
        )

    return fuse_products(graph, cover, fusion, 3, "backward pass of attention", fuel)


def find_backward(graph: TensorGraph, product: OpNode) -> BackwardMatch | Refusal | None:
    """The backward pass whose dQ or dK a contraction computes; None where no operand of it is one."""
    for tensor in product.inputs:
        made = graph.producer(tensor)
        if made is None or made.op is None or made.op.family == "contraction":
            continue
        between, firsts = _walk(graph, tensor)
        exponentials = [n for n in between if graph.nodes[n].prim == "exp"]
        if len(firsts) != 2 or len(exponentials) != 1:
            continue
        inner = between | firsts
        behind_exp = graph.ancestors(frozenset(inner), exponentials[0])
        scores, gradient = firsts & behind_exp, firsts - behind_exp
        if len(scores) != 1 or len(gradient) != 1:
            continue
        if len(between) > MOST_BETWEEN:
            return Refusal(product.prim, f"more than {MOST_BETWEEN} operations between its products")
        return _checked(graph, product, tensor, between, min(scores), min(gradient), exponentials[0])
    return None


def _walk(graph: TensorGraph, tensor: int) -> tuple[NodeSet, NodeSet]:
    """Backward walk from a tensor to contractions, by element-wise operations and layouts of its size."""
    found: set[int] = set()
    firsts: set[int] = set()
    size = graph.tensors[tensor].type.size
    stack = [tensor]
    while stack and len(found) <= MOST_BETWEEN:
        made = graph.producer(stack.pop())
        if made is None or made.op is None or made.number in found:
            continue
        if made.op.family == "contraction":
            firsts.add(made.number)
        elif made.op.family in BETWEEN and made.op.family != "reduction":
            found.add(made.number)
            stack += [t for t in made.inputs if graph.tensors[t].type.size == size]
    return frozenset(found), frozenset(firsts)


def _checked(
    graph: TensorGraph, product: OpNode, changed: int, between: NodeSet, scores: int, gradient: int, exponential: int
) -> BackwardMatch | Refusal:
    """The match, if nothing else needs what lies between its products."""
    inner = between | {scores, gradient}
    behind = {n for n in between if {scores, gradient} & graph.ancestors(inner, n)}
    weights = graph.nodes[exponential].outputs[0]
    size = graph.tensors[weights].type.size
    kept, ends = set(behind), dict[int, int]()
    stack = [scores, gradient, *sorted(behind)]
    while stack:
        node = graph.nodes[stack.pop()]
        if any(graph.tensors[t].escapes for t in node.outputs):
            return Refusal(node.prim, "weights or their gradients are results")
        for tensor in node.outputs:
            for user in graph.tensors[tensor].users:
                other = graph.nodes[user]
                if user in kept or user == product.number:
                    continue
                if other.op is not None and other.op.family == "contraction":
                    if user in ends and ends[user] != tensor:
                        return Refusal(other.prim, "a product of weights with themselves")
                    ends[user] = tensor
                elif _only_moves(other, size):
                    kept.add(user)
                    stack.append(user)
                else:
                    return Refusal(other.prim, "weights or their gradients are needed elsewhere")
    if len(ends) > 1:
        return Refusal(product.prim, "weights or their gradients are factors of further products")
    lists = frozenset(kept | exclusive_producers(graph, between - behind, kept))
    products = (*ends.items(), (product.number, changed))
    return BackwardMatch(scores, gradient, products, weights, lists)


def _only_moves(node: OpNode, size: int) -> bool:
    """Whether an equation changes no more than layout or type of so many elements."""
    if node.op is None or len(node.inputs) != 1 or node.op.outputs[0].size != size:
        return False
    return node.op.family == "layout" or node.prim == "convert_element_type"
