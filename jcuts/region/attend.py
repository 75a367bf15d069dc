"""Attention as one program: a product, a softmax of what follows it, and a product with the result.

    scores = chain(queries . keys);  weights = softmax(scores);  out = tail(weights . values)

The *attention* form runs row by row, as the rows form does: a phase computes the scores of one query and keeps them,
one finds their largest, one the sum of exponentials, one the weights, the last one multiplies.  No greedy merge leads
there, because what lies between is no kernel: `attended` looks for the whole in a cover.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jcuts.base.errors import Refusal
from jcuts.dfg.index import Index, flatten
from jcuts.dfg.program import Acc, Axis, Grid, Phase, Program, Red, Store
from jcuts.ops.registry import IndexTuple
from jcuts.region import rows as R
from jcuts.region.attention import recognise
from jcuts.region.build import Declined, acc_node, build, descendants, push_places
from jcuts.region.graph import OpNode, TensorGraph
from jcuts.region.legality import Dag, Subset, is_acyclic_cover, is_convex

log = logging.getLogger("jcuts.region")

Cover = list[tuple[Subset, Program]]
BETWEEN = ("elementwise", "layout", "reduction", "constant")
"""Families of operations that may lie between the two products."""
MOST_BETWEEN = 48
TEMPLATE = "attention"


@dataclass(frozen=True)
class Found:
    """Two products and what lies between them. ``weights``: the second one's operand that the softmax makes."""

    first: int
    second: int
    weights: int
    between: Subset


def attended(
    graph: TensorGraph, cover: Sequence[tuple[Subset, Program]], fuel: Callable[[], bool] = lambda: True
) -> Cover:  # fmt: skip
    """The cover in which every attention that a GPU kernel can take is one subset.

    What is left of a subset that gave operations away becomes a subset of its own, or several.
    """
    seconds = [n for n in graph.nodes if n.op is not None and n.op.family == "contraction"]
    found, dag = dict(cover), None
    for node in seconds if len(seconds) > 1 else []:
        pair = find(graph, node)
        if isinstance(pair, Refusal):
            log.info("no attention: %s", pair)
        if not isinstance(pair, Found):
            continue
        dag = dag or Dag.of((n.number for n in graph.nodes), graph.edges())
        made = _exchanged(graph, found, pair, dag)
        if isinstance(made, Refusal):
            log.info("no attention: %s", made)
        elif fuel():
            found = made
    return sorted(found.items(), key=lambda item: max(item[0]))


def find(graph: TensorGraph, second: OpNode) -> Found | Refusal | None:
    """The product and the softmax before a product, None where it has no such operand."""
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
        kept = behind | _only_for(graph, between - behind, behind)
        for number in (first, *sorted(behind)):
            users = {u for t in graph.nodes[number].outputs for u in graph.tensors[t].users}
            escapes = any(graph.tensors[t].escapes for t in graph.nodes[number].outputs)
            if escapes or not users <= kept | {second.number}:
                return Refusal(graph.nodes[number].prim, "scores or weights of an attention are needed elsewhere")
        return Found(first, second.number, tensor, frozenset(kept))
    return None


def _walk(graph: TensorGraph, tensor: int) -> tuple[Subset, set[int]]:
    """Operations before a tensor up to products: those as large as it and those with one value per row."""
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


def _only_for(graph: TensorGraph, others: Subset, behind: set[int]) -> set[int]:
    """Of operations that do not depend on the scores those that serve nothing else: masks, broadcasts."""
    found: set[int] = set()
    for number in sorted(others, reverse=True):
        outputs = graph.nodes[number].outputs
        users = {u for t in outputs for u in graph.tensors[t].users}
        if users <= behind | found and not any(graph.tensors[t].escapes for t in outputs):
            found.add(number)
    return found


