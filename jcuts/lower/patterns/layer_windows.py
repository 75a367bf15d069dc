"""Matches the layers of a fused chain to the windows that they read of the result before them, halo included.

    reads[d] = 2 y + ky - 1,  y in a block of outputs, ky in a filter's rows

is the row of the intermediate result that the next layer reads at output row y.  Flat addresses are decomposed into one
index per dimension; each is proven to stay inside its dimension, by its range or by the load's guards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index, Ranges
from jcuts.kernel_ir.node import Guard, Node
from jcuts.kernel_ir.program import Phase, Program

Place = tuple[Index, ...]
"""One index per dimension."""


@dataclass(frozen=True)
class LayerLink:
    """An intermediate result between two layers.

    Attributes:
        buffer, shape: the local buffer.
        reads: where the later layer's loads read it, each once.
        writes: where the earlier layer stores it: per dimension the axis of its phase, '' for dimensions of extent 1.
    """

    buffer: str
    shape: tuple[int, ...]
    reads: tuple[Place, ...]
    writes: tuple[str, ...]


def match_layers(program: Program) -> tuple[LayerLink, ...] | Refusal:
    """The intermediate results of an unscheduled chain of layers, in the order of its phases."""
    links = []
    for before, after in itertools.pairwise(program.phases):
        if len(before.stores) != 1:
            return Refusal("layers", "a layer with several results")
        (store,) = before.stores
        shape = program.buffer(store.buffer).shape
        place = tensor_index(store.address, shape)
        if place is None:
            return Refusal("layers", "a result that is not stored dimension by dimension")
        writes = []
        for index, extent in zip(place, shape, strict=True):
            name = _single_axis(index)
            if name is None or (name == "") != (extent == 1) or (name and before.ranges()[name] != extent):
                return Refusal("layers", "a dimension of a result that is not one loop of its layer")
            writes.append(name)
        if len({w for w in writes if w}) < sum(1 for w in writes if w):
            return Refusal("layers", "a diagonal result")
        reads: dict[Place, None] = {}
        for node in loads_of(after, store.buffer):
            found = proven_place(node, shape, after.ranges())
            if found is None:
                return Refusal("layers", "a read whose place in the result is not known")
            reads[found] = None
        if not reads:
            return Refusal("layers", "a layer that does not read the one before it")
        links.append(LayerLink(store.buffer, shape, tuple(reads), tuple(writes)))
    return tuple(links)


def loads_of(phase: Phase, buffer: str) -> Iterator[Node]:
    """The loads of a buffer in both graphs of a phase."""
    for graph in (phase.body, phase.exit):
        yield from (node for node in graph.nodes if node.op == "load" and node.buffer == buffer)


def _single_axis(index: Index) -> str | None:
    """The axis that an index is; '' for 0, None for anything else."""
    if not index.const and not index.terms:
        return ""
    if index.const or len(index.terms) != 1:
        return None
    atom, factor = index.terms[0]
    return atom.name if atom.kind == "axis" and factor == 1 else None


def proven_place(node: Node, shape: Sequence[int], ranges: Ranges) -> Place | None:
    """Where a load reads, if its range or its guards keep every dimension's index inside."""
    assert node.index is not None
    place = tensor_index(node.index, shape)
    if place is None:
        return None
    for index, extent in zip(place, shape, strict=True):
        low, high = index.bounds(ranges)
        shifts = [(guard, shift.const) for guard in node.guards if not (shift := guard.index - index).terms]
        low = max(
            (n for n in (low, *(g.low - c for g, c in shifts if g.low is not None)) if n is not None), default=None
        )
        high = min(
            (n for n in (high, *(g.high - c for g, c in shifts if g.high is not None)) if n is not None), default=None
        )
        if low is None or high is None or low < 0 or high >= extent:
            return None
    return place


