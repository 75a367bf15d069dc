"""Register tiling (unroll and jam): copies the per-output graph once per point of a tile, merging common loads and
values.

This is the thesis' baseline DFG (3.3.1) at the level of registers: every point of the tile gets a copy of the graph of
one output, loads of the same address merge, and what does not depend on the point is computed once.  With lanes, a
point of the vector axis is a whole vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard
from jcuts.kernel_ir.program import Phase

Point = tuple[tuple[str, int], ...]
Term = tuple[Point, Point, int, tuple[int, ...]]


@dataclass(frozen=True)
class Extent:
    """Points of one axis in a register tile: ``count`` copies, ``step`` apart (the lanes, on the vector axis)."""

    name: str
    count: int
    step: int = 1
    fixed: bool = False  # the tile covers the whole axis: its coordinates are numbers
    scale: int = 1  # points per unit of the axis' variable: it counts tiles where this is not 1


@dataclass
class Tile:
    """The graph of one register tile and, per point, the nodes of its results.

    ``terms[k]`` is a list of (point, reduction point, accumulator, values) for body tiles; ``stores`` of (point, store
    number, value, address, guards) for exit tiles.
    """

    graph: Graph = field(default_factory=Graph)
    terms: list[Term] = field(default_factory=list)
    stores: list[tuple[Point, int, int, Index, tuple[Guard, ...]]] = field(default_factory=list)
    accs: dict[int, tuple[Point, int]] = field(default_factory=dict)


def points(extents: Sequence[Extent]) -> Iterator[Point]:
    """Offsets of every point of a tile, row-major."""
    for offsets in itertools.product(*(range(0, e.count * e.step, e.step) for e in extents)):
        yield tuple((e.name, offset) for e, offset in zip(extents, offsets, strict=True))


def replacements(extents: Sequence[Extent], point: Point) -> dict[str, Index]:
    """axis -> axis + offset (or the offset alone, where the tile covers the axis)."""
    by_name = {e.name: e for e in extents}
    found = {}
    for name, offset in point:
        extent = by_name[name]
        if extent.fixed:
            found[name] = Index(offset)
        elif offset or extent.scale != 1:
            found[name] = Index.axis(name) * extent.scale + offset
    return found


def body_tile(phase: Phase, axes: Sequence[Extent], reds: Sequence[Extent], ranges: Mapping[str, int]) -> Tile:
    """The body graph for all points of the tile and all unrolled reduction points."""
    tile = Tile()
    wanted = [value for acc in phase.accs for value in acc.values]
    for red_point in points(reds):
        for point in points(axes):
            replace = {**replacements(axes, point), **replacements(reds, red_point)}
            numbers = phase.body.copy_into(tile.graph, wanted, replace, ranges)
            position = 0
            for number, acc in enumerate(phase.accs):
                values = tuple(numbers[position : position + len(acc.values)])
                position += len(acc.values)
                tile.terms.append((point, red_point, number, values))
    return tile


def exit_tile(phase: Phase, axes: Sequence[Extent], ranges: Mapping[str, int]) -> Tile:
    """The exit graph for all points of the tile; every point has accumulators of its own."""
    tile = Tile()
    wanted = [store.value for store in phase.stores]
    acc_nodes = [k for k, node in enumerate(phase.exit.nodes) if node.op == "acc"]
    for point in points(axes):
        accs: dict[int, int] = {}
        for k in acc_nodes:
            node = phase.exit.nodes[k]
            number = int(str(node.attr("number")))
            renamed = type(node)("acc", node.dtype, attrs=(("number", number), ("point", point)))
            accs[k] = tile.graph.add(renamed)
            tile.accs[accs[k]] = (point, number)
        replace = replacements(axes, point)
        numbers = phase.exit.copy_into(tile.graph, wanted, replace, ranges, accs)
        for k, (store, value) in enumerate(zip(phase.stores, numbers, strict=True)):
            guards = tuple(Guard(g.index.substitute(replace, ranges), g.low, g.high) for g in store.guards)
            if any(g.never(ranges) for g in guards):
                continue
            guards = tuple(g for g in guards if not g.always(ranges))
            tile.stores.append((point, k, value, store.address.substitute(replace, ranges), guards))
    return tile
