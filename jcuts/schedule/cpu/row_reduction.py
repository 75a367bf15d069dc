"""CPU schedules of row reductions (softmax, layer norm, batch statistics): lanes, unrolling, independent accumulators.

Where rows lie along memory, the lanes run along the reduced dimension; else they run along the last output dimension,
and a task takes one register tile of it.
"""

from __future__ import annotations

from dataclasses import replace

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.program import Grid, Program, Red
from jcuts.schedule import fit
from jcuts.schedule.cpu.loop_candidates import TASKS_PER_THREAD, Machine, lanes_of, work

CHAINS = 16
"""Independent accumulators (vectors) per reduction: they hide latency and shorten the sums."""
_FIT = fit.coefficients("cpu", "row_reduction")
UNROLL_SCORES = ((4, 1.0), (2, _FIT.unroll_2_score), (1, _FIT.unroll_1_score))
"""Vectors per step of a row's loop, and the score of such a schedule."""


def schedules(program: Program, machine: Machine, limit: int) -> list[tuple[Program, float]]:
    """Scheduled programs of several phases without a carried value, best estimate first."""
    lanes = lanes_of(program, machine)
    plain = collapse_program(program)
    found: list[tuple[Program, float]] = []
    for unroll, score in UNROLL_SCORES:
        candidate = _column(plain, lanes, unroll, machine) if _lane_axis(plain) else _row(plain, lanes, unroll, machine)
        if all(candidate.digest != c.digest for c, _ in found):
            found.append((candidate, score))
    return found[:limit]


def _lane_axis(program: Program) -> str:
    free = [g.axis for g in program.grid if g.axis not in program.serial]
    return free[0] if free else ""


def _row(program: Program, lanes: int, unroll: int, machine: Machine) -> Program:
    phases = []
    for phase in program.phases:
        if phase.reds:
            last = phase.reds[-1]
            width = lanes
            while width > 2 and width // 2 >= last.extent:
                width //= 2
            count = max(1, min(unroll, -(-last.extent // lanes)))
            reds = (
                *_interleave_accumulators(phase.reds[:-1], CHAINS // count),
                Red(last.name, last.extent, count, True, count),
            )
            phases.append(replace(phase, reds=reds))
        else:
            inner = [a for a in phase.axes if a.name not in program.serial]
            if not inner:
                phases.append(phase)
                continue
            last_axis = inner[-1]
            count = max(1, min(unroll, -(-last_axis.extent // lanes)))
            axes = tuple(replace(a, unroll=count, vector=True) if a.name == last_axis.name else a for a in phase.axes)
            phases.append(replace(phase, axes=axes))
    grid = _row_blocks(program, machine)
    return replace(program, phases=tuple(phases), lanes=lanes, grid=grid, params=(("lanes", lanes), ("unroll", unroll)))


def _interleave_accumulators(reds: tuple[Red, ...], chains: int) -> tuple[Red, ...]:
    """The innermost of ``reds`` in independent chains: a sum of n terms then loses n / chains roundings, not n."""
    plain = tuple(replace(r, unroll=1, chains=1) for r in reds)
    if not plain or chains < 2 or plain[-1].extent < 2:
        return plain
    chains = min(chains, plain[-1].extent)
    return (*plain[:-1], replace(plain[-1], unroll=chains, chains=chains))


def _row_blocks(program: Program, machine: Machine) -> tuple[Grid, ...]:
    total = sum(work(p) for p in program.phases)
    tasks = (
        1 if machine.threads == 1 or total < 30_000 else machine.threads * (TASKS_PER_THREAD if total > 500_000 else 1)
    )
    grid = []
    for g in program.grid:
        count = min(tasks, g.extent)
        block = -(-g.extent // count)
        grid.append(Grid(g.axis, g.extent, block))
        tasks = max(1, tasks // -(-g.extent // block))
    return tuple(grid)


def _column(program: Program, lanes: int, unroll: int, machine: Machine) -> Program:
    lane = _lane_axis(program)
    extent = next(g.extent for g in program.grid if g.axis == lane)
    while lanes > 2 and lanes // 2 >= extent:
        lanes //= 2
    count = max(1, min(unroll, -(-extent // lanes)))
    block = count * lanes
    phases = []
    for phase in program.phases:
        names = [a.name for a in phase.axes]
        order = [n for n in names if n != lane]
        place = names.index(lane)
        serial = [n for n in order if n in program.serial]
        rest = [n for n in order if n not in program.serial]
        arranged = [*serial, *rest, lane] if not phase.reds else [*serial, lane, *rest]
        by_name = {a.name: a for a in phase.axes}
        axes = tuple(replace(by_name[n], unroll=count, vector=True) if n == lane else by_name[n] for n in arranged)
        reds = _interleave_accumulators(phase.reds, CHAINS // count)
        assert place >= 0
        phases.append(replace(phase, axes=axes, reds=reds))
    grid = tuple(Grid(g.axis, g.extent, block if g.axis == lane else 1) for g in program.grid)
    buffers = tuple(replace(b, shape=(block + lanes,)) if b.role == "local" else b for b in program.buffers)
    return replace(
        program,
        phases=tuple(phases),
        lanes=lanes,
        grid=grid,
        buffers=buffers,
        params=(("lanes", lanes), ("unroll", unroll)),
    )
