"""Tile of the persistent recurrence kernel: blocks, threads, and how a phase's points lie on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.cuda.reduction.column import ColumnShape
from jcuts.codegen.cuda.reduction.split import column_program
from jcuts.kernel_ir.program import Axis, Phase, Program
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.recurrence.schedules import SHORT

ONE = "one"
"""An axis of one column, for results without any."""
ALIGNED = 16


@dataclass(frozen=True)
class RecurrenceTile:
    """Attributes:
    blocks: of the grid; one block keeps what is carried in shared memory.
    threads: of a block. flight: terms of a product that a thread loads at once.
    """

    blocks: int
    threads: int
    flight: int

    @property
    def is_alone(self) -> bool:
        """Whether one block runs the whole loop."""
        return self.blocks == 1


def recurrence_tile(program: Program) -> RecurrenceTile:
    """The tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    params = dict(program.params)
    blocks = int(str(params.get("split", 1)))
    tile = RecurrenceTile(blocks, *(int(str(params[k])) for k in ("threads", "flight")))
    if tile.blocks < 1 or tile.flight < 1 or tile.threads % WARP:
        raise CompileRejected(f"{program.name}: {tile} is no block of whole warps")
    return tile


def is_short(phase: Phase) -> bool:
    """Whether a thread computes points by itself: no product, or one of few terms."""
    return math.prod(r.extent for r in phase.reds) <= SHORT


def columns_of(phase: Phase, tile: RecurrenceTile) -> int:
    """Neighbouring columns of a block: a power of two."""
    lane = phase.axes[-1].extent if phase.axes[-1].name != STEP else 1
    return 1 << (-(-lane // tile.blocks) - 1).bit_length()


def column_phase(program: Program, phase: Phase, tile: RecurrenceTile) -> tuple[Program, ColumnShape]:
    """A phase's products in the columns form, a thread having all rows, and the mapping of the block onto them."""
    axes = phase.axes if phase.axes[-1].name != STEP else (*phase.axes, Axis(ONE, 1))
    rows = tuple(a if a.name == STEP else replace(a, unroll=a.extent) for a in axes[:-1])
    across = columns_of(phase, tile)
    if across > tile.threads:
        raise CompileRejected(f"{program.name}: {across} columns of a block")
    params = (("threads", tile.threads), ("across", across), ("flight", tile.flight))
    alone = replace(program, phases=(replace(phase, axes=(*rows, axes[-1])),), params=params, grid=(), serial=())
    made = column_program(alone)
    terms = int(str(dict(made.params)["terms"]))
    return made, ColumnShape(across, tile.threads // across, tile.threads, tile.flight, terms)


def shared_places(program: Program) -> tuple[dict[str, int], int]:
    """Offsets of the local buffers in the shared memory of a block that is alone, and its size [B]."""
    places, total = {}, 0
    for buffer in program.locals:
        places[buffer.name] = total
        total += -(-buffer.bytes // ALIGNED) * ALIGNED
    return places, total
