"""Buffers of a program after fusion: which values are written to memory, and which share, copy or reuse a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcuts.plan.cost.expanded_jaxpr import Node, Value, body_of
from jcuts.plan.cost.jaxpr import bytes_of, inner
from jcuts.plan.cost.primitive_kinds import BUFFERS, EXPENSIVE, REDUCTIONS, UPDATES, VIEWS
from jcuts.trace import jaxapi

RECOMPUTED = 0.625
"""An expensive value is computed again in each consumer if its operands have at most this fraction of its bytes: half,
and statistics of rows beside (a softmax in 32 bits of scores in 16)."""


def owners(nodes: list[Node], results: Sequence[Value | None]) -> dict[Value, Value | None]:
    """Maps every value to the one that owns its buffer (itself, or what it is a view of), or to None if it is fused
    away.
    """
    users: dict[Value, list[Node]] = {}
    for node in nodes:
        for v in node.inputs:
            users.setdefault(v, []).append(node)
    kept = {v for v in results if v is not None}
    owner: dict[Value, Value | None] = {}
    origin: dict[Value, float] = {}  # bytes of the buffers that a value which fuses away is computed from
    for node in nodes:
        read = sum(origin.get(v, 0.0) if owner.get(v, v) is None else bytes_of(v) for v in node.inputs)
        for v in node.outputs:
            origin[v] = read
            mine = users.get(v, [])
            if node.name in VIEWS:
                source = node.inputs[0] if node.inputs else None
                owner[v] = owner.get(source, source) if source is not None else None
            elif node.name in ("broadcast_in_dim", "iota", "axis_index"):
                owner[v] = None
            elif node.name in BUFFERS or inner(node.equation) or v in kept:
                owner[v] = v
            else:
                # Cheap results are computed again in each consumer; expensive ones are kept when there are several,
                # unless they are larger than what they are computed from.
                again = len(mine) <= 1 or node.name not in EXPENSIVE or read <= RECOMPUTED * bytes_of(v)
                owner[v] = None if again and not any(opaque_node(user) for user in mine) else v
    return owner


def opaque_node(node: Node) -> bool:
    """Whether a node needs its operands as buffers (a reduction or a gather fuses with the producer of its operand)."""
    return node.name in BUFFERS - REDUCTIONS - {"gather"} or bool(inner(node.equation))


def last_uses(nodes: list[Node], owner: dict[Value, Value | None]) -> dict[Value, int]:
    """The position of the last node that reads each buffer, itself or through what fuses into it."""
    last: dict[Value, int] = {}
    roots: dict[Value, set[Value]] = {}  # what a value that fuses away is computed from
    for position, node in enumerate(nodes):
        mine: set[Value] = set()
        for v in node.inputs:
            base = owner.get(v, v)
            mine |= roots.get(v, set()) if base is None else {base}
        last |= dict.fromkeys(mine, position)
        roots |= {v: mine for v in node.outputs if owner[v] is None}
    return last


def is_same_array(new: Value, old: Value) -> bool:
    """Whether a fused kernel may write ``new`` where ``old`` lay: XLA shares buffers of one shape and type alone."""
    return new.aval.shape == old.aval.shape and new.aval.dtype == old.aval.dtype


def flattened(nodes: list[Node], owner: dict[Value, Value | None]) -> set[Value]:
    """Buffers that a product reads as a matrix of another shape.

    A product's operand with several free or several contracted dimensions is reshaped to two of them; the fused kernel
    that makes it ends in that reshape, so that it cannot write into an operand of its own.
    """
    found: set[Value] = set()
    for node in nodes:
        if node.name != "dot_general":
            continue
        contracted, batch = node.equation.params["dimension_numbers"]
        for v, over, along in zip(node.inputs, contracted, batch, strict=False):
            base = owner.get(v, v)
            if base is not None and max(len(over), v.aval.ndim - len(over) - len(along)) > 1:
                found.add(base)
    return found


def is_transposed(v: Any, contracted: Sequence[int]) -> bool:
    """Whether a product contracts other dimensions of an operand than its last."""
    return bool(contracted) and min(contracted) < v.aval.ndim - len(contracted)


def transposed_copies(node: Node, owner: dict[Value, Value | None], fused: set[Value]) -> float:
    """Bytes of a product's operands that XLA's CPU compiler copies first: its kernels contract the last dimensions.

    A fused kernel writes its result transposed instead.
    """
    if node.name != "dot_general":
        return 0.0
    pairs = zip(node.inputs, node.equation.params["dimension_numbers"][0], strict=False)
    return sum(bytes_of(v) for v, over in pairs if is_transposed(v, over) and owner.get(v, v) not in fused)


def two_layouts(nodes: list[Node], owner: dict[Value, Value | None]) -> set[Value]:
    """Buffers that one product reads as they are and another transposed: if fused kernels make them, two write them."""
    found: dict[bool, set[Value]] = {False: set(), True: set()}
    for node in nodes:
        if node.name == "dot_general":
            for v, over in zip(node.inputs, node.equation.params["dimension_numbers"][0], strict=False):
                base = owner.get(v, v)
                if base is not None:
                    found[is_transposed(v, over)].add(base)
    return found[False] & found[True]


def doubled_carries(node: Node, scatters: bool) -> list[Value]:
    """Values of a ``scan``'s carry that one turn does not update in place: an elementwise result that nothing follows
    which reads the old value does (a sum of gradients), and, if ``scatters``, an update of a part."""
    loop = node.equation
    first, count = jaxapi.scan_constants(loop), jaxapi.scan_carries(loop)
    nodes, outs, given = body_of(node, inner(loop)[0][0])
    owner = owners(nodes, outs)
    made = {v: position for position, node in enumerate(nodes) for v in node.outputs}
    last: dict[Value, int] = {}
    for position, node in enumerate(nodes):
        last |= {owner.get(v, v) or v: position for v in node.inputs}
    extra: list[Value] = []
    for old, new in zip(given[first : first + count], outs[:count], strict=True):
        if new is None or new is old:
            continue
        position = made.get(owner.get(new, new) or new, -1)
        kernel = nodes[position] if position >= 0 else None
        in_place = kernel is not None and (not opaque_node(kernel) or (scatters and kernel.name in UPDATES))
        if not (in_place and last.get(old, -1) <= position and old in _sources(nodes, position, owner)):
            extra.append(new)
    return extra


def _sources(nodes: list[Node], position: int, owner: dict[Value, Value | None]) -> set[Value]:
    """Buffers that a node's kernel reads, through what fuses into it."""
    found: set[Value] = set()
    wanted = set(nodes[position].inputs)
    for node in reversed(nodes[:position]):
        if any(v in wanted and owner.get(v, v) is None for v in node.outputs):
            wanted |= set(node.inputs)
    for v in wanted:
        base = owner.get(v, v)
        if base is not None:
            found.add(base)
    return found
