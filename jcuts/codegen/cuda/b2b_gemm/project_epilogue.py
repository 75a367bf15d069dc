"""Epilogue of the second of two fused GEMMs: exit graph on the accumulators, predicated stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jcuts.codegen.cuda.b2b_gemm.loads import RowPlaces
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.smem_tile import SmemTile, lane_columns
from jcuts.codegen.cuda.graph.node_emitter import Emitter, store_all
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Buffer, Phase, Store
from jcuts.lower.patterns.gemm import COLUMNS, ROWS
from jcuts.schedule.gpu.b2b_gemm.pair_tile import ROW_TILE, GemmPairTile

_HELD = "held"  # axis: the first column of those that one access takes


def store_epilogue(
    frame: M.Frame,
    shape: GemmPairTile,
    place: RowPlaces,
    tile: SmemTile,
    buffers: Mapping[str, Buffer],
    lane: L.Value,
    row: L.Value,
    column: L.Value,
    totals: Totals,
) -> None:
    """Runs the exit graph on a lane's accumulators and stores the results.

    Args: row, column: the warp's first ones in the tile.
    """
    builder, phase = frame.builder, shape.block.project.phases[0]
    step, offsets = lane_columns(tile)
    first = builder.add(column, builder.mul(builder.and_(lane, L.I32(3)), L.I32(step)))
    row = builder.add(row, builder.lshr(lane, L.I32(2)))
    pixels, extents = phase.ranges()[ROWS], phase.ranges()
    reach = shape.n_per_warp * shape.project[1] - max(o for two in offsets for o in two)
    variables, ranges = {COLUMNS: first}, {COLUMNS: reach}
    inside: list[L.Value | None] = []
    for number in range(2 * shape.m_fragments_out):
        at = builder.add(row, L.I32(ROW_TILE // 2 * number))
        variables[f"{ROWS}{number}"], held = place.of_output(at)
        ranges[f"{ROWS}{number}"] = pixels
        inside.append(held)
    frame = replace(frame, variables=variables, ranges=ranges, multiples={COLUMNS: step}, values={}, cache={})
    exit_, stores = _guarded(phase)
    accs = [k for k, node in enumerate(exit_.nodes) if node.op == "acc"]
    graph = Graph()
    emitter = Emitter(frame, graph, buffers)
    whole = extents[COLUMNS] % step == 0  # neighbours in one access are inside together, or not at all
    groups: list[tuple[int, int, list[tuple[str, Index, int]]]] = []
    for number in range(2 * shape.m_fragments_out):
        for run in _runs(offsets[: len(totals[0])], whole):
            rows: list[tuple[str, Index, int]] = []
            start = run[0][0]
            for offset, (j, k) in run:
                where = {
                    ROWS: Index.axis(f"{ROWS}{number}"),
                    COLUMNS: Index.axis(COLUMNS) + offset,
                    _HELD: Index.axis(COLUMNS) + start,
                }
                given = graph.add(Node("acc", "float32", attrs=(("number", 0), ("point", (number, offset)))))
                emitter.bind(given, E.Lanes(totals[number // 2][j][2 * (number % 2) + k], "float32"))
                numbers = exit_.copy_into(graph, [s.value for s in stores], where, ranges, dict.fromkeys(accs, given))
                rows += [
                    (s.buffer, s.address.substitute(where, ranges), made)
                    for s, made in zip(stores, numbers, strict=True)
                ]
            groups.append((number, start, rows))
    emitter.vectorize_loads(made for *_, rows in groups for _, _, made in rows)
    for number, start, rows in groups:
        live, beyond = (
            inside[number],
            M.condition(frame, (Guard(Index.axis(COLUMNS) + start, None, extents[COLUMNS] - 1),)),
        )
        frame.live = beyond if live is None else live if beyond is None else builder.and_(live, beyond)
        store_all(emitter, rows)


def _guarded(phase: Phase) -> tuple[Graph, tuple[Store, ...]]:
    """The exit graph and its stores, with loads predicated to existing columns."""
    found, numbers, last = Graph(), {}, phase.ranges()[COLUMNS] - 1
    for number, node in enumerate(phase.exit.nodes):
        index = None if node.index is None else node.index.renumber(numbers)
        guards = tuple(Guard(g.index.renumber(numbers), g.low, g.high) for g in node.guards)
        if node.op == "load" and index is not None and (index.values() or COLUMNS in index.axes()):
            guards += (Guard(Index.axis(_HELD), None, last),)
        value = 0 if node.op == "load" and node.value is None else node.value
        args = tuple(numbers[a] for a in node.args)
        numbers[number] = found.add(replace(node, args=args, index=index, guards=guards, value=value))
    return found, tuple(replace(s, value=numbers[s.value]) for s in phase.stores)


def _runs(offsets: list[list[int]], whole: bool) -> list[list[tuple[int, tuple[int, int]]]]:
    """Runs of a lane's contiguous columns (single ones where the last may be cut off): (offset, accumulator)."""
    columns = sorted((offset, (j, k)) for j, two in enumerate(offsets) for k, offset in enumerate(two))
    runs: list[list[tuple[int, tuple[int, int]]]] = []
    for column in columns:
        if not whole or not runs or column[0] != runs[-1][-1][0] + 1:
            runs.append([])
        runs[-1].append(column)
    return runs
