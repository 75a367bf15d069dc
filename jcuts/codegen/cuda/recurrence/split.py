"""Kernels of a persistent recurrence: those that fill what is carried and clear the counter, then the loop itself."""

from __future__ import annotations

from dataclasses import replace

from jcuts.codegen.cuda.reduction.split import Split
from jcuts.kernel_ir.program import Buffer, Phase, Program, Store

SYNC = "sync"
"""The counter of the grid barrier."""
FILL_THREADS = 128


def split_recurrence(program: Program) -> Split:
    """A kernel per carried value, of which the first clears the counter as well, and the loop's."""
    fills = [phase for phase in program.phases if phase.once]
    sync = Buffer(SYNC, "int32", (program.buffer(fills[0].stores[0].buffer).size,), "scratch")
    shared = tuple(replace(b, role="scratch") for b in program.locals)
    kernels = [_fill(program, phase, sync if number == 0 else None) for number, phase in enumerate(fills)]
    loop = replace(
        program,
        name=f"{program.name}_loop",
        buffers=(*program.inputs, *program.outputs, *shared, sync),
        phases=tuple(phase for phase in program.phases if not phase.once),
    )
    return [*kernels, loop], [*shared, sync]


def _fill(program: Program, phase: Phase, sync: Buffer | None) -> Program:
    """The kernel of one carried value."""
    (store,) = phase.stores
    written = replace(program.buffer(store.buffer), role="out")
    read = {node.buffer for node in phase.exit.nodes if node.op == "load"}
    buffers = [*(b for b in program.inputs if b.name in read), written]
    stores = [store]
    if sync is not None:
        stores.append(Store(SYNC, store.address, phase.exit.const(0, "int32")))
        buffers.append(replace(sync, role="out"))
    return replace(
        program,
        name=f"{program.name}_{store.buffer}",
        buffers=tuple(buffers),
        phases=(replace(phase, stores=tuple(stores), once=()),),
        grid=(),
        serial=(),
        params=(("cuda", "point"), ("threads", FILL_THREADS)),
    )
