"""Checks a kernel program between stages: a wrong one is a bug of jcuts, found here rather than as a wrong number."""

from __future__ import annotations

from jcuts.base.errors import IRError
from jcuts.dfg.node import Graph
from jcuts.dfg.program import Phase, Program, Red


def verify(program: Program) -> None:
    """Raises IRError, naming the phase, where names, ranges or types do not fit together."""
    names = [b.name for b in program.buffers]
    if len(set(names)) != len(names):
        raise IRError(f"{program.name}: two buffers of one name")
    if not program.outputs:
        raise IRError(f"{program.name}: no result")
    known = {g.axis for g in program.grid}
    for axis in program.serial:
        if axis not in known:
            raise IRError(f"{program.name}: serial axis {axis} is not on the grid")
    for phase in program.phases:
        _phase(program, phase)


def _phase(program: Program, phase: Phase) -> None:
    where = f"{program.name}/{phase.name}"
    axes = [a.name for a in (*phase.axes, *phase.reds)]
    if len(set(axes)) != len(axes):
        raise IRError(f"{where}: two axes of one name")
    vectors = [a for a in (*phase.axes, *phase.reds) if a.vector]
    if len(vectors) > 1 or (vectors and program.lanes < 2):
        raise IRError(f"{where}: {len(vectors)} vector axes with {program.lanes} lanes")
    for axis in (*phase.axes, *phase.reds):
        if axis.unroll < 1 or axis.extent < 1:
            raise IRError(f"{where}: axis {axis.name} has extent {axis.extent} and unroll {axis.unroll}")
        if isinstance(axis, Red) and axis.chains > 1 and axis.unroll % axis.chains:
            raise IRError(f"{where}: {axis.chains} chains do not divide unroll {axis.unroll} of {axis.name}")
    for axis in (*phase.once, *phase.last):
        if axis not in program.serial:
            raise IRError(f"{where}: runs once in the loop over {axis}, which is not serial")
    if phase.when and (program.buffer(phase.when).role, program.buffer(phase.when).dtype) != ("local", "bool"):
        raise IRError(f"{where}: runs when {phase.when}, which is no local bool buffer")
    if bool(phase.reds) != bool(phase.accs):
        raise IRError(f"{where}: reductions without accumulators, or the reverse")
    grid = {f"{g.axis}_lo" for g in program.grid}
    inside = {a.name for a in phase.axes} | grid | set(program.serial)
    _graph(program, where, phase.body, inside | {r.name for r in phase.reds}, 0)
    _graph(program, where, phase.exit, inside, len(phase.accs))
    for acc in phase.accs:
        if len(acc.values) != (2 if acc.index_dtype else 1) or any(v >= len(phase.body.nodes) for v in acc.values):
            raise IRError(f"{where}: accumulator {acc.combine} with contributions {acc.values}")
    for store in phase.stores:
        buffer = program.buffer(store.buffer)
        if buffer.role == "in":
            raise IRError(f"{where}: stores into operand {buffer.name}")
        if store.value >= len(phase.exit.nodes):
            raise IRError(f"{where}: stores value {store.value}, which does not exist")
        if phase.exit.nodes[store.value].dtype != buffer.dtype:
            raise IRError(f"{where}: {phase.exit.nodes[store.value].dtype} value into {buffer.dtype} {buffer.name}")
        for index in (store.address, *(g.index for g in store.guards)):
            if index.axes() - inside:
                raise IRError(f"{where}: store address uses {sorted(index.axes() - inside)}")
        if any(a.vector and a.name in g.index.axes() for a in phase.axes for g in store.guards):
            raise IRError(f"{where}: a store into {buffer.name} is guarded by the lane axis")
        low, high = store.address.bounds({**phase.ranges(), **dict.fromkeys(grid, 1)})
        if (
            buffer.role == "out"
            and not store.guards
            and (low is None or high is None or low < 0 or high >= buffer.size)
        ):
            raise IRError(
                f"{where}: store address {store.address} leaves {buffer.name} ({low}..{high} of {buffer.size})"
            )


def _graph(program: Program, where: str, graph: Graph, axes: set[str], accs: int) -> None:
    for number, node in enumerate(graph.nodes):
        if any(a >= number for a in node.args):
            raise IRError(f"{where}: node {number} ({node.op}) uses a later value")
        if node.op == "load":
            buffer = program.buffer(node.buffer)
            if buffer.role == "out":
                raise IRError(f"{where}: loads from result {buffer.name}")
            if buffer.dtype != node.dtype:
                raise IRError(f"{where}: {node.dtype} load from {buffer.dtype} {buffer.name}")
        if node.op == "acc" and not 0 <= int(str(node.attr("number", -1))) < accs:
            raise IRError(f"{where}: accumulator {node.attr('number')} of {accs}")
        for index in (node.index, *(g.index for g in node.guards)):
            if index is not None and index.axes() - axes:
                raise IRError(f"{where}: node {number} ({node.op}) uses {sorted(index.axes() - axes)}")
