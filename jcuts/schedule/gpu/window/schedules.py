"""Schedules of windows (pooling, depthwise convolution, their gradients): register tiles and sliding windows.

A thread computes a register tile of output points whose taps share loads; it may also slide along the first axis that
the window moves along (`codegen.cuda.window.sliding_window`), and read every row once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jcuts.estimate.time_model import KernelTime
from jcuts.kernel_ir.program import Axis, Phase, Program
from jcuts.schedule import fit
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.machine import (
    ACCESS,
    MOST_REGISTERS,
    REGISTERS,
    Candidate,
    GpuMachine,
    loads_of,
    narrowest,
    scheduled,
    unroll_period,
    unrolled,
    window_values,
)
from jcuts.schedule.gpu.window.cost import WindowCost
from jcuts.schedule.gpu.window.counter import Slide, WindowCounter

MOST_STRIDE = 4  # of a window, or dilation, whose period a register tile covers
MOST_POINTS = 64  # of a tile of a walk
_REGISTERS = fit.coefficients("gpu/window", "registers")
AGAIN = fit.coefficients("gpu/window", "candidates").alike_score_factor
"""What every further schedule counts that has as many neighbours in a thread, and walks as well."""
ROWS = (1, 2, 3, 4, 5, 7, 8)
"""Points of a register tile along the first axis that a window slides along."""
COLUMNS = (1, 2, 3, 4, 5)
"""The same along the second one."""
THREADS = (128, 256, 96)
"""Threads of a block."""
WALKERS = (128, 64, 96)
"""Threads of a block that slides along an axis."""


def windows(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Window schedules: register tiles, with and without a sliding window."""
    yield from register_tiles(program, machine)
    yield from sliding_tiles(program, machine)


