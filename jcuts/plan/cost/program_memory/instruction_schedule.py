"""Instruction order of a program as XLA's schedulers leave it, where that decides what is live together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jcuts.plan.cost.expanded_jaxpr import Node, Value, used
from jcuts.plan.cost.jaxpr import inner
from jcuts.plan.cost.primitive_kinds import COLLECTIVES


def scalars_last(nodes: list[Node], results: Sequence[Value | None]) -> list[Node]:
    """Moves what only results of one number need (a loss) behind all else, where XLA's CPU compiler schedules it."""
    arrays = [v for v in results if v is not None and getattr(v.aval, "size", 2) > 1]
    first = used(nodes, arrays)
    early = {id(node) for node in first}
    return first + [node for node in nodes if id(node) not in early] if arrays else nodes


def carry_first(nodes: list[Node], carries: Sequence[Value | None]) -> list[Node]:
    """Moves what only a loop's stacked results need (gradients of weights) behind the chain of its carry, where XLA's
    GPU compiler schedules it."""
    first = used(nodes, carries)
    early = {id(node) for node in first}
    return first + [node for node in nodes if id(node) not in early]


def is_reduced_over_devices(node: Node) -> bool:
    """Whether a node is a collective among more than one device."""
    if node.name not in COLLECTIVES:
        return False
    names = node.equation.params.get("axes", node.equation.params.get("axis_name", ()))
    return math.prod(node.axes.get(name, 2) for name in ((names,) if isinstance(names, str) else names)) > 1


def collectives_late(nodes: list[Node]) -> list[Node]:
    """Moves a product that only a collective needs (the gradient of a table) right before it, where XLA's GPU compiler
    schedules it, with what comes between."""
    users: dict[Value, list[Node]] = {}
    for node in nodes:
        for v in node.inputs:
            users.setdefault(v, []).append(node)
    late: set[int] = set()
    for node in reversed(nodes):
        mine = [user for v in node.outputs for user in users.get(v, [])]
        waits = all(id(user) in late or is_reduced_over_devices(user) for user in mine)
        if mine and waits and not inner(node.equation) and not is_reduced_over_devices(node):
            late.add(id(node))
    made: set[Value] = set()
    for node in nodes:  # what leads to the first product stays
        if id(node) in late and node.name != "dot_general" and not any(v in made for v in node.inputs):
            late.remove(id(node))
        if id(node) in late:
            made |= set(node.outputs)
    maker = {v: node for node in nodes for v in node.outputs if id(node) in late}
    order: list[Node] = []
    placed: set[int] = set()

    def place(node: Node) -> None:
        for v in node.inputs:
            if v in maker and id(maker[v]) not in placed:
                placed.add(id(maker[v]))
                place(maker[v])
        order.append(node)

    for node in nodes:
        if id(node) not in late:
            place(node)
    return order
