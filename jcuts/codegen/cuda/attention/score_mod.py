"""Score modification of flash attention (scale, mask, bias, soft cap), applied to the score accumulators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llvmlite import ir

from jcuts.codegen.cuda.graph.node_emitter import Emitter
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Buffer, Phase
from jcuts.lower.patterns.gemm import COLUMNS, ROWS
from jcuts.schedule.gpu.attention.tile import EIGHT, SIXTEEN, FlashTile

LEAST = ir.Constant(L.F32, -math.inf)
Tile = list[list[list[L.Value]]]
"""Accumulators: [16 rows][8 columns][4], or [2] where the lower eight rows are left out."""


@dataclass(frozen=True)
class TilePlace:
    """Where a warp's accumulators lie in the scores of a head.

    Attributes:
        row, column: the first of the warp. lane: the thread's.
        extents: rows and columns that there are. ranges: exclusive bounds of a lane's first row and column.
    """

    row: L.Value
    column: L.Value
    lane: L.Value
    extents: tuple[int, int]
    ranges: tuple[int, int]

    def lane_column(self, builder: GpuBuilder) -> L.Value:
        """The lane's first column."""
        return builder.add(self.column, builder.mul(builder.and_(self.lane, L.I32(3)), L.I32(2)))


def place_of(shape: FlashTile, first: tuple[L.Value, L.Value], lane: L.Value) -> TilePlace:
    """Where a warp's accumulators of QK^T lie. Args: first: its row and key."""
    ranges = (
        shape.blocks[1] * shape.rows - shape.warp[0] + EIGHT,
        shape.tiles * shape.keys - shape.warp[1] + EIGHT,
    )
    return TilePlace(*first, lane, (shape.attention.rows, shape.attention.keys), ranges)


def apply_score_mod(
    frame: M.Frame,
    shape: FlashTile,
    buffers: Mapping[str, Buffer],
    scores: Tile,
    place: TilePlace,
    loaded: Sequence[L.Value] = (),
) -> Tile:
    """Applies the score modification to a warp's QK^T accumulators; -inf for keys beyond the last. Args: loaded: what
    `load_columns` has given for this place.
    """
    phase = shape.attention.scores
    found = apply_to_tiles(frame, phase, buffers, [scores], {}, place, loaded=loaded)
    return mask_columns(frame.builder, found, place, LEAST) if shape.attention.keys % shape.keys else found


def load_columns(frame: M.Frame, shape: FlashTile, buffers: Mapping[str, Buffer], place: TilePlace) -> list[L.Value]:
    """Issues the score modification's loads that depend on the key alone (a mask, a bias per key), which so need not
    wait for QK^T.
    """
    bands, pairs = shape.warp[0] // SIXTEEN, shape.warp[1] // EIGHT
    points = itertools.product(range(bands), range(pairs), range(2 * shape.lane_rows))
    graph = TileGraph(frame, shape.attention.scores, buffers, list(points), {}, place)
    loads = graph.column_loads()
    graph.emitter.vectorize_loads(loads)
    return [lanes.value for lanes in graph.emitter.emit(loads)]


