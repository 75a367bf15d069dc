"""Schedules of row reductions: a team of threads shares a row and meets by ``shfl.sync`` and shared memory.

Rows are reductions along the dimension that is contiguous in memory (sums, norms, softmax); ``split`` groups of blocks
share a long row, and a second kernel combines their partial results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jcuts.kernel_ir.program import Phase, Program
from jcuts.schedule import fit
from jcuts.schedule.gpu.machine import RESIDENT, Candidate, GpuMachine, loads_of, narrowest, scheduled, vectors

_ROW = fit.coefficients("gpu/reduction", "row")
TEAMS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Cooperating threads of a row."""
ROW_ACCESS = {32: _ROW.access_32_bytes, 16: 1.0, 8: _ROW.access_8_bytes, 4: _ROW.access_4_bytes}
"""Share of the bandwidth, by bytes of an access."""
ROW_TEAMS = {256: _ROW.threads_256_factor, 512: _ROW.threads_512_factor, 1024: _ROW.threads_1024_factor}
"""Factor on a score, by cooperating threads of a row."""


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
    """Schedules whose teams of 8 to 1,024 threads share a row, or one of ``split`` parts of it."""
    rows, length = row_shape(program)
    size = narrowest(program)
    for vector in vectors(length, size):
        share = -(-length // (split * vector)) * vector
        for team in TEAMS:
            pieces = -(-share // (team * vector))
            kept = pieces * vector
            if team > 8 and share < team * vector / 2:
                continue
            most = RESIDENT if len(program.phases) > 1 else max(RESIDENT, 256 // size)
            chunks = pieces if kept <= most else max(1, (8 if len(program.phases) > 1 else 16) // vector)
            threads = max(team, 256 if team <= 32 else team)
            # Measured on an H200: 32 elements per thread in teams of 128 to 256 keep most loads in flight.
            fill = min(1.0, rows * split * team / machine.threads)
            loops = -(-pieces // chunks)
            depth = min(1.0, kept / RESIDENT) if kept <= most else _ROW.looped_depth * min(1.0, 16 / loops)
            # Measured as well: accesses of 8 bytes are as fast, two of 16 side by side leave lines half used.
            access = ROW_ACCESS.get(vector * size, _ROW.access_narrow)
            lost = share / (pieces * team * vector)
            score = _ROW.access_base + _ROW.access_slope * access
            score *= _ROW.occupancy_base + _ROW.occupancy_slope * fill
            score *= _ROW.depth_base + _ROW.depth_slope * depth
            score *= lost
            score *= ROW_TEAMS.get(team, 1.0) * (_ROW.split_factor if split > 1 else 1.0)
            if len(program.phases) > 1 and kept > RESIDENT:
                score *= _ROW.reread_factor  # the row is read again by every phase
            more = (("split", split),) if split > 1 else ()
            yield (
                scheduled(program, "team", threads, ("team", team), ("vector", vector), ("chunks", chunks), *more),
                score,
            )


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
