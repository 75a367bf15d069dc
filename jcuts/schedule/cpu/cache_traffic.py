"""Cache-reuse analysis of a loop nest: bytes moved between cache levels, from working sets and loop order, as terms of
the kernel's time model.

For each level of the nest the lines that all accesses touch inside it are its working set.  The outermost level whose
set fits a cache is loaded once per run of it; an access that the next loops outwards do not move stays where it is.
Rows a large power of two apart fall on few sets of a cache: they fit only as often as these sets are used.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from jcuts.arch.cpu_cores import CORE, Core
from jcuts.estimate.time_model import Resource, TimeTerm, soft_longest, term
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.schedule import fit
from jcuts.schedule.cpu.machine import Machine

_FIT = fit.coefficients("cpu", "cache_traffic")
L2_BYTES = _FIT.l2_bytes_per_cycle  # per cycle, from that level into the next one
L3_BYTES = _FIT.l3_bytes_per_cycle
START = _FIT.line_start_bytes  # bytes whose time it takes until a run of lines elsewhere comes in
EXPOSED = _FIT.l2_exposed_ratio  # share of the shorter of computing and moving that the longer does not hide
FAR_EXPOSED = _FIT.l3_exposed_ratio
NOTHING = term(Resource.START, 0.0)


@dataclass(frozen=True)
class _Access:
    """One operand's addresses: byte strides of the axes that move it."""

    strides: tuple[tuple[str, int], ...]
    size: int
    total: int  # bytes of the buffer
    line: int = 64  # bytes
    core: Core = CORE

    def _rows(self, extents: dict[str, int]) -> tuple[float, int, int]:
        """(bytes of one row of neighbouring lines, rows, bytes between two rows or 0)."""
        run, rows, step = float(self.size), 1, 0
        for stride, count in sorted((abs(s), extents.get(n, 1)) for n, s in self.strides):
            if count == 1:
                continue
            if stride <= max(run, self.line):
                run += stride * (count - 1)
            else:
                rows, step = rows * count, step or stride
        return run, rows, step

    def lines(self, extents: dict[str, int], cache: int) -> tuple[float, float]:
        """(bytes of the lines touched while the axes run over ``extents``; room that they take in a cache).

        Rows ``step`` bytes apart start at way / gcd(step, way) places of a way (its sets, in bytes); if there are more
        rows than places, only the share row / gcd(step, way) of the cache is of use.
        """
        run, rows, step = self._rows(extents)
        row = math.ceil(run / self.line) * self.line
        bytes_ = min(float(rows * row), float(max(self.total, self.line)))
        if not step:
            return bytes_, bytes_
        way = cache // self.core.cache_ways
        apart = math.gcd(step, way)
        return bytes_, bytes_ if rows * apart <= way else bytes_ / min(1.0, row / apart)

    def has_set_conflicts(self, extents: dict[str, int], cache: int) -> bool:
        """Whether rows of one tile are so far apart that they push each other out of their sets.

        Two ways are left to the other operands.
        """
        _, rows, step = self._rows(extents)
        return step > 0 and rows * math.gcd(step, cache // self.core.cache_ways) > (self.core.cache_ways - 2) * (
            cache // self.core.cache_ways
        )

    def page_opens_per_byte(self, extents: dict[str, int]) -> float:
        """Pages that are opened anew per byte of a tile: its rows over their length, where each lies in another."""
        run, rows, step = self._rows(extents)
        return 0.0 if rows == 1 or step < self.core.page_bytes else 1.0 / max(run, self.line)

    def moved_by(self, name: str) -> bool:
        """Whether an axis changes the address."""
        return any(n == name for n, _ in self.strides)


def beside_traffic(program: Program, phase: Phase, lanes: int, machine: Machine, busy: TimeTerm) -> TimeTerm:
    """All tiles of a phase: what computes, ``busy``, overlapped with the cache lines that are loaded meanwhile.

    Of computing and of each level's transfers the longest counts, and a share of the others that it does not hide.
    """
    accesses = _accesses(program, phase, machine)
    loops = _loops(program, phase, lanes)
    second = _bytes_into_cache(accesses, loops, machine.l1, _FIT.l1_usable_ratio, 0.0)
    third = _bytes_into_cache(accesses, loops, machine.l2, 1.0, START)
    near = soft_longest(EXPOSED, busy, term(Resource.L2, second / L2_BYTES, second), NOTHING)
    return soft_longest(FAR_EXPOSED, near, term(Resource.L3, third / L3_BYTES, third), NOTHING)


def _accesses(program: Program, phase: Phase, machine: Machine) -> list[_Access]:
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
        found.add(_Access(tuple(strides), size, total, machine.line, machine.core))

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


def _bytes_into_cache(
    accesses: list[_Access], loops: list[tuple[str, int, int]], cache: int, usable: float, start: float
) -> float:
    """Bytes that come into a cache of that size; each run of neighbouring lines costs ``start`` bytes more."""
    tile: dict[str, int] = {}
    for name, _, step in reversed(loops):
        tile.setdefault(name, step)
    held, level = dict(tile), len(loops)
    total, share = 0.0, 1.0
    if any(access.has_set_conflicts(tile, cache) for access in accesses):
        everything = math.prod(trips for _, trips, _ in loops)
        return everything * sum(access.lines(tile, cache)[0] for access in accesses)
    while True:
        # What of the next wider set does not fit comes anew in each run of this one.
        wider = held if not level else {**held, loops[level - 1][0]: loops[level - 1][1] * loops[level - 1][2]}
        need = sum(access.lines(wider, cache)[1] for access in accesses)
        fits = 1.0 if not level else min(1.0, max(0.0, 2.0 - need / (usable * cache)))
        left = share * (1.0 - fits) if level else share
        if left:
            total += left * sum(_runs(a, held, loops[:level], tile, cache, start) for a in accesses)
        share *= fits
        if not level or share < _FIT.negligible_share:
            return total
        held, level = wider, level - 1


def _runs(
    access: _Access,
    held: dict[str, int],
    outer: list[tuple[str, int, int]],
    tile: dict[str, int],
    cache: int,
    start: float,
) -> float:
    """Bytes of one access where what loops inside ``outer`` touch stays in the cache.

    Loops that do not move it cost nothing; of the next one, neighbouring iterations share what overlaps.
    """
    left = list(itertools.dropwhile(lambda loop: not access.moved_by(loop[0]), reversed(outer)))
    if left:
        name, trips, step = left[0]
        together, _ = access.lines({**held, name: trips * step}, cache)
        moved = min(together, trips * access.lines(held, cache)[0])
    else:
        moved = access.lines(held, cache)[0]
    return moved * math.prod(trips for _, trips, _ in left[1:]) * (1.0 + start * access.page_opens_per_byte(tile))
