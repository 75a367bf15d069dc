"""Element-wise schedules: register tiles of chains, operand switch of concatenations, shared-memory transposes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.loop_transforms import map_indices
from jcuts.kernel_ir.node import Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Phase, Program
from jcuts.lower.tensor_graph import MOST_SWITCHED
from jcuts.schedule.gpu import family_statistics as stats
from jcuts.schedule.gpu.launch_stats import memory_score
from jcuts.schedule.gpu.machine import (
    ACCESS,
    SHARED,
    Candidate,
    GpuMachine,
    narrowest,
    scheduled,
    transposed_axis,
    unrolled,
    vectors,
)

SWITCH = "part"  # the axis that numbers a concatenation's operands


def register_tiles(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Register tiles of a map: a vector of neighbours per thread, of one row or more; concatenations by operand."""
    phase = program.phases[0]
    if not phase.axes:
        yield scheduled(program, "point", 32), 1.0
        return
    switched = _with_operand_axis(program)
    if switched is not None:
        yield from _concat_switch(switched, machine)
    lane = phase.axes[-1]
    size = narrowest(program)
    crossed = transposed_axis(phase, lane.name)
    for vector in vectors(lane.extent, size):
        tiles = [(lane.name, vector)]
        options = [tiles]
        if crossed is not None:
            options = [[*tiles, (crossed.name, n)] for n in (4, 8) if n <= crossed.extent] or options
        elif len(phase.axes) > 1 and phase.axes[-2].extent % 2 == 0:
            options.append([*tiles, (phase.axes[-2].name, 2)])
        for option, threads in itertools.product(options, (256, 128)):
            tiled = unrolled(program, dict(option))
            if crossed is not None:
                for along in (8, 16):  # threads along the operand's own direction: whole lines of it per block
                    shape = ((crossed.name, along), (lane.name, threads // along))
                    made = scheduled(tiled, "point", threads, ("block", shape))
                    yield made, memory_score(made, stats.REGISTER_TILES, machine)
            made = scheduled(tiled, "point", threads)
            yield made, memory_score(made, stats.REGISTER_TILES, machine)


def _with_operand_axis(program: Program) -> Program | None:
    """The program with an axis more, the first one, that numbers the operands of a concatenation of equal parts."""
    phase = program.phases[0]
    for axis in phase.axes:
        starts = {0, axis.extent}
        for node in phase.exit.nodes:
            for guard in node.guards:
                moving = Index(0, guard.index.terms)
                if moving == Index.axis(axis.name) and guard.low is not None and guard.high is not None:
                    starts |= {guard.low - guard.index.const, guard.high - guard.index.const + 1}
        places = sorted(s for s in starts if 0 <= s <= axis.extent)
        size = math.gcd(*places)
        count = axis.extent // size
        if not 2 < count <= MOST_SWITCHED or size < 2:
            continue
        inner = Index.axis(axis.name) + Index.axis(SWITCH) * size
        ranges = {**phase.ranges(), SWITCH: count, axis.name: size}
        made = map_indices(phase, lambda index, to=inner, name=axis.name, r=ranges: index.substitute({name: to}, r))
        axes = (Axis(SWITCH, count), *(replace(a, extent=size) if a.name == axis.name else a for a in phase.axes))
        return replace(program, phases=(replace(made, axes=axes),))
    return None


def _concat_switch(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Concatenations: threads of a block mostly copy from one operand, and branch to code for it alone."""
    phase = program.phases[0]
    lane = phase.axes[-1]
    rows = phase.axes[-2]
    for vector in vectors(lane.extent, ITEM_SIZE[program.outputs[0].dtype]):
        for deep in (1, 2, 4):
            if deep > 1 and (rows.name == SWITCH or rows.extent % deep):
                continue
            tiled = unrolled(program, {lane.name: vector, rows.name: deep})
            for threads in (128, 256):
                made = scheduled(tiled, "point", threads, ("switch", SWITCH))
                yield made, memory_score(made, stats.REGISTER_TILES, machine)


def smem_staged_loads(phase: Phase, crossed: str) -> list[Node]:
    """Loads that the transposing kernel stages in shared memory: contiguous along ``crossed``, not along the lanes."""
    lane = phase.axes[-1].name
    found = (
        n
        for n in phase.exit.nodes
        if n.op == "load"
        and n.index is not None
        and not n.guards
        and not n.index.values()
        and n.index.stride(crossed) == 1
        and n.index.stride(lane) not in (0, 1, None)
    )
    return list(dict.fromkeys(found))


def smem_transposes(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Tiles of the operand's direction times the result's, through shared memory; only of maps that transpose."""
    phase = program.phases[0]
    if not phase.axes:
        return
    lane = phase.axes[-1]
    crossed = transposed_axis(phase, lane.name)
    if crossed is None:
        return
    held = sum(ITEM_SIZE[n.dtype] for n in smem_staged_loads(phase, crossed.name))
    if min(crossed.extent, lane.extent) < 8 or not held:
        return
    size = max(ITEM_SIZE[b.dtype] for b in program.outputs)
    vector = next(v for v in (max(1, ACCESS // size), 8, 4, 2, 1) if v * size <= ACCESS and lane.extent % v == 0)
    lines = 8 * vector  # of a warp: eight accesses side by side
    for rows, columns in ((64, lines), (128, lines), (64, 2 * lines), (32, lines), (32, 2 * lines), (32, 64)):
        for threads in (256, 512):
            if columns % vector or threads * vector > rows * columns or rows % max(1, threads * vector // columns):
                continue
            if threads % (columns // vector) or rows * columns * max(size, held) > SHARED:
                continue
            params = (("crossed", crossed.name), ("rows", rows), ("columns", columns))
            made = scheduled(unrolled(program, {lane.name: vector}), "transposed", threads, *params)
            yield made, memory_score(made, stats.TRANSPOSES, machine)
