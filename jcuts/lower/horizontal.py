"""Horizontal fusion: element-wise programs of different sizes become one program (one launch) with a phase for each.

Used for the vectors that `rewrite.hoist_vectors` collects (the scales and biases of all batch norms of a network, a few
thousand numbers together, are one launch instead of one per layer), and for an optimiser's updates of all parameters
(`rewrite.backward.multi_tensor_update`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Buffer, Phase, Program
from jcuts.lower.weight_transpose import MOST

TEMPLATE = "combined"
FORM = "combined"
THREADS = 256
"""Of a block."""


def horizontal_fuse(
    programs: Sequence[Program], operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> Program | None:
    """Fuses programs horizontally into one; None where one is not a map along one axis, or there are too many buffers.

    Args: operands, results: for each program the places of its buffers among those of the call; every result has one.
    """
    inputs: dict[int, Buffer] = {}
    outputs: dict[int, Buffer] = {}
    phases = []
    for number, (program, reads, makes) in enumerate(zip(programs, operands, results, strict=True)):
        if len(program.phases) != 1 or program.locals or program.grid:
            return None
        phase = collapse_axes(program.phases[0])
        if not is_map(phase):
            return None
        names = {}
        for buffers, places, found, letter in (
            (program.inputs, reads, inputs, "a"),
            (program.outputs, makes, outputs, "b"),
        ):
            for buffer, place in zip(buffers, places, strict=True):
                names[buffer.name] = f"{letter}{place}"
                found[place] = replace(buffer, name=f"{letter}{place}")
        phases.append(_renamed(phase, f"map{number}", names))
    phases = _sharing(phases, inputs)
    if not phases or len(inputs) + len(outputs) > MOST:
        return None
    if sorted(inputs) != list(range(len(inputs))) or sorted(outputs) != list(range(len(outputs))):
        return None
    every = (*(inputs[k] for k in sorted(inputs)), *(outputs[k] for k in sorted(outputs)))
    return Program("vectors", every, (), (), tuple(phases), 1, TEMPLATE, (("cuda", FORM), ("threads", THREADS)))


def _sharing(phases: Sequence[Phase], inputs: dict[int, Buffer]) -> list[Phase]:
    """Phases of one extent that read the same array as one: it is read once, and may be overwritten."""
    arrays = {buffer.name for buffer in inputs.values() if buffer.size > 1}
    found: list[Phase] = []
    for phase in phases:
        extent, mine = phase.axes[0].extent, arrays & _loaded(phase)
        alike = [other for other in found if other.axes[0].extent == extent and mine & _loaded(other)]
        found = [other for other in found if not any(other is one for one in alike)]
        found.append(functools.reduce(_merged, [*alike, phase]))
    return found


def _loaded(phase: Phase) -> set[str]:
    return {node.buffer for node in phase.exit.nodes if node.op == "load"}


def _merged(one: Phase, other: Phase) -> Phase:
    """One phase with the stores of two."""
    graph, ranges = Graph(), one.ranges()
    where = {other.axes[0].name: Index.axis(one.axes[0].name)}
    first = one.exit.copy_into(graph, [s.value for s in one.stores], {}, ranges)
    second = other.exit.copy_into(graph, [s.value for s in other.stores], where, ranges)
    stores = [replace(s, value=n) for s, n in zip(one.stores, first, strict=True)]
    moved = [
        replace(s, value=n, address=s.address.substitute(where, ranges))
        for s, n in zip(other.stores, second, strict=True)
    ]
    return replace(one, exit=graph, stores=(*stores, *moved))


def collapse_axes(phase: Phase) -> Phase:
    """Loop collapsing: one axis in place of all, if every address is one number or the point's row-major place."""
    axes = [axis for axis in phase.axes if axis.extent > 1]
    if len(axes) < 2 or phase.reds or any(axis.unroll != 1 or axis.vector for axis in axes):
        return phase
    place, extent = Index(), 1
    for axis in reversed(axes):
        place, extent = place + Index.axis(axis.name) * extent, extent * axis.extent
    one = Index.axis(axes[0].name)
    moved = {place: one}

    def there(index: Index) -> Index | None:
        return moved.get(index, index if not index.axes() else None)

    indices = [node.index for node in phase.exit.nodes if node.index is not None]
    if any(there(index) is None for index in (*indices, *(s.address for s in phase.stores))):
        return phase
    nodes = [node if node.index is None else replace(node, index=there(node.index)) for node in phase.exit.nodes]
    stores = tuple(replace(s, address=there(s.address) or s.address) for s in phase.stores)
    return replace(phase, axes=(replace(axes[0], extent=extent),), exit=Graph(nodes), stores=stores)


def is_map(phase: Phase) -> bool:
    """Whether a phase is an element-wise map along one axis whose loads have no guards."""
    plain = not phase.reds and not phase.accs and len(phase.axes) == 1 and phase.axes[0].unroll == 1
    guarded = any(node.guards for node in phase.exit.nodes) or any(store.guards for store in phase.stores)
    return plain and not phase.axes[0].vector and not guarded


def _renamed(phase: Phase, name: str, names: dict[str, str]) -> Phase:
    graph = Graph([replace(n, buffer=names[n.buffer]) if n.op == "load" else n for n in phase.exit.nodes])
    stores = tuple(replace(s, buffer=names[s.buffer]) for s in phase.stores)
    return replace(phase, name=name, exit=graph, stores=stores)