def tensor_index(address: Index, shape: Sequence[int]) -> Place | None:
    """A flat row-major address as one index per dimension; None where its terms do not tell the dimensions apart.

    Every term belongs to the outermost dimension whose stride divides it; the constant is decomposed to the nearest
    multiples, so that the small negative offsets of padding stay small.  Nothing is proven about the result.
    """
    if address.values():
        return None
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    used = [d for d, extent in enumerate(shape) if extent > 1]
    found = [Index() for _ in shape]
    for atom, factor in address.terms:
        home = next((d for d in used if factor % strides[d] == 0), None)
        if home is None:
            return None
        found[home] = found[home] + Index(0, ((atom, factor // strides[home]),))
    left = address.const
    for d in used:
        count = left if d == used[-1] else (2 * left + strides[d]) // (2 * strides[d])
        found[d] = found[d] + count
        left -= count * strides[d]
    return tuple(found) if not left else None


@dataclass(frozen=True)
class Window:
    """What a tile of the last layer needs of an intermediate result, per dimension.

    Attributes:
        start: the first index, over the axes that number the tiles; 0 where all of the dimension is kept.
        size: how many; step: by how many it moves from one tile to the next along the innermost tiled axis.
    """

    start: Place
    size: tuple[int, ...]
    step: tuple[int, ...]

    @property
    def overlap(self) -> tuple[int, ...]:
        """Per dimension, how many of a window the next one has, too; 0 where it does not move."""
        return tuple(max(0, n - s) if s else 0 for n, s in zip(self.size, self.step, strict=True))


@dataclass(frozen=True)
class TiledLayer:
    """One layer of a tiled chain.

    Attributes:
        where: its tiled axes as expressions: number of the tile, and place in it.
        extents: of the axes inside a tile, by the name of the tiled axis; whole: of the whole axis.
        result: the window of what it produces; None for the last layer.
    """

    where: Mapping[str, Index]
    extents: Mapping[str, int]
    whole: Mapping[str, int]
    result: Window | None


def inner_name(axis: str) -> str:
    """The loop inside a tile of an axis."""
    return f"{axis}u"


def tile_number(axis: str) -> str:
    """The loop over the tiles of an axis."""
    return f"{axis}s"


def tile_layers(
    program: Program, links: Sequence[LayerLink], tiles: Mapping[str, int]
) -> tuple[TiledLayer, ...] | Refusal:
    """The layers for tiles of the last one, or a refusal where a tile would compute again what another one has.

    Every window has to move with every cut axis; along the innermost one by at least its halo.

    Args: tiles: axis of the last layer -> its points per tile, in loop order, the innermost last.
    """
    ranges = program.phases[-1].ranges()
    counts = {tile_number(a): -(-ranges[a] // size) for a, size in tiles.items()}
    innermost = list(counts)[-1]
    where = {
        a: Index.axis(tile_number(a)) * size + (Index.axis(inner_name(a)) if size > 1 else 0)
        for a, size in tiles.items()
    }
    layer = TiledLayer(where, dict(tiles), {a: ranges[a] for a in tiles}, None)
    found = [layer]
    for k in reversed(range(len(links))):
        window = _window(links[k], program.phases[k + 1], layer, counts, innermost)
        if isinstance(window, Refusal):
            return window
        if frozenset().union(*(index.axes() for index in window.start)) != counts.keys():
            return Refusal("layers", "a result that tiles would compute again")
        if any(kept > step for kept, step in zip(window.overlap, window.step, strict=True) if kept):
            return Refusal("layers", "a tile smaller than its halo")
        before = program.phases[k].ranges()
        axes = [(a, d) for d, a in enumerate(links[k].writes) if a and window.start[d].terms]
        layer = TiledLayer(
            {a: window.start[d] + (Index.axis(inner_name(a)) if window.size[d] > 1 else 0) for a, d in axes},
            {a: window.size[d] for a, d in axes},
            {a: before[a] for a, _ in axes},
            window,
        )
        found.append(layer)
    return tuple(reversed(found))


SMALLEST = 4
"""Points of the tile by which an axis is tried: as many as the halo of most filters."""


def movable_axes(program: Program, links: Sequence[LayerLink]) -> list[str]:
    """Axes of the last layer whose tiles need a window of every intermediate result, outermost first."""
    axes = {a.name: min(SMALLEST, a.extent) for a in program.phases[-1].axes}
    return [a for a, size in axes.items() if not isinstance(tile_layers(program, links, {a: size}), Refusal)]


def _window(
    link: LayerLink, phase: Phase, layer: TiledLayer, counts: Mapping[str, int], innermost: str
) -> Window | Refusal:
    """What a tile of a layer reads of the result before it."""
    inner = {**phase.ranges(), **{inner_name(a): n for a, n in layer.extents.items()}}
    ranges = {**inner, **counts}
    start, size, step = [], [], []
    for d, extent in enumerate(link.shape):
        bases, lows, highs = [], [], []
        for place in link.reads:
            index = place[d].substitute(layer.where, ranges)
            base = Index(0, tuple((a, f) for a, f in index.terms if a.kind == "axis" and a.name in counts))
            rest = index - base
            if rest.axes() & counts.keys():
                return Refusal("layers", "a window that does not move evenly")
            low, high = rest.bounds(inner)
            if low is None or high is None:
                return Refusal("layers", "a window of unknown size")
            bases.append(base)
            lows.append(low)
            highs.append(high)
        if len(set(bases)) > 1:
            return Refusal("layers", "windows that move differently")
        if not bases[0].terms:
            start.append(Index())
            size.append(extent)
            step.append(0)
            continue
        if link.writes[d] == "":
            return Refusal("layers", "a window along a dimension of extent 1")
        low, high = min(lows), max(highs)
        moved = bases[0].stride(innermost) or 0
        if any(coef < high - low + 1 for atom, coef in bases[0].terms if atom.name != innermost and coef >= 0) or any(
            coef < 0 for _, coef in bases[0].terms
        ):
            return Refusal("layers", "windows that overlap along an outer axis")
        start.append(bases[0] + low)
        size.append(high - low + 1)
        step.append(moved)
    if sum(1 for n, s in zip(size, step, strict=True) if s and n > s) > 1:
        return Refusal("layers", "windows that overlap along two dimensions")
    return Window(tuple(start), tuple(size), tuple(step))


def outside(layer: TiledLayer, ranges: Ranges) -> list[Guard]:
    """Guards that hold where a tile's points are points of the layer; those that always hold are left out."""
    guards = [Guard(index, 0, layer.whole[a] - 1) for a, index in layer.where.items()]
    return [g for g in guards if not g.always(ranges)]
