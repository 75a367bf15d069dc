"""Operands that stay in shared memory over all steps of a persistent recurrence: a block's columns of its weights.

A block has the same columns of a product in every step, so it reads the operand that does not change once, before the
first step: [terms, columns of the block], neighbouring threads at neighbouring words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Buffer, Phase, Program
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.recurrence.stage_product import columns_of, is_short, mma_stages

LOADED = 64
"""Values of what is carried that a thread has under way."""
PARTIAL = 40 << 10
"""Bytes of (static) shared memory that the sums of a block's threads may take beside what is resident."""
ALIGNED = 16
"""Bytes that places in shared memory are multiples of."""


@dataclass(frozen=True)
class Resident:
    """A load of a phase's body that shared memory serves.

    Attributes:
        phase: number of the phase. node: of the load in its body. operand: what it reads. index: where.
        terms, columns: of the slice. buffer: the slice.
    """

    phase: int
    node: int
    operand: str
    index: Index
    terms: int
    columns: int
    buffer: Buffer


def terms_of_thread(phase: Phase, blocks: int, threads: int) -> int:
    """Terms of a product that a thread adds up."""
    deep = max(1, threads // columns_of(phase, blocks))
    return -(-math.prod(r.extent for r in phase.reds) // deep)


def terms_at_once(phase: Phase, blocks: int, threads: int, flight: int) -> int:
    """Terms of a product that a thread has under way: ``flight``, as far as there are, and registers for all rows."""
    points = math.prod(a.extent for a in phase.axes if a.name != STEP)
    rows = points // (phase.axes[-1].extent if phase.axes[-1].name != STEP else 1)
    return max(1, min(flight, terms_of_thread(phase, blocks, threads), LOADED // rows))


def residents(program: Program, blocks: int) -> list[Resident]:
    """The operands of a loop's products that are the same in every step, on a grid of so many blocks.

    Those that tensor cores multiply stay in registers (`stage_product`).
    """
    multiplied = {stage.number for stage in mma_stages(program, blocks, 0)}
    others = [(number, phase) for number, phase in enumerate(program.phases) if number not in multiplied]
    return [one for number, phase in others for one in _of_phase(program, number, phase, blocks)]


def _of_phase(program: Program, number: int, phase: Phase, blocks: int) -> Iterator[Resident]:
    if is_short(phase):
        return
    lane = phase.axes[-1].name if phase.axes[-1].name != STEP else ""
    reds = {r.name for r in phase.reds}
    terms, columns = math.prod(r.extent for r in phase.reds), columns_of(phase, blocks)
    for node, load in enumerate(phase.body.nodes):
        if load.op != "load" or load.guards or load.index is None or load.index.values():
            continue
        axes = load.index.axes()
        if (
            program.buffer(load.buffer).role == "in"
            and axes & reds
            and axes <= {*reds, lane}
            and (lane in axes or not lane)
        ):
            buffer = Buffer(f"w{number}_{node}", load.dtype, (terms, columns), "local")
            yield Resident(number, node, load.buffer, load.index, terms, columns, buffer)


def shared_layout(
    program: Program, blocks: int, *, resident: int, exchanged: Sequence[Buffer] = ()
) -> tuple[dict[str, int], int]:
    """Offsets of buffers in a block's dynamic shared memory, and its size [B].

    A block that is alone has what is carried there, others copies of what they exchange; ``resident``: so many operands
    that do not change, too.  Behind them are the sums of the warps of every stage that tensor cores multiply.
    """
    buffers = [*(program.locals if blocks == 1 else exchanged)]
    buffers += [one.buffer for one in residents(program, blocks)[:resident]]
    places, total = {}, 0
    for buffer in buffers:
        places[buffer.name] = total
        total += -(-buffer.size * ITEM_SIZE[buffer.dtype] // ALIGNED) * ALIGNED
    for stage in mma_stages(program, blocks, int(str(dict(program.params).get("threads", 0)))):
        places[sums_name(stage.number)] = total
        total += stage.sum_bytes
    return places, total


def sums_name(number: int) -> str:
    """The place of a phase's sums in the layout."""
    return f"sums{number}"
