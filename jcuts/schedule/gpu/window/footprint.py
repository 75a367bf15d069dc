"""Data footprint of a block of register tiles: sectors and 128-byte lines that it touches, without its addresses.

The tiles of a block are taken for a box along the axes (threads fill the last axis first).  Along the axes and window
taps that move one memory dimension the elements of the box are counted exactly, and the counts of different dimensions
multiply; the innermost dimension is rounded up to whole sectors.  Padding, and chunks of
threads that are no box, are ignored: `schedule.gpu.traffic` counts addresses, a hundred times slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jcuts.arch.sm_limits import SM_90
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.schedule.gpu.coalescing import LINE
from jcuts.schedule.gpu.machine import ACCESS, WARP

SECTOR = SM_90.sector_bytes


@dataclass(frozen=True)
class Footprint:
    """Of one thread block. Args: bytes: of all sectors that it loads and stores, each once; lines: 128-byte lines of
    all accesses of all its warps."""

    bytes: float
    lines: float


@dataclass(frozen=True)
class _Access:
    """One load or store. Args: counts: points of a thread's tile by axis and tap."""

    buffer: str
    index: Index
    is_load: bool
    counts: Mapping[str, int]


def block_footprint(
    program: Program, tile: Mapping[str, int], beside: Mapping[str, int], threads: int, resident: frozenset[str]
) -> Footprint:
    """The footprint of a block of register tiles.

    Args:
        program: one loop nest. tile: points of a thread's tile by axis, all steps of a sliding window together.
        beside: threads by axis (`threads_by_axis`). threads: of a block. resident: operands that the L1 cache keeps
            from block to block.
    """
    phase = program.phases[0]
    sizes = {b.name: ITEM_SIZE[b.dtype] for b in program.buffers}
    extents = phase.ranges()
    box = {name: min(extents[name], count * tile[name]) for name, count in beside.items()}
    taps = {r.name: r.extent for r in phase.reds}
    loaded: dict[str, float] = {}
    stored = lines = 0.0
    for access in _accesses(phase, tile, taps):
        size = sizes[access.buffer]
        covered = {**box, **taps} if access.is_load else box
        amount = _box_bytes(access.index, covered, size)
        if not access.is_load:
            stored += amount
        elif access.buffer not in resident:
            loaded[access.buffer] = max(loaded.get(access.buffer, 0.0), amount)
        lines += threads / WARP * _lines(phase, access, beside, size)
    return Footprint(stored + sum(loaded.values()), lines)


def threads_by_axis(phase: Phase, tiles: Mapping[str, int], threads: int, shape: Mapping[str, int]) -> dict[str, int]:
    """Threads of a block along every axis: as its shape says, or the last one is filled first."""
    if shape:
        return {axis.name: shape.get(axis.name, 1) for axis in phase.axes}
    found, left = {}, threads
    for axis in reversed(phase.axes):
        found[axis.name] = min(tiles[axis.name], max(1, left))
        left = -(-left // found[axis.name])
    return found


def _accesses(phase: Phase, tile: Mapping[str, int], taps: Mapping[str, int]) -> Iterator[_Access]:
    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.op == "load" and node.index is not None:
                yield _Access(node.buffer, node.index, True, {**tile, **taps})
    for store in phase.stores:
        yield _Access(store.buffer, store.address, False, tile)


def _box_bytes(index: Index, box: Mapping[str, int], size: int) -> float:
    """Bytes of the sectors that a box of points covers in one buffer."""
    strides = {name: index.stride(name) for name, count in box.items() if count > 1}
    count = _irregular(strides, box)
    for base, points in _dimensions(strides, box):
        near = base * size < SECTOR
        count *= max(1, math.ceil(points * base * size / SECTOR)) if near else points
    return float(count * SECTOR)


def _points(index: Index, counts: Mapping[str, int]) -> int:
    """Different elements that a box of points covers in one buffer."""
    strides = {name: index.stride(name) for name, count in counts.items() if count > 1}
    return _irregular(strides, counts) * math.prod(points for _, points in _dimensions(strides, counts))


def _irregular(strides: Mapping[str, int | None], box: Mapping[str, int]) -> int:
    """Points along axes without a stride (quotients and remainders): neighbours share elements, two on average."""
    return math.prod(max(1, box[name] // 2) for name, stride in strides.items() if stride is None)


def _dimensions(strides: Mapping[str, int | None], box: Mapping[str, int]) -> list[tuple[int, int]]:
    """(stride, different elements) of every memory dimension.

    An axis that moves by a multiple of another's stride, no further than that one reaches, moves the same dimension:
    what they cover together has no gaps.
    """
    found: list[tuple[int, int]] = []
    moving = sorted((abs(stride), name) for name, stride in strides.items() if stride)
    for stride, name in moving:
        for place, (base, reach) in enumerate(found):
            if stride % base == 0 and stride // base <= reach:
                found[place] = base, reach + stride // base * (box[name] - 1)
                break
        else:
            found.append((stride, box[name]))
    return found


def _lines(phase: Phase, access: _Access, beside: Mapping[str, int], size: int) -> float:
    """Lines that one warp touches with all accesses of its tiles, each access for itself."""
    lane = phase.axes[-1]
    index, joined = access.index, 1
    if index.stride(lane.name) == 1:
        joined = math.gcd(lane.unroll, max(1, ACCESS // size))
    span, apart, left = joined * size, 1, WARP
    for axis in reversed(phase.axes):
        count = min(beside[axis.name], left)
        stride = index.stride(axis.name)
        step = LINE if stride is None else abs(stride) * access.counts[axis.name] * size
        if count > 1 and step:
            if apart == 1 and (step <= span or step < LINE):
                span += step * (count - 1)
            else:
                apart *= count
        left //= max(1, count)
        if left <= 1:
            break
    return apart * max(1.0, span / LINE) * _points(index, access.counts) / joined
