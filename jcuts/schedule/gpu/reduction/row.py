"""Schedules of row reductions: a team of threads shares a row and meets by ``shfl.sync`` and shared memory.

Rows are reductions along the dimension that is contiguous in memory (sums, norms, softmax); ``split`` groups of blocks
share a long row, and a second kernel combines their partial results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jcuts.kernel_ir.program import Phase, Program
from jcuts.schedule.gpu import family_statistics as stats
from jcuts.schedule.gpu.launch_shapes import row_shape
from jcuts.schedule.gpu.launch_stats import memory_score
from jcuts.schedule.gpu.machine import RESIDENT, Candidate, GpuMachine, loads_of, narrowest, scheduled, vectors

TEAMS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Cooperating threads of a row."""


def reduces_rows(phase: Phase) -> bool:
    """Whether the reduced points of an output lie next to each other (else neighbouring outputs do)."""
    last = phase.reds[-1].name
    strides = [n.index.stride(last) for n in loads_of(phase) if n.index is not None and n.index.stride(last) != 0]
    return not phase.axes or any(s == 1 for s in strides) or not strides


def row_reduction(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of a single reduction along rows, also split over the grid where rows are few."""
    phase = program.phases[0]
    yield from row_reduction_teams(program, machine, 1)
    length = math.prod(r.extent for r in phase.reds)
    rows = math.prod(a.extent for a in phase.axes)
    if any(acc.index_dtype for acc in phase.accs):
        return
    wanted = machine.threads / max(1, rows)
    counts = {min(4096, int(min(wanted, length / per_thread)) // 256 * 2) for per_thread in (16, 64)}
    counts |= {k * machine.sms for k in (2, 4, 8) if rows * 16 <= machine.sms and length >= 4096 * k * machine.sms}
    for count in sorted(counts):
        if count > 1:
            yield from row_reduction_teams(program, machine, count)


def row_reduction_teams(program: Program, machine: GpuMachine, split: int) -> Iterator[Candidate]:
    """Schedules whose teams of 8 to 1,024 threads share a row, or one of ``split`` parts of it, ranked by the model of
    memory-bound launches (`estimate.gpu_kernel`)."""
    _, length = row_shape(program)
    size = narrowest(program)
    most = RESIDENT if len(program.phases) > 1 else max(RESIDENT, 256 // size)
    for vector in vectors(length, size):
        share = -(-length // (split * vector)) * vector
        for team in TEAMS:
            pieces = -(-share // (team * vector))
            if team > 8 and share < team * vector / 2:
                continue
            whole = pieces * vector <= most
            chunks = pieces if whole else max(1, (8 if len(program.phases) > 1 else 16) // vector)
            threads = max(team, 256 if team <= 32 else team)
            more = (("split", split),) if split > 1 else ()
            params = (("team", team), ("vector", vector), ("chunks", chunks), *more)
            made = scheduled(program, "team", threads, *params)
            yield made, memory_score(made, stats.ROWS, machine)