class TileGraph:
    """The exit graph of a phase over rows and columns, copied to all points of a warp's accumulators."""

    def __init__(
        self,
        frame: M.Frame,
        phase: Phase,
        buffers: Mapping[str, Buffer],
        points: Sequence[tuple[int, int, int]],
        kept: Mapping[str, int],
        place: TilePlace,
    ) -> None:
        """Args: points: (16 rows, 8 columns, value) of the accumulators; kept: see `apply_to_tiles`."""
        builder = frame.builder
        row, column = builder.add(place.row, builder.lshr(place.lane, L.I32(2))), place.lane_column(builder)
        frame = replace(
            frame,
            variables={**frame.variables, ROWS: row, COLUMNS: column},
            ranges={**frame.ranges, ROWS: place.ranges[0], COLUMNS: place.ranges[1]},
            multiples={COLUMNS: 2},
            cache={},
        )
        made, wanted = _inside(phase, dict(zip((ROWS, COLUMNS), place.extents, strict=True)), kept)
        accs = [(n, int(str(node.attr("number")))) for n, node in enumerate(made.nodes) if node.op == "acc"]
        self.graph = Graph()
        self.emitter = Emitter(frame, self.graph, buffers)
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.accumulators: list[tuple[int, int, tuple[int, int, int]]] = []
        """Nodes that stand for accumulators: the node, the number of the tile, the point."""
        for i, j, k in points:
            down, across = i * SIXTEEN + EIGHT * (k // 2), j * EIGHT + k % 2
            point = ("point", (down, across))
            given = {n: self.graph.add(Node("acc", "float32", attrs=(("number", t), point))) for n, t in accs}
            self.accumulators += [(given[n], t, (i, j, k)) for n, t in accs]
            where = {ROWS: Index.axis(ROWS) + down, COLUMNS: Index.axis(COLUMNS) + across}
            (self.numbers[i, j, k],) = made.copy_into(self.graph, [wanted], where, frame.ranges, given)

    def column_loads(self) -> list[int]:
        """Loads at an address that depends on the column, not on the row or on other loads."""
        found = []
        for number in self.graph.needed(self.numbers.values()):
            node = self.graph.nodes[number]
            if node.op == "load" and node.index is not None:
                every = [node.index, *(guard.index for guard in node.guards)]
                if not any(ROWS in index.axes() or index.values() for index in every):
                    found.append(number)
        return found

    def emit(self, tiles: Sequence[Tile], loaded: Sequence[L.Value]) -> Tile:
        """The values at all points. Args: tiles: accumulators; loaded: values of `column_loads`, if they are known."""
        emitter = self.emitter
        for node, t, (i, j, k) in self.accumulators:
            emitter.bind(node, E.Lanes(tiles[t][i][j][k], "float32"))
        if loaded:
            for number, value in zip(self.column_loads(), loaded, strict=True):
                emitter.bind(number, E.Lanes(value, self.graph.nodes[number].dtype))
        emitter.vectorize_loads(self.numbers.values())
        values = dict(zip(self.numbers, emitter.emit(list(self.numbers.values())), strict=True))
        return [
            [[values[i, j, k].value for k in range(len(four))] for j, four in enumerate(row)]
            for i, row in enumerate(tiles[0])
        ]


def apply_to_tiles(
    frame: M.Frame,
    phase: Phase,
    buffers: Mapping[str, Buffer],
    tiles: Sequence[Tile],
    kept: Mapping[str, int],
    place: TilePlace,
    *,
    coarse_exp: bool = False,
    loaded: Sequence[L.Value] = (),
) -> Tile:
    """Runs the exit graph of a phase over rows and columns on a warp's accumulators; gives what it stores.

    Args:
        tiles: the accumulators of the phase, then values of earlier phases.
        kept: local buffer -> number of the tile that holds its values.
        coarse_exp: whether exponentials are those of `fast_exp_nonpositive`: of values that are rounded to 11 bits.
        loaded: values of the loads that depend on the column alone, if they are known.
    """
    points = [(i, j, k) for i, row in enumerate(tiles[0]) for j, four in enumerate(row) for k in range(len(four))]
    graph = TileGraph(frame, phase, buffers, points, kept, place)
    graph.emitter.coarse_exp = coarse_exp
    return graph.emit(tiles, loaded)


def mask_columns(builder: GpuBuilder, tile: Tile, place: TilePlace, fill: L.Value) -> Tile:
    """A warp's values with ``fill`` in columns beyond the last."""
    column = place.lane_column(builder)
    found = [[list(four) for four in row] for row in tile]
    for j, k in itertools.product(range(len(tile[0])), range(2)):
        there = builder.icmp_signed("<", column, L.I32(place.extents[1] - j * EIGHT - k))
        for row in found:
            for at in range(k, len(row[j]), 2):
                row[j][at] = builder.select(there, row[j][at], fill)
    return found


def _inside(phase: Phase, extents: Mapping[str, int], kept: Mapping[str, int]) -> tuple[Graph, int]:
    """A phase's exit graph with loads predicated to existing rows and columns, and its result; kept values are
    accumulators.
    """
    found, numbers = Graph(), {}
    for number, node in enumerate(phase.exit.nodes):
        if node.op == "load" and node.buffer in kept:
            numbers[number] = found.add(Node("acc", node.dtype, attrs=(("number", kept[node.buffer]),)))
            continue
        index = None if node.index is None else node.index.renumber(numbers)
        guards = tuple(Guard(g.index.renumber(numbers), g.low, g.high) for g in node.guards)
        if node.op == "load" and index is not None:
            used = set(extents) if index.values() else index.axes()
            guards += tuple(Guard(Index.axis(a), None, e - 1) for a, e in extents.items() if a in used)
        value = 0 if node.op == "load" and node.value is None else node.value
        args = tuple(numbers[a] for a in node.args)
        numbers[number] = found.add(replace(node, args=args, index=index, guards=guards, value=value))
    return found, numbers[phase.stores[0].value]
