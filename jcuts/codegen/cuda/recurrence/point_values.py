"""What a thread's points have in registers from one step to the next, so that no load is waited for in a step.

Arrays that the loop does not write, its inputs, are read a step ahead: they may have to come from memory.  What a point
itself wrote in the step before (its own part of what is carried) is not read at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Node
from jcuts.kernel_ir.program import Buffer
from jcuts.lower.recurrence.program import STEP


class PointValues:
    """Values of the points of one thread, by number of the point and node of its exit graph."""

    def __init__(self, builder: GpuBuilder, buffers: Mapping[str, Buffer]) -> None:
        self.builder = builder
        self.fixed = frozenset(name for name, buffer in buffers.items() if buffer.role == "in")
        self.held: dict[tuple[int, int], tuple[E.Lanes, L.Value]] = {}
        """How a value is held, and its slot: LLVM keeps it in a register."""

    def prepare(self, ends: Sequence[RegisterTileEmitter]) -> None:
        """Loads what the first step needs."""
        self.load_inputs(ends)
        for number, end in enumerate(ends):
            nodes = end.exit_tile().graph.nodes
            own = [nodes[node] for node in own_values(end)]
            self._keep(number, end.load_ahead(only=lambda load, own=own: load in own))

    def load_inputs(self, ends: Sequence[RegisterTileEmitter]) -> None:
        """Loads inputs of a step. Args: ends: its points."""
        for number, end in enumerate(ends):
            self._keep(number, end.load_ahead(only=lambda load: load.buffer in self.fixed))

    def load_ahead(self, ends: Sequence[RegisterTileEmitter]) -> None:
        """Gives a step's points what is known of them, and issues their other loads."""
        for number, end in enumerate(ends):
            found = {node: held for (point, node), held in self.held.items() if point == number}
            end.load_ahead({n: replace(lanes, value=self.builder.load(slot)) for n, (lanes, slot) in found.items()})

    def keep_results(self, number: int, end: RegisterTileEmitter) -> None:
        """Keeps what a point, which is finished, reads of itself in the next step."""
        assert end.ahead is not None
        done = end.ahead[1].done
        self._keep(number, {node: done[value] for node, value in own_values(end).items()})

    def _keep(self, number: int, values: Mapping[int, E.Lanes]) -> None:
        for node, lanes in values.items():
            if (number, node) not in self.held:
                with self.builder.goto_entry_block():
                    self.held[number, node] = lanes, self.builder.alloca(lanes.value.type)
            self.builder.store(lanes.value, self.held[number, node][1])


def own_values(end: RegisterTileEmitter) -> dict[int, int]:
    """Loads of what the same point stored in the step before -> the value of the store, as nodes of its exit graph.

    Not of 16-bit floats, of which registers may have more bits than memory.
    """
    tile = end.exit_tile()
    before = {STEP: Index.axis(STEP) - 1}
    stored = {
        (end.phase.stores[k].buffer, address.substitute(before, end.ranges)): value
        for _, k, value, address, guards in tile.stores
        if not guards
    }
    return {
        number: stored[node.buffer, node.index]
        for number, node in enumerate(tile.graph.nodes)
        if node.index is not None and _is_plain(node) and (node.buffer, node.index) in stored
    }


def _is_plain(node: Node) -> bool:
    return node.op == "load" and not node.guards and node.dtype not in E.HALVES
