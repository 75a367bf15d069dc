"""Schedules of the depthwise filter gradient (wgrad): a register-tiled reduction whose window slides down image rows.

Rows that windows share stay in registers; the reduction is split over blocks; the cost model of column reductions
ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jcuts.kernel_ir.program import Phase, Program, Red
from jcuts.schedule.gpu.machine import (
    ACCESS,
    MOST_REGISTERS,
    SECTOR,
    TAPS,
    Candidate,
    GpuMachine,
    block_threads,
    distinct_loads,
    lane_counts,
    loads_of,
    narrowest,
    scheduled,
    tiled,
)
from jcuts.schedule.gpu.reduction.column_cost import ColumnSchedule, column_time, groups_of, memory_of


def sliding_gradients(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules whose threads take a few columns of an image, slide down its rows, and keep shared rows in
    registers.
    """
    phase = program.phases[0]
    taps = taps_of(phase)
    if not taps or math.prod(taps.values()) > TAPS or any(acc.index_dtype for acc in phase.accs):
        return
    last, others = inner_reduction(phase, taps)
    if not others:
        return
    lane, size, down = phase.axes[-1], narrowest(program), others[-1]
    for vector in [v for v in (ACCESS // size // 2, ACCESS // size // 4) if v and lane.extent % v == 0]:
        for wide, rows in itertools.product((2, 4, 7, 8), (1, 2, 4)):
            if last.extent % wide or down.extent % rows:
                continue
            values, fresh = _values(phase, {**taps, last.name: wide, down.name: rows, lane.name: vector}, down.name)
            for pieces in (1, 2, 4):
                if down.extent % (pieces * rows) == 0 and down.extent > pieces * rows:
                    tile = _Tile(
                        vector, {last.name: wide, down.name: down.extent // pieces}, (down.name, rows), values, fresh
                    )
                    yield from _shapes(program, machine, tile)


@dataclass(frozen=True)
class _Tile:
    """Register tile of a filter gradient.

    Attributes:
        vector: neighbouring outputs of a thread.
        terms: points of reductions that it slides over.
        walk: the axis that it slides along; points of a step.
        values: values loaded by a step.
        fresh: new values in it.
    """

    vector: int
    terms: dict[str, int]
    walk: tuple[str, int]
    values: int
    fresh: int

    def counted(self, phase: Phase) -> tuple[int, int, int]:
        """Tiles of a reduction; accumulators of a thread; points of a step."""
        down, rows = self.walk
        tiles = math.prod(r.extent // self.terms.get(r.name, 1) for r in phase.reds)
        kept = math.prod(taps_of(phase).values()) * self.vector
        return tiles, kept, math.prod(self.terms.values()) // self.terms[down] * rows

    def over(
        self, lane: int, counts: tuple[int, int, int], size: int, across: int, threads: int, ahead: int, split: int
    ) -> ColumnSchedule:
        """The reduction that its threads share.

        Args: lane: outputs along the last axis; counts: `counted`; size: bytes of an element; ahead: steps that are
            loaded early; split: groups of blocks.
        """
        tiles, kept, inside = counts
        return ColumnSchedule(
            lane // self.vector,
            1,
            self.vector,
            size,
            across,
            threads,
            kept,
            self.fresh,
            inside,
            max(1, ahead),
            groups_of(tiles, threads // across, split),
            True,
            self.values + max(0, ahead - 1) * self.fresh,
        )


def _values(phase: Phase, counts: dict[str, int], down: str) -> tuple[int, int]:
    """Values that a step loads; new ones among them."""
    values = distinct_loads(phase, counts)
    return values, max(1, distinct_loads(phase, {**counts, down: 2 * counts[down]}) - values)


def _shapes(program: Program, machine: GpuMachine, tile: _Tile) -> Iterator[Candidate]:
    """Blocks and splits of one tile."""
    phase = program.phases[0]
    taps, lane, size = taps_of(phase), phase.axes[-1], narrowest(program)
    results, memory = math.prod(a.extent for a in phase.axes), memory_of(program, machine)
    terms = math.prod(r.extent for r in phase.reds) // math.prod(tile.terms.values())
    counts, made = tile.counted(phase), tiled(program, {**taps, lane.name: tile.vector}, tile.terms)
    wide = lane.extent // tile.vector
    options = lane_counts(wide)
    exact = [a for a in options if wide % a == 0] or options
    for across in [a for a in exact if a * tile.vector * size % SECTOR == 0] or exact:
        for threads, each, ahead in itertools.product(block_threads(across, (128, 256, 512)), (1, 2), (1, 2)):
            deep = threads // across
            split = -(-terms // (deep * each))
            if split < 2 or deep < 2 or across * tile.vector > threads:
                continue
            shape = tile.over(lane.extent, counts, size, across, threads, ahead, split)
            if shape.registers > MOST_REGISTERS or not machine.resident_blocks(threads, shape.registers, 0):
                continue
            seconds = column_time(shape, results, memory, machine).value
            params = (("across", across), ("flight", 1), ("split", split), ("walk", tile.walk), ("ahead", ahead))
            yield scheduled(made, "columns", threads, *params), memory.value / seconds


def gradient_schedule(program: Program) -> ColumnSchedule:
    """The schedule of a scheduled filter gradient with a sliding window."""
    params: Any = dict(program.params)
    phase = program.phases[0]
    taps, lane = taps_of(phase), phase.axes[-1]
    down, rows = params["walk"]
    terms = {r.name: r.unroll for r in phase.reds}
    values, fresh = _values(phase, {**taps, **terms, down: rows, lane.name: lane.unroll}, down)
    tile = _Tile(lane.unroll, terms, (down, rows), values, fresh)
    across, threads, ahead, split = (int(params[n]) for n in ("across", "threads", "ahead", "split"))
    return tile.over(lane.extent, tile.counted(phase), narrowest(program), across, threads, ahead, split)


def inner_reduction(phase: Phase, taps: dict[str, int]) -> tuple[Red, list[Red]]:
    """The innermost reduction (densest points), and the others that taps move along with."""
    last = phase.reds[-1] if len(phase.reds) == 1 else max(phase.reds, key=lambda r: innermost(phase, r.name))
    return last, [r for r in phase.reds if r is not last and any(shares_operand(phase, a, r.name) for a in taps)]


def taps_of(phase: Phase) -> dict[str, int]:
    """Axes of results that share operands: the taps of a filter's gradient."""
    strides = {
        a.name: [n.index.stride(a.name) for n in loads_of(phase) if n.index is not None] for a in phase.axes[:-1]
    }
    slides = {
        name for name, moves in strides.items() if any(m not in (0, None) for m in moves) and any(m == 0 for m in moves)
    }
    return {a.name: a.extent for a in phase.axes[:-1] if a.name in slides}


def shares_operand(phase: Phase, axis: str, red: str) -> bool:
    """Whether some operand depends on an axis and a reduction through their sum."""
    return any(
        n.index is not None and n.index.stride(axis) not in (0, None) and n.index.stride(red) not in (0, None)
        for n in loads_of(phase)
    )


def innermost(phase: Phase, name: str) -> float:
    """Stride of a reduction's points, as a sort key."""
    strides = [abs(s) for n in loads_of(phase) if n.index is not None and (s := n.index.stride(name))]
    return -max(strides, default=math.inf)
