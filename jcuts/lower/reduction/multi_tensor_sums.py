"""Multi-tensor reduction: partial sums of many arrays become one program (one launch) with a phase for each array.

    result[first + b] = sum of f(operand[b * chunk + r]) over r          one phase per array; all sizes differ

For the sums of squares of all gradients, which a global norm adds up (`rewrite.backward.multi_tensor_norm`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Phase, Program, Red, Store
from jcuts.lower.horizontal import collapse_axes, is_map
from jcuts.lower.weight_transpose import MOST

TEMPLATE = "partial_sums"
FORM = "partial_sums"
THREADS = 256
"""Of a block."""
TYPE = "float32"
RESULT = "b0"
ARRAY = "array"
"""In a function: the buffer of the array."""
BLOCK = "b"
"""The axis of the partial sums of an array."""
TERM = "r"
"""The axis of the terms of a partial sum."""


@dataclass(frozen=True)
class ArraySum:
    """The sum of an element-wise function of one array.

    Attributes:
        program: the function, an element-wise map of one result; None: the array itself.
        operands: the places of the program's operands (or of the array) among those of the call.
        blocks, chunk: the partial sums, and the elements of each; the last may have fewer.
    """

    program: Program | None
    operands: tuple[int, ...]
    blocks: int
    chunk: int


@dataclass(frozen=True)
class PartialSums:
    """A phase of a program of partial sums, as a kernel reads it.

    Attributes:
        array: the buffer that is summed; size: its elements.
        first: the place of the first of its partial sums. blocks, chunk: as `ArraySum` has them.
        function: a term's graph, without guards: loads of the buffer `ARRAY` at the axis `TERM`, and of single numbers.
        value: its node that is the term.
    """

    array: str
    size: int
    first: int
    blocks: int
    chunk: int
    function: Graph
    value: int


def multi_tensor_sums(operands: Sequence[tuple[tuple[int, ...], str]], sums: Sequence[ArraySum]) -> Program | None:
    """The program of the partial sums of arrays; None where a function is no element-wise map of one array, or there
    are too many buffers.

    Args: operands: shape and type of each.
    """
    if not sums or len(operands) + 1 > MOST:
        return None
    inputs = [Buffer(f"a{k}", dtype, shape, "in") for k, (shape, dtype) in enumerate(operands)]
    phases: list[Phase] = []
    first = 0
    for number, one in enumerate(sums):
        arrays = [inputs[k] for k in one.operands]
        found = _sums_of(one, arrays, first)
        if found is None:
            return None
        phases.append(_phase(f"sum{number}", found))
        first += one.blocks
    buffers = (*inputs, Buffer(RESULT, TYPE, (first,), "out"))
    return Program("partial_sums", buffers, (), (), tuple(phases), 1, TEMPLATE, (("cuda", FORM), ("threads", THREADS)))


def _sums_of(one: ArraySum, arrays: Sequence[Buffer], first: int) -> PartialSums | None:
    size = max(buffer.size for buffer in arrays)
    found = _function(one.program, arrays, size)
    if found is None or not (one.blocks - 1) * one.chunk < size <= one.blocks * one.chunk:
        return None
    return PartialSums(found[2], size, first, one.blocks, one.chunk, *found[:2])


def _phase(name: str, one: PartialSums) -> Phase:
    body, total, ranges = Graph(), Graph(), {BLOCK: one.blocks, TERM: one.chunk}
    place = Index.axis(BLOCK) * one.chunk + Index.axis(TERM)
    inside = (Guard(Index.axis(TERM), None, one.size - 1),)
    nodes = [
        replace(n, buffer=one.array, guards=inside, value=0) if n.buffer == ARRAY else n for n in one.function.nodes
    ]
    (value,) = Graph(nodes).copy_into(body, [one.value], {TERM: place}, ranges)
    if one.blocks * one.chunk > one.size:
        holds = body.add(Node("guard", "bool", guards=(Guard(place, None, one.size - 1),)))
        value = body.apply("select", TYPE, holds, value, body.const(0.0, TYPE))
    stored = total.add(Node("acc", TYPE, attrs=(("number", 0),)))
    store = Store(RESULT, Index.axis(BLOCK) + one.first, stored)
    accs = (Acc("add", TYPE, (value,)),)
    return Phase(name, (Axis(BLOCK, one.blocks),), (Red(TERM, one.chunk),), accs, body, total, (store,))


def _function(program: Program | None, arrays: Sequence[Buffer], size: int) -> tuple[Graph, int, str] | None:
    """The graph of a function as `PartialSums` has it, its value, and the array; None where it is no such function."""
    function, term = Graph(), Index.axis(TERM)
    if program is None:
        value = function.load(ARRAY, term, arrays[0].dtype)
        return (function, value, arrays[0].name) if arrays[0].dtype == TYPE else None
    if len(program.phases) != 1 or program.locals or program.grid:
        return None
    phase = _without_single_points(program.phases[0])
    if not is_map(phase) or len(phase.stores) != 1 or phase.axes[0].extent != size:
        return None
    found = Graph()
    where = {phase.axes[0].name: term}
    (value,) = phase.exit.copy_into(found, [phase.stores[0].value], where, {TERM: size})
    loads = [node for node in found.nodes if node.op == "load"]
    moving = {node.buffer for node in loads if node.index == term}
    if (
        len(moving) != 1
        or any(node.index not in (term, Index(0)) for node in loads)
        or found.nodes[value].dtype != TYPE
    ):
        return None
    (array,) = moving
    names = {old.name: new.name for old, new in zip(program.inputs, arrays, strict=True)}
    if any(node.buffer == array and node.index != term for node in loads):
        return None
    for node in found.nodes:
        known = node.op == "load" and (ARRAY if node.buffer == array else names[node.buffer])
        function.add(replace(node, buffer=known) if known else node)
    return function, value, names[array]


def _without_single_points(phase: Phase) -> Phase:
    """Loop collapsing (`horizontal.collapse_axes`) of a map whose shape may have dimensions of one."""
    single = {axis.name: Index(0) for axis in phase.axes if axis.extent == 1}
    axes = tuple(axis for axis in phase.axes if axis.extent > 1)
    graph, ranges = Graph(), phase.ranges()
    values = phase.exit.copy_into(graph, [store.value for store in phase.stores], single, ranges)
    stores = tuple(
        replace(store, value=value, address=store.address.substitute(single, ranges))
        for store, value in zip(phase.stores, values, strict=True)
    )
    return collapse_axes(replace(phase, axes=axes, exit=graph, stores=stores))


def partial_sums_of(program: Program) -> list[PartialSums] | None:
    """The partial sums of such a program; None for any other program."""
    if [buffer.name for buffer in program.outputs] != [RESULT] or program.outputs[0].dtype != TYPE:
        return None
    sizes = {buffer.name: buffer.size for buffer in program.inputs}
    found = [_partial_sums(phase, sizes) for phase in program.phases]
    known = [one for one in found if one is not None]
    firsts = [0, *itertools.accumulate(one.blocks for one in known)]
    if len(known) < len(found) or [one.first for one in known] != firsts[:-1] or firsts[-1] != program.outputs[0].size:
        return None
    return known


def _partial_sums(phase: Phase, sizes: Mapping[str, int]) -> PartialSums | None:
    """A phase read backwards: what `_phase` has made it of."""
    if [a.name for a in phase.axes] != [BLOCK] or [r.name for r in phase.reds] != [TERM]:
        return None
    if len(phase.stores) != 1 or len(phase.accs) != 1 or phase.accs[0].combine != "add":
        return None
    (axis,), (red,), (store,), (acc,) = phase.axes, phase.reds, phase.stores, phase.accs
    place, term = Index.axis(BLOCK) * red.extent + Index.axis(TERM), Index.axis(TERM)
    arrays = {n.buffer for n in phase.body.nodes if n.op == "load" and n.index == place}
    if len(arrays) != 1:
        return None
    (array,) = arrays
    nodes = phase.body.nodes
    bare = [replace(n, buffer=ARRAY, index=term, guards=(), value=None) if n.buffer == array else n for n in nodes]
    value, size = acc.values[0], sizes[array]
    if axis.extent * red.extent > size and nodes[value].op == "select":
        value = nodes[value].args[1]
    function = Graph()
    (value,) = Graph(bare).copy_into(function, [value], {}, {TERM: red.extent})
    one = PartialSums(array, size, store.address.const, axis.extent, red.extent, function, value)
    return one if _phase(phase.name, one) == phase else None
