"""CPU schedules of cumulative operations (prefix scans): SIMD lanes and register tiles across rows, steps in order."""

from __future__ import annotations

from dataclasses import replace

from jcuts.kernel_ir.program import Grid, Program
from jcuts.lower.scan_axes import CARRY, LANE, TIME
from jcuts.schedule import fit
from jcuts.schedule.cpu.loop_candidates import TASKS_PER_THREAD, Machine, lanes_of, work

SMALL_TASK = 30_000  # element operations below which a scan is one task
_FIT = fit.coefficients("cpu", "scan")
UNROLL_SCORES = ((4, 1.0), (2, _FIT.unroll_2_score), (1, _FIT.unroll_1_score))
"""Steps of a scan per turn of its loop, and the score of such a schedule."""


def schedules(program: Program, machine: Machine, limit: int) -> list[tuple[Program, float]]:
    """Scheduled programs of a scan, best estimate first."""
    found: list[tuple[Program, float]] = []
    for unroll, score in UNROLL_SCORES:
        candidate = _scheduled(program, unroll, machine)
        if all(candidate.digest != other.digest for other, _ in found):
            found.append((candidate, score))
    return found[:limit]


def _scheduled(program: Program, unroll: int, machine: Machine) -> Program:
    extent = next((g.extent for g in program.grid if g.axis == LANE), 1)
    lanes = lanes_of(program, machine)
    while lanes > 1 and lanes // 2 >= extent:
        lanes //= 2
    count = max(1, min(unroll, -(-extent // lanes)))
    vector = lanes > 1
    phases = []
    for phase in program.phases:
        axes = tuple(replace(a, unroll=count, vector=vector) if a.name == LANE else a for a in phase.axes)
        phases.append(replace(phase, axes=axes))
    block = count * lanes
    buffers = tuple(replace(b, shape=(block + lanes,)) if b.name == CARRY else b for b in program.buffers)
    return replace(
        program,
        phases=tuple(phases),
        buffers=buffers,
        grid=_grid(program, block, machine),
        lanes=lanes,
        params=(("lanes", lanes), ("unroll", count)),
    )


def _grid(program: Program, block: int, machine: Machine) -> tuple[Grid, ...]:
    """Lanes in register tiles; rows shared out to the threads; the scanned dimension whole."""
    total = sum(work(p) for p in program.phases)
    tasks = 1 if machine.threads == 1 or total < SMALL_TASK else machine.threads * TASKS_PER_THREAD
    grid = []
    for g in program.grid:
        size = g.extent
        if g.axis == LANE:
            size = block
        elif g.axis != TIME:
            size = -(-g.extent // min(tasks, g.extent))
            tasks = max(1, tasks // -(-g.extent // size))
        grid.append(Grid(g.axis, g.extent, size))
    return tuple(grid)