def register_tiles(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of register tiles with all taps of the window unrolled."""
    program = fully_unrolled(program)
    if not program.phases[0].axes:
        yield scheduled(program, "point", 32), 0.5
        return
    yield from _diverse(program, _tiles(program, machine))


def sliding_tiles(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of register tiles that slide along an axis of the window, all taps unrolled."""
    program = fully_unrolled(program)
    if program.phases[0].axes:
        yield from _diverse(program, sliding_windows(program, machine))


@dataclass(frozen=True)
class _Tiling:
    """A scored schedule whose program is not made yet.

    Attributes: unroll: points of a register tile by axis; threads: of a block; more: further parameters.
    """

    score: float
    unroll: Mapping[str, int]
    threads: int
    more: tuple[tuple[str, Any], ...] = ()


def _diverse(program: Program, found: Iterable[_Tiling]) -> Iterator[Candidate]:
    """The best of every register tile; scores fall with the number of schedules of the same kind.

    Estimates of the best differ by less than they are off: neighbours of a thread should differ.
    """
    seen: set[tuple[int, ...]] = set()
    kinds: dict[int, int] = {}
    extents = {a.name: a.extent for a in program.phases[0].axes}
    for made in sorted(found, key=lambda made: (-made.score, made.threads, made.more)):
        tile = tuple(min(made.unroll.get(name, 1), extent) for name, extent in extents.items())
        if tile in seen:
            continue
        seen.add(tile)
        score = made.score * AGAIN ** kinds.get(tile[-1], 0)
        yield scheduled(unrolled(program, made.unroll), "point", made.threads, *made.more), score
        kinds[tile[-1]] = kinds.get(tile[-1], 0) + 1


def fully_unrolled(program: Program) -> Program:
    """The program with all taps of a window unrolled."""
    phase = program.phases[0]
    reds = tuple(replace(r, unroll=r.extent, chains=1) for r in phase.reds)
    return replace(program, phases=(replace(phase, reds=reds),))


def _tiles(program: Program, machine: GpuMachine) -> Iterator[_Tiling]:
    phase, counter = program.phases[0], WindowCounter(program)
    least = counter.compulsory / machine.bandwidth
    lane = phase.axes[-1]
    size = narrowest(program)
    slid = _reuse_axes(phase, lane.name)
    periods = {a.name: min(a.extent, unroll_period(phase, a.name)) for a in slid}
    for vector in _widths(lane.extent, size):
        for rows, columns in itertools.product(ROWS, COLUMNS):
            unroll = {lane.name: vector}
            for axis, count in zip(reversed(slid), (columns, rows), strict=False):
                unroll[axis.name] = count
            if any(unroll[a.name] % periods[a.name] or unroll[a.name] > a.extent for a in slid):
                continue
            if (columns > 1 and not slid) or (rows > 1 and len(slid) < 2):
                continue
            tile = math.prod(unroll.values())
            values = window_values(phase, unroll)
            if tile + values > 2 * REGISTERS:
                continue
            for threads in THREADS:
                yield _Tiling(least / counter.cost(unroll, values, threads).seconds(machine), unroll, threads)


def _widths(extent: int, size: int) -> list[int]:
    """Vector widths of a thread: a warp reads whole lines in any case."""
    most = max(1, ACCESS // size)
    return [v for v in (most, most // 2, most // 4) if v and extent % v == 0] or [1]


def cost_of(program: Program) -> WindowCost:
    """The counts of a scheduled window, with or without a sliding window."""
    params: Any = dict(program.params)
    phase = program.phases[0]
    unroll = {a.name: a.unroll for a in phase.axes}
    values, threads, counter = window_values(phase, unroll), int(params["threads"]), WindowCounter(program)
    if "walk" not in params:
        return counter.cost(unroll, values, threads, shape=dict(params.get("block", ())))
    along, tiles = params["walk"]
    rows = unroll[along]
    fresh = max(1, window_values(phase, {**unroll, along: 2 * rows}) - values)
    count = next(a.extent for a in phase.axes if a.name == along) // rows
    slide = Slide(along, fresh, tiles, -(-count // tiles), int(params["ahead"]))
    return counter.cost(unroll, values, threads, slide)


def window_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The model of a scheduled window: pooling, depthwise convolution, a contraction of few terms."""
    return KernelTime(cost_of(program).time(machine), unit="ffma", compulsory=memory_bound(program).bytes)


def _reuse_axes(phase: Phase, lane: str) -> list[Axis]:
    """Axes that a window slides along (not the lanes), outermost first: neighbouring points share loads."""
    found = []
    for axis in phase.axes:
        if axis.name == lane:
            continue
        for node in loads_of(phase):
            assert node.index is not None
            step = node.index.stride(axis.name)
            if step is None and unroll_period(phase, axis.name) <= MOST_STRIDE:
                found.append(axis)
                break
            if step and any(
                (s := node.index.stride(r.name)) and step % s == 0 and step // s < r.extent + 1 for r in phase.reds
            ):
                found.append(axis)
                break
    return found[-2:]


def sliding_windows(program: Program, machine: GpuMachine) -> Iterator[_Tiling]:
    """Schedules whose threads slide along the first axis that the window moves along."""
    phase = program.phases[0]
    lane, size = phase.axes[-1], narrowest(program)
    slid = _reuse_axes(phase, lane.name)
    if not slid:
        return
    along, across = slid[0], slid[1] if len(slid) > 1 else None
    periods, counter = {a.name: unroll_period(phase, a.name) for a in slid}, WindowCounter(program)
    most = ACCESS // size
    for vector in [v for v in (most, most // 2, most // 4) if v and lane.extent % v == 0]:
        for columns in (1, 2, 3, 4, 5, 7, 8) if across is not None else (1,):
            for rows in (1, 2, 4, 7, 8):
                unroll = {lane.name: vector, along.name: rows, **({across.name: columns} if across is not None else {})}
                if any(a.extent % unroll[a.name] or unroll[a.name] % periods[a.name] for a in slid):
                    continue
                if along.extent // rows > 1 and vector * columns * rows <= MOST_POINTS:
                    yield from _walks(program, machine, counter, along, unroll)


def _walks(
    program: Program, machine: GpuMachine, counter: WindowCounter, along: Axis, unroll: dict[str, int]
) -> Iterator[_Tiling]:
    """Sliding windows of one register tile: segments of the axis, with or without prefetch."""
    phase, size = program.phases[0], counter.size
    tile, rows = math.prod(unroll.values()), unroll[along.name]
    values = window_values(phase, unroll)
    fresh = window_values(phase, {**unroll, along.name: 2 * rows}) - values  # of a tile that follows another
    if fresh < 1:
        return
    least = counter.compulsory / machine.bandwidth
    count = along.extent // rows
    for pieces, ahead in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 0)):
        tiles = -(-count // pieces)
        # without early loads, rows are read where they are used: few are there at once
        registers = (
            _REGISTERS.sliding_base
            + tile
            + (values + (ahead or _REGISTERS.sliding_no_prefetch_factor) * fresh) * size / 4
        )
        if tiles < 2 + ahead // 2 or -(-count // tiles) != pieces or registers > MOST_REGISTERS:
            continue
        for threads in WALKERS:
            counted = counter.cost(unroll, values, threads, Slide(along.name, fresh, tiles, pieces, ahead))
            params = (("walk", (along.name, tiles)), ("ahead", ahead))
            yield _Tiling(least / counted.seconds(machine), unroll, threads, params)
