"""Candidate schedules of windows for a GPU: pooling, depthwise convolution, their gradients.

A thread computes a register tile of output points whose taps share loads; it may also walk along the first axis that
the window slides along (`codegen.cuda.walk`), and read every row once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from jcuts.dfg.program import Axis, Phase, Program
from jcuts.region.gpu_tiles import (
    ACCESS,
    IN_FLIGHT,
    MOST_REGISTERS,
    REGISTERS,
    Candidate,
    GpuMachine,
    distinct,
    levelled,
    loads_of,
    narrowest,
    period,
    scheduled,
    unrolled,
    vectors,
    window_values,
)

MOST_STRIDE = 4  # of a window, or dilation, whose period a register tile covers
MOST_POINTS = 64  # of a tile of a walk


def windows(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Tiles of single threads, and walks."""
    program = whole(program)
    if not program.phases[0].axes:
        yield scheduled(program, "point", 32), 0.5
        return
    plain, moving = list(_tiles(program, machine)), distinct(walks(program, machine))
    yield from plain
    yield from levelled(moving, plain)


def whole(program: Program) -> Program:
    """The program with all terms of a window in straight-line code."""
    phase = program.phases[0]
    reds = tuple(replace(r, unroll=r.extent, chains=1) for r in phase.reds)
    return replace(program, phases=(replace(phase, reds=reds),))


def _tiles(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    phase = program.phases[0]
    lane = phase.axes[-1]
    size = narrowest(program)
    points = math.prod(a.extent for a in phase.axes)
    slid = _slid(phase, lane.name)
    taps = math.prod(r.extent for r in phase.reds)
    periods = {a.name: min(a.extent, period(phase, a.name)) for a in slid}
    narrow = max(1, ACCESS // size // 4)
    widths = [*vectors(lane.extent, size), *([narrow] if size < 4 and lane.extent % narrow == 0 else [])]
    for vector in widths:
        for rows in (1, 2, 4, 7, 8):
            for columns in (1, 2, 4):
                unroll = {lane.name: vector}
                for axis, count in zip(reversed(slid), (columns, rows), strict=False):
                    unroll[axis.name] = count
                if any(unroll[a.name] % periods[a.name] for a in slid):
                    continue
                if (columns > 1 and not slid) or (rows > 1 and len(slid) < 2):
                    continue
                if any(count > a.extent for a in slid for count in [unroll[a.name]]):
                    continue
                tile = math.prod(unroll.values())
                values = window_values(phase, unroll)
                if tile + values > 2 * REGISTERS:
                    continue
                loads_per_use = values / (tile * taps)
                waste = math.prod(a.extent / (-(-a.extent // unroll[a.name]) * unroll[a.name]) for a in slid)
                fill = min(1.0, points / tile / machine.threads)
                pressure = 1.0 if tile + values <= REGISTERS else 0.75
                access = min(1.0, vector * size / ACCESS)
                score = waste * pressure * (0.4 + 0.6 * access) * (0.25 + 0.75 * fill) / (1.0 + 2.0 * loads_per_use)
                for threads in (128, 256):
                    yield (
                        scheduled(unrolled(program, unroll), "point", threads),
                        score * (1 if threads == 128 else 0.99),
                    )


def _slid(phase: Phase, lane: str) -> list[Axis]:
    """Axes that a window slides along (not the lanes), outermost first: neighbouring points share loads."""
    found = []
    for axis in phase.axes:
        if axis.name == lane:
            continue
        for node in loads_of(phase):
            assert node.index is not None
            step = node.index.stride(axis.name)
            if step is None and period(phase, axis.name) <= MOST_STRIDE:
                found.append(axis)
                break
            if step and any((s := node.index.stride(r.name)) and step % s == 0 and step // s < r.extent + 1
                            for r in phase.reds):  # fmt: skip
                found.append(axis)
                break
    return found[-2:]


def walks(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Threads that walk along the first of the axes that the window slides along."""
    phase = program.phases[0]
    lane, size = phase.axes[-1], narrowest(program)
    slid = _slid(phase, lane.name)
    if not slid:
        return
    along, across = slid[0], slid[1] if len(slid) > 1 else None
    periods = {a.name: period(phase, a.name) for a in slid}
    most = ACCESS // size
    for vector in [v for v in (most, most // 2, most // 4) if v and lane.extent % v == 0]:
        for columns in (1, 2, 3, 4, 5, 7, 8) if across is not None else (1,):
            for rows in (1, 2, 4, 7, 8):
                unroll = {lane.name: vector, along.name: rows, **({across.name: columns} if across is not None else {})}
                if any(a.extent % unroll[a.name] or unroll[a.name] % periods[a.name] for a in slid):
                    continue
                if along.extent // rows > 1 and vector * columns * rows <= MOST_POINTS:
                    yield from _walks(program, machine, along, unroll)


def _walks(program: Program, machine: GpuMachine, along: Axis, unroll: dict[str, int]) -> Iterator[Candidate]:
    """Walks of one register tile: pieces of the axis, early loads or not."""
    phase, size = program.phases[0], narrowest(program)
    tile, rows = math.prod(unroll.values()), unroll[along.name]
    values = window_values(phase, unroll)
    fresh = window_values(phase, {**unroll, along.name: 2 * rows}) - values  # of a tile that follows another
    if fresh < 1:
        return
    made = unrolled(program, unroll)
    count = along.extent // rows
    for pieces, ahead in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 0)):
        tiles = -(-count // pieces)
        # without early loads, rows are read where they are used: few are there at once
        registers = 24 + tile + (values + (ahead or -0.75) * fresh) * size / 4
        if tiles < 2 + ahead // 2 or -(-count // tiles) != pieces or registers > MOST_REGISTERS:
            continue
        counts = {a.name: -(-a.extent // unroll.get(a.name, 1)) for a in phase.axes}
        threads = math.prod(counts.values()) // count * pieces
        resident = machine.sms * min(2048, 65536 // (-(-int(registers) // 8) * 8) // 32 * 32)
        waves = max(1.0, threads / resident)
        there = min(threads, resident)
        # As in `estimate.launches`; of loads two tiles early a third more are under way than of those one early.
        under_way = there * fresh * size * {0: 0.5, 1: 1.0, 2: 1.3}[ahead]
        hidden = (there / machine.threads) ** 0.2 / (1.0 + 0.5 * IN_FLIGHT / 2 / under_way)
        spent = 1.0 + 0.25 * fresh / tile  # accesses of columns that neighbouring tiles read as well
        spent *= 1.0 + 0.3 * (values / fresh - 1.0) / tiles  # rows that a new piece reads again, from the L2 cache
        spent *= 1.0 + 1.0 / (tiles * waves)  # before the first store, after the last load
        spent *= pieces * tiles / count * (1.0 + 0.1 * (waves > 1.0) / waves)
        spent *= {16: 1.0, 8: 1.04}.get(unroll[phase.axes[-1].name] * size, 1.12) / hidden
        yield scheduled(made, "point", 128, ("walk", (along.name, tiles)), ("ahead", ahead)), 1.0 / spent
