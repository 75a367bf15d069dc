"""Loop transformations: collapsing of neighbouring axes, and substitution of axes in every address and guard.

Two loops become one (loop collapsing) where every address is affine in the fused index: a row-major tensor of any rank
is then one axis.  Lowering and schedules of the CPU and the GPU alike start from the collapsed program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Axis, Phase, Program, Red, Store


def collapse_axes(phase: Phase, keep: frozenset[str] = frozenset()) -> Phase:
    """Collapses neighbouring axes (a, b) where the stride of a is extent(b) times the stride of b in every address.

    Row-major tensors of one shape collapse to a single axis; a broadcast operand keeps the axes apart. Output axes
    merge with output axes, reductions with reductions; axes in ``keep`` stay.
    """
    chains = [chain for group in (phase.axes, phase.reds) for chain in _chains(phase, group, keep) if len(chain) > 1]
    return _merge(phase, chains) if chains else phase


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


def _chains(phase: Phase, group: Sequence[Axis | Red], keep: frozenset[str]) -> list[list[Axis | Red]]:
    """Neighbouring axes that are one: a merged axis has the strides of its last one, so that pairs decide."""
    found: list[list[Axis | Red]] = []
    for axis in group:
        if found and not {found[-1][-1].name, axis.name} & keep and _mergeable(phase, found[-1][-1], axis):
            found[-1].append(axis)
        else:
            found.append([axis])
    return found


def _mergeable(phase: Phase, outer: Axis | Red, inner: Axis | Red) -> bool:
    for index in _indices(phase):
        a, b = index.stride(outer.name), index.stride(inner.name)
        if a is None or b is None or a != b * inner.extent:
            return False
    return True


def _merge(phase: Phase, chains: Sequence[Sequence[Axis | Red]]) -> Phase:
    """The phase with each of these chains as one axis, of the name of its first."""
    extents = {chain[0].name: math.prod(a.extent for a in chain) for chain in chains}
    inner = {a.name for chain in chains for a in chain[1:]}
    ranges = {**phase.ranges(), **extents}
    nothing = {a.name: Index() for chain in chains for a in chain}

    def change(index: Index) -> Index:
        """a*e*s + b*s with a*e + b = m is m*s: drop all but one, and let that count single steps."""
        made = index.substitute(nothing, ranges)
        for chain in chains:
            made = made + Index.axis(chain[0].name) * (index.stride(chain[-1].name) or 0)
        return made

    axes = tuple(replace(a, extent=extents.get(a.name, a.extent)) for a in phase.axes if a.name not in inner)
    reds = tuple(replace(r, extent=extents.get(r.name, r.extent)) for r in phase.reds if r.name not in inner)
    return map_indices(replace(phase, axes=axes, reds=reds), change)


def map_indices(phase: Phase, change: Callable[[Index], Index]) -> Phase:
    """The phase with ``change`` applied to every address and guard, once to equal ones."""
    change = functools.cache(change)
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


def _rewrite_graph(graph: Graph, change: Callable[[Index], Index]) -> tuple[Graph, Mapping[int, int]]:
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
