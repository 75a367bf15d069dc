"""Online softmax (Milakov and Gimelshein, 2018): recognises a row's maximum and the sum of exponentials that follows.

A program that first takes the maximum m of v and then sums ``exp(v - c)``, with ``c`` made from m, reads its rows
twice.  With a running maximum m' one pass is enough: a sum of ``exp(v - m)`` becomes one of ``exp(v - m')`` by the
factor ``exp(m - m')``, and (m, s) of two sets of points merge in the same way.  `codegen.cuda.reduction.online_softmax`
emits that pass; the program keeps its phases.

``c`` is the maximum wherever that is finite; where it is not (``logsumexp`` takes 0 there), the sum is ``exp(m - c)``:
NaN of -inf - -inf and of a NaN in the row, 0 of rows of -inf and infinity where c is 0, as the two passes give them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Phase, Program, Store

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class OnlineSoftmax:
    """Result of `match_online_softmax`.

    Attributes:
        first, second: numbers of the phases of the maximum and of the sum.
        maximum: number of the maximum among the accumulators of the first.
        sums: numbers of the sums of exponentials among those of the second; none of its others depend on the first.
        centre: the local buffer that holds ``c``.
    """

    first: int
    second: int
    maximum: int
    sums: tuple[int, ...]
    centre: str


def match_online_softmax(program: Program) -> OnlineSoftmax | None:
    """Matches two successive reductions of a program to maximum and sum of exponentials; None where there are none."""
    if program.template != "rows" or {g.axis for g in program.grid} != set(program.serial):
        return None
    reducing = [number for number, phase in enumerate(program.phases) if phase.reds]
    for first, second in itertools.pairwise(reducing):
        for number, acc in enumerate(program.phases[first].accs):
            if acc.combine == "max" and acc.dtype in DTYPES:
                found = _with_maximum(program, first, second, number)
                if found is not None:
                    return found
    return None


def _with_maximum(program: Program, first: int, second: int, number: int) -> OnlineSoftmax | None:
    """The match of two reductions with one of the first one's accumulators as the maximum."""
    one, other = program.phases[first], program.phases[second]
    kept = {s.buffer: (p, s) for p in program.phases[:second] if not p.reds for s in p.stores}
    made = {s.buffer: s for s in one.stores if program.buffer(s.buffer).role == "local"}
    centres = {name for name, store in made.items() if _is_the_maximum(one.exit, store.value, number)}
    value = one.body, one.accs[number].values[0]
    sums, used = [], set()
    for place, acc in enumerate(other.accs):
        root = other.body, acc.values[0]
        centre = _exponential(root, value, kept, centres) if acc.combine == "add" else None
        if centre is not None and acc.dtype == one.accs[number].dtype:
            sums.append(place)
            used.add(centre)
        elif not _locals_of(other.body, acc.values, kept).isdisjoint(made):
            return None
    if not sums or len(used) > 1 or one.reds != other.reds or one.axes != other.axes:
        return None
    return OnlineSoftmax(first, second, number, tuple(sums), used.pop())


Kept = dict[str, tuple[Phase, Store]]
Value = tuple[Graph, int]


def _exponential(root: Value, value: Value, kept: Kept, centres: set[str]) -> str | None:
    """The centre c of ``exp(v - c)`` with this v; None where a node is something else."""
    graph, number = _followed(root, kept)
    node = graph.nodes[number]
    if node.op != "exp" or node.dtype not in DTYPES:
        return None
    graph, number = _followed((graph, node.args[0]), kept)
    difference = graph.nodes[number]
    if difference.op != "sub" or difference.dtype != node.dtype:
        return None
    centre = graph.nodes[difference.args[1]]
    if centre.op != "load" or centre.buffer not in centres or centre.dtype != node.dtype:
        return None
    return centre.buffer if _equal(value, (graph, difference.args[0]), kept) else None


def _followed(value: Value, kept: Kept) -> Value:
    """What an earlier phase has stored into the local buffer that a node loads, at the same point; else the node."""
    graph, number = value
    node = graph.nodes[number]
    if node.op != "load" or node.buffer not in kept or node.guards:
        return value
    phase, store = kept[node.buffer]
    return _followed((phase.exit, store.value), kept) if store.address == node.index else value


def _equal(one: Value, other: Value, kept: Kept) -> bool:
    (a, x), (b, y) = _followed(one, kept), _followed(other, kept)
    left, right = a.nodes[x], b.nodes[y]
    if replace(left, args=()).key() != replace(right, args=()).key() or len(left.args) != len(right.args):
        return False
    if any(index.values() for index in (left.index, *(g.index for g in left.guards)) if index is not None):
        return False
    return all(_equal((a, p), (b, q), kept) for p, q in zip(left.args, right.args, strict=True))


def _is_the_maximum(graph: Graph, number: int, maximum: int) -> bool:
    """Whether a value of an exit graph is the maximum wherever that is finite, elsewhere it or a finite number."""
    node = graph.nodes[number]
    if node.op == "acc":
        return node.attr("number") == maximum
    if node.dtype not in DTYPES:
        return False
    if node.op == "max":
        a, b = node.args
        return any(_is_minus_infinity(graph, p) and _is_the_maximum(graph, q, maximum) for p, q in ((a, b), (b, a)))
    if node.op == "select":
        holds, then, otherwise = node.args
        condition = graph.nodes[holds]
        is_finite = condition.op == "is_finite" and _is_the_maximum(graph, condition.args[0], maximum)
        return is_finite and _is_the_maximum(graph, then, maximum) and _is_finite_constant(graph, otherwise)
    return False


def _is_finite_constant(graph: Graph, number: int) -> bool:
    node = graph.nodes[number]
    return node.op == "const" and node.value is not None and math.isfinite(node.value)


def _is_minus_infinity(graph: Graph, number: int) -> bool:
    node = graph.nodes[number]
    return node.op == "const" and node.value == float("-inf")


def _locals_of(graph: Graph, wanted: tuple[int, ...], kept: Kept) -> set[str]:
    """Local buffers that values load, through those that earlier phases keep."""
    found: set[str] = set()
    for number in graph.needed(wanted):
        node = graph.nodes[number]
        if node.op == "load" and node.buffer in kept:
            phase, store = kept[node.buffer]
            found |= _locals_of(phase.exit, (store.value,), kept)
        elif node.op == "load":
            found.add(str(node.buffer))
    return found
