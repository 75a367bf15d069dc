"""Score modification of flash attention (scale, mask, bias, soft cap), applied to the score accumulators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from llvmlite import ir

from jcuts.codegen.cuda.graph.node_emitter import Emitter
from jcuts.codegen.cuda.ptx import global_memory as M
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
    builder, attention = frame.builder, shape.attention
    phase, keys = attention.scores, attention.keys
    row = builder.add(first[0], builder.lshr(lane, L.I32(2)))
    key = builder.add(first[1], builder.mul(builder.and_(lane, L.I32(3)), L.I32(2)))
    ranges = {
        ROWS: shape.blocks[1] * shape.rows - shape.warp[0] + EIGHT,
        COLUMNS: shape.tiles * shape.keys - shape.warp[1] + EIGHT,
    }
    frame = replace(
        frame,
        variables={**frame.variables, ROWS: row, COLUMNS: key},
        ranges={**frame.ranges, **ranges},
        multiples={COLUMNS: 2},
        cache={},
    )
    made, wanted = _inside(phase, {ROWS: attention.rows, COLUMNS: keys})
    accs = [n for n, node in enumerate(made.nodes) if node.op == "acc"]
    graph = Graph()
    emitter = Emitter(frame, graph, buffers)
    numbers: dict[tuple[int, int, int], int] = {}
    for i, j, k in itertools.product(range(len(scores)), range(len(scores[0])), range(4)):
        down, across = i * SIXTEEN + EIGHT * (k // 2), j * EIGHT + k % 2
        given = graph.add(Node("acc", "float32", attrs=(("number", 0), ("point", (down, across)))))
        emitter.bind(given, E.Lanes(scores[i][j][k], "float32"))
        where = {ROWS: Index.axis(ROWS) + down, COLUMNS: Index.axis(COLUMNS) + across}
        (numbers[i, j, k],) = made.copy_into(graph, [wanted], where, frame.ranges, dict.fromkeys(accs, given))
    emitter.vectorize_loads(numbers.values())
    places = list(numbers)
    values = dict(zip(places, emitter.emit([numbers[p] for p in places]), strict=True))
    found = [[[values[i, j, k].value for k in range(4)] for j in range(len(row))] for i, row in enumerate(scores)]
    if keys % shape.keys:
        for j, k in itertools.product(range(len(scores[0])), range(2)):
            there = builder.icmp_signed("<", key, L.I32(keys - j * EIGHT - k))
            for row_ in found:
                for half in (k, k + 2):
                    row_[j][half] = builder.select(there, row_[j][half], LEAST)
    return found


def _inside(phase: Phase, extents: Mapping[str, int]) -> tuple[Graph, int]:
    """The score modification's graph with loads predicated to existing rows and keys, and its result."""
    found, numbers = Graph(), {}
    for number, node in enumerate(phase.exit.nodes):
        index = None if node.index is None else node.index.renumber(numbers)
        guards = tuple(Guard(g.index.renumber(numbers), g.low, g.high) for g in node.guards)
        if node.op == "load" and index is not None:
            used = set(extents) if index.values() else index.axes()
            guards += tuple(Guard(Index.axis(a), None, e - 1) for a, e in extents.items() if a in used)
        value = 0 if node.op == "load" and node.value is None else node.value
        args = tuple(numbers[a] for a in node.args)
        numbers[number] = found.add(replace(node, args=args, index=index, guards=guards, value=value))
    return found, numbers[phase.stores[0].value]
