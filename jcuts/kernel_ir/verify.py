"""IR verifier: checks a kernel program between stages, and one that was read from a file before it is compiled.

An invalid program that jcuts made is a bug, found here rather than as a wrong number.  One from a file has passed
`kernel_ir.json_schema`; here names, types and arities are checked against each other, unguarded stores must stay inside
their results and, in a database row that this cache has not signed, every address inside its buffer
(`kernel_ir.address_bounds`).
"""

from __future__ import annotations

import math
from typing import Any

from jcuts.base.errors import IRError
from jcuts.kernel_ir import numpy_semantics
from jcuts.kernel_ir.address_bounds import check_bounds
from jcuts.kernel_ir.json_schema import is_axis, is_buffer, is_label, is_word
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import ALIGNMENT, ITEM_SIZE, Buffer, Phase, Program, Red

START_TYPES = ("int32", "int64")
"""Of operands that give a run-time offset."""
MOST_POINTS = 1 << 12
"""Points of a phase that are computed together: every one is a copy of the graph."""


def read(data: dict[str, Any] | str, *, signed: bool = False) -> Program:
    """Reads and verifies a program from a file: plain data or its JSON text.  Raises IRError (SchemaError for malformed
    data).

    Args: signed: the row carries this cache's signature (`tune.row_signature`), so its addresses are as lowering made
        them. Intervals cannot prove all of those; in a row of somebody else what they cannot prove is refused.
    """
    program = Program.from_json(data)
    verify(program, all_addresses=not signed)
    return program


def verify(program: Program, *, all_addresses: bool = False) -> None:
    """Raises IRError, naming the phase, where names, ranges, types or unguarded stores into results are inconsistent.

    Args: all_addresses: every load and store, guarded or not, must be proven to stay inside its buffer
        (`address_bounds.check_bounds`), as in a program from somebody else's file.
    """
    _names(program)
    names = [b.name for b in program.buffers]
    if len(set(names)) != len(names):
        raise IRError(f"{program.name}: two buffers of one name")
    if not program.outputs:
        raise IRError(f"{program.name}: no result")
    for buffer in program.buffers:
        _offset(program, buffer)
    known = {g.axis for g in program.grid}
    if len(known) != len(program.grid) or len(set(program.serial)) != len(program.serial):
        raise IRError(f"{program.name}: an axis is twice on the grid")
    for axis in program.serial:
        if axis not in known:
            raise IRError(f"{program.name}: serial axis {axis} is not on the grid")
    for phase in program.phases:
        _phase(program, phase)
        if all_addresses:
            check_bounds(program, phase)
    written = {store.buffer for phase in program.phases for store in phase.stores}
    if missing := [b.name for b in program.outputs if b.name not in written]:
        raise IRError(f"{program.name}: nothing is stored into {missing}")


def _offset(program: Program, buffer: Buffer) -> None:
    """A run-time offset is of a result of a kernel for GPUs, and starts at an integer operand."""
    if buffer.offset is None:
        return
    start = program.buffer(buffer.offset.start)
    if buffer.role != "out" or "cuda" not in dict(program.params):
        raise IRError(f"{program.name}: {buffer.name} has a run-time offset, and is no result of a kernel for GPUs")
    if (start.role, start.size, start.dtype in START_TYPES) != ("in", 1, True) or buffer.reach < 1:
        raise IRError(f"{program.name}: {buffer.name} starts at {start.dtype}{list(start.shape)} {start.name}")
    if buffer.offset.stride * ITEM_SIZE[buffer.dtype] % ALIGNMENT:
        raise IRError(f"{program.name}: the run-time offset of {buffer.name} is not of {ALIGNMENT} bytes")


