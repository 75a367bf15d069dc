"""Matrix products in the form that `codegen.cuda.product` reads: axes ``m`` and ``n``, ``b`` of a batch, term ``k``.

A contraction or a 1x1 convolution is such a product where each operand is one array, read without guards, whose
addresses are linear in the summed axis:

    out[b, m, n] = epilogue(sum over k of left[b, m, k] * right[b, k, n])

``left`` and ``right`` are named so that neighbouring n are neighbours in the first result: they may be the operands in
either order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.dfg.index import Index, unflatten
from jcuts.dfg.node import Graph, Node
from jcuts.dfg.program import ITEM_SIZE, Acc, Axis, Phase, Program, Red
from jcuts.region.schedule import collapsed, rewritten

B, ROWS, COLUMNS, K, S = "b", "m", "n", "k", "s"
"""Axes: batch, rows, columns, the summed one, and the group of terms where a sum is split over the grid."""
TYPES = {"float32": "tf32", "bfloat16": "bf16", "float16": "f16"}
"""What the matrix units take of each storage type."""
COPY = (16, 8, 4)
"""Bytes of one asynchronous copy into shared memory."""
LEAST_TERMS = 8


@dataclass(frozen=True)
class Side:
    """One operand of a product.

    Attributes:
        buffer, dtype: the array. index: address of an element.
        outer: its axis that is not summed, m or n.
        along_terms: neighbouring k are neighbours in memory, else neighbouring m (or n).
        width: elements of one asynchronous copy.
    """

    buffer: str
    dtype: str
    index: Index
    outer: str
    along_terms: bool
    width: int

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZE[self.dtype]


def as_product(program: Program) -> Program | None:
    """The program as a product, unscheduled; None if it is none, or if its arithmetic must not be that of matrix units.

    float32 products that ask for more than the default precision are none: matrix units round operands to TF32, which
    is XLA's default on GPUs too.
    """
    if len(program.phases) != 1 or dict(program.params).get("precision"):
        return None
    program = collapsed(program)
    phase = program.phases[0]
    loads = _factors(phase)
    if loads is None or len(phase.reds) != 1:
        return None
    red = phase.reds[0]
    strides = [{a.name: n.index.stride(a.name) for a in (*phase.axes, red)} for n in loads if n.index is not None]
    if len(strides) != 2 or any(s is None for found in strides for s in found.values()):
        return None
    first, second = strides
    if not first[red.name] or not second[red.name] or red.extent < LEAST_TERMS:
        return None
    if any(not first[a.name] and not second[a.name] for a in phase.axes):
        return None
    batch = [a for a in phase.axes if first[a.name] and second[a.name]]
    free = [[a for a in phase.axes if found[a.name] and a not in batch] for found in strides]
    last = next((a for a in phase.axes if phase.stores[0].address.stride(a.name) == 1), None)
    if last is None or last in batch or any(s.guards for s in phase.stores):
        return None
    left, right = (1, 0) if last in free[0] else (0, 1)
    if len(free[right]) != 1:  # the columns of a thread's accumulators are neighbours in memory
        return None
    made = _renamed(program, loads[left], loads[right], red, batch, free[left], free[right][0])
    return made if all(side is not None for side in _sides(made.phases[0], red.extent)) else None


def shares(total: int, terms: int, split: int) -> tuple[int, int]:
    """(tiles of ``terms`` terms of a group, groups) of a sum that at most ``split`` groups of blocks share.

    >>> shares(1000, 32, 5)
    (7, 5)
    """
    tiles = -(-total // terms)
    share = -(-tiles // split)
    return share, -(-tiles // share)


def summed(program: Program) -> int:
    """Terms of the whole sum (of a group of them the program has guards for what lies beyond)."""
    return int(str(dict(program.params).get("terms", program.phases[0].reds[0].extent)))


def sides(program: Program) -> tuple[Side, Side]:
    """Left and right operand of a product."""
    left, right = _sides(program.phases[0], summed(program))
    assert left is not None and right is not None
    return left, right


def _factors(phase: Phase) -> tuple[Node, Node] | None:
    """The two loads whose product is summed."""
    if len(phase.accs) != 1 or (phase.accs[0].combine, phase.accs[0].dtype) != ("add", "float32"):
        return None
    product = phase.body.nodes[phase.accs[0].values[0]]
    if product.op != "mul" or product.dtype != "float32":
        return None
    found = []
    for number in product.args:
        node = phase.body.nodes[number]
        if node.op == "widen":
            node = phase.body.nodes[node.args[0]]
        if node.op != "load" or node.guards or node.index is None or node.index.values() or node.dtype not in TYPES:
            return None
        found.append(node)
    return (found[0], found[1]) if found[0].dtype == found[1].dtype else None


def _renamed(
    program: Program, left: Node, right: Node, red: Red, batch: list[Axis], rows: list[Axis], column: Axis
) -> Program:
    """The program over the axes b, m and n."""
    phase = program.phases[0]
    groups = {B: batch, ROWS: rows, COLUMNS: [column]}
    extents = {name: math.prod(a.extent for a in group) for name, group in groups.items()}
    ranges = {**extents, K: red.extent}
    where = {red.name: Index.axis(K)}
    for name, group in groups.items():
        places = unflatten(Index.axis(name), tuple(a.extent for a in group), ranges)
        where.update(zip((a.name for a in group), places, strict=True))
    made = rewritten(phase, lambda index: index.substitute(where, ranges))
    body = Graph()
    factors = []
    for node in (left, right):
        assert node.index is not None
        value = body.load(node.buffer, node.index.substitute(where, ranges), node.dtype)
        factors.append(value if node.dtype == "float32" else body.apply("widen", "float32", value))
    total = body.apply("mul", "float32", *factors)
    axes = tuple(Axis(name, extents[name]) for name in (B, ROWS, COLUMNS) if name != B or batch)
    acc = Acc("add", "float32", (total,))
    phase = replace(made, axes=axes, reds=(Red(K, red.extent),), accs=(acc,), body=body)
    return replace(program, phases=(phase,), params=())


def _sides(phase: Phase, total: int) -> tuple[Side | None, Side | None]:
    product = phase.body.nodes[phase.accs[0].values[0]]
    if product.op == "select":  # of a group of terms, those that there are
        product = phase.body.nodes[product.args[1]]
    ranges = {**phase.ranges(), K: total}
    found = []
    for number, outer in zip(product.args, (ROWS, COLUMNS), strict=True):
        node = phase.body.nodes[number]
        node = phase.body.nodes[node.args[0]] if node.op == "widen" else node
        found.append(_side(node, outer, ranges))
    return found[0], found[1]


def _side(node: Node, outer: str, ranges: dict[str, int]) -> Side | None:
    index = node.index
    assert index is not None
    for contiguous in (K, outer):
        if index.stride(contiguous) != 1:
            continue
        rest = index - Index.axis(contiguous)
        size = ITEM_SIZE[node.dtype]
        steps = [rest.const, ranges[contiguous], *(coef for _, coef in rest.terms)]
        for width in (b // size for b in COPY):
            if all(step % width == 0 for step in steps):
                return Side(node.buffer, node.dtype, index, outer, contiguous == K, width)
    return None
