"""Lowers attention, softmax(score_mod(Q K^T)) V, to one unscheduled kernel program of five phases.

    scores = score_mod(Q K^T);  weights = softmax(scores);  out = epilogue(weights V)

The program states the meaning, row by row as a row reduction does (`lower/reduction/row_reduction.py`): a phase each
for the scores of one query (into a local buffer), their maximum, the sum of exponentials, the weights, and the PV
product. `lower.patterns.attention` recognises it for the one-pass GPU kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Grid, Phase, Program, Red, Store
from jcuts.lower.builder import (
    Builder,
    NotLowered,
    acc_node,
    axes_of,
    built_or_refused,
    descendants,
    local_dtype,
    make_buffers,
    propagate_indices,
)
from jcuts.lower.tensor_graph import OpNode, TensorGraph
from jcuts.ops.registry import IndexTuple

TEMPLATE = "attention"
STATISTICS = "statistics"
"""Name of the phase whose results are statistics of a row (logsumexp), where there are any."""


@dataclass(frozen=True)
class AttentionMatch:
    """The two contractions of an attention, QK^T and PV, and the equations between them.  ``weights``: the operand of
    PV that the softmax produces.
    """

    first: int
    second: int
    weights: int
    between: frozenset[int]


@dataclass
class IndexProbe:
    """A context that only records the index at which a contraction reads its operands."""

    found: dict[int, IndexTuple] = field(default_factory=dict)

    def input(self, number: int, index: IndexTuple, *more: Any) -> int:
        self.found[number] = index
        return 0

    def apply(self, *more: Any, **attrs: Any) -> int:
        return 0


def build_attention(
    graph: TensorGraph, subset: frozenset[int], pair: AttentionMatch, name: str = "attention"
) -> Program | Refusal:
    """The unscheduled program of a region that holds a matched attention, or a refusal with the reason."""
    return built_or_refused(graph, subset, lambda: _build(graph, subset, pair, name))


def _build(graph: TensorGraph, subset: frozenset[int], pair: AttentionMatch, name: str) -> Program | Refusal:
    roots = [graph.nodes[n] for n in sorted(subset) if (op := graph.nodes[n].op) is not None and op.is_root]
    roots = [r for r in roots if r.number not in (pair.first, pair.second)]
    first, second = graph.nodes[pair.first], graph.nodes[pair.second]
    outputs = graph.subset_outputs(subset)
    ins, outs, buffers = make_buffers(graph, subset, outputs)
    axes, index, ranges = axes_of(graph.tensors[first.outputs[0]].type.shape, "o")
    made = AttentionBuilder(Builder(graph, subset, ins), axes, ranges, buffers)
    places = index_places(graph, subset, first, index, ranges)
    keys = {places[r.inputs[0]][d] if r.inputs[0] in places else Index() for r in roots for d in reduced_dims(r)}
    key = next((a for a in axes if keys == {Index.axis(a.name)}), None)
    if key is None or pair.weights not in places or any(len(reduced_dims(r)) != 1 for r in roots):
        return Refusal("subset", "a softmax over several dimensions, or over none of the keys")
    made.key = key
    add_scores(made, first, index, roots[0].inputs[0], places)
    for root in roots:
        _reduce(made, root, places)
    made.begin(key)
    value = made.builder.value(pair.weights, places[pair.weights])
    made.keep("weights", pair.weights, places[pair.weights], value, key)
    after = descendants(graph, subset, pair.second) | {pair.second}
    last = {t: outs[t] for t in outputs if graph.tensors[t].producer in after}
    _add_statistics(made, {t: outs[t] for t in outputs if t not in last}, places)
    refusal = add_product(made, second, pair.weights, places, last)
    if refusal is not None:
        return refusal
    grid = tuple(Grid(a.name, a.extent, a.extent) for a in made.rows)
    asked = [p for op in (first.op, second.op) if op is not None and (p := op.info.get("precision"))]
    params = tuple(("precision", p) for p in asked[:1])
    serial = tuple(a.name for a in made.rows)
    return Program(name, tuple(made.buffers), grid, serial, tuple(made.phases), 1, TEMPLATE, params)


@dataclass
class AttentionBuilder:
    """Program under construction: its builder, and the axes of a score, one of which is the key's."""

    builder: Builder
    axes: tuple[Axis, ...]
    ranges: dict[str, int]
    buffers: list[Buffer]
    phases: list[Phase] = field(default_factory=list)
    key: Axis = field(default_factory=lambda: Axis("", 1))

    @property
    def rows(self) -> tuple[Axis, ...]:
        """Axes of a row of scores."""
        return tuple(a for a in self.axes if a != self.key)

    def begin(self, *more: Axis | Red) -> None:
        """Begins a graph over the rows and further axes."""
        self.builder.start({a.name: a.extent for a in (*self.rows, *more)})

    def keep(
        self,
        name: str,
        tensor: int,
        place: IndexTuple,
        value: int,
        axis: Axis | None,
        accs: tuple[Acc, ...] = (),
        body: Graph | None = None,
        reds: tuple[Red, ...] = (),
    ) -> None:
        """Ends a phase that stores a tensor's value in a local buffer, per key or per row."""
        builder = self.builder
        address = Index() if axis is None else Index.axis(axis.name)
        dtype = local_dtype(builder.graph.tensors[tensor].type.dtype)
        into = f"local{len(builder.locals)}"
        self.buffers.append(Buffer(into, dtype, (1 if axis is None else axis.extent,), "local"))
        builder.locals[tensor] = (into, place, address)
        store = Store(into, address, builder.to_local_dtype(value))
        axes = self.rows if axis is None else (*self.rows, axis)
        self.phases.append(Phase(name, axes, reds, accs, body or Graph(), builder.target, (store,)))


