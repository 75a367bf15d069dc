"""Flattening of a jaxpr: calls inlined, loops over layers unrolled, and which values are made of which parameters.

A ``scan`` is a loop over layers when most of the parameters that its body uses are stacked along the loop; then each
iteration is a layer with its slice of the stack.  Any other loop (over time, over blocks of attention) stays one
equation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.plan.cost.expanded_jaxpr import Node, Value, inlined, view
from jcuts.plan.cost.jaxpr import inner
from jcuts.trace import jaxapi

SLICES = frozenset({"slice", "dynamic_slice", "gather", "split", "squeeze", "unstack"})
"""Primitives that take a part of a parameter."""


@dataclass(frozen=True)
class Piece:
    """A parameter, or the slice of one that a layer uses: ``leaf`` by position, which part, and how many values."""

    leaf: int
    part: tuple
    size: float


Sources = dict[Value, frozenset[Piece]]


class Flat:
    """A traced function as one list of equations: calls inlined, loops over layers unrolled.

    Attributes: nodes; sources: the parameters that a value is made of alone; data: values that depend on the inputs.
    """

    def __init__(self, jaxpr: Any, held: Sequence[float]) -> None:
        given = [Value(v.aval) for v in jaxpr.invars]
        self.nodes: list[Node] = []
        self.results: list[Value | None] = []
        self.sources: Sources = {v: frozenset({Piece(i, (), held[i])}) for i, v in enumerate(given[: len(held)])}
        self.data: set[Value] = set(given[len(held) :])
        nodes, self.results = inlined(jaxpr, given)
        self._take(nodes)

    def _take(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._propagate(node)
            stacked = self._stacked(node) if node.name == "scan" else None
            if stacked is None:
                self.nodes.append(node)
            else:
                self._unroll(node, stacked)

    def _propagate(self, node: Node) -> None:
        """What a node's results are made of."""
        if any(v in self.data for v in node.inputs):
            self.data |= set(node.outputs)
            return
        pieces = frozenset().union(*(self.sources.get(v, frozenset()) for v in node.inputs))
        if len(pieces) == 1 and node.name in SLICES and node.name != "squeeze":
            (piece,) = pieces
            for position, v in enumerate(node.outputs):
                size = float(math.prod(v.aval.shape))
                part = (*piece.part, _where(node, position))
                self.sources[v] = frozenset({Piece(piece.leaf, part, size) if size < piece.size else piece})
        elif pieces:
            self.sources |= dict.fromkeys(node.outputs, pieces)

    def _stacked(self, node: Node) -> set[int] | None:
        """Positions of a loop's operands that are parameters stacked along it; None if it is no loop over layers: if
        they are less than half of the parameter values that its body uses."""
        body, length = inner(node.equation)[0]
        operands = node.arguments
        carries, constants = jaxapi.scan_carries(node.equation), jaxapi.scan_constants(node.equation)
        stacked, used, sliced = set(), 0.0, 0.0
        for i, v in enumerate(operands):
            pieces = self.sources.get(v, frozenset()) if v is not None and v not in self.data else frozenset()
            size = sum(piece.size for piece in pieces)
            used += size
            if size and (i >= constants + carries or (i < constants and _indexed(body, i, length))):
                stacked.add(i)
                sliced += size
        return stacked if 2 * sliced >= used > 0 else None

    def _unroll(self, node: Node, stacked: set[int]) -> None:
        """Inlines every iteration of a loop over layers, each with its slice of what is stacked."""
        body, length = inner(node.equation)[0]
        operands = node.arguments
        constants, carries = jaxapi.scan_constants(node.equation), jaxapi.scan_carries(node.equation)
        carry = operands[constants : constants + carries]
        over = constants + carries
        for turn in range(int(length)):
            given: list[Value | None] = []
            for i, (v, inside) in enumerate(zip(operands, body.invars, strict=True)):
                if constants <= i < over:
                    given.append(carry[i - constants])
                    continue
                if i < constants and i not in stacked:
                    given.append(v)
                    continue
                given.append(self._slice(v, inside.aval, (id(node), i, turn), length))
            nodes, results = inlined(body, given)
            self._take(nodes)
            carry = results[:carries]
        for v, result in zip(node.outputs[:carries], carry, strict=True):
            self._alias(v, result)
        for v in node.outputs[carries:]:  # stacked results: data wherever the body's are
            self.data.add(v)

    def _slice(self, v: Value | None, aval: Any, part: tuple, length: float) -> Value:
        """One iteration's slice of a stacked operand."""
        made = Value(aval)
        if v is None:
            return made
        if v in self.data:
            self.data.add(made)
        self.sources[made] = frozenset(
            Piece(piece.leaf, (*piece.part, part), piece.size / length) for piece in self.sources.get(v, frozenset())
        )
        return made

    def _alias(self, outer: Value, result: Value | None) -> None:
        """The result of an unrolled loop under the name that later equations know."""
        if result is None:
            return
        if result in self.data:
            self.data.add(outer)
        if result in self.sources:
            self.sources[outer] = self.sources[result]
        self.nodes.append(view(result, outer))


def _where(node: Node, position: int) -> Any:
    """What tells two slices of one parameter apart: literal offsets, or the equation itself."""
    params = node.equation.params
    literals = tuple(str(v.val) for v in node.equation.invars if hasattr(v, "val"))
    if node.name == "slice":
        return (params["start_indices"], params["limit_indices"], params["strides"])
    if node.name == "dynamic_slice" and len(literals) == len(node.equation.invars) - 1:
        return (literals, params["slice_sizes"])
    return (id(node), position)


def _indexed(body: Any, position: int, length: float) -> bool:
    """Whether a loop's body uses a constant operand only by one slice per iteration (``w[i]`` in a ``fori_loop``)."""
    v = body.invars[position]
    if not v.aval.shape or v.aval.shape[0] != length:
        return False
    uses = [equation for equation in body.eqns if v in [u for u in equation.invars if not hasattr(u, "val")]]
    one = math.prod(v.aval.shape) / length
    return bool(uses) and all(
        equation.primitive.name in ("dynamic_slice", "gather") and math.prod(equation.outvars[0].aval.shape) == one
        for equation in uses
    )
