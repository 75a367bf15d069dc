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
"""Accumulators: [16 rows][8 columns][4]."""


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


def apply_score_mod(
    frame: M.Frame,
    shape: FlashTile,
    buffers: Mapping[str, Buffer],
    scores: Tile,
    first: tuple[L.Value, L.Value],
    lane: L.Value,
) -> Tile:
    """Applies the score modification to a warp's QK^T accumulators; -inf for keys beyond the last. Args: first: row and
    key of the first.
    """
    attention = shape.attention
    ranges = (
        shape.blocks[1] * shape.rows - shape.warp[0] + EIGHT,
        shape.tiles * shape.keys - shape.warp[1] + EIGHT,
    )
    place = TilePlace(*first, lane, (attention.rows, attention.keys), ranges)
    found = apply_to_tiles(frame, attention.scores, buffers, [scores], {}, place)
    return mask_columns(frame.builder, found, place, LEAST) if attention.keys % shape.keys else found


def apply_to_tiles(
    frame: M.Frame,
    phase: Phase,
    buffers: Mapping[str, Buffer],
    tiles: Sequence[Tile],
    kept: Mapping[str, int],
    place: TilePlace,
    coarse_exp: bool = False,
) -> Tile:
    """Runs the exit graph of a phase over rows and columns on a warp's accumulators; gives what it stores.

    Args:
        tiles: the accumulators of the phase, then values of earlier phases.
        kept: local buffer -> number of the tile that holds its values.
        coarse_exp: whether exponentials are those of `fast_exp_nonpositive`: of values that are rounded to 11 bits.
    """
    builder = frame.builder
    row = builder.add(place.row, builder.lshr(place.lane, L.I32(2)))
    column = place.lane_column(builder)
    frame = replace(
        frame,
        variables={**frame.variables, ROWS: row, COLUMNS: column},
        ranges={**frame.ranges, ROWS: place.ranges[0], COLUMNS: place.ranges[1]},
        multiples={COLUMNS: 2},
        cache={},
    )
    made, wanted = _inside(phase, dict(zip((ROWS, COLUMNS), place.extents, strict=True)), kept)
    accs = [(n, int(str(node.attr("number")))) for n, node in enumerate(made.nodes) if node.op == "acc"]
    graph = Graph()
    emitter = Emitter(frame, graph, buffers)
    emitter.coarse_exp = coarse_exp
    numbers: dict[tuple[int, int, int], int] = {}
    first = tiles[0]
    for i, j, k in itertools.product(range(len(first)), range(len(first[0])), range(4)):
        down, across = i * SIXTEEN + EIGHT * (k // 2), j * EIGHT + k % 2
        point = ("point", (down, across))
        given = {n: graph.add(Node("acc", "float32", attrs=(("number", t), point))) for n, t in accs}
        for n, t in accs:
            emitter.bind(given[n], E.Lanes(tiles[t][i][j][k], "float32"))
        where = {ROWS: Index.axis(ROWS) + down, COLUMNS: Index.axis(COLUMNS) + across}
        (numbers[i, j, k],) = made.copy_into(graph, [wanted], where, frame.ranges, given)
    emitter.vectorize_loads(numbers.values())
    places = list(numbers)
    values = dict(zip(places, emitter.emit([numbers[p] for p in places]), strict=True))
    return [[[values[i, j, k].value for k in range(4)] for j in range(len(row))] for i, row in enumerate(first)]


def mask_columns(builder: GpuBuilder, tile: Tile, place: TilePlace, fill: L.Value) -> Tile:
    """A warp's values with ``fill`` in columns beyond the last."""
    column = place.lane_column(builder)
    found = [[list(four) for four in row] for row in tile]
    for j, k in itertools.product(range(len(tile[0])), range(2)):
        there = builder.icmp_signed("<", column, L.I32(place.extents[1] - j * EIGHT - k))
        for row in found:
            for half in (k, k + 2):
                row[j][half] = builder.select(there, row[j][half], fill)
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