def _exchanged(
    graph: TensorGraph, cover: dict[Subset, Program], pair: Found, dag: Dag
) -> dict[Subset, Program] | Refusal:
    """The cover with an attention for what its operations were part of."""
    last = next((s for s in cover if pair.second in s), frozenset())
    tail = descendants(graph, last, pair.second)
    core = pair.between | {pair.first, pair.second}
    made: Program | Refusal = Refusal("subset", "no program")
    for members in dict.fromkeys((_with_layout(graph, core | tail, cover), core | tail, core)):
        made = build_attention(graph, members, pair)
        if isinstance(made, Program):
            known = recognise(made)
            if not isinstance(known, Refusal):
                break
            made = known
    if isinstance(made, Refusal):
        return made
    found = {s: p for s, p in cover.items() if not s & members}
    for owner in cover:
        rest = owner - members
        if owner & members and rest:
            left = build(graph, rest)
            parts = [rest] if isinstance(left, Program) else [frozenset({n}) for n in rest]
            found.update((s, p) for s in parts if isinstance(p := build(graph, s), Program))
    found[members] = made
    alone = [frozenset({n}) for n in dag.nodes - {n for s in found for n in s}]
    if not is_convex(dag, members) or not is_acyclic_cover(dag, [*found, *alone]):
        return Refusal("subset", "an attention and what else its operations feed need each other")
    return found


def _with_layout(graph: TensorGraph, members: Subset, cover: dict[Subset, Program]) -> Subset:
    """The operations with slices, reshapes and numbers that make their operands and serve nothing else."""
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


# -- the program ----------------------------------------------------------------------------------------------------
@dataclass
class _Probe:
    """A context that only notes at which index a product reads its operands."""

    found: dict[int, IndexTuple] = field(default_factory=dict)

    def input(self, number: int, index: IndexTuple, *more: Any) -> int:
        self.found[number] = index
        return 0

    def apply(self, *more: Any, **attrs: Any) -> int:
        return 0


def build_attention(graph: TensorGraph, subset: Subset, pair: Found, name: str = "attention") -> Program | Refusal:
    """The unscheduled program of a subset that holds what was found, or why there is none."""
    for number in sorted(subset):
        refusal = graph.nodes[number].refusal
        if refusal is not None:
            return refusal
    try:
        return _build(graph, subset, pair, name)
    except Declined as declined:
        return declined.refusal


def _build(graph: TensorGraph, subset: Subset, pair: Found, name: str) -> Program | Refusal:
    roots = [graph.nodes[n] for n in sorted(subset) if (op := graph.nodes[n].op) is not None and op.is_root]
    roots = [r for r in roots if r.number not in (pair.first, pair.second)]
    first, second = graph.nodes[pair.first], graph.nodes[pair.second]
    scores = roots[0].inputs[0]
    shape, reduced = graph.tensors[scores].type.shape, _reduced(roots[0])
    if graph.tensors[first.outputs[0]].type.shape != shape or graph.tensors[pair.weights].type.shape != shape:
        return Refusal("subset", "scores change their shape between the products")
    if len(reduced) != 1 or any(_reduced(r) != reduced or _shape(r) != shape for r in roots):
        return Refusal("subset", "a softmax over several dimensions")
    outputs = graph.subset_outputs(subset)
    made = R._start(graph, subset, roots, shape, reduced, outputs)
    if made.lane:
        return Refusal("subset", "a softmax that does not run along the keys' last dimension")
    R._levels(made)
    _scores(made, first, scores)
    size, outer = math.prod(shape), math.prod(made.outer_shape)
    for level in sorted({made.level[r.outputs[0]] for r in roots}):
        members = [r for r in roots if made.level[r.outputs[0]] == level]
        R._reduce_phase(made, members, level, [], size, outer)
    R._keep_phase(made, pair.weights)
    refusal = _values(made, second, pair.weights, outputs)
    if refusal is not None:
        return refusal
    phases, buffers = R._without_unread(made)
    serial = tuple(a.name for a in made.axes)
    grid = tuple(Grid(a.name, a.extent, a.extent) for a in made.axes)
    asked = [op.info.get("precision") for op in (first.op, second.op) if op is not None]
    params = tuple(("precision", p) for p in asked[:1] if p) or tuple(("precision", p) for p in asked[1:] if p)
    return Program(name, buffers, grid, serial, phases, 1, TEMPLATE, params)


def _reduced(root: OpNode) -> tuple[int, ...]:
    return () if root.op is None else tuple(sorted(root.op.info["axes"]))


