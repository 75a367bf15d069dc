"""Operand packing (as in BLIS GEMM): a fetch phase copies the lane operand's panel into cache before the compute phase.

This is the thesis' looped operation with a fetch and a compute phase (3.2.1), where the panel replaces shared memory.
It pays where the operand is not contiguous along the lanes (a transposed matrix), or where its rows lie a power of two
apart and evict each other from the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Buffer, Grid, Phase, Program, Red, Store

MIN_ROWS = 16  # rows that must share a panel for its copy to be cheap
PANEL_LIMIT = 768 << 10  # bytes: must stay in a core's second-level cache
TILES = ((12, 2), (14, 2), (10, 2), (8, 3), (6, 4), (9, 3), (8, 2), (7, 3), (4, 4), (5, 4), (14, 1), (7, 2), (4, 2))


@dataclass(frozen=True)
class Packing:
    """One packing: the load that is packed, and the compute tile."""

    load: int
    lane: str
    row: str
    rows: int
    vectors: int
    lanes: int


def packings(program: Program, lanes: int, registers: int) -> Iterator[Packing]:
    """Possible packings of an unscheduled single-phase program."""
    phase = program.phases[0]
    if len(program.phases) != 1 or not phase.reds or len(phase.accs) != 1:
        return
    depth = math.prod(r.extent for r in phase.reds)
    for lane in phase.axes:
        if lane.extent < lanes // 2 or any(s.address.stride(lane.name) != 1 for s in phase.stores):
            continue
        for number, node in enumerate(phase.body.nodes):
            if not _packable(phase, node, lane.name):
                continue
            assert node.index is not None
            free = [a for a in phase.axes if a is not lane and node.index.stride(a.name) == 0]
            rows = max(free, key=lambda a: (a.extent >= MIN_ROWS, phase.axes.index(a)), default=None)
            if rows is None or math.prod(a.extent for a in free) < MIN_ROWS:
                continue
            for count, vectors in TILES:
                if count * vectors + vectors + 1 > registers or count > rows.extent:
                    continue
                if (vectors - 1) * lanes >= lane.extent or depth * vectors * lanes * ITEM_SIZE[
                    node.dtype
                ] > PANEL_LIMIT:
                    continue
                yield Packing(number, lane.name, rows.name, count, vectors, lanes)


def _packable(phase: Phase, node: Node, lane: str) -> bool:
    if node.op != "load" or node.guards or node.index is None or node.index.values():
        return False
    stride = node.index.stride(lane)
    if stride is None or stride == 0:
        return False
    return any(node.index.stride(r.name) != 0 for r in phase.reds)


def apply(program: Program, packing: Packing, threads: int) -> Program:
    """The two-phase program."""
    phase = program.phases[0]
    node = phase.body.nodes[packing.load]
    assert node.index is not None
    axes = {a.name: a for a in phase.axes}
    lane, row = axes[packing.lane], axes[packing.row]
    width = packing.vectors * packing.lanes
    batch = [a for a in phase.axes if a is not lane and node.index.stride(a.name) != 0]
    rest = [a for a in phase.axes if a is not lane and a is not row and a not in batch]
    depth = math.prod(r.extent for r in phase.reds)
    place = flatten(tuple(Index.axis(r.name) for r in phase.reds), tuple(r.extent for r in phase.reds)) * width
    place = place + Index.axis(lane.name) - Index.axis(f"{lane.name}_lo")
    panel = Buffer("panel", node.dtype, (depth, width), "local")

    fetch_graph = Graph()
    value = fetch_graph.add(Node("load", node.dtype, buffer=node.buffer, index=node.index))
    unit = node.index.stride(lane.name) == 1
    fetch_axes = (
        *(Axis(a.name, a.extent) for a in batch),
        *(
            Axis(r.name, r.extent, 1 if unit or k < len(phase.reds) - 1 else min(4, r.extent))
            for k, r in enumerate(phase.reds)
        ),
        Axis(lane.name, lane.extent, packing.vectors if unit else 1, True),
    )
    fetch = Phase("fetch", fetch_axes, (), (), Graph(), fetch_graph, (Store(panel.name, place, value),))

    body, numbers = Graph(), {}
    for number, old in enumerate(phase.body.nodes):
        args = tuple(numbers[a] for a in old.args)
        new = (
            Node("load", old.dtype, buffer=panel.name, index=place)
            if number == packing.load
            else replace(old, args=args)
        )
        numbers[number] = body.add(new)
    accs = tuple(replace(a, values=tuple(numbers[v] for v in a.values)) for a in phase.accs)
    compute_axes = (
        *(Axis(a.name, a.extent) for a in batch),
        Axis(lane.name, lane.extent, packing.vectors, True),
        *(Axis(a.name, a.extent) for a in rest),
        Axis(row.name, row.extent, packing.rows),
    )
    last = len(phase.reds) - 1
    reds = tuple(Red(r.name, r.extent, min(r.extent, 2) if k == last else 1) for k, r in enumerate(phase.reds))
    compute = replace(phase, name=f"{phase.name}.packed", axes=compute_axes, reds=reds, accs=accs, body=body)

    grid = [Grid(a.name, a.extent, 1) for a in batch] + [Grid(lane.name, lane.extent, width)]
    tasks = math.prod(g.blocks for g in grid)
    split = rest[0] if rest and rest[0].extent > 1 else row
    step = packing.rows if split is row else 1
    pieces = -(-split.extent // step)
    wanted = max(1, -(-2 * threads // tasks)) if threads > 1 else 1
    if wanted > 1 and pieces > 1:
        grid.append(Grid(split.name, split.extent, -(-pieces // min(wanted, pieces)) * step))
    params = (
        ("lanes", packing.lanes),
        ("vector", lane.name),
        ("unroll", ((lane.name, packing.vectors), (row.name, packing.rows))),
        ("packed", node.buffer),
        ("panel_bytes", panel.bytes),
    )
    return replace(
        program,
        buffers=(*program.buffers, panel),
        grid=tuple(grid),
        serial=tuple(a.name for a in batch),
        phases=(fetch, compute),
        lanes=packing.lanes,
        params=params,
    )
