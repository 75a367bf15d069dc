"""Enumerates loop-nest schedules for a CPU: lane axis, register tile, unrolling, loop order, best estimate first.

Tried are lane axes along which memory is contiguous, register tiles of rows and vectors whose accumulators fit the
register file, unrolled short reductions, and the loop orders that keep one operand or the other in cache.
`schedule.cpu.cycle_model` ranks them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Phase, Program, Red
from jcuts.schedule import fit
from jcuts.schedule.cpu.cycle_model import cycles
from jcuts.schedule.cpu.loop_schedule import Schedule, apply
from jcuts.schedule.cpu.machine import Machine

SMALL_TASK = 30_000  # element operations below which a kernel is not split into tasks (about 5 microseconds)
TASKS_PER_THREAD = 4
SHORT = 7  # a reduction of at most so many points is unrolled
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
COLUMNS = (1, 2, 3, 4, 6, 8)
_FIT = fit.coefficients("cpu", "candidates")


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
    found = _reduction_schedules(phase, lanes, machine) if phase.reds else _map(phase, lanes, machine)
    scored = {s: score(apply(program, s), machine) for s in dict.fromkeys(found)}
    ranked = sorted(scored.items(), key=lambda item: (-item[1], str(item[0])))
    return ranked[:limit] or [(Schedule(), 0.0)]


def score(program: Program, machine: Machine) -> float:
    """Ranking score of a scheduled program: its arithmetic's cycles at the machine's peak over its estimated cycles."""
    lanes = lanes_of(program, machine)
    phase = program.phases[-1]  # packing puts a copy in front
    points = math.prod(a.extent for a in phase.axes)
    inner = math.prod(r.extent for r in phase.reds)
    steps = inner * len(phase.accs) if phase.reds else max(1, len(phase.stores))
    least = points * steps / (lanes * machine.fma_ports)
    return max(_FIT.score_floor, min(1.0, least / cycles(program, machine)))


def work(phase: Phase) -> int:
    """Element operations of a phase: points times nodes."""
    points = math.prod(a.extent for a in phase.axes)
    inner = math.prod(r.extent for r in phase.reds)
    body = sum(node.op not in ("const", "index", "guard") for node in phase.body.nodes) if phase.reds else 0
    return points * (inner * max(1, body) + max(1, len(phase.exit.nodes)))


def task_tiles(
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
def _map(phase: Phase, lanes: int, machine: Machine) -> Iterator[Schedule]:
    if not phase.axes:
        yield Schedule()
        return
    ranked = sorted(phase.axes, key=lambda a: (-_contiguity(phase, a.name), -phase.axes.index(a)))
    for axis in ranked[:2]:
        width = _fit(lanes, axis.extent)
        others = [a for a in phase.axes if a is not axis]
        if width < 2:
            yield Schedule(blocks=task_tiles(phase, list(phase.axes), {}, machine))
            continue
        # Rows along an axis that some operand is contiguous along: what a strided load brings in is used at once.
        rows_axes = [a for a in others if _is_contiguous(phase, a.name)] or [None]
        for rows_axis in (None, *rows_axes) if rows_axes[0] is not None else rows_axes:
            for rows in (1,) if rows_axis is None else (2, 4, 8, 16):
                for unroll in (1, 2, 4):
                    if unroll > -(-axis.extent // width) or (rows_axis is not None and rows > rows_axis.extent):
                        continue
                    tile = {axis.name: unroll} | ({} if rows_axis is None else {rows_axis.name: rows})
                    both = rows_axis is not None
                    yield from _ordered(phase, axis, rows_axis, width, tile, (), (), machine, both)


def _ordered(
    phase: Phase,
    axis: Axis,
    rows_axis: Axis | None,
    width: int,
    tile: Mapping[str, int],
    reds: tuple[tuple[str, int], ...],
    chains: tuple[tuple[str, int], ...],
    machine: Machine,
    both: bool,
) -> Iterator[Schedule]:
    """The schedule in its loop orders, each with the axis that tasks should split first.

    Lanes outside rows keep the lane operand's panel in cache while rows stream by; rows outside lanes the reverse.
    """
    rest = [a.name for a in phase.axes if a is not axis and a is not rows_axis]
    row = [rows_axis.name] if rows_axis is not None else []
    inside, outside = (*rest, *row, axis.name), (axis.name, *rest, *row)
    orders = [(inside, "")]
    if both and all(r.extent <= SHORT for r in phase.reds):
        orders.append((outside, axis.name))
    elif both:
        orders = [(outside, axis.name)]
        if row or rest:
            orders += [(outside, (row or rest)[0]), (inside, (rest or row)[0])]
    steps = {**tile, axis.name: tile.get(axis.name, 1) * width}
    for order, prefer in orders:
        ordered = [next(a for a in phase.axes if a.name == n) for n in order]
        blocks = task_tiles(phase, ordered, steps, machine, prefer)
        yield Schedule(width, axis.name, tuple(sorted(tile.items())), order, reds, chains, blocks)


def _contiguity(phase: Phase, axis: str) -> float:
    """How well memory accesses run along an axis: contiguous good, constant neutral, strided bad."""
    total = sum(_stride_value(index, axis) for index in _loaded(phase))
    return total + sum(2 * _stride_value(store.address, axis) for store in phase.stores)


def _is_contiguous(phase: Phase, axis: str) -> bool:
    """Whether some load runs along an axis."""
    return any(index.stride(axis) == 1 and not index.values() for index in _loaded(phase))


def _loaded(phase: Phase) -> list[Index]:
    nodes = (node for graph in (phase.body, phase.exit) for node in graph.nodes)
    return [node.index for node in nodes if node.op == "load" and node.index is not None]


def _stride_value(index: Index, axis: str) -> float:
    stride = index.stride(axis)
    if index.values():
        return -1.0
    if stride is None:
        return -2.0
    return {0: 0.0, 1: 2.0}.get(stride, _FIT.gathered_axis_preference)


def _fit(lanes: int, extent: int) -> int:
    """Fewer lanes where the axis is shorter than a vector."""
    while lanes > 1 and lanes // 2 >= extent:
        lanes //= 2
    return lanes


# -- reductions, windows, contractions, convolutions ------------------------------------------------------------------
def _reduction_schedules(phase: Phase, lanes: int, machine: Machine) -> Iterator[Schedule]:
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
        if isinstance(axis, Red):
            yield from _lane_reduced(phase, axis, width, machine)
        else:
            yield from _lane_parallel(phase, axis, width, machine)
            if machine.fma_ports == 1 and width == lanes and lanes >= 8 and _rows_unaligned(phase, axis.name, lanes):
                yield from _lane_parallel(phase, axis, width // 2, machine)
    yield Schedule(blocks=task_tiles(phase, list(phase.axes), {}, machine))


def _rows_unaligned(phase: Phase, axis: str, lanes: int) -> bool:
    """Whether rows of vectors start anywhere in a line: cores that split vectors then lose less with half of one."""
    rows = [i for i in _loaded(phase) if i.stride(axis) == 1 and not i.values()]
    return any((i.stride(name) or 0) % lanes for i in rows for name in phase.ranges() if name != axis)


def _fully_unrolled(phase: Phase, budget: int) -> tuple[tuple[str, int], ...]:
    """Reduction axes that are unrolled completely: short ones, innermost first."""
    result = []
    for red in reversed(phase.reds):
        if red.extent > SHORT or red.extent > budget:
            break
        result.append((red.name, red.extent))
        budget //= red.extent
    return tuple(result)


def _lane_reduced(phase: Phase, axis: Red, width: int, machine: Machine) -> Iterator[Schedule]:
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
            yield Schedule(
                width,
                axis.name,
                unroll,
                tuple(names),
                ((axis.name, chains),),
                ((axis.name, chains),),
                task_tiles(phase, list(phase.axes), steps, machine),
            )


def _lane_parallel(phase: Phase, axis: Axis, width: int, machine: Machine) -> Iterator[Schedule]:
    vectors = -(-axis.extent // width)
    others = [a for a in phase.axes if a is not axis]
    taps = _fully_unrolled(phase, 32)
    inner_red = phase.reds[-1]
    loads = [n for n in phase.body.nodes if n.op == "load" and n.index is not None]
    # Rows: the axes along which some operand of the vector loads is shared, innermost first, at most two.
    shared = sorted(others, key=lambda a: (-_reused_loads(loads, a.name, axis.name), -phase.axes.index(a)))
    for rows_axis in shared[:2] or [None]:
        for rows in [1] if rows_axis is None else _row_counts(rows_axis.extent):
            for count in COLUMNS if rows_axis is not None else ROWS:
                accs = rows * count * len(phase.accs)
                if count > vectors or accs + min(rows, count) + 1 > machine.registers:
                    continue
                tile = {axis.name: count} | ({} if rows_axis is None else {rows_axis.name: rows})
                # Unrolled taps share what their windows overlap in; loops over them need fewer registers.
                for unrolled in (taps, taps[:1]) if len(taps) > 1 else (taps,):
                    reds = dict(unrolled)
                    if inner_red.name not in reds:
                        reds[inner_red.name] = 2 if accs >= 16 else 4
                    fixed = tuple(sorted(reds.items()))
                    yield from _ordered(phase, axis, rows_axis, width, tile, fixed, (), machine, both=True)


def _reused_loads(loads: list[Node], axis: str, vector: str) -> int:
    """Loads along the lanes that stay the same along ``axis``: what a register tile over it saves."""
    return sum(1 for n in loads if n.index is not None and n.index.stride(axis) == 0 and n.index.stride(vector) != 0)


def _row_counts(extent: int) -> list[int]:
    return [c for c in ROWS if c <= extent] or [1]