def _shape(root: OpNode) -> tuple[int, ...]:
    return () if root.op is None else root.op.inputs[0].shape


def _scores(made: R._Rows, first: OpNode, scores: int) -> None:
    """The phase that computes the scores of a row and keeps them."""
    assert first.op is not None and first.op.reduce is not None
    builder, spec = made.builder, first.op.reduce
    reds = tuple(Red(n, extent) for n, extent in spec.reds)
    keys = tuple(Axis(r.name, r.extent) for r in made.reds)
    ranges = {a.name: a.extent for a in (*made.axes, *keys)}
    builder.start({**ranges, **{r.name: r.extent for r in reds}})
    terms = spec.term(builder.context(first), made.index, tuple(Index.axis(r.name) for r in reds))  # type: ignore[arg-type]
    body = builder.target
    accs = tuple(Acc(a.combine, a.dtype, tuple(t)) for a, t in zip(spec.accs, terms, strict=True))
    builder.start(ranges)
    values = [builder.target.add(acc_node(k, a)) for k, a in enumerate(accs)]
    results = spec.finish(builder.context(first), values, made.index)  # type: ignore[arg-type]
    builder.anchors[first.outputs[0]] = (made.index, results[0])
    value = builder.value(scores, made.index)
    address = Index.axis(keys[0].name)
    into = R._local(made, scores, (keys[0].extent,), made.index, address)
    store = Store(into, address, builder.kept(value))
    made.phases.append(Phase("scores", (*made.axes, *keys), reds, accs, body, builder.target, (store,)))


def _values(made: R._Rows, second: OpNode, weights: int, outputs: list[int]) -> Refusal | None:
    """The phase that multiplies the weights of a row by the values."""
    assert second.op is not None and second.op.reduce is not None
    builder, spec = made.builder, second.op.reduce
    out = second.op.outputs[0].shape
    probe = _Probe()
    names = tuple(f"x{d}" for d in range(len(out)))
    spec.term(probe, tuple(map(Index.axis, names)), tuple(Index.axis(n) for n, _ in spec.reds))  # type: ignore[arg-type]
    read = probe.found[second.inputs.index(weights)]
    terms_of = [n for n, _ in spec.reds]
    index, reds = [Index.axis(f"n{d}") for d in range(len(out))], [Index()] * len(terms_of)
    for place, part in enumerate(read):
        ((atom, _),) = part.terms
        if atom.name in terms_of:
            reds[terms_of.index(atom.name)] = made.index[place]
        else:
            index[names.index(atom.name)] = made.index[place]
    axes = tuple(Axis(f"n{d}", e) for d, e in enumerate(out) if index[d] == Index.axis(f"n{d}"))
    if len(reds) != 1 or len(axes) != 1:
        return Refusal(second.prim, "weights and values of an attention that share more than the keys")
    ranges = {a.name: a.extent for a in (*made.axes, *axes)}
    builder.start({**ranges, **{r.name: r.extent for r in made.reds}})
    terms = spec.term(builder.context(second), tuple(index), tuple(reds))  # type: ignore[arg-type]
    body = builder.target
    accs = tuple(Acc(a.combine, a.dtype, tuple(t)) for a, t in zip(spec.accs, terms, strict=True))
    builder.start(ranges)
    values = [builder.target.add(acc_node(k, a)) for k, a in enumerate(accs)]
    results = spec.finish(builder.context(second), values, tuple(index))  # type: ignore[arg-type]
    builder.anchors[second.outputs[0]] = (tuple(index), results[0])
    after = descendants(made.graph, made.subset, second.number)
    places = push_places(made.graph, after, second, tuple(index), ranges)
    stores = []
    for tensor in outputs:
        place = places.get(tensor)
        if place is None:
            return Refusal(second.prim, "a result whose points do not follow the product's")
        address = flatten(place, made.graph.tensors[tensor].type.shape)
        stores.append(Store(made.outs[tensor], address, builder.value(tensor, place)))
    made.phases.append(Phase("values", (*made.axes, *axes), made.reds, accs, body, builder.target, tuple(stores)))
    return None
