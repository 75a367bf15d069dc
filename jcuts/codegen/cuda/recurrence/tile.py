"""Tile of the persistent recurrence kernel: blocks, threads, and how a phase's points lie on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.cuda.reduction.column import ColumnShape
from jcuts.codegen.cuda.reduction.split import column_program
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Axis, Buffer, Phase, Program, Red
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.recurrence.exchange import exchanged
from jcuts.schedule.gpu.recurrence.parameters import HELD, MMA, REPLICAS, is_flagged
from jcuts.schedule.gpu.recurrence.residency import Resident, shared_layout, terms_at_once
from jcuts.schedule.gpu.recurrence.stage_product import columns_of, mma_stages

ONE = "one"
"""An axis of one column, for results without any."""
FIRST = "first"
"""The block's first column, in addresses of what is resident."""


@dataclass(frozen=True)
class RecurrenceTile:
    """Attributes:
    blocks: of the grid; one block keeps what is carried in shared memory.
    threads: of a block. flight: terms of a product that a thread loads at once, at most.
    resident: operands that do not change which stay in shared memory: the first so many.
    held: whether those operands stay in registers instead.
    flagged: whether blocks exchange carried values with flags in place of a grid barrier. replicas: of these values.
    """

    blocks: int
    threads: int
    flight: int
    resident: int
    held: bool = False
    flagged: bool = False
    replicas: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether one block runs the whole loop."""
        return self.blocks == 1

    def layout(self, program: Program) -> tuple[dict[str, int], int]:
        """Offsets in dynamic shared memory, and its size [B]."""
        return shared_layout(program, self.blocks, resident=self.resident, exchanged=self.exchanged(program))

    def exchanged(self, program: Program) -> list[Buffer]:
        """The carried values that blocks exchange with flags. Raises CompileRejected where the loop needs barriers."""
        found = exchanged(program, self.blocks) if self.flagged else []
        if self.flagged and not found:
            raise CompileRejected(f"{program.name}: carried values need a grid barrier")
        return found


def recurrence_tile(program: Program) -> RecurrenceTile:
    """The tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    params = dict(program.params)
    blocks, threads, flight = (int(str(params.get(k, 1))) for k in ("split", "threads", "flight"))
    if blocks < 1 or flight < 1 or threads < WARP or threads % WARP:
        raise CompileRejected(f"{program.name}: {blocks} blocks of {threads} threads, {flight} terms at once")
    if MMA in params and not mma_stages(program, blocks, threads):
        raise CompileRejected(f"{program.name}: no stage for tensor cores of {params[MMA]}")
    resident, replicas = int(str(params.get("resident", 0))), int(str(params.get(REPLICAS, 1)))
    if replicas < 1:
        raise CompileRejected(f"{program.name}: {replicas} replicas of what is exchanged")
    return RecurrenceTile(blocks, threads, flight, resident, params.get(HELD) == 1, is_flagged(program), replicas)


def column_phase(
    program: Program, phase: Phase, tile: RecurrenceTile, kept: Sequence[Resident]
) -> tuple[Program, ColumnShape]:
    """A phase's products in the columns form, a thread having all rows, and the mapping of the block onto them.

    Args: kept: loads of the phase's body that shared memory serves.
    """
    phase = _reading_shared(phase, kept)
    axes = phase.axes if phase.axes[-1].name != STEP else (*phase.axes, Axis(ONE, 1))
    rows = tuple(a if a.name == STEP else replace(a, unroll=a.extent) for a in axes[:-1])
    across = columns_of(phase, tile.blocks)
    if across > tile.threads:
        raise CompileRejected(f"{program.name}: {across} columns of a block")
    flight = terms_at_once(phase, tile.blocks, tile.threads, tile.flight)
    params = (("threads", tile.threads), ("across", across), ("flight", flight))
    alone = replace(program, phases=(replace(phase, axes=(*rows, axes[-1])),), params=params, grid=(), serial=())
    made = column_program(alone)
    terms = int(str(dict(made.params)["terms"]))
    return made, ColumnShape(across, tile.threads // across, tile.threads, flight, terms)


def digits(builder: GpuBuilder, number: L.Value, axes: Sequence[Axis | Red]) -> dict[str, L.Value]:
    """Mixed-radix digits of a number (i32) below the product of the extents, the last axis fastest."""
    found: dict[str, L.Value] = {}
    for axis in reversed(axes):
        found[axis.name] = builder.urem(number, L.I32(axis.extent))
        number = builder.udiv(number, L.I32(axis.extent))
    return found


def _reading_shared(phase: Phase, kept: Sequence[Resident]) -> Phase:
    """The phase with loads from the slices in shared memory."""
    if not kept:
        return phase
    by_node, body = {one.node: one for one in kept}, Graph()
    lane = phase.axes[-1].name
    column = Index.axis(lane) - Index.axis(FIRST) if lane != STEP else Index()
    term = flatten(tuple(Index.axis(r.name) for r in phase.reds), tuple(r.extent for r in phase.reds))
    for number, node in enumerate(phase.body.nodes):
        if (one := by_node.get(number)) is not None:
            node = replace(node, buffer=one.buffer.name, index=term * one.columns + column)
        body.nodes.append(node)  # the numbers stay
    return replace(phase, body=body)
