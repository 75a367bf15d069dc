"""Pattern matcher for attention programs: operands, axes and score modification that the flash-attention kernel needs.

    out[b, m, f] = epilogue(sum_n softmax_n(score_mod(sum_k query[b, m, k] key[b, n, k])) * value[b, n, f])

Queries are rows ``m``, keys are columns ``n`` of the first GEMM; the features ``f`` are the columns ``n`` of the
second.  One query per head (decoding) has no axis of rows: they are one.  Strides are free as long as k of queries and
keys and f of values are contiguous, so Q, K and V may be slices of one array.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.loop_transforms import map_indices
from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Phase, Program
from jcuts.lower.attention.forward import STATISTICS
from jcuts.lower.patterns.gemm import COLUMNS, COPY, ROWS, TYPES

EIGHT = 8
"""Depths are multiples of this."""
MOST_DEPTH = 128
"""Depths are at most this."""
BESIDE = ("convert", "widen")
"""Changes of type: between the products everything is carried in float32."""


@dataclass(frozen=True)
class Operand:
    """Queries, keys or values: a buffer of type ``dtype``.

    Attributes:
        base: address of the first one by the batch's axes. step: elements from one to the next.
        width: elements of one copy (0: the array is not even words). extent: how many; length: of each.
    """

    buffer: str
    dtype: str
    base: Index
    step: int
    extent: int
    length: int
    width: int

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class Attention:
    """A matched attention, its axes renamed.

    Attributes:
        batch: axes of the grid besides the rows.
        scores: the first phase over ``m`` and ``n``; result: the last one over ``m`` and the features ``n``.
        statistics: results that are one value per row, over ``m``; None where there are none.
        row_values: the local buffers of a row's maximum and sum of exponentials.
    """

    query: Operand
    key: Operand
    value: Operand
    batch: tuple[Axis, ...]
    scores: Phase
    result: Phase
    statistics: Phase | None = None
    row_values: tuple[str, str] = ("", "")

    @property
    def batches(self) -> int:
        """Heads of all examples."""
        return math.prod(a.extent for a in self.batch)

    @property
    def rows(self) -> int:
        """Queries of a head."""
        return self.query.extent

    @property
    def keys(self) -> int:
        """Keys of a head."""
        return self.key.extent

    @property
    def kind(self) -> str:
        """Operand type of the ``mma`` instruction."""
        return TYPES[self.query.dtype]

    @property
    def score_ops(self) -> int:
        """Element-wise operations between QK^T and the softmax (score modification), per score."""
        return sum(bool(n.args) and n.op not in BESIDE for n in self.scores.exit.nodes)

    def __str__(self) -> str:
        return (
            f"{self.batches} x {self.rows} queries, {self.keys} keys of {self.query.length}, values of "
            f"{self.value.length}, {self.query.dtype}, {self.score_ops} operations on a score"
        )


def match(program: Program) -> Attention | Refusal:
    """Matches a program of the attention template, or refuses it with the reason why no kernel supports it."""
    if program.template != "attention" or len(program.phases) < 5:
        return _reject("it is no attention")
    if dict(program.params).get("precision"):
        return _reject("its products ask for more than the default precision")
    scores, *middle, result = program.phases
    statistics = middle.pop() if middle[-1].name == STATISTICS else None
    weights = _softmax(scores, middle)
    if isinstance(weights, Refusal):
        return weights
    found = _operands(program, scores, result, weights)
    if isinstance(found, Refusal) or statistics is None:
        return found
    kept = (middle[0].stores[0].buffer, middle[1].stores[0].buffer)
    if any(n.op == "load" and n.buffer not in kept for n in statistics.exit.nodes):
        return _reject("statistics of its rows are made of more than their maximum and sum")
    (row,) = {a.name for a in scores.axes[:-1]} - {a.name for a in found.batch}
    statistics = _in_float32(statistics, program)
    return replace(found, statistics=renamed(statistics, {row: ROWS}), row_values=kept)


def _in_float32(phase: Phase, program: Program) -> Phase:
    """Statistics of rows in float32, with one rounding, where they are stored (excess precision).

    The online softmax rounds neither the scores' maximum nor the sum to 16 bits: a logsumexp of a maximum that is
    rounded does not belong to the sum of exponentials of scores less the one that is not.
    """
    graph, numbers = Graph(), dict[int, int]()
    for number, node in enumerate(phase.exit.nodes):
        below = node.args[0] if node.args else number
        if node.op in BESIDE and not node.declared and {node.dtype, phase.exit.nodes[below].dtype} <= TYPES.keys():
            numbers[number] = numbers[below]
        else:
            dtype = "float32" if node.dtype in TYPES else node.dtype
            numbers[number] = graph.add(replace(node, dtype=dtype, args=tuple(numbers[a] for a in node.args)))
    stores = []
    for store in phase.stores:
        value, dtype = numbers[store.value], program.buffer(store.buffer).dtype
        if dtype != graph.nodes[value].dtype:
            value = graph.add(Node("convert", dtype, (value,), attrs=(("source", graph.nodes[value].dtype),)))
        stores.append(replace(store, value=value))
    return replace(phase, exit=graph, stores=tuple(stores))


def _reject(reason: str) -> Refusal:
    return Refusal("attention", reason)


# -- the softmax ----------------------------------------------------------------------------------------------------
def _softmax(scores: Phase, middle: list[Phase]) -> str | Refusal:
    """The local buffer of the weights, where the phases between the GEMMs are a softmax of the scores."""
    if len(middle) != 3 or any(len(p.stores) != 1 for p in (scores, *middle)):
        return _reject("what lies between its products is no softmax")
    largest, total, last = middle
    kept = scores.stores[0].buffer
    if [a.combine for a in largest.accs] != ["max"] or [a.combine for a in total.accs] != ["add"] or last.reds:
        return _reject("its rows are not divided by a sum of exponentials")
    most = largest.stores[0].buffer
    whole = _strip(largest.exit, largest.stores[0].value).op == "acc"
    if not whole or not _is_load(largest.body, largest.accs[0].values[0], kept):
        return _reject("it takes the largest of something else than its scores")
    if not _is_exponential(total.body, total.accs[0].values[0], kept, most):
        return _reject("it sums something else than exponentials of scores")
    exit_, value = total.exit, total.stores[0].value
    if _strip(exit_, value).op != "acc":
        return _reject("its sum of exponentials is changed")
    node = _strip(last.exit, last.stores[0].value)
    summed = total.stores[0].buffer
    if node.op != "div" or not _is_exponential(last.exit, node.args[0], kept, most):
        return _reject("its weights are no quotients of exponentials")
    if not _is_load(last.exit, node.args[1], summed):
        return _reject("its weights are divided by something else than the sum of exponentials")
    return last.stores[0].buffer


def _strip(graph: Graph, number: int) -> Node:
    """The node below conversions between float types.

    What goes through integers loses more than bits, and a rounding that the function declares is none of them.
    """
    node = graph.nodes[number]
    while node.op in BESIDE and not node.declared and {node.dtype, graph.nodes[node.args[0]].dtype} <= TYPES.keys():
        node = graph.nodes[node.args[0]]
    return node


def _is_load(graph: Graph, number: int, buffer: str) -> bool:
    node = _strip(graph, number)
    return node.op == "load" and node.buffer == buffer


def _is_largest(graph: Graph, number: int, buffer: str) -> bool:
    """The largest score, or the larger of it and -inf."""
    node = _strip(graph, number)
    if node.op == "max":
        least = [a for a in node.args if (n := _strip(graph, a)).op == "const" and n.value == -math.inf]
        return len(least) == 1 and any(_is_load(graph, a, buffer) for a in node.args)
    return _is_load(graph, number, buffer)


def _is_exponential(graph: Graph, number: int, scores: str, most: str) -> bool:
    node = _strip(graph, number)
    inner = _strip(graph, node.args[0]) if node.op == "exp" else node
    if (node.op, inner.op) != ("exp", "sub"):
        return False
    return _is_load(graph, inner.args[0], scores) and _is_largest(graph, inner.args[1], most)


# -- operands -------------------------------------------------------------------------------------------------------
def _operands(program: Program, scores: Phase, result: Phase, weights: str) -> Attention | Refusal:
    pair, other = factors(scores), factors(result)
    if pair is None or other is None or len(scores.reds) != 1 or len(result.reds) != 1:
        return _reject("its products are not of arrays as they are")
    key_axis, feature = scores.axes[-1], result.axes[-1]
    depth = scores.reds[0]
    outer = scores.axes[:-1]
    if result.axes[:-1] != outer or result.reds[0].name != key_axis.name:
        return _reject("its products run over different axes")
    key, query = pair if depends_on(pair[0], key_axis) else pair[::-1]
    value = other[0] if other[1].buffer == weights else other[1]
    if (
        depends_on(query, key_axis)
        or not depends_on(key, key_axis)
        or weights not in (other[0].buffer, other[1].buffer)
    ):
        return _reject("its queries move with its keys")
    if len({n.dtype for n in (query, key, value)}) > 1 or query.dtype not in TYPES:
        return _reject(f"operands of {query.dtype}, {key.dtype} and {value.dtype}")
    free = [a for a in outer if depends_on(query, a) and not depends_on(key, a) and not depends_on(value, a)]
    if not free and TYPES[query.dtype] == "tf32":
        return _reject("one query per head is multiplied in float32, not rounded to TF32")
    row = max(free, key=lambda a: (a.extent, a.name), default=Axis(ROWS, 1))
    batch = tuple(a for a in outer if a is not row)
    sides = []
    for node, axis, along in ((query, row, depth), (key, key_axis, depth), (value, key_axis, feature)):
        side = operand_of(node, Axis(axis.name, axis.extent), Axis(along.name, along.extent), batch)
        if isinstance(side, Refusal):
            return side
        sides.append(side)
    names = {row.name: ROWS}
    first = renamed(scores, {**names, key_axis.name: COLUMNS})
    last = renamed(result, {**names, feature.name: COLUMNS})
    if any(s.guards for s in last.stores):
        return _reject("results with guards")
    if not any(s.address.stride(COLUMNS) == 1 for s in last.stores):
        return _reject("its features are no neighbours in the result")
    queries, keys, values = sides
    return Attention(queries, keys, values, batch, first, last)


def factors(phase: Phase) -> tuple[Node, Node] | None:
    """The two loads whose product is summed, without guards and with linear addresses."""
    if len(phase.accs) != 1 or (phase.accs[0].combine, phase.accs[0].dtype) != ("add", "float32"):
        return None
    product = phase.body.nodes[phase.accs[0].values[0]]
    if product.op != "mul" or product.dtype != "float32":
        return None
    loads = [_strip(phase.body, a) for a in product.args]
    names = [a.name for a in (*phase.axes, *phase.reds)]
    for node in loads:
        if node.op != "load" or node.guards or node.index is None or node.index.values():
            return None
        if any(node.index.stride(n) is None for n in names):
            return None
    return loads[0], loads[1]


def depends_on(node: Node, axis: Axis) -> bool:
    """Whether an address moves with an axis."""
    return node.index is not None and bool(node.index.stride(axis.name))


def operand_of(node: Node, axis: Axis, along: Axis, batch: tuple[Axis, ...]) -> Operand | Refusal:
    """A factor of a product as queries, keys or values. Args: axis: of its rows; along: of their elements."""
    assert node.index is not None
    item = ITEM_SIZE[node.dtype]
    if node.index.stride(along.name) != 1 and along.extent > 1:
        return _reject(f"elements of a row of {node.buffer} are no neighbours in memory")
    if along.extent % EIGHT or not EIGHT <= along.extent <= MOST_DEPTH:
        return _reject(f"rows of {along.extent} elements: multiples of {EIGHT} up to {MOST_DEPTH} are taken")
    step = node.index.stride(axis.name) or 0
    base = Index(node.index.const)
    for other in batch:
        base = base + Index.axis(other.name) * (node.index.stride(other.name) or 0)
    steps = [along.extent, step, base.const, *(c for _, c in base.terms)]
    width = next((b // item for b in COPY if all(s % (b // item) == 0 for s in steps)), 0)
    if not width:
        return _reject(f"rows of {node.buffer} do not begin at words")
    return Operand(node.buffer, node.dtype, base, step, axis.extent, along.extent, width)


def renamed(phase: Phase, names: dict[str, str]) -> Phase:
    """The phase with axes of other names."""
    made = map_indices(phase, lambda index: index.substitute({a: Index.axis(n) for a, n in names.items()}, {}))
    return replace(
        made,
        axes=tuple(replace(a, name=names.get(a.name, a.name)) for a in phase.axes),
        reds=tuple(replace(r, name=names.get(r.name, r.name)) for r in phase.reds),
    )
