"""Lowers the backward pass of attention with recomputed weights to one unscheduled kernel program of three or four
phases (FlashAttention-2).

    P  = exp(score_mod(Q K^T) - lse)            lse = log(sum of exponentials) + maximum, of the forward pass
    dS = P * (dO V^T - delta) * ...             delta = rowsum(dO * O)
    dQ = dS K                                   a row is a query
    dV = P^T dO,  dK = dS^T Q                   a row is a key

A phase each for a row of P and of dS (into local buffers), then one per result.  Nothing is reduced between the
products, since lse and delta are operands: the same program form serves queries and keys, and
`lower.patterns.attention_backward` recognises both for one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import Axis, Grid, Program
from jcuts.lower.attention.forward import AttentionBuilder, add_product, add_scores, index_places, product_point
from jcuts.lower.builder import Builder, axes_of, built_or_refused, descendants, make_buffers
from jcuts.lower.tensor_graph import OpNode, TensorGraph
from jcuts.ops.registry import IndexTuple

TEMPLATE = "attention_backward"


@dataclass(frozen=True)
class BackwardMatch:
    """The contractions of an attention's backward pass and what lies between them.

    Attributes:
        scores, gradient: the equations of Q K^T and dO V^T.
        products: those of the results, with the operand of each that is computed here: dV of the weights (keys only),
            then dK or dQ.
        weights: the tensor P, the result of an exponential.
        between: the equations between them.
    """

    scores: int
    gradient: int
    products: tuple[tuple[int, int], ...]
    weights: int
    between: frozenset[int]

    @property
    def core(self) -> frozenset[int]:
        """All equations of the match."""
        return self.between | {self.scores, self.gradient, *(number for number, _ in self.products)}


def build_attention_backward(
    graph: TensorGraph, subset: frozenset[int], found: BackwardMatch, name: str = "attention_backward"
) -> Program | Refusal:
    """The unscheduled program of a region that holds a matched backward pass, or a refusal with the reason."""
    return built_or_refused(graph, subset, lambda: _build(graph, subset, found, name))


def _build(graph: TensorGraph, subset: frozenset[int], match: BackwardMatch, name: str) -> Program | Refusal:
    roots = {n for n in subset if (op := graph.nodes[n].op) is not None and op.is_root}
    if roots != {match.scores, match.gradient, *(number for number, _ in match.products)}:
        return Refusal("subset", "a backward pass of attention with further reductions")
    scores, gradient = graph.nodes[match.scores], graph.nodes[match.gradient]
    outputs = graph.subset_outputs(subset)
    ins, outs, buffers = make_buffers(graph, subset, outputs)
    axes, index, ranges = axes_of(graph.tensors[scores.outputs[0]].type.shape, "o")
    places = index_places(graph, subset, scores, index, ranges)
    point = _gradient_point(graph, subset, gradient, places, axes)
    if point is None:
        return Refusal(gradient.prim, "gradients of weights that do not lie as the weights do")
    places = {**index_places(graph, subset, gradient, point, ranges), **places}
    changed = match.products[-1][1]
    if not {match.weights, *(t for _, t in match.products)} <= places.keys():
        return Refusal("subset", "weights of an attention at points that do not follow its scores'")
    _, reds = product_point(graph.nodes[match.products[-1][0]], changed, places)
    made = AttentionBuilder(Builder(graph, subset, ins), axes, ranges, buffers)
    key = next((a for a in axes if [r for r in reds if r != Index()] == [Index.axis(a.name)]), None)
    if key is None:
        return Refusal("subset", "a product over several dimensions of the scores, or over none")
    made.key = key
    add_scores(made, scores, index, match.weights, places)
    add_scores(made, gradient, point, changed, places, "gradient")
    left = dict(outs)
    for k, (number, operand) in enumerate(match.products):
        after = descendants(graph, subset, number) | {number}
        mine = {t: outs[t] for t in outputs if graph.tensors[t].producer in after and t in left}
        left = {t: to for t, to in left.items() if t not in mine}
        refusal = add_product(made, graph.nodes[number], operand, places, mine, f"product{k}")
        if refusal is not None:
            return refusal
    if left:
        return Refusal("subset", "a result of no product")
    grid = tuple(Grid(a.name, a.extent, a.extent) for a in made.rows)
    asked = [p for n in roots if (op := graph.nodes[n].op) is not None and (p := op.info.get("precision"))]
    params = tuple(("precision", p) for p in sorted(asked)[:1])
    serial = tuple(a.name for a in made.rows)
    return Program(name, tuple(made.buffers), grid, serial, tuple(made.phases), 1, TEMPLATE, params)


def _gradient_point(
    graph: TensorGraph, subset: frozenset[int], gradient: OpNode, places: dict[int, IndexTuple], axes: tuple[Axis, ...]
) -> IndexTuple | None:
    """The point of dO V^T that belongs to a score's point: both meet in an element-wise operation."""
    own, index, ranges = axes_of(graph.tensors[gradient.outputs[0]].type.shape, "g")
    pushed = index_places(graph, subset, gradient, index, ranges)
    scores = {t for t in places if t not in pushed}
    for number in sorted(subset):
        node = graph.nodes[number]
        if node.op is None or node.op.family != "elementwise":
            continue
        full = [t for t in node.inputs if graph.tensors[t].type.shape == node.op.outputs[0].shape]
        here, there = [t for t in full if t in scores], [t for t in full if t in pushed and t not in places]
        if not here or not there:
            continue
        known = dict(zip(pushed[there[0]], places[here[0]], strict=True))
        if any(Index.axis(a.name) not in known for a in own) or len(own) != len(axes):
            return None
        return tuple(known.get(part, Index()) for part in index)
    return None
