"""Printer of kernel programs: readable text for ``JCUTS_DUMP`` and golden tests."""

from __future__ import annotations

from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import Phase, Program


def program_text(program: Program) -> str:
    """The whole program, one line per buffer, loop, node and store."""
    head = f"program {program.name} [{program.template}] lanes={program.lanes} tiles={program.tiles}"
    lines = [head]
    if program.params:
        lines.append("  params " + ", ".join(f"{k}={v}" for k, v in program.params))
    for buffer in program.buffers:
        moved = "" if buffer.offset is None else f" from {buffer.offset} on"
        lines.append(f"  {buffer.role:5} {buffer.name}: {buffer.dtype}{list(buffer.shape)}{moved}")
    for grid in program.grid:
        serial = " serial" if grid.axis in program.serial else ""
        lines.append(f"  grid {grid.axis}: {grid.extent} in blocks of {grid.block}{serial}")
    for phase in program.phases:
        lines.extend("  " + line for line in phase_lines(phase))
    return "\n".join(lines) + "\n"


def phase_lines(phase: Phase) -> list[str]:
    """One phase: loops, body graph, exit graph."""
    head = f"phase {phase.name}"
    if phase.once:
        head += f" at the first {', '.join(phase.once)}"
    if phase.last:
        head += f" at the last {', '.join(phase.last)}"
    if phase.when:
        head += f" when {phase.when}"
    lines = [head]
    depth = 1
    for axis in phase.axes:
        note = " vector" if axis.vector else ""
        lines.append("  " * depth + f"for {axis.name} in {axis.extent} unroll {axis.unroll}{note}:")
        depth += 1
    inner = depth
    for red in phase.reds:
        note = (" vector" if red.vector else "") + (f" chains {red.chains}" if red.chains > 1 else "")
        lines.append("  " * inner + f"reduce {red.name} in {red.extent} unroll {red.unroll}{note}:")
        inner += 1
    if phase.reds:
        lines.extend("  " * inner + line for line in graph_lines(phase.body))
        for number, acc in enumerate(phase.accs):
            values = ", ".join(f"%{v}" for v in acc.values)
            lines.append("  " * inner + f"acc{number}: {acc.dtype} = {acc.combine}(acc{number}, {values})")
        lines.append("  " * depth + "exit:")
    lines.extend("  " * depth + line for line in graph_lines(phase.exit))
    for store in phase.stores:
        guards = (" if " + " and ".join(map(str, store.guards))) if store.guards else ""
        lines.append("  " * depth + f"{store.buffer}[{store.address}] = %{store.value}{guards}")
    return lines


def graph_lines(graph: Graph) -> list[str]:
    """One line per node."""
    return [f"%{number}: {node.dtype} = {node_text(node)}" for number, node in enumerate(graph.nodes)]


def node_text(node: Node) -> str:
    """The right-hand side of one node."""
    guards = (" if " + " and ".join(map(str, node.guards))) if node.guards else ""
    if node.op == "const":
        return repr(node.value)
    if node.op == "load":
        return f"{node.buffer}[{node.index}]" + (f"{guards} else {node.value!r}" if guards else "")
    if node.op == "index":
        return f"index({node.index})"
    if node.op == "guard":
        return "guard(" + " and ".join(map(str, node.guards)) + ")"
    attrs = [f"{k}={v}" for k, v in node.attrs]
    return f"{node.op}({', '.join([f'%{a}' for a in node.args] + attrs)})"
