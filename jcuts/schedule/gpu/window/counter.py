"""Counts of window schedules for the cost model: what depends on the program alone is counted once for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jcuts.kernel_ir.program import Program
from jcuts.schedule.gpu.machine import narrowest
from jcuts.schedule.gpu.traffic import l1_resident
from jcuts.schedule.gpu.window.cost import WindowCost
from jcuts.schedule.gpu.window.footprint import BlockFootprint, threads_by_axis


@dataclass(frozen=True)
class Slide:
    """How threads slide along an axis.

    Args: fresh: values that a next tile adds; steps: tiles of a thread; pieces: threads along it; ahead: tiles that are
        loaded early.
    """

    along: str
    fresh: int
    steps: int
    pieces: int
    ahead: int


class WindowCounter:
    """Counts schedules of one window program."""

    def __init__(self, program: Program) -> None:
        self.phase = phase = program.phases[0]
        resident = frozenset(l1_resident(program))
        self.footprint = BlockFootprint(program, resident)
        self.compulsory = float(sum(b.bytes for b in (*program.inputs, *program.outputs)))
        self.kept = sum(b.bytes for b in program.inputs if b.name in resident)
        self.extents = {a.name: a.extent for a in phase.axes}
        self.lane, self.size, self.exit_ops = phase.axes[-1].name, narrowest(program), len(phase.exit.nodes)
        self.taps = math.prod(r.extent for r in phase.reds)

    def cost(
        self,
        unroll: Mapping[str, int],
        values: int,
        threads: int,
        slide: Slide | None = None,
        shape: Mapping[str, int] = MappingProxyType({}),
    ) -> WindowCost:
        """A schedule's counts.

        Args: unroll: points of a register tile by axis; values: that it loads; threads: of a block; shape: the same by
            axis.
        """
        tile = {name: unroll.get(name, 1) for name in self.extents}
        tiles = {name: -(-extent // tile[name]) for name, extent in self.extents.items()}
        points = math.prod(tile.values())
        if slide is not None:
            along = slide.along
            tiles[along], tile[along] = slide.pieces, min(self.extents[along], tile[along] * slide.steps)
        footprint = self.footprint.of(tile, threads_by_axis(self.phase, tiles, threads, shape), threads)
        count = math.prod(tiles.values())
        blocks = math.prod(-(-tiles[a] // shape.get(a, 1)) for a in tiles) if shape else -(-count // threads)
        return WindowCost(
            points,
            values,
            slide.fresh if slide else values,
            slide.steps if slide else 1,
            slide.ahead if slide else -1,
            unroll[self.lane],
            self.taps,
            self.exit_ops,
            self.size,
            count,
            threads,
            blocks,
            self.compulsory,
            max(self.compulsory, footprint.bytes * count / threads + self.kept),
            footprint.lines * count / threads,
        )
