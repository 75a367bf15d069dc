"""Compulsory traffic of a kernel program: every operand and result once, of a table that is looked up only those rows.

    bytes = sum of results + sum over operands of min(their size, elements that loads address)

Of an operand all of whose addresses depend on loaded values (a gather, a dynamic slice) a load reads one element per
point of the axes that its address depends on; all others count whole.
"""

from __future__ import annotations

import math

from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import ITEM_SIZE, Buffer, Program


def compulsory_bytes(program: Program) -> int:
    """Bytes that any schedule of a program moves.

    Args: program: scheduled or not. Returns: at most the bytes of all operands and results.
    """
    results = sum(b.bytes for b in program.outputs)
    return results + sum(_read(program, b) if b.bytes > results else b.bytes for b in program.inputs)


def _read(program: Program, buffer: Buffer) -> int:
    """Bytes of an operand that are read: the most that any one graph reads, as several may read the same."""
    most = 0
    for phase in program.phases:
        axes = {a.name: a.extent for a in phase.axes}
        for graph, extents in ((phase.body, {**axes, **{r.name: r.extent for r in phase.reds}}), (phase.exit, axes)):
            if (looked_up := _looked_up(graph, buffer.name, extents)) is None:
                return buffer.bytes
            most = max(most, looked_up)
    return min(buffer.bytes, most * ITEM_SIZE[buffer.dtype]) if most else buffer.bytes


def _looked_up(graph: Graph, buffer: str, extents: dict[str, int]) -> int | None:
    """Elements that loads address by loaded values; None where some address depends on none."""
    found = 0
    for number, node in enumerate(graph.nodes):
        if node.op != "load" or node.buffer != buffer:
            continue
        if node.index is None or not node.index.values():
            return None
        indices = [graph.nodes[n].index for n in graph.needed([number])]
        used = {axis for index in indices if index is not None for axis in index.axes()}
        found += math.prod(extent for axis, extent in extents.items() if axis in used)
    return found
