"""Horizontal fusion: several element-wise programs of one axis in one launch; a block selects its program by its
number.

This is the *combined* form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.horizontal import is_map

POINTS = 4
"""Of a thread: 16 bytes of float32."""


@dataclass(frozen=True)
class CombinedShape:
    """How horizontally fused programs divide the grid.

    Attributes:
        threads: of a block.
        points: of a thread, by program: as many as a vector load has, one where they do not divide the axis.
        first: the first block of every program.
        blocks: of the launch.
    """

    threads: int
    points: tuple[int, ...]
    first: tuple[int, ...]
    blocks: int


def combined_shape(program: Program) -> CombinedShape:
    """How a program's phases divide the grid. Raises CompileRejected where one is not an element-wise map along one
    axis.
    """
    threads = int(str(dict(program.params)["threads"]))
    if not all(map(is_map, program.phases)):
        raise CompileRejected(f"{program.name}: not only maps along one axis")
    extents = [phase.axes[0].extent for phase in program.phases]
    points = tuple(POINTS if extent % POINTS == 0 else 1 for extent in extents)
    blocks = (-(-extent // (threads * each)) for extent, each in zip(extents, points, strict=True))
    counts = [0, *itertools.accumulate(blocks)]
    return CombinedShape(threads, points, tuple(counts[:-1]), counts[-1])


def binary_dispatch(builder: GpuBuilder, number: L.Value, first: Sequence[int], emit: Callable[[int], None]) -> None:
    """Branches to one of several code sequences by binary search on a number.

    Args: first: the first number of every range, from 0 on; emit: emits one range's code at the builder's position.
    """
    done = builder.append_basic_block("done")

    def look(low: int, high: int) -> None:
        if high - low == 1:
            emit(low)
            builder.branch(done)
            return
        middle = (low + high) // 2
        before, after = (builder.append_basic_block(name) for name in ("before", "after"))
        builder.cbranch(builder.icmp_signed("<", number, L.I32(first[middle])), before, after)
        for block, ends in ((before, (low, middle)), (after, (middle, high))):
            builder.position_at_end(block)
            look(*ends)

    look(0, len(first))
    builder.position_at_end(done)


class HorizontalKernel:
    """Emits one thread of the horizontally fused kernel."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: CombinedShape,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.program, self.shape, self.buffers = builder, program, tile, buffers
        self.pointers, self.block, self.thread = pointers, integers["block"], integers["thread"]

    def emit(self) -> None:
        """Computes this thread's points."""
        binary_dispatch(self.builder, self.block, self.shape.first, self._map)

    def _map(self, number: int) -> None:
        builder, phase = self.builder, self.program.phases[number]
        (axis,) = phase.axes
        points = self.shape.points[number]
        block = builder.sub(self.block, L.I32(self.shape.first[number]))
        thread = builder.add(builder.mul(block, L.I32(self.shape.threads)), self.thread)
        place = builder.mul(thread, L.I32(points)) if points > 1 else thread
        point = RegisterTileEmitter(
            builder,
            phase,
            TileVariant(((axis.name, points),)),
            self.buffers,
            self.pointers,
            {axis.name: place},
            {axis.name: points},
        )
        point.in_place = True
        with builder.if_then(builder.icmp_signed("<", place, L.I32(axis.extent))):
            point.emit()
