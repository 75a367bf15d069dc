"""Horizontal fusion: element-wise programs of different sizes become one program (one launch) with a phase for each.

Used for the vectors that `rewrite.hoist_vectors` collects: the scales and biases of all batch norms of a network, a few
thousand numbers together, are one launch instead of one per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
        if len(program.phases) != 1 or program.locals or program.grid or not is_map(program.phases[0]):
            return None
        names = {}
        for buffers, places, found, letter in (
            (program.inputs, reads, inputs, "a"),
            (program.outputs, makes, outputs, "b"),
        ):
            for buffer, place in zip(buffers, places, strict=True):
                names[buffer.name] = f"{letter}{place}"
                found[place] = replace(buffer, name=f"{letter}{place}")
        phases.append(_renamed(program.phases[0], f"map{number}", names))
    if not phases or len(inputs) + len(outputs) > MOST:
        return None
    if sorted(inputs) != list(range(len(inputs))) or sorted(outputs) != list(range(len(outputs))):
        return None
    every = (*(inputs[k] for k in sorted(inputs)), *(outputs[k] for k in sorted(outputs)))
    return Program("vectors", every, (), (), tuple(phases), 1, TEMPLATE, (("cuda", FORM), ("threads", THREADS)))


def is_map(phase: Phase) -> bool:
    """Whether a phase is an element-wise map along one axis whose loads have no guards."""
    plain = not phase.reds and not phase.accs and len(phase.axes) == 1 and phase.axes[0].unroll == 1
    guarded = any(node.guards for node in phase.exit.nodes) or any(store.guards for store in phase.stores)
    return plain and not phase.axes[0].vector and not guarded


def _renamed(phase: Phase, name: str, names: dict[str, str]) -> Phase:
    graph = Graph([replace(n, buffer=names[n.buffer]) if n.op == "load" else n for n in phase.exit.nodes])
    stores = tuple(replace(s, buffer=names[s.buffer]) for s in phase.stores)
    return replace(phase, name=name, exit=graph, stores=stores)
