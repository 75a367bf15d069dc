"""Predication of a phase by a guard: masked loads and neutral accumulators where it fails; the phase without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Phase
from jcuts.ops.window import identity


def predicate_loads(
    graph: Graph, places: Mapping[str, Index], guard: Guard, ranges: Mapping[str, int]
) -> tuple[Graph, dict[int, int]]:
    """The graph with axes replaced and its loads predicated by the guard; and the new number of every node."""
    target = Graph()
    numbers: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        index = None
        if node.index is not None:
            index = node.index.substitute(places, ranges).renumber(numbers)
        guards = tuple(Guard(g.index.substitute(places, ranges).renumber(numbers), g.low, g.high) for g in node.guards)
        if node.op == "load":
            guards = (*guards, guard)
        guards = tuple(g for g in guards if not g.always(ranges))
        value = node.value if node.op != "load" or node.guards else (0 if guards else None)
        args = tuple(numbers[a] for a in node.args)
        if node.op == "guard" and not guards:
            numbers[number] = target.const(True, "bool")
            continue
        numbers[number] = target.add(Node(node.op, node.dtype, args, node.buffer, index, guards, value, node.attrs))
    return target, numbers


def mask_accumulators(body: Graph, accs: tuple[Acc, ...], numbers: Mapping[int, int], guard: Guard) -> tuple[Acc, ...]:
    """Accumulators that get their neutral element where the guard fails; ``numbers``: new numbers of the
    reduced nodes.
    """
    holds = body.add(Node("guard", "bool", guards=(guard,)))
    found = []
    for acc in accs:
        values = []
        for place, value in enumerate(acc.values):
            dtype = body.nodes[numbers[value]].dtype
            # of argmax and argmin the position: one after all real ones, so that ties with the identity lose
            nothing = identity(acc.combine, acc.dtype) if place == 0 else _last(dtype)
            values.append(body.apply("select", dtype, holds, numbers[value], body.const(nothing, dtype)))
        found.append(replace(acc, values=tuple(values)))
    return tuple(found)


def _last(dtype: str) -> int:
    return 2 ** int(dtype[4:]) - 1 if dtype.startswith("u") else -1


def restrict_to_guard(phase: Phase, guard: Guard) -> Phase:
    """The phase reduced over the points at which the guard holds."""
    ranges = phase.ranges()
    body, numbers = predicate_loads(phase.body, {}, guard, {**ranges, **dict.fromkeys(guard.index.axes(), 1 << 30)})
    return replace(phase, body=body, accs=mask_accumulators(body, phase.accs, numbers, guard))


def drop_guard(phase: Phase, guard: Guard) -> Phase:
    """The phase without a guard that is known to hold: the inverse of `restrict_to_guard`."""
    body, numbers = Graph(), {}
    for number, node in enumerate(phase.body.nodes):
        args = tuple(numbers[a] for a in node.args)
        index = None if node.index is None else node.index.renumber(numbers)
        guards = tuple(Guard(g.index.renumber(numbers), g.low, g.high) for g in node.guards if g != guard)
        if node.op == "guard" and not guards:
            numbers[number] = body.const(True, "bool")
        elif node.op == "select" and body.nodes[args[0]].op == "const":
            numbers[number] = args[1] if body.nodes[args[0]].value else args[2]
        else:
            value = node.value if node.op != "load" or guards else None
            numbers[number] = body.add(Node(node.op, node.dtype, args, node.buffer, index, guards, value, node.attrs))
    accs = tuple(replace(a, values=tuple(numbers[v] for v in a.values)) for a in phase.accs)
    return replace(phase, body=body, accs=accs)
