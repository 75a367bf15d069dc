"""Bytes that a loop nest moves between cache levels: the reuse that its order leaves, counted from the addresses.

For each level of the nest the lines that all accesses touch inside it are its working set.  The outermost level whose
set fits a cache is loaded once per run of it; an access that the next loops outwards do not move stays where it is.
Rows a large power of two apart fall on few sets of a cache: they fit only as often as these sets are used.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from jcuts.dfg.index import Index
from jcuts.dfg.program import ITEM_SIZE, Phase, Program
from jcuts.region.machine import Machine

LINE = 64
WAYS = 8
L2_BYTES, L3_BYTES = 32.0, 12.0  # per cycle, from that level into the next one
START = 64.0  # bytes whose time it takes until a run of lines elsewhere comes in
OVERLAP = 0.5  # share of the transfers that the core's own work does not hide
USABLE = 0.75  # of a cache: the rest holds what streams through


@dataclass(frozen=True)
class _Access:
    """One operand's addresses: byte strides of the axes that move it."""

    strides: tuple[tuple[str, int], ...]
    size: int
    total: int  # bytes of the buffer

    def lines(self, extents: dict[str, int], cache: int) -> tuple[float, float]:
        """(bytes of the lines touched while the axes run over ``extents``; room that they take in a cache).

        Rows ``step`` bytes apart start at way / gcd(step, way) places of a way (its sets, in bytes); if there are more
        rows than places, only the share row / gcd(step, way) of the cache is of use.
        """
        run, rows, step = float(self.size), 1, 0
        for stride, count in sorted((abs(s), extents.get(n, 1)) for n, s in self.strides):
            if count == 1:
                continue
            if stride <= max(run, LINE):
                run += stride * (count - 1)
            else:
                rows, step = rows * count, step or stride
        row = math.ceil(run / LINE) * LINE
        bytes_ = min(float(rows * row), float(max(self.total, LINE)))
        if not step:
            return bytes_, bytes_
        apart = math.gcd(step, cache // WAYS)
        return bytes_, bytes_ if rows * apart <= cache // WAYS else bytes_ / min(1.0, row / apart)

    def run(self, extents: dict[str, int]) -> float:
        """Bytes of neighbouring elements that one tile touches, at least a line."""
        run = float(self.size)
        for stride, count in sorted((abs(s), extents.get(n, 1)) for n, s in self.strides):
            if count > 1 and stride <= run:
                run += stride * (count - 1)
        return max(run, float(LINE))

    def moved_by(self, name: str) -> bool:
        """Whether an axis changes the address."""
        return any(n == name for n, _ in self.strides)


def traffic_cycles(program: Program, phase: Phase, lanes: int, machine: Machine) -> float:
    """Cycles of one core that wait for lines, beyond those that its work hides, for all tiles of a phase."""
    accesses = _accesses(program, phase)
    loops = _loops(program, phase, lanes)
    second = _moved(accesses, loops, machine.l1)
    third = _moved(accesses, loops, machine.l2)
    return OVERLAP * (second / L2_BYTES + third / L3_BYTES)


def _accesses(program: Program, phase: Phase) -> list[_Access]:
    sizes = {b.name: (ITEM_SIZE[b.dtype], b.bytes) for b in program.buffers}
    found: set[_Access] = set()

    def add(buffer: str, index: Index) -> None:
        size, total = sizes[buffer]
        ranges = phase.ranges()
        strides = []
        for name in sorted(index.axes()):
            stride = index.stride(name)
            if stride is None:  # inside a division or remainder: as if it moved from line to line
                stride = max(1, total // size // ranges.get(name, 1))
            if stride and name in ranges:
                strides.append((name, stride * size))
        found.add(_Access(tuple(strides), size, total))

    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.op == "load" and node.index is not None:
                add(node.buffer, node.index)
    for store in phase.stores:
        add(store.buffer, store.address)
    return sorted(found, key=lambda a: (a.strides, a.size, a.total))


def _loops(program: Program, phase: Phase, lanes: int) -> list[tuple[str, int, int]]:
    """(axis, iterations, elements per iteration) of every loop, outermost first; the tile itself is innermost."""
    grid = {g.axis: g for g in program.grid}
    loops: list[tuple[str, int, int]] = []
    inner: list[tuple[str, int, int]] = []
    for name, g in grid.items():
        if any(a.name == name for a in phase.axes) and name not in program.serial:
            loops.append((name, g.blocks, g.block))
    for axis in phase.axes:
        step = 1 if axis.name in program.serial else axis.unroll * (lanes if axis.vector else 1)
        extent = min(axis.extent, grid[axis.name].block) if axis.name in grid else axis.extent
        if axis.name in program.serial:
            loops.append((axis.name, axis.extent, 1))
        else:
            inner.append((axis.name, -(-extent // step), min(step, axis.extent)))
    for red in phase.reds:
        step = red.unroll * (lanes if red.vector else 1)
        inner.append((red.name, -(-red.extent // step), min(step, red.extent)))
    return [*loops, *inner]


def _moved(accesses: list[_Access], loops: list[tuple[str, int, int]], cache: int) -> float:
    """Bytes that come into a cache of that size."""
    spans: dict[str, int] = {}
    for name, _, step in reversed(loops):
        spans.setdefault(name, step)
    tile = dict(spans)
    level, held = len(loops), dict(spans)
    for number in range(len(loops) - 1, -1, -1):
        name, trips, step = loops[number]
        wider = {**held, name: trips * step}
        if sum(a.lines(wider, cache)[1] for a in accesses) > USABLE * cache:
            break
        level, held = number, wider
    total = 0.0
    for access in accesses:
        moved, _ = access.lines(held, cache)
        moved *= 1.0 + START / access.run(tile)
        outer = list(itertools.dropwhile(lambda loop, a=access: not a.moved_by(loop[0]), reversed(loops[:level])))
        total += moved * math.prod(trips for _, trips, _ in outer)
    return total
