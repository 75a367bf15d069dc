"""Pattern matcher for programs of an attention's backward pass: operands and element-wise graphs that the kernel needs.

    P[m, n]  = weights(sum_k row_scores[m, k] scores[n, k])
    dS[m, n] = change(P[m, n], sum_f row_gradient[m, f] gradient[n, f])
    out[m, k] = sum_n dS[m, n] scores[n, k],    and, where rows are keys,    out[m, f] = sum_n P[m, n] gradient[n, f]

Rows ``m`` are queries (dQ) or keys (dK and dV), columns ``n`` are the others.  The operands of the columns are factors
of two products each, so that a kernel reads a tile of them once.  Both graphs may be any element-wise operations that
load what they need (lse, delta, biases, masks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Axis, Phase, Program
from jcuts.lower.attention.backward import TEMPLATE
from jcuts.lower.patterns.attention import Operand, depends_on, factors, operand_of, renamed
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, TYPES


@dataclass(frozen=True)
class AttentionBackward:
    """A matched backward pass, its axes renamed.

    Attributes:
        row_scores, row_gradient: Q and dO where a row is a query, K and V where it is a key.
        scores, gradient: the others.
        batch: axes of the grid besides the rows.
        weights, change: the phases of P and dS over ``m`` and ``n``; their stores are local buffers.
        results: dV and dK, or dQ: phases over ``m`` and the features ``n``.
    """

    row_scores: Operand
    row_gradient: Operand
    scores: Operand
    gradient: Operand
    batch: tuple[Axis, ...]
    weights: Phase
    change: Phase
    results: tuple[Phase, ...]

    @property
    def batches(self) -> int:
        """Heads of all examples."""
        return math.prod(a.extent for a in self.batch)

    @property
    def rows(self) -> int:
        """Rows of a head."""
        return self.row_scores.extent

    @property
    def columns(self) -> int:
        """Columns of a head."""
        return self.scores.extent

    @property
    def kind(self) -> str:
        """Operand type of the ``mma`` instruction."""
        return TYPES[self.scores.dtype]

    @property
    def element_ops(self) -> int:
        """Element-wise operations per score, of both graphs."""
        return sum(bool(n.args) for phase in (self.weights, self.change) for n in phase.exit.nodes)

    @property
    def pair_loads(self) -> int:
        """Loads of both graphs at a row and a column."""
        nodes = [n for phase in (self.weights, self.change) for n in phase.exit.nodes if n.op == "load"]
        return sum(n.index is not None and {ROWS, COLUMNS} <= n.index.axes() for n in nodes)

    @property
    def products(self) -> tuple[int, ...]:
        """Depths of all products: of Q K^T, dO V^T and the results."""
        depth, features = self.scores.length, self.gradient.length
        return (depth, features, depth) if len(self.results) == 1 else (depth, features, features, depth)

    def __str__(self) -> str:
        of = "dQ" if len(self.results) == 1 else "dK and dV"
        return (
            f"{of} of {self.batches} x {self.rows} rows, {self.columns} columns, depths {self.scores.length} and "
            f"{self.gradient.length}, {self.scores.dtype}, {self.element_ops} operations on a score"
        )


def match_backward(program: Program) -> AttentionBackward | Refusal:
    """Matches a program of the backward template, or refuses it with the reason why no kernel supports it."""
    if program.template != TEMPLATE or len(program.phases) not in (3, 4):
        return _reject("it is no backward pass")
    if dict(program.params).get("precision"):
        return _reject("its products ask for more than the default precision")
    weights, change, *results = program.phases
    if any(len(p.stores) != 1 for p in (weights, change)):
        return _reject("its weights are no single value")
    pairs = [factors(p) for p in (weights, change, *results)]
    if any(p is None for p in pairs) or any(len(p.reds) != 1 for p in program.phases):
        return _reject("its products are not of arrays as they are")
    return _operands(program, [p for p in pairs if p is not None])


def _reject(reason: str) -> Refusal:
    return Refusal("attention", reason)


def _operands(program: Program, pairs: list) -> AttentionBackward | Refusal:
    weights, change, *results = program.phases
    key, outer = weights.axes[-1], weights.axes[:-1]
    if change.axes != weights.axes or any(r.axes[:-1] != outer or r.reds[0].name != key.name for r in results):
        return _reject("its products run over different axes")
    sides = []
    for pair in pairs[:2]:
        right, left = pair if depends_on(pair[0], key) else pair[::-1]
        if depends_on(left, key) or not depends_on(right, key):
            return _reject("its queries move with its keys")
        sides.append((left, right))
    (left, right), (left_gradient, right_gradient) = sides
    nodes = (left, left_gradient, right, right_gradient)
    if len({n.dtype for n in nodes}) > 1 or left.dtype not in TYPES:
        return _reject(f"operands of {', '.join(n.dtype for n in nodes)}")
    free = [
        a
        for a in outer
        if all(depends_on(n, a) for n in (left, left_gradient))
        and not any(depends_on(n, a) for n in (right, right_gradient))
    ]
    if not free:
        return _reject("it has no axis of rows alone")
    row = max(free, key=lambda a: (a.extent, a.name))
    batch = tuple(a for a in outer if a is not row)
    found: list[Operand] = []
    for node, axis, along in (
        (left, row, weights.reds[0]),
        (left_gradient, row, change.reds[0]),
        (right, key, weights.reds[0]),
        (right_gradient, key, change.reds[0]),
    ):
        side = operand_of(node, Axis(axis.name, axis.extent), Axis(along.name, along.extent), batch)
        if isinstance(side, Refusal):
            return side
        found.append(side)
    kept = (change.stores[0].buffer,) if len(results) == 1 else (weights.stores[0].buffer, change.stores[0].buffer)
    read = (found[2],) if len(results) == 1 else (found[3], found[2])
    for phase, pair, local, side in zip(results, pairs[2:], kept, read, strict=True):
        other = next((n for n, twin in (pair, pair[::-1]) if twin.buffer == local), None)
        if other is None:
            return _reject("its results are no products of its weights and their gradients")
        again = operand_of(other, Axis(key.name, key.extent), Axis(phase.axes[-1].name, phase.axes[-1].extent), batch)
        if again != side or depends_on(other, row):
            return _reject("its results are no products with its operands")
    names = {row.name: ROWS}
    first, second = (renamed(p, {**names, key.name: COLUMNS}) for p in (weights, change))
    last = tuple(renamed(p, {**names, p.axes[-1].name: COLUMNS}) for p in results)
    if any(s.guards for p in last for s in p.stores):
        return _reject("results with guards")
    if not all(any(s.address.stride(COLUMNS) == 1 for s in p.stores) for p in last):
        return _reject("its features are no neighbours in a result")
    return AttentionBackward(found[0], found[1], found[2], found[3], batch, first, second, last)