def reduced_dims(root: OpNode) -> tuple[int, ...]:
    return () if root.op is None else tuple(sorted(int(d) for d in root.op.info["axes"]))


def index_places(
    graph: TensorGraph, subset: frozenset[int], first: OpNode, index: IndexTuple, ranges: dict[str, int]
) -> dict[int, IndexTuple]:
    """The index of a score's point in every tensor computed from the scores, whatever its layout."""
    places = {first.outputs[0]: index}
    for number in sorted(subset):
        node = graph.nodes[number]
        known = [t for t in node.inputs if t in places]
        if node.op is None or not known:
            continue
        source, made = places[known[0]], node.outputs[0]
        if node.op.family == "reduction":
            reduced = reduced_dims(node)
            places[made] = tuple(part for d, part in enumerate(source) if d not in reduced)
        elif node.op.family == "elementwise":
            alike = [t for t in known if graph.tensors[t].type.shape == node.op.outputs[0].shape]
            if alike:
                places[made] = places[alike[0]]
        elif node.op.push is not None and node.inputs[0] in places:
            places[made] = node.op.push(places[node.inputs[0]], ranges)
    return places


def summand(made: AttentionBuilder, node: OpNode, out: IndexTuple, reds: IndexTuple) -> tuple[tuple[Acc, ...], Graph]:
    """The summand of a reduction at a point of its result; the current graph has the axes of both."""
    assert node.op is not None and node.op.reduce is not None
    builder, spec = made.builder, node.op.reduce
    terms = spec.term(builder.context(node), out, reds)  # type: ignore[arg-type]
    accs = zip(spec.accs, terms, strict=True)
    return tuple(Acc(a.combine, a.dtype, tuple(t), a.index_dtype) for a, t in accs), builder.target


def bind_result(made: AttentionBuilder, node: OpNode, accs: tuple[Acc, ...], out: IndexTuple) -> int:
    """Registers a reduction's result in the current graph for its users."""
    assert node.op is not None and node.op.reduce is not None
    builder = made.builder
    values = [builder.target.add(acc_node(k, a)) for k, a in enumerate(accs)]
    found = node.op.reduce.finish(builder.context(node), values, out)[0]  # type: ignore[arg-type]
    builder.anchors[node.outputs[0]] = (out, found)
    return found


