"""Kernels of a persistent recurrence: those that fill what is carried and clear the counter, then the loop itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jcuts.codegen.cuda.recurrence.flag_exchange import flags_of
from jcuts.codegen.cuda.recurrence.tile import recurrence_tile
from jcuts.codegen.cuda.reduction.split import Split
from jcuts.kernel_ir.program import ITEM_SIZE, Buffer, Phase, Program, Store
from jcuts.schedule.gpu.recurrence.exchange import FLAGGED_BYTES

SYNC = "sync"
"""The counter of the grid barrier."""
FILL_THREADS = 128


def split_recurrence(program: Program) -> Split:
    """A kernel per carried value, of which the first clears the counter as well, and the loop's."""
    fills = [phase for phase in program.phases if phase.once]
    sync = Buffer(SYNC, "int32", (program.buffer(fills[0].stores[0].buffer).size // 2,), "scratch")
    shared = tuple(replace(b, role="scratch") for b in program.locals)
    tile = recurrence_tile(program)
    flags = {b.name: _flags(b, tile.replicas) for b in tile.exchanged(program)}
    kernels = []
    for number, phase in enumerate(fills):
        cleared = [*([sync] if number == 0 else []), *(flags[s.buffer] for s in phase.stores if s.buffer in flags)]
        kernels.append(_fill(program, phase, cleared))
    loop = replace(
        program,
        name=f"{program.name}_loop",
        buffers=(*program.inputs, *program.outputs, *shared, *flags.values(), sync),
        phases=tuple(phase for phase in program.phases if not phase.once),
    )
    return [*kernels, loop], [*shared, *flags.values(), sync]


def _flags(carried: Buffer, replicas: int) -> Buffer:
    """Both copies of a carried value with flags, as words of 32 bits."""
    size = replicas * FLAGGED_BYTES // ITEM_SIZE["int32"] * carried.size
    return Buffer(flags_of(carried.name), "int32", (size,), "scratch")


def _fill(program: Program, phase: Phase, cleared: Sequence[Buffer]) -> Program:
    """The kernel of one carried value. Args: cleared: buffers of a multiple of its points, for zeros."""
    (store,) = phase.stores
    written = replace(program.buffer(store.buffer), role="out")
    read = {node.buffer for node in phase.exit.nodes if node.op == "load"}
    buffers = [*(b for b in program.inputs if b.name in read), written]
    stores, points = [store], written.size // 2
    for buffer in cleared:
        zero = phase.exit.const(0, "int32")
        stores += [Store(buffer.name, store.address + first, zero) for first in range(0, buffer.size, points)]
        buffers.append(replace(buffer, role="out"))
    return replace(
        program,
        name=f"{program.name}_{store.buffer}",
        buffers=tuple(buffers),
        phases=(replace(phase, stores=tuple(stores), once=()),),
        grid=(),
        serial=(),
        params=(("cuda", "point"), ("threads", FILL_THREADS)),
    )
