"""GEMM epilogue: runs the exit graph (bias, activation, residual) on the accumulators, stores with predicates, and
reduces columns.

A lane's results are the rows and columns that `mma` and `wgmma` give it; its columns are chosen so that neighbours
leave as one store of up to 16 bytes.  With ``paired``, neighbouring lanes first exchange the halves of two tiles of 8
columns, so that each has four columns side by side.  Only tiles that reach beyond the matrix predicate their loads and
stores.  What the phase stores into local buffers are summands of column sums (`column_reduction`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jcuts.codegen.cuda.gemm.column_reduction import ColumnReducer
from jcuts.codegen.cuda.gemm.epilogue_bulk_copy import EpilogueStaging
from jcuts.codegen.cuda.gemm.smem_tile import PAIR, SmemTile, lane_columns, lane_rows
from jcuts.codegen.cuda.graph.node_emitter import Emitter, store_all
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import shuffle
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Axis, Buffer, Phase, Store
from jcuts.lower.patterns.gemm import COLUMNS, ROWS

Totals = list[list[list[L.Value]]]
"""Accumulators: [tile of 16 rows][tile of 8 columns][4]."""
_HELD = "held"  # axis: the first column of those that one access takes


def epilogue(
    frame: M.Frame,
    phase: Phase,
    tiles: tuple[SmemTile, SmemTile],
    buffers: Mapping[str, Buffer],
    lane: L.Value,
    totals: Totals,
    further: Axis | None = None,
    keeper: EpilogueStaging | ColumnReducer | None = None,
    paired: bool = False,
) -> L.Value:
    """Runs the exit graph on a lane's accumulators and stores the results.

    Args:
        frame: its rows and columns are the first ones of the accumulators of the whole warp.
        tiles: the block's tiles of the left and the right operand.
        further: an axis along which the warp has several such tiles; ``frame`` has its first point.
        keeper: of matrices whose tiles lie in shared memory, and of results that go there; or of values that are
            summed along columns.
        paired: whether neighbouring lanes first exchange results, so that each has four columns side by side, not two.

    Returns: the first column of the lane in the warp's tile.
    """
    reducer, keeper = (keeper, None) if isinstance(keeper, ColumnReducer) else (None, keeper)
    lane_tile = _lane_tile(frame, tiles, lane, totals, paired)
    frame = lane_tile.frame
    if keeper is not None:
        keeper.bind_lane(lane_tile.row, lane_tile.column, lane_tile.column_step)
    exit_, stores = _guarded(phase, tiles, further, keeper)
    emitter = Emitter(frame, Graph(), buffers)
    groups = list(_store_groups(emitter, exit_, stores, tiles, lane_tile, further))
    emitter.vectorize_loads(number for group in groups for *_, number in group.rows)
    staged = {} if keeper is None else dict(keeper.held.stored)
    kept = () if reducer is None else reducer.partials.kept
    summed = {place: kept.index(s.buffer) for place, s in enumerate(stores) if s.buffer in kept}
    left, right = tiles
    for group in groups:
        if keeper is not None:
            given_to = group.accumulators
            for n in sorted(set(given_to[0]) - {0}):
                read = keeper.read(n - 1, group.down, group.first, len(given_to))
                for given, value in zip(given_to, read, strict=True):
                    emitter.bind(given[n], value)
        guards = (
            Guard(Index.axis(ROWS) + group.down, None, left.extent - 1),
            Guard(Index.axis(COLUMNS) + group.first, None, right.extent - 1),
            *(() if further is None else (Guard(Index.axis(further.name) + group.far, None, further.extent - 1),)),
        )
        frame.live = M.condition(frame, guards)
        rows = group.rows
        stored = [row for row in rows if row[0] not in staged and row[0] not in summed]
        store_all(emitter, [(buffer, address, value) for _, buffer, address, value in stored])
        if keeper is not None:
            for place, mine in staged.items():
                values = emitter.emit([number for at, _, _, number in rows if at == place])
                keeper.write(mine, group.down, group.first, values)
        if reducer is not None:
            for place, which in summed.items():
                values = emitter.emit([number for at, _, _, number in rows if at == place])
                reducer.add(which, group.first, [value.value for value in values], frame.live)
    return lane_tile.column


class _LaneTile(NamedTuple):
    """A lane's share of the warp's accumulators.

    Attributes:
        frame: of the lane's first row and column; row, column: where these lie in the warp's tile.
        column_step: columns that a lane has side by side.
        row_offsets, column_offsets: of its results, by tile of 16 rows and of 8 columns.
        totals: its accumulators, after an exchange with its neighbour where lanes are paired.
    """

    frame: M.Frame
    row: L.Value
    column: L.Value
    column_step: int
    row_offsets: list[list[int]]
    column_offsets: list[list[int]]
    totals: Totals


def _lane_tile(
    frame: M.Frame, tiles: tuple[SmemTile, SmemTile], lane: L.Value, totals: Totals, paired: bool
) -> _LaneTile:
    builder = frame.builder
    left, right = tiles
    row_step, row_offsets = lane_rows(left)
    column_step, column_offsets = lane_columns(right)
    if paired:
        totals, column_step = _swap_lane_pairs(builder, lane, totals), 2 * PAIR
        column_offsets = [[group + n, group + n + 1] for group in range(0, right.warp, 16) for n in (0, PAIR)]
    row_offsets, column_offsets = row_offsets[: len(totals)], column_offsets[: len(totals[0])]
    row = builder.mul(builder.lshr(lane, L.I32(2)), L.I32(row_step))
    quarter = builder.and_(lane, L.I32(3))
    if paired:  # odd lanes have the second one of two tiles
        odd = builder.shl(builder.and_(lane, L.I32(1)), L.I32(1))
        quarter = builder.or_(odd, builder.lshr(quarter, L.I32(1)))
    column = builder.mul(quarter, L.I32(column_step))
    frame = replace(
        frame,
        variables={
            **frame.variables,
            ROWS: builder.add(frame.variables[ROWS], row),
            COLUMNS: builder.add(frame.variables[COLUMNS], column),
        },
        ranges={**frame.ranges, ROWS: _lane_extent(left, row_offsets), COLUMNS: _lane_extent(right, column_offsets)},
        multiples={ROWS: row_step, COLUMNS: column_step},
        cache={},
    )
    return _LaneTile(frame, row, column, column_step, row_offsets, column_offsets, totals)


class _StoreGroup(NamedTuple):
    """Results of a lane that one store takes: neighbours of a row.

    Attributes:
        far: the tile along the further axis; down: the row; first: the first column.
        accumulators: for each result, the graph's node of each accumulator.
        rows: (number of the store, buffer, address, node) of every value.
    """

    far: int
    down: int
    first: int
    accumulators: list[dict[int, int]]
    rows: list[tuple[int, str, Index, int]]


def _store_groups(
    emitter: Emitter,
    exit_: Graph,
    stores: Sequence[Store],
    tiles: tuple[SmemTile, SmemTile],
    lane_tile: _LaneTile,
    further: Axis | None,
) -> Iterator[_StoreGroup]:
    """Copies the exit graph into the emitter's for every result of a lane; its accumulators are bound."""
    graph, ranges, totals = emitter.graph, lane_tile.frame.ranges, lane_tile.totals
    wanted = [s.value for s in stores]
    accs = [(k, int(str(node.attr("number")))) for k, node in enumerate(exit_.nodes) if node.op == "acc"]
    held = tiles[1].extent % lane_tile.column_step == 0  # neighbours in one access are inside together, or not at all
    many, each = len(totals) // len(lane_tile.row_offsets), len(lane_tile.row_offsets)
    points = _lane_outputs(lane_tile.row_offsets, lane_tile.column_offsets)
    for far, (down, runs) in itertools.product(range(many), points):
        for run in runs if held else [[point] for many in runs for point in many]:
            rows: list[tuple[int, str, Index, int]] = []
            kept: list[dict[int, int]] = []
            first = run[0][0]
            for offset, (i, j, k) in run:
                where = {
                    ROWS: Index.axis(ROWS) + down,
                    COLUMNS: Index.axis(COLUMNS) + offset,
                    _HELD: Index.axis(COLUMNS) + first,
                    **({} if further is None else {further.name: Index.axis(further.name) + far}),
                }
                point = ("point", (far, down, offset))
                given = {n: graph.add(Node("acc", exit_.nodes[k].dtype, attrs=(("number", n), point))) for k, n in accs}
                emitter.bind(given[0], E.Lanes(totals[far * each + i][j][k], graph.nodes[given[0]].dtype))
                emitter.coarse.add(given[0])
                kept.append(given)
                numbers = exit_.copy_into(graph, wanted, where, ranges, {k: given[n] for k, n in accs})
                rows += [
                    (place, s.buffer, s.address.substitute(where, ranges), number)
                    for place, (s, number) in enumerate(zip(stores, numbers, strict=True))
                ]
            yield _StoreGroup(far, down, first, kept, rows)


