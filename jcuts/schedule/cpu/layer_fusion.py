"""Schedules layer fusion on a CPU: tiles of the last layer, intermediate results in a core's L2 cache, sliding windows.

A task goes over the tiles of the last layer in order. For each it runs the earlier layers on the windows that the tile
needs, from operands in memory to local buffers, then the last layer.  Where windows of neighbouring tiles overlap (the
halo of a filter), the rows that the next tile needs again are kept (sliding window): a halo is computed once per task.

    halo      the first rows of a window                     at a task's first tile
    layer     the new rows of a window                       at every tile
    ...
    last      the tile of the result
    shift     the rows that the next tile needs, to the front

Source: Alwani et al., Fused-layer CNN accelerators (2016), section 3; Ragan-Kelley et al., Halide (2013), 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.loop_transforms import collapse_axes, map_indices
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import ITEM_SIZE, Acc, Axis, Buffer, Grid, Phase, Program, Store
from jcuts.lower.patterns.layer_windows import (
    LayerLink,
    TiledLayer,
    Window,
    inner_name,
    outside,
    proven_place,
    tensor_index,
    tile_layers,
    tile_number,
)

PAD_FROM = 512
"""Rows of a multiple of so many bytes get a line more: a power of two apart they would evict each other."""
LINE = 64
HALO = ".halo"
"""Ends the name of a phase that makes the first rows of a window."""


@dataclass(frozen=True)
class LayerTiling:
    """Tiles of the last layer.

    Attributes:
        tiles: (axis of the last layer, points per tile), outermost loop first; all but the last have one point.
        split: (axis that numbers tiles, tiles per task).
    """

    tiles: tuple[tuple[str, int], ...]
    split: tuple[tuple[str, int], ...] = ()


def windows(program: Program, links: Sequence[LayerLink], tiling: LayerTiling) -> tuple[TiledLayer, ...] | Refusal:
    """The layers of a tiling, or a refusal."""
    return tile_layers(program, links, dict(tiling.tiles))


def local_strides(window: Window, size: int) -> tuple[int, ...]:
    """Elements between neighbours of a window in its local buffer. Args: size: bytes of an element."""
    strides, total = [], 1
    for d, extent in reversed(list(enumerate(window.size))):
        strides.append(total)
        total *= extent
        if d == len(window.size) - 1 and total * size % PAD_FROM == 0 and len(window.size) > 1:
            total += LINE // size
    return tuple(reversed(strides))


def local_elements(window: Window, size: int) -> int:
    """Elements of a window's local buffer."""
    return max(s * n for s, n in zip(local_strides(window, size), window.size, strict=True))