def _names(program: Program) -> None:
    """Whatever reaches generated source text has to be a name."""
    axes = [a.name for phase in program.phases for a in (*phase.axes, *phase.reds)]
    buffers = [b.name for b in program.buffers]
    kinds = (
        ("program", is_label, [program.name, *(phase.name for phase in program.phases)]),
        ("buffer", is_buffer, buffers),
        ("axis", is_axis, [*axes, *program.serial, *(g.axis for g in program.grid)]),
        ("template", is_word, [program.template] if program.template else []),
        ("parameter", is_word, [name for name, _ in program.params]),
    )
    for kind, fits, names in kinds:
        for name in names:
            if not fits(name):
                raise IRError(f"{repr(name)[:80]} names no {kind}")
    if both := {*axes, *(g.axis for g in program.grid)} & set(buffers):
        raise IRError(f"{program.name}: {sorted(both)} name axes and buffers")


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
    if math.prod(a.unroll for a in (*phase.axes, *phase.reds)) > MOST_POINTS:
        raise IRError(f"{where}: more than {MOST_POINTS} points at once")
    _blocks(program, where, phase)
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
            and (low is None or high is None or not 0 <= low <= high < buffer.reach)
        ):
            raise IRError(
                f"{where}: store address {store.address} leaves {buffer.name} ({low}..{high} of {buffer.reach})"
            )


def _blocks(program: Program, where: str, phase: Phase) -> None:
    """An axis on the grid runs in whole steps inside its block."""
    grid = {g.axis: g for g in program.grid}
    for axis in phase.axes:
        if (split := grid.get(axis.name)) is None:
            continue
        step = 1 if axis.name in program.serial else axis.unroll * (program.lanes if axis.vector else 1)
        if split.extent != axis.extent or (split.block % step and split.blocks > 1):
            raise IRError(f"{where}: blocks of {split.block} of {split.extent} for {axis.name} of {axis.extent}")
        if axis.name in program.serial and axis.vector:
            raise IRError(f"{where}: lanes run along the serial axis {axis.name}")
    if any(red.name in grid for red in phase.reds):
        raise IRError(f"{where}: a reduction is on the grid")


def _graph(program: Program, where: str, graph: Graph, axes: set[str], accs: int) -> None:
    for number, node in enumerate(graph.nodes):
        if any(a >= number for a in node.args):
            raise IRError(f"{where}: node {number} ({node.op}) uses a later value")
        _operation(where, graph, number)
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
            if index is not None and any(value >= number for value in index.values()):
                raise IRError(f"{where}: node {number} ({node.op}) uses a later value")


def _operation(where: str, graph: Graph, number: int) -> None:
    """A node has what its operation needs, and nothing else."""
    node = graph.nodes[number]
    needed = _NEEDED.get(node.op, ())
    has = {
        "buffer": bool(node.buffer),
        "index": node.index is not None,
        "guards": bool(node.guards),
        "value": node.value is not None,
    }
    odd = [part for part, there in has.items() if there != (part in needed) and (node.op, part) not in _MAY]
    if odd or (node.op == "load" and node.value is not None and not node.guards):
        raise IRError(f"{where}: node {number} ({node.op}) with or without {odd}")
    count = numpy_semantics.arguments(node.op) if node.op not in _NEEDED else 0
    if count is None or count != len(node.args):
        raise IRError(f"{where}: node {number} ({node.op}) of {len(node.args)} arguments")
    which = {"integer_pow": "y", "round": "method"}.get(node.op)
    if which is not None and type(node.attr(which)) is not int:
        raise IRError(f"{where}: node {number} ({node.op}) does not say which")
    types = [graph.nodes[a].dtype for a in node.args if a < number]
    wanted = numpy_semantics.result_types(node.op, types) if types and len(types) == count else None
    if wanted is not None and node.dtype != wanted:
        raise IRError(f"{where}: node {number} ({node.op}) of {types} is {node.dtype}")
    if node.op == "const" and isinstance(node.value, float) and node.dtype not in numpy_semantics.FLOATS:
        raise IRError(f"{where}: node {number} is {node.value} as {node.dtype}")


_NEEDED: dict[str, tuple[str, ...]] = {
    "const": ("value",),
    "load": ("buffer", "index"),
    "index": ("index",),
    "guard": ("guards",),
    "acc": (),
}
_MAY = frozenset({("load", "guards"), ("load", "value"), ("guard", "guards")})
