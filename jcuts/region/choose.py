"""Candidate schedules of a program for a CPU, best estimate first.

The register tile is chosen by counting: loads per multiply-add that the tile needs (a load whose address does not move
along an unrolled axis is shared by the points of that axis), lanes and rows wasted at the edges, and whether the
accumulators fit the register file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jcuts.dfg.index import Index
from jcuts.dfg.node import Graph, Node
from jcuts.dfg.program import ITEM_SIZE, Axis, Phase, Program, Red
from jcuts.region.machine import Machine
from jcuts.region.schedule import Schedule

FMA_LATENCY = 8  # independent accumulators that keep the multiply-add units busy
SMALL_TASK = 30_000  # element operations below which a kernel is not split into tasks (about 5 microseconds)
TASKS_PER_THREAD = 4


def lanes_of(program: Program, machine: Machine) -> int:
    """Lanes so that the widest type of the program's values fills one register."""
    widest = 1
    for phase in program.phases:
        for graph in (phase.body, phase.exit):
            for node in graph.nodes:
                if node.op not in ("guard", "index") and node.dtype != "bool":
                    size = (
                        max(4, ITEM_SIZE[node.dtype])
                        if node.dtype in ("bfloat16", "float16")
                        else ITEM_SIZE[node.dtype]
                    )
                    widest = max(widest, size)
    return max(4, min(machine.vector_bytes // max(widest, 2), 64))


def candidates(program: Program, machine: Machine, limit: int = 8) -> list[tuple[Schedule, float]]:
    """Schedules with their score in (0, 1], best first, at least one."""
    phase = program.phases[0]
    lanes = lanes_of(program, machine)
    if not phase.reds:
        found = list(_map(program, phase, lanes, machine))
    else:
        found = list(_rooted(program, phase, lanes, machine))
    best: dict[Schedule, float] = {}
    for schedule, score in found:
        best[schedule] = max(score, best.get(schedule, 0.0))
    ranked = sorted(best.items(), key=lambda item: (-item[1], str(item[0])))
    return ranked[:limit] or [(Schedule(), 0.0)]


def work(phase: Phase) -> int:
    """Element operations of a phase: points times nodes."""
    points = math.prod(a.extent for a in phase.axes)
    inner = math.prod(r.extent for r in phase.reds)
    body = sum(node.op not in ("const", "index", "guard") for node in phase.body.nodes) if phase.reds else 0
    return points * (inner * max(1, body) + max(1, len(phase.exit.nodes)))


def blocks_for(
    phase: Phase, axes: list[Axis], steps: dict[str, int], machine: Machine, prefer: str = ""
) -> tuple[tuple[str, int], ...]:
    """Task blocks: enough tasks for the threads, along the outermost axes that have room."""
    if machine.threads == 1 or work(phase) < SMALL_TASK:
        return ()
    tasks = machine.threads * (TASKS_PER_THREAD if work(phase) > 16 * SMALL_TASK else 1)
    order = sorted(axes, key=lambda a: a.name != prefer)
    result: list[tuple[str, int]] = []
    for axis in order:
        step = steps.get(axis.name, 1)
        pieces = -(-axis.extent // step)
        if pieces < 2 or tasks < 2:
            continue
        count = min(pieces, tasks)
        per = -(-pieces // count)
        result.append((axis.name, per * step))
        tasks = -(-tasks // -(-pieces // per))
        if tasks < 2:
            break
    return tuple(result)


# -- element-wise ---------------------------------------------------------------------------------------------------
def _map(program: Program, phase: Phase, lanes: int, machine: Machine) -> Iterator[tuple[Schedule, float]]:
    if not phase.axes:
        yield Schedule(), 1.0
        return
    ranked = sorted(phase.axes, key=lambda a: (-_contiguity(phase, a.name), -phase.axes.index(a)))
    for rank, axis in enumerate(ranked[:2]):
        width = _fit(lanes, axis.extent)
        if width < 2:
            yield Schedule(blocks=blocks_for(phase, list(phase.axes), {}, machine)), 0.05 / (rank + 1)
            continue
        vectors = -(-axis.extent // width)
        heavy = len(phase.exit.nodes) > 24
        for unroll in (1, 2, 4) if not heavy else (1, 2):
            if unroll > vectors:
                continue
            order = (*(a.name for a in phase.axes if a is not axis), axis.name)
            steps = {axis.name: unroll * width}
            axes = [a for a in phase.axes if a is not axis] + [axis]
            schedule = Schedule(
                width, axis.name, ((axis.name, unroll),), order, blocks=blocks_for(phase, axes, steps, machine)
            )
            waste = axis.extent / (vectors * width)
            score = waste * (0.9 if unroll == 1 else 1.0 if unroll == (2 if heavy else 4) else 0.95) / (1 + rank)
            yield schedule, min(1.0, score * (1.0 if _contiguity(phase, axis.name) > 0 else 0.3))


def _contiguity(phase: Phase, axis: str) -> float:
    """How well memory accesses run along an axis: contiguous good, constant neutral, strided bad."""
    total = 0.0
    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.op == "load" and node.index is not None:
                total += _stride_value(node.index, axis)
    for store in phase.stores:
        total += 2 * _stride_value(store.address, axis)
    return total


def _stride_value(index: Index, axis: str) -> float:
    stride = index.stride(axis)
    if index.values():
        return -1.0
    if stride is None:
        return -2.0
    return {0: 0.0, 1: 2.0}.get(stride, -3.0)


def _fit(lanes: int, extent: int) -> int:
    """Fewer lanes where the axis is shorter than a vector."""
    while lanes > 1 and lanes // 2 >= extent:
        lanes //= 2
    return lanes


# -- reductions, windows, contractions, convolutions ------------------------------------------------------------------
def _rooted(program: Program, phase: Phase, lanes: int, machine: Machine) -> Iterator[tuple[Schedule, float]]:
    choices: list[tuple[Axis | Red, float]] = []
    for axis in phase.axes:
        choices.append((axis, _contiguity(phase, axis.name)))
    for red in phase.reds:
        choices.append((red, _contiguity(phase, red.name) - 0.5))
    choices.sort(key=lambda item: -item[1])
    for rank, (axis, merit) in enumerate(choices[:3]):
        if merit < 0 and rank > 0:
            break
        width = _fit(lanes, axis.extent)
        if width < 2:
            continue
        weight = (1.0 if merit > 0 else 0.4) / (1 + rank)
        if isinstance(axis, Red):
            yield from _lane_reduced(phase, axis, width, machine, weight)
        else:
            yield from _lane_parallel(program, phase, axis, width, machine, weight)
    yield Schedule(blocks=blocks_for(phase, list(phase.axes), {}, machine)), 0.01


def _taps(phase: Phase, budget: int) -> tuple[tuple[str, int], ...]:
    """Reduction axes that are unrolled completely: short ones, innermost first."""
    result = []
    for red in reversed(phase.reds):
        if red.extent > 7 or red.extent > budget:
            break
        result.append((red.name, red.extent))
        budget //= red.extent
    return tuple(result)


def _lane_reduced(
    phase: Phase, axis: Red, width: int, machine: Machine, weight: float
) -> Iterator[tuple[Schedule, float]]:
    vectors = -(-axis.extent // width)
    names = [a.name for a in phase.axes]
    for chains in (4, 2, 1):
        if chains > vectors:
            continue
        for rows in (1, 2, 4):
            inner = phase.axes[-1] if phase.axes else None
            if rows > 1 and (inner is None or inner.extent < rows or chains * rows > 8):
                continue
            unroll = ((inner.name, rows),) if rows > 1 and inner is not None else ()
            steps = {inner.name: rows} if inner is not None else {}
            schedule = Schedule(
                width, axis.name, unroll, tuple(names), ((axis.name, chains),), ((axis.name, chains),),
                blocks_for(phase, list(phase.axes), steps, machine),
            )  # fmt: skip
            score = weight * min(1.0, chains * rows / 4) * axis.extent / (vectors * width) * (0.8 if rows > 1 else 1.0)
            yield schedule, max(1e-6, min(1.0, score))


def _lane_parallel(
    program: Program, phase: Phase, axis: Axis, width: int, machine: Machine, weight: float
) -> Iterator[tuple[Schedule, float]]:
    vectors = -(-axis.extent // width)
    others = [a for a in phase.axes if a is not axis]
    taps = _taps(phase, 32)
    tap_count = math.prod(n for _, n in taps)
    inner_red = phase.reds[-1]
    loads = [n for n in phase.body.nodes if n.op == "load" and n.index is not None]
    # Rows: the axes along which some operand of the vector loads is shared, innermost first, at most two.
    rows_axes: list[Axis | None] = [
        *sorted(others, key=lambda a: (-_sharing(loads, a.name, axis.name), -phase.axes.index(a)))[:2],
        None,
    ]
    for place, rows_axis in enumerate(rows_axes):
        if rows_axis is None and others:
            continue
        row_options = [1] if rows_axis is None else _row_counts(rows_axis.extent)
        for rows in row_options:
            for count in (1, 2, 3, 4, 6, 8):
                if count > vectors:
                    continue
                tile = {axis.name: count}
                if rows_axis is not None:
                    tile[rows_axis.name] = rows
                vector_loads, scalar_loads = _tile_loads(loads, tile, axis.name, taps, phase)
                accs = rows * count * len(phase.accs)
                if accs + count + 1 > machine.registers:
                    continue
                red_unroll = dict(taps)
                if not taps or inner_red.name not in red_unroll:
                    red_unroll[inner_red.name] = 2 if accs >= 16 else 4
                work_units = rows * count * max(1, tap_count) * max(1, len(phase.accs))
                issue = work_units / max(work_units, 1.0 * vector_loads + 0.5 * scalar_loads)
                fill = min(1.0, accs / FMA_LATENCY)
                lanes_used = axis.extent / (-(-axis.extent // (width)) * width)
                rows_used = 1.0
                if rows_axis is not None:
                    rows_used = _edge(rows_axis.extent, rows)
                count_used = _edge(vectors, count)
                score = (
                    weight * (0.9 if place else 1.0) * issue * fill * lanes_used * rows_used * (0.5 + 0.5 * count_used)
                )
                for order, prefer in _orders(phase, axis, rows_axis):
                    steps = {axis.name: count * width}
                    if rows_axis is not None:
                        steps[rows_axis.name] = rows
                    ordered = [next(a for a in phase.axes if a.name == n) for n in order]
                    blocks = blocks_for(phase, ordered, steps, machine, prefer)
                    schedule = Schedule(
                        width,
                        axis.name,
                        tuple(sorted(tile.items())),
                        order,
                        tuple(sorted(red_unroll.items())),
                        (),
                        blocks,
                    )
                    yield schedule, max(1e-6, min(1.0, score))
                    score *= 0.97


def _sharing(loads: list[Node], axis: str, vector: str) -> int:
    """Loads along the lanes that stay the same along ``axis``: what a register tile over it saves."""
    return sum(1 for n in loads if n.index is not None and n.index.stride(axis) == 0 and n.index.stride(vector) != 0)


def _row_counts(extent: int) -> list[int]:
    counts = [c for c in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14) if c <= extent]
    return counts or [1]


def _edge(extent: int, step: int) -> float:
    """Share of full-tile efficiency that is left with a partial tile at the end."""
    whole, rest = divmod(extent, step)
    if not rest:
        return 1.0
    return extent / ((whole + 1) * step) if whole == 0 else extent / (whole * step + max(rest, min(step, 4)))


def _tile_loads(
    loads: list[Node], tile: dict[str, int], vector: str, taps: tuple[tuple[str, int], ...], phase: Phase
) -> tuple[int, int]:
    """Distinct vector and scalar loads of one tile, taps unrolled (equal addresses counted once)."""
    vectors = scalars = 0
    red_names = dict(taps)
    for node in loads:
        assert node.index is not None
        spans = [(node.index.stride(n), c) for n, c in tile.items()] + [
            (node.index.stride(n), c) for n, c in red_names.items()
        ]
        distinct = {0}
        for stride, count in spans:
            if stride is None:
                distinct = {d * 1000 + k for d in distinct for k in range(count)}
            elif stride:
                step = stride
                distinct = {d + step * k for d in distinct for k in range(count)}
        if node.index.stride(vector) == 0:
            scalars += len(distinct)
        else:
            vectors += len(distinct)
    return vectors, scalars


def _orders(phase: Phase, axis: Axis, rows_axis: Axis | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """Loop orders and the axis that tasks should split first.

    Lanes outside rows keeps the lane operand's panel in cache while rows stream by; rows outside lanes the reverse.
    """
    rest = [a.name for a in phase.axes if a is not axis and a is not rows_axis]
    row = [rows_axis.name] if rows_axis is not None else []
    small_taps = all(r.extent <= 7 for r in phase.reds)
    if small_taps:
        yield (*rest, *row, axis.name), ""
        yield (axis.name, *rest, *row), axis.name
        return
    yield (axis.name, *rest, *row), axis.name
    if row or rest:
        yield (axis.name, *rest, *row), (row or rest)[0]
        yield (*rest, *row, axis.name), (rest or row)[0]


def graph_cost(graph: Graph) -> int:
    """Nodes that cost an instruction."""
    return sum(node.op not in ("const", "load", "index", "guard", "acc") for node in graph.nodes)
