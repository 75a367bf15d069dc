"""Data footprint of a block of register tiles: sectors and 128-byte lines that it touches, without its addresses.

The tiles of a block are taken for a box along the axes (threads fill the last axis first).  Along the axes and window
taps that move one memory dimension the elements of the box are counted exactly, and the counts of different dimensions
multiply; the innermost dimension is rounded up to whole sectors.  Padding, and chunks of
threads that are no box, are ignored: `schedule.gpu.traffic` counts addresses, a hundred times slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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


class _Access:
    """One load or store, with what its box of points in memory depends on; equal boxes are counted once.

    Attributes:
        buffer, size: the array, bytes of its elements. strides: elements per step of every axis and reduction, None for
            quotients and remainders.
    """

    def __init__(self, buffer: str, size: int, index: Index, names: Iterable[str], *, is_load: bool) -> None:
        self.buffer, self.size, self.is_load = buffer, size, is_load
        self.strides = {name: index.stride(name) for name in names}
        self._points: dict[tuple[int, ...], int] = {}
        self._bytes: dict[tuple[int, ...], float] = {}

    def points(self, counts: Mapping[str, int]) -> int:
        """Different elements that a box of points covers in the buffer."""
        key = tuple(counts.values())
        if key not in self._points:
            strides = {name: self.strides[name] for name, count in counts.items() if count > 1}
            inner = math.prod(points for _, points in _dimensions(strides, counts))
            self._points[key] = _irregular(strides, counts) * inner
        return self._points[key]

    def sector_bytes(self, box: Mapping[str, int]) -> float:
        """Bytes of the sectors that a box of points covers in the buffer."""
        key = tuple(box.values())
        if key not in self._bytes:
            strides = {name: self.strides[name] for name, count in box.items() if count > 1}
            count = _irregular(strides, box)
            for base, points in _dimensions(strides, box):
                near = base * self.size < SECTOR
                count *= max(1, math.ceil(points * base * self.size / SECTOR)) if near else points
            self._bytes[key] = float(count * SECTOR)
        return self._bytes[key]


class BlockFootprint:
    """Counts the footprints of a program's blocks, of one register tile after the other.

    Args: program: one loop nest; resident: operands that the L1 cache keeps from block to block.
    """

    def __init__(self, program: Program, resident: frozenset[str]) -> None:
        phase = program.phases[0]
        sizes = {b.name: ITEM_SIZE[b.dtype] for b in program.buffers}
        self._known: dict[tuple[int, ...], Footprint] = {}
        self.lane, self.resident = phase.axes[-1], resident
        self.extents, self.taps = phase.ranges(), {r.name: r.extent for r in phase.reds}
        self.axes = [axis.name for axis in reversed(phase.axes)]
        names = (*self.extents, *self.taps)
        self.accesses = [
            _Access(n.buffer, sizes[n.buffer], n.index, names, is_load=True)
            for graph in (phase.body, phase.exit)
            for n in graph.nodes
            if n.op == "load" and n.index is not None
        ]
        self.accesses += [_Access(s.buffer, sizes[s.buffer], s.address, names, is_load=False) for s in phase.stores]

    def of(self, tile: Mapping[str, int], beside: Mapping[str, int], threads: int) -> Footprint:
        """The footprint of a block.

        Args:
            tile: points of a thread's tile by axis, all steps of a sliding window together.
            beside: threads by axis (`threads_by_axis`). threads: of a block.
        """
        key = (*tile.values(), *beside.values(), threads)
        if key not in self._known:  # schedules that differ in their prefetch distance alone have the same
            self._known[key] = self._count(tile, beside, threads)
        return self._known[key]

    def _count(self, tile: Mapping[str, int], beside: Mapping[str, int], threads: int) -> Footprint:
        box = {name: min(self.extents[name], count * tile[name]) for name, count in beside.items()}
        read, loads = {**box, **self.taps}, {**tile, **self.taps}
        loaded: dict[str, float] = {}
        stored = lines = 0.0
        for access in self.accesses:
            amount = access.sector_bytes(read if access.is_load else box)
            if not access.is_load:
                stored += amount
            elif access.buffer not in self.resident:
                loaded[access.buffer] = max(loaded.get(access.buffer, 0.0), amount)
            lines += threads / WARP * self._lines(access, loads if access.is_load else tile, beside)
        return Footprint(stored + sum(loaded.values()), lines)

    def _lines(self, access: _Access, counts: Mapping[str, int], beside: Mapping[str, int]) -> float:
        """Lines that one warp touches with all accesses of its tiles, each access for itself."""
        size, joined = access.size, 1
        if access.strides[self.lane.name] == 1:
            joined = math.gcd(self.lane.unroll, max(1, ACCESS // size))
        span, apart, left = joined * size, 1, WARP
        for axis in self.axes:
            count = min(beside[axis], left)
            stride = access.strides[axis]
            step = LINE if stride is None else abs(stride) * counts[axis] * size
            if count > 1 and step:
                if apart == 1 and (step <= span or step < LINE):
                    span += step * (count - 1)
                else:
                    apart *= count
            left //= max(1, count)
            if left <= 1:
                break
        return apart * max(1.0, span / LINE) * access.points(counts) / joined


def threads_by_axis(phase: Phase, tiles: Mapping[str, int], threads: int, shape: Mapping[str, int]) -> dict[str, int]:
    """Threads of a block along every axis: as its shape says, or the last one is filled first."""
    if shape:
        return {axis.name: shape.get(axis.name, 1) for axis in phase.axes}
    found, left = {}, threads
    for axis in reversed(phase.axes):
        found[axis.name] = min(tiles[axis.name], max(1, left))
        left = -(-left // found[axis.name])
    return found


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