def add_scores(
    made: AttentionBuilder,
    product: OpNode,
    index: IndexTuple,
    kept: int,
    places: dict[int, IndexTuple],
    name: str = "scores",
) -> None:
    """The phase that computes what element-wise operations make of a product, per row into a local buffer.

    Args: index: the product's point; kept: the tensor that is kept.
    """
    assert product.op is not None and product.op.reduce is not None
    reds = tuple(Red(n, extent) for n, extent in product.op.reduce.reds)
    made.begin(made.key, *reds)
    accs, body = summand(made, product, index, tuple(Index.axis(r.name) for r in reds))
    made.begin(made.key)
    bind_result(made, product, accs, index)
    value = made.builder.value(kept, places[kept])
    made.keep(name, kept, places[kept], value, made.key, accs, body, reds)


def _reduce(made: AttentionBuilder, root: OpNode, places: dict[int, IndexTuple]) -> None:
    """The phase that computes one reduced value per row."""
    tensor, red = root.outputs[0], Red(made.key.name, made.key.extent)
    made.begin(red)
    accs, body = summand(made, root, places[tensor], (Index.axis(red.name),))
    made.begin()
    value = bind_result(made, root, accs, places[tensor])
    made.keep(root.prim, tensor, places[tensor], value, None, accs, body, (red,))


def _add_statistics(made: AttentionBuilder, outs: dict[int, str], places: dict[int, IndexTuple]) -> None:
    """The phase of results that are one value per row, made of its maximum and its sum."""
    if not outs:
        return
    made.begin()
    builder = made.builder
    stores = []
    for tensor, to in outs.items():
        place = places.get(tensor)
        if place is None or any(made.key.name in part.axes() for part in place):
            raise NotLowered(Refusal("subset", "scores or weights of an attention are results"))
        address = flatten(place, builder.graph.tensors[tensor].type.shape)
        stores.append(Store(to, address, builder.value(tensor, place)))
    made.phases.append(Phase(STATISTICS, made.rows, (), (), Graph(), builder.target, tuple(stores)))


def product_point(node: OpNode, operand: int, places: dict[int, IndexTuple]) -> tuple[list[Index], list[Index]]:
    """The point of a product's result, with axes ``n0``, ``n1``, ..., and of its sum, at which it reads ``operand``
    where that is computed.
    """
    assert node.op is not None and node.op.reduce is not None
    shape, terms = node.op.outputs[0].shape, [n for n, _ in node.op.reduce.reds]
    probe, names = IndexProbe(), [f"x{d}" for d in range(len(shape))]
    node.op.reduce.term(probe, tuple(map(Index.axis, names)), tuple(map(Index.axis, terms)))  # type: ignore[arg-type]
    index, reds = [Index.axis(f"n{d}") for d in range(len(shape))], [Index()] * len(terms)
    for place, part in zip(places[operand], probe.found[node.inputs.index(operand)], strict=True):
        ((atom, _),) = part.terms
        (reds if atom.name in terms else index)[(terms if atom.name in terms else names).index(atom.name)] = place
    return index, reds


def add_product(
    made: AttentionBuilder,
    node: OpNode,
    operand: int,
    places: dict[int, IndexTuple],
    outs: dict[int, str],
    name: str = "values",
) -> Refusal | None:
    """The phase that multiplies an operand that is kept per row (the weights) by another array (the values)."""
    assert node.op is not None
    builder, shape = made.builder, node.op.outputs[0].shape
    index, reds = product_point(node, operand, places)
    axes = tuple(Axis(f"n{d}", e) for d, e in enumerate(shape) if index[d] == Index.axis(f"n{d}"))
    if [r for r in reds if r != Index()] != [Index.axis(made.key.name)] or len(axes) != 1:
        return Refusal(node.prim, "weights and values of an attention that share more than the keys")
    red, out = Red(made.key.name, made.key.extent), tuple(index)
    made.begin(red, *axes)
    accs, body = summand(made, node, out, tuple(reds))
    made.begin(*axes)
    bind_result(made, node, accs, out)
    after = descendants(builder.graph, builder.subset, node.number)
    found = propagate_indices(builder.graph, after, node, out, builder.ranges)
    if any(t not in found for t in outs):
        return Refusal(node.prim, "a result whose points do not follow the product's")
    stores = tuple(
        Store(to, flatten(found[t], builder.graph.tensors[t].type.shape), builder.value(t, found[t]))
        for t, to in outs.items()
    )
    made.phases.append(Phase(name, (*made.rows, *axes), (red,), accs, body, builder.target, stores))
    return None
