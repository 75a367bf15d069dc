"""Grid, block and register estimate of memory-bound kernels before they are compiled (CUDA occupancy inputs).

The grid follows from the schedule as the kernel's launch code computes it; registers are an estimate from the values
that a thread keeps, shared memory what the schedule asks for.  After compilation the assembler's figures take their
place (`schedule.gpu.kernel_time.launch_stats`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower.patterns.row_column_sums import TYPE, register_values, split_phases
from jcuts.lower.reduction import welford
from jcuts.lower.scan_axes import LANE, TIME
from jcuts.schedule.gpu.machine import WARP, distinct_loads, narrowest

ADDRESSES = 20
"""Registers of a thread for addresses, counters and constants."""
MOST_REGISTERS = 255
"""Of a thread."""
COMBINING_THREADS = 256
"""Threads of a block that adds up partial sums."""


@dataclass(frozen=True)
class LaunchShape:
    """One launch. Args: registers: of a thread; shared: bytes of shared memory of a block."""

    blocks: int
    threads: int
    registers: int
    shared: int = 0

    @property
    def taken(self) -> tuple[int, int, int, int]:
        """As `launch_stats.Taken`."""
        return self.blocks, self.threads, self.registers, self.shared


def row_shape(program: Program) -> tuple[int, int]:
    """Rows, and elements of a row."""
    if len(program.phases) == 1:
        phase = program.phases[0]
        return math.prod(a.extent for a in phase.axes), math.prod(r.extent for r in phase.reds)
    rows = math.prod(g.extent for g in program.grid)
    return rows, max(
        math.prod([*(r.extent for r in p.reds), *(a.extent for a in p.axes if a.name not in program.serial)])
        for p in program.phases
    )


def thread_tile_launch(program: Program) -> list[LaunchShape]:
    """Register tiles: one thread each, or one per run of tiles along a sliding window."""
    params: Any = dict(program.params)
    phase, threads = program.phases[0], int(params["threads"])
    counts = {a.name: -(-a.extent // a.unroll) for a in phase.axes}
    if "walk" in params:
        name, tiles = params["walk"]
        counts[name] = -(-counts[name] // int(tiles))
    shape = {str(k): int(v) for k, v in params.get("block", ())}
    blocks = math.prod(-(-c // shape.get(n, 1)) for n, c in counts.items())
    blocks = blocks if shape else -(-blocks // threads)
    tile = {**{a.name: a.unroll for a in phase.axes}, **{r.name: r.unroll for r in phase.reds}}
    size = max(1, narrowest(program) // 4)
    values = distinct_loads(phase, tile) * size + math.prod(a.unroll for a in phase.axes)
    split = int(params.get("split", 1))
    first = LaunchShape(blocks * split, threads, min(MOST_REGISTERS, ADDRESSES + values))
    return _with_partial_sums(program, first, split)


def transpose_launch(program: Program) -> list[LaunchShape]:
    """Transposes: one block per tile of shared memory."""
    params: Any = dict(program.params)
    phase, rows, columns = program.phases[0], int(params["rows"]), int(params["columns"])
    sides = {params["crossed"]: rows, phase.axes[-1].name: columns}
    blocks = math.prod(-(-a.extent // sides.get(a.name, 1)) for a in phase.axes)
    each = rows * columns // int(params["threads"])
    return [LaunchShape(blocks, int(params["threads"]), ADDRESSES + each, rows * (columns + 1) * narrowest(program))]


def row_launch(program: Program) -> list[LaunchShape]:
    """Row reductions: a team of threads per row, or per part of one."""
    params: Any = dict(program.params)
    team, threads, split = int(params["team"]), int(params["threads"]), int(params.get("split", 1))
    rows, _ = row_shape(program)
    kept = int(params["vector"]) * int(params["chunks"]) * max(1, narrowest(program) // 4)
    first = LaunchShape(-(-rows * split // (threads // team)), threads, min(MOST_REGISTERS, ADDRESSES + 2 * kept))
    return _with_partial_sums(program, first, split)


def online_row_launch(program: Program) -> list[LaunchShape]:
    """Online softmax of rows: a block per row; a thread keeps the values of one iteration."""
    params: Any = dict(program.params)
    kept = int(params["vector"]) * int(params["chunks"]) * max(1, narrowest(program) // 4)
    rows, _ = row_shape(program)
    registers = min(MOST_REGISTERS, ADDRESSES + kept)
    return [LaunchShape(-(-rows // (int(params["threads"]) // int(params["team"]))), int(params["threads"]), registers)]


def row_groups(program: Program) -> tuple[int, int]:
    """Row reductions with column sums: rows that a block walks over, and blocks."""
    params: Any = dict(program.params)
    rows, teams = split_phases(program).row_count, int(params["threads"]) // int(params["team"])
    share = -(-rows // (int(params["blocks"]) * teams)) * teams
    return share, -(-rows // share)


def row_column_sums_launch(program: Program) -> list[LaunchShape]:
    """Row reductions with column sums: blocks that walk over rows, then the sum of their partial results."""
    params: Any = dict(program.params)
    team, threads, columns = int(params["team"]), int(params["threads"]), split_phases(program).columns
    kept = int(params["vector"]) * int(params["chunks"]) * register_values(program)
    registers = min(MOST_REGISTERS, ADDRESSES + kept)
    shared = threads // team * columns * ITEM_SIZE[TYPE] if team < threads else 0
    second = LaunchShape(-(-columns // WARP), COMBINING_THREADS, 2 * ADDRESSES)
    return [LaunchShape(row_groups(program)[1], threads, registers, shared), second]


def column_launch(program: Program) -> list[LaunchShape]:
    """Column reductions: a block per group of neighbouring outputs and part of the reduction."""
    params: Any = dict(program.params)
    phase, across, threads = program.phases[0], int(params["across"]), int(params["threads"])
    lane, split = phase.axes[-1], int(params.get("split", 1))
    lanes = -(-lane.extent // (lane.unroll * across))
    outer = math.prod(-(-a.extent // a.unroll) for a in phase.axes[:-1])
    tile = {**{a.name: a.unroll for a in phase.axes}, **{r.name: r.unroll for r in phase.reds}}
    kept = math.prod(a.unroll for a in phase.axes) * len(phase.accs)
    loads = int(params.get("flight", 1)) * distinct_loads(phase, tile)
    registers = min(MOST_REGISTERS, ADDRESSES + kept + loads)
    return _with_partial_sums(program, LaunchShape(lanes * outer * split, threads, registers), split)


def column_points_launch(program: Program) -> list[LaunchShape]:
    """Norms and softmax of columns: a block has all points of its columns, or one part of them."""
    params: Any = dict(program.params)
    phase = next(p for p in program.phases if p.reds)
    across, vector, split = int(params["across"]), int(params["vector"]), int(params.get("split", 1))
    lane = phase.axes[-1]
    outer = math.prod(a.extent for a in phase.axes[:-1])
    blocks = -(-lane.extent // (vector * across)) * outer * split
    kept = vector * int(params["chunks"])
    first = LaunchShape(blocks, int(params["threads"]), min(MOST_REGISTERS, ADDRESSES + 2 * kept))
    return _with_partial_sums(program, first, split)


def welford_launch(program: Program) -> list[LaunchShape]:
    """One-pass statistics: partial ones, those merged per column, and the maps that use them."""
    first = column_points_launch(program)[0]
    columns = math.prod(a.extent for a in program.phases[0].axes)
    second = LaunchShape(-(-columns // WARP), COMBINING_THREADS, 2 * ADDRESSES)
    maps = []
    for part in welford.split_kernels(program).programs[2:]:
        points = max(b.size for b in part.outputs) // 4
        maps.append(LaunchShape(-(-points // COMBINING_THREADS), COMBINING_THREADS, 2 * ADDRESSES))
    return [first, second, *maps]


def scan_launch(program: Program) -> list[LaunchShape]:
    """Prefix scans: a thread per group of columns, or a team per row."""
    params: Any = dict(program.params)
    phase, threads, vector = program.phases[0], int(params["threads"]), int(params["vector"])
    others = math.prod(a.extent for a in phase.axes if a.name != TIME)
    if "team" in params:
        total, each = others * int(params["team"]), vector
    else:
        wide = vector if any(a.name == LANE for a in phase.axes) else 1
        total, each = others // wide * int(params.get("split", 1)), vector * int(params["unroll"])
    return [LaunchShape(max(1, -(-total // threads)), threads, min(MOST_REGISTERS, ADDRESSES + 2 * each))]


def _with_partial_sums(program: Program, first: LaunchShape, split: int) -> list[LaunchShape]:
    """A launch, and where a reduction is split over the grid the one that adds up its partial sums."""
    if split <= 1:
        return [first]
    results = sum(b.size for b in program.outputs)
    lanes = max(1, COMBINING_THREADS // WARP)
    item = max(ITEM_SIZE[b.dtype] for b in program.outputs)
    second = LaunchShape(-(-results // lanes), COMBINING_THREADS, ADDRESSES + 2 * item)
    return [first, second]
