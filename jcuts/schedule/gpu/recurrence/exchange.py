"""Which carried values of a persistent recurrence pass from block to block with flags in place of a grid barrier.

A loop whose step is one stage needs no barrier if all that a block reads of others are values it waits for one by one
(`codegen.cuda.recurrence.flag_exchange`), and every block writes some of them in every step, so that nobody is two
steps ahead.
"""

from __future__ import annotations

from collections.abc import Iterator

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Buffer, Phase, Program, Store
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.recurrence.parameters import MMA
from jcuts.schedule.gpu.recurrence.stage_product import columns_in, columns_of, is_short

FLAGGED_BYTES = 8
"""Of a carried value with its flag, the number of its step."""
WIDEST = 4
"""Bytes of a value that fits beside its flag in a word of 64 bits."""


def exchanged(program: Program, blocks: int) -> list[Buffer]:
    """The carried values that blocks exchange with flags; none where the loop needs grid barriers.

    Tensor cores read carried values straight from global memory, behind a barrier: polling whole fragments for flags
    was slower (`docs/kernels/recurrence.md`).
    """
    if MMA in dict(program.params):
        return []
    phases = [phase for phase in program.phases if not phase.once and not phase.last]
    stores = {s.buffer: (p, s) for p in phases for s in p.stores}
    local = {b.name: b for b in program.buffers if b.role in ("local", "scratch")}
    found: set[str] = set()
    for phase in phases:
        for name, index, is_body in _loads(phase):
            if name not in local or name not in stores:
                continue
            if not name.startswith("s"):
                return []  # kept for a later stage of the same step
            if is_body or not _is_own(phase, index, *stores[name]):
                found.add(name)
    taken = [buffer for name, buffer in local.items() if name in found]
    if any(ITEM_SIZE[b.dtype] not in (2, WIDEST) for b in taken):
        return []
    return taken if any(_by_all(stores[b.name][0], blocks) for b in taken) else []


def _loads(phase: Phase) -> Iterator[tuple[str, Index, bool]]:
    """Buffer and index of every load, and whether it is one of the products' operands."""
    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.op == "load" and node.index is not None:
                yield node.buffer, node.index, graph is phase.body


def _is_own(phase: Phase, index: Index, writer: Phase, store: Store) -> bool:
    """Whether an epilogue reads the point that the same thread has written in the step before."""
    ranges = writer.ranges()
    read, written = (i.substitute({STEP: Index(n)}, ranges) for i, n in ((index, 1), (store.address, 0)))
    return phase is writer and read == written


def _by_all(phase: Phase, blocks: int) -> bool:
    """Whether every block writes results of a phase, behind the products that read what is carried."""
    if is_short(phase) or not any(buffer.startswith("s") for buffer, _, is_body in _loads(phase) if is_body):
        return False
    return -(-columns_in(phase) // columns_of(phase, blocks)) == blocks
