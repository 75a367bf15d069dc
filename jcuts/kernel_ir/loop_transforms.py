"""Loop transformations: collapsing of neighbouring axes, and substitution of axes in every address and guard.

Two loops become one (loop collapsing) where every address is affine in the fused index: a row-major tensor of any rank
is then one axis.  Lowering and schedules of the CPU and the GPU alike start from the collapsed program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Axis, Phase, Program, Red, Store


def collapse_axes(phase: Phase, keep: frozenset[str] = frozenset()) -> Phase:
    """Collapses neighbouring axes (a, b) where the stride of a is extent(b) times the stride of b in every address.

    Row-major tensors of one shape collapse to a single axis; a broadcast operand keeps the axes apart. Output axes
    merge with output axes, reductions with reductions; axes in ``keep`` stay.
    """
    while True:
        for group in (phase.axes, phase.reds):
            pair = next(
                (p for p in itertools.pairwise(group) if not {p[0].name, p[1].name} & keep and _mergeable(phase, *p)),
                None,
            )
            if pair is not None:
                phase = _merge(phase, *pair)
                break
        else:
            return phase


def _indices(phase: Phase) -> Iterable[Index]:
    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.index is not None:
                yield node.index
            for guard in node.guards:
                yield guard.index
    for store in phase.stores:
        yield store.address
        for guard in store.guards:
            yield guard.index


def _mergeable(phase: Phase, outer: Axis | Red, inner: Axis | Red) -> bool:
    for index in _indices(phase):
        a, b = index.stride(outer.name), index.stride(inner.name)
        if a is None or b is None or a != b * inner.extent:
            return False
    return True


def _merge(phase: Phase, outer: Axis | Red, inner: Axis | Red) -> Phase:
    extent = outer.extent * inner.extent
    ranges = {**phase.ranges(), outer.name: extent}

    def change(index: Index) -> Index:
        """a*e*s + b*s with a*e + b = m is m*s: drop b, and let a count single steps."""
        step = index.stride(inner.name) or 0
        rest = index.substitute({inner.name: Index(), outer.name: Index()}, ranges)
        return rest + Index.axis(outer.name) * step

    axes = tuple(replace(a, extent=extent) if a.name == outer.name else a for a in phase.axes if a.name != inner.name)
    reds = tuple(replace(r, extent=extent) if r.name == outer.name else r for r in phase.reds if r.name != inner.name)
    return map_indices(replace(phase, axes=axes, reds=reds), change)


def map_indices(phase: Phase, change) -> Phase:
    """The phase with ``change`` applied to every address and guard."""
    body, body_map = _rewrite_graph(phase.body, change)
    exit_, exit_map = _rewrite_graph(phase.exit, change)
    accs = tuple(Acc(a.combine, a.dtype, tuple(body_map[v] for v in a.values), a.index_dtype) for a in phase.accs)
    stores = tuple(
        Store(
            s.buffer,
            change(s.address),
            exit_map[s.value],
            tuple(Guard(change(g.index), g.low, g.high) for g in s.guards),
        )
        for s in phase.stores
    )
    return replace(phase, body=body, exit=exit_, accs=accs, stores=stores)


def _rewrite_graph(graph: Graph, change) -> tuple[Graph, Mapping[int, int]]:
    new, numbers = Graph(), {}
    for number, node in enumerate(graph.nodes):
        index = None if node.index is None else change(node.index).renumber(numbers)
        guards = tuple(Guard(change(g.index).renumber(numbers), g.low, g.high) for g in node.guards)
        args = tuple(numbers[a] for a in node.args)
        numbers[number] = new.add(Node(node.op, node.dtype, args, node.buffer, index, guards, node.value, node.attrs))
    return new, numbers


def collapse_program(program: Program) -> Program:
    """The program with every phase's axes merged where possible."""
    keep = frozenset(program.serial) | {g.axis for g in program.grid}
    return replace(program, phases=tuple(collapse_axes(p, keep) for p in program.phases))