def tile_program(
    program: Program, links: Sequence[LayerLink], layers: Sequence[TiledLayer], tiling: LayerTiling
) -> Program:
    """The program with one phase per step of a tile; loops inside a tile are not scheduled yet."""
    ranges = program.phases[-1].ranges()
    serial = tuple(Axis(tile_number(a), -(-ranges[a] // size)) for a, size in tiling.tiles)
    elements = {
        link.buffer: local_elements(layer.result, ITEM_SIZE[program.buffer(link.buffer).dtype])
        for link, layer in zip(links, layers, strict=False)
        if layer.result is not None
    }
    buffers = tuple(replace(b, shape=(elements[b.name],)) if b.name in elements else b for b in program.buffers)
    phases: list[Phase] = []
    shifts: list[Phase] = []
    for k, phase in enumerate(program.phases):
        layer, before = layers[k], (links[k - 1], layers[k - 1]) if k else None
        into = links[k] if k < len(links) else None
        moved = _kept_dimension(layer.result) if layer.result is not None else None
        if moved is None or into is None or layer.result is None:
            phases.append(_layer_phase(program, phase, layer, before, into, serial, {}))
            continue
        axis, kept = into.writes[moved], layer.result.overlap[moved]
        new = layer.result.size[moved] - kept
        halo = _layer_phase(program, phase, layer, before, into, serial, {axis: (0, kept)})
        phases.append(replace(halo, name=f"{halo.name}{HALO}", once=(serial[-1].name,)))
        phases.append(_layer_phase(program, phase, layer, before, into, serial, {axis: (kept, new)}))
        shifts.append(_shift(program.buffer(into.buffer), layer.result, moved, serial))
    grid = tuple(Grid(a.name, a.extent, a.extent) for a in serial)
    names = tuple(a.name for a in serial)
    tiled = replace(program, buffers=buffers, grid=grid, serial=names, phases=(*phases, *shifts))
    return split_tiles(tiled, tiling)


def split_tiles(program: Program, tiling: LayerTiling) -> Program:
    """A tiled program with the tiling's tiles per task; all in one task along axes that it does not split."""
    split = dict(tiling.split)
    return replace(program, grid=tuple(Grid(g.axis, g.extent, split.get(g.axis, g.extent)) for g in program.grid))


def _kept_dimension(window: Window) -> int | None:
    """The dimension along which neighbouring windows overlap."""
    return next((d for d, kept in enumerate(window.overlap) if kept), None)


def _layer_phase(
    program: Program,
    phase: Phase,
    layer: TiledLayer,
    before: tuple[LayerLink, TiledLayer] | None,
    into: LayerLink | None,
    serial: Sequence[Axis],
    part: Mapping[str, tuple[int, int]],
) -> Phase:
    """A layer on a tile, or on a part of its window.

    Args: before: the result that it reads, and the layer that made it; into: the result that it makes, None for the
        last layer; part: axis -> (first, how many) of its points in a window.
    """
    bounds = {a: part.get(a, (0, n)) for a, n in layer.extents.items()}
    shift = {inner_name(a): Index.axis(inner_name(a)) + first for a, (first, _) in bounds.items() if first}
    inner = [Axis(inner_name(a.name), bounds[a.name][1]) if a.name in bounds else a for a in phase.axes]
    axes = (*serial, *(a for a in inner if not (a.name.removesuffix("u") in bounds and a.extent == 1)))
    single = {inner_name(a): Index() for a, (_, count) in bounds.items() if count == 1}
    ranges = {a.name: a.extent for a in (*axes, *phase.reds)}
    whole = {**ranges, **{inner_name(a): n for a, n in layer.extents.items()}}
    where = {a: index.substitute(shift, whole).substitute(single, whole) for a, index in layer.where.items()}
    placed = replace(layer, where=where)
    guards = outside(placed, ranges)
    change = _Substitution(program, where, ranges, guards, before)
    body, numbers = change.graph(phase.body)
    accs = tuple(Acc(a.combine, a.dtype, tuple(numbers[v] for v in a.values), a.index_dtype) for a in phase.accs)
    exit_, values = change.graph(phase.exit)
    if into is None or layer.result is None:
        stores = tuple(
            Store(s.buffer, s.address.substitute(where, ranges), values[s.value], tuple(guards)) for s in phase.stores
        )
    else:
        (store,) = phase.stores
        buffer = program.buffer(into.buffer)
        address = Index()
        for name, start, stride in zip(
            into.writes, layer.result.start, local_strides(layer.result, ITEM_SIZE[buffer.dtype]), strict=True
        ):
            if name:
                address = address + (where.get(name, Index.axis(name)) - start) * stride
        stores = (Store(into.buffer, address, values[store.value]),)
    return Phase(phase.name, axes, phase.reds, accs, body, exit_, stores)


@dataclass(frozen=True)
class _Substitution:
    """Rewrites the graphs of a layer for its tile."""

    program: Program
    where: Mapping[str, Index]
    ranges: Mapping[str, int]
    guards: Sequence[Guard]
    before: tuple[LayerLink, TiledLayer] | None

    def graph(self, old: Graph) -> tuple[Graph, dict[int, int]]:
        """The graph, and the new number of every node."""
        new, numbers = Graph(), {}
        reach: list[frozenset[str]] = []
        for number, node in enumerate(old.nodes):
            mine = frozenset() if node.index is None else frozenset(node.index.axes())
            mine = mine.union(*(g.index.axes() for g in node.guards), *(reach[a] for a in node.args))
            if node.index is not None:
                mine = mine.union(*(reach[v] for v in node.index.values()))
            reach.append(mine)
            numbers[number] = new.add(self._node(node, numbers, mine))
        return new, numbers

    def _node(self, node: Node, numbers: Mapping[int, int], reach: frozenset[str]) -> Node:
        def change(index: Index) -> Index:
            return index.substitute(self.where, self.ranges).renumber(numbers)

        guards = tuple(Guard(change(g.index), g.low, g.high) for g in node.guards)
        guards = tuple(g for g in guards if not g.always(self.ranges))
        index, value = None if node.index is None else change(node.index), node.value
        if node.op == "load" and self.before is not None and node.buffer == self.before[0].buffer:
            index = self._local(node)
        elif node.op == "load":
            moved = {n for a in reach & self.where.keys() for n in self.where[a].axes()}
            more = tuple(g for g in self.guards if g not in guards and g.index.axes() & moved)
            inside = replace(node, index=index, guards=guards)
            if more and proven_place(inside, self.program.buffer(node.buffer).shape, self.ranges) is not None:
                more = ()  # padding guards keep points beyond the window inside the operand already
            guards, value = (*guards, *more), 0 if more and value is None else value
        if node.op == "load" and not guards:
            value = None
        return replace(node, args=tuple(numbers[a] for a in node.args), index=index, guards=guards, value=value)

    def _local(self, node: Node) -> Index:
        """Where the window of the result before has what a load reads."""
        assert self.before is not None and node.index is not None
        link, layer = self.before
        place, window = tensor_index(node.index, link.shape), layer.result
        assert place is not None and window is not None
        total = Index()
        for index, start, stride in zip(place, window.start, local_strides(window, ITEM_SIZE[node.dtype]), strict=True):
            total = total + (index.substitute(self.where, self.ranges) - start) * stride
        return total


def _shift(buffer: Buffer, window: Window, moved: int, serial: Sequence[Axis]) -> Phase:
    """Moves what the next window needs to the front of the local buffer."""
    strides = local_strides(window, ITEM_SIZE[buffer.dtype])
    extents = [window.overlap[moved] if d == moved else n for d, n in enumerate(window.size)]
    axes = tuple(Axis(f"k{d}", n) for d, n in enumerate(extents) if n > 1)
    to = Index()
    for d, n in enumerate(extents):
        to = to + (Index.axis(f"k{d}") * strides[d] if n > 1 else 0)
    graph = Graph()
    value = graph.add(Node("load", buffer.dtype, buffer=buffer.name, index=to + window.step[moved] * strides[moved]))
    store = Store(buffer.name, to, value)
    return Phase(f"{buffer.name}.shift", (*serial, *axes), (), (), Graph(), graph, (store,))


def schedule_phases(program: Program, lanes: int, choose: Callable[[Program, frozenset[str]], Phase]) -> Program:
    """The tiled program with scheduled loops inside its tiles.

    Args: choose: the schedule of one phase, given as a program of its own without the loops over tiles, and the axes
        along which its stores are guarded: no lanes run along them.
    """
    keep = frozenset(program.serial)
    phases = []
    for phase in program.phases:
        merged = collapse_axes(phase, keep)
        serial = tuple(a for a in merged.axes if a.name in keep)
        guarded = frozenset(a for s in merged.stores for g in s.guards for a in g.index.axes())
        chosen = choose(first_tile(program, merged), guarded)
        order = {a.name: k for k, a in enumerate(chosen.axes)}
        by_name = {a.name: a for a in chosen.axes}
        inner = sorted((a for a in merged.axes if a.name not in keep), key=lambda a: order[a.name])
        axes = (*serial, *(replace(a, unroll=by_name[a.name].unroll, vector=by_name[a.name].vector) for a in inner))
        phases.append(replace(merged, axes=axes, reds=chosen.reds))
    return replace(program, phases=tuple(phases), lanes=lanes)


def first_tile(program: Program, phase: Phase) -> Program:
    """A phase as a program of its own, without the loops over tiles: what its schedule is chosen for."""
    zero = {name: Index() for name in program.serial}
    inside = tuple(a for a in phase.axes if a.name not in zero)
    ranges = {a.name: a.extent for a in (*inside, *phase.reds)}

    alone = map_indices(phase, lambda index: index.substitute(zero, ranges))
    stores = tuple(replace(s, guards=()) for s in alone.stores)
    alone = replace(alone, axes=inside, stores=stores, once=(), last=(), when="")
    return replace(program, grid=(), serial=(), phases=(alone,))


def local_bytes(program: Program) -> int:
    """Bytes of the intermediate results that a task keeps."""
    return sum(b.bytes for b in program.locals)