def _swap_lane_pairs(builder: GpuBuilder, lane: L.Value, totals: Totals) -> Totals:
    """Exchanges halves of two 8-column tiles between neighbouring lanes (``shfl``), so that each has four contiguous
    columns.
    """
    odd = builder.icmp_signed("!=", builder.and_(lane, L.I32(1)), L.I32(0))
    found: Totals = []
    for row in totals:
        made: list[list[L.Value]] = []
        for first, second in zip(row[::2], row[1::2], strict=True):
            sent = [builder.select(odd, a, b) for a, b in zip(first, second, strict=True)]
            got = [shuffle(builder, value, 1) for value in sent]
            made.append([builder.select(odd, g, a) for g, a in zip(got, first, strict=True)])
            made.append([builder.select(odd, b, g) for g, b in zip(got, second, strict=True)])
        found.append(made)
    return found


def _guarded(
    phase: Phase, tiles: tuple[SmemTile, SmemTile], further: Axis | None, keeper: EpilogueStaging | None
) -> tuple[Graph, tuple[Store, ...]]:
    """The exit graph and its stores with predicated loads; staged matrices are accumulators."""
    found, numbers = Graph(), {}
    last = {axis: tile.extent - 1 for axis, tile in zip((ROWS, COLUMNS), tiles, strict=True)}
    names = [(ROWS, ROWS), (COLUMNS, _HELD)]
    if further is not None:
        last[further.name] = further.extent - 1
        names.append((further.name, further.name))
    for number, node in enumerate(phase.exit.nodes):
        kept = None if keeper is None else keeper.loaded(node)
        if kept is not None:
            numbers[number] = found.add(Node("acc", node.dtype, attrs=(("number", 1 + kept),)))
            continue
        index = None if node.index is None else node.index.renumber(numbers)
        guards = tuple(Guard(g.index.renumber(numbers), g.low, g.high) for g in node.guards)
        if node.op == "load" and index is not None:
            used = set(last) if index.values() else index.axes()
            guards += tuple(Guard(Index.axis(name), None, last[axis]) for axis, name in names if axis in used)
        value = 0 if node.op == "load" and node.value is None else node.value
        args = tuple(numbers[a] for a in node.args)
        numbers[number] = found.add(replace(node, args=args, index=index, guards=guards, value=value))
    return found, tuple(replace(s, value=numbers[s.value]) for s in phase.stores)


Run = list[tuple[int, tuple[int, int, int]]]


def _lane_outputs(row_offsets: list[list[int]], column_offsets: list[list[int]]) -> list[tuple[int, list[Run]]]:
    """A lane's outputs: (row offset, runs of contiguous columns), each with its accumulator."""
    found = []
    for i, pair in enumerate(row_offsets):
        for high, down in enumerate(pair):
            columns = sorted(
                (offset, (i, j, 2 * high + k)) for j, two in enumerate(column_offsets) for k, offset in enumerate(two)
            )
            runs: list[Run] = []
            for offset, place in columns:
                if not runs or offset != runs[-1][-1][0] + 1:
                    runs.append([])
                runs[-1].append((offset, place))
            found.append((down, runs))
    return found


def _lane_extent(tile: SmemTile, offsets: list[list[int]]) -> int:
    """Range of a lane's first row (or column): the rows of the grid's tiles minus its largest offset."""
    return -(-tile.extent // tile.size) * tile.size - max(o for pair in offsets for o in pair)
