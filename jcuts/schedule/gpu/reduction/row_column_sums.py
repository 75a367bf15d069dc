"""Schedules of row reductions with column sums: teams walk over rows, column sums stay in registers (`team_columns`).

``blocks`` is the most blocks of the grid.  One wave of resident blocks leaves the fewest partial sums; several waves
even out their times.
"""

from __future__ import annotations

from collections.abc import Iterator

from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.column_sums import SUMS
from jcuts.lower.patterns.row_column_sums import TEMPLATE, split_phases
from jcuts.schedule.gpu import family_statistics as stats
from jcuts.schedule.gpu.family import ScheduleFamily
from jcuts.schedule.gpu.launch_shapes import row_column_sums_launch
from jcuts.schedule.gpu.launch_stats import memory_score
from jcuts.schedule.gpu.machine import RESIDENT, SHARED, WARP, Candidate, GpuMachine, narrowest, scheduled, vectors
from jcuts.schedule.gpu.reduction.row import TEAMS

FORM = "team_columns"
BLOCKS = (128, 256)
"""Threads of a block whose teams are at most a warp."""
QUARTERS = (1, 2, 4, 8, 16)
"""Quarters of a wave of resident blocks: less than one wave where there are few rows."""
EACH = 2
"""Schedules of teams of one size."""


def row_column_sums(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of teams of 8 to 1,024 threads whose part of a row stays in registers, with the sums of its columns.

    The best of every team, of different numbers of blocks: models of memory-bound launches do not know what barriers
    between rows cost.
    """
    columns = split_phases(program).columns
    for team in TEAMS:
        found = (
            candidate
            for vector in vectors(columns, narrowest(program))
            if team == TEAMS[0] or columns >= team * vector / 2
            for threads in (BLOCKS if team <= WARP else (team,))
            for candidate in _of_team(program, machine, team, threads, vector)
        )
        best: dict[object, Candidate] = {}
        for made, score in sorted(found, key=lambda one: -one[1]):  # of equal ones the widest accesses come first
            best.setdefault(dict(made.params)["blocks"], (made, score))
        yield from [*best.values()][:EACH]


def _of_team(program: Program, machine: GpuMachine, team: int, threads: int, vector: int) -> Iterator[Candidate]:
    """Schedules of one mapping of threads onto rows, by numbers of blocks."""
    found = split_phases(program)
    pieces, most = -(-found.columns // (team * vector)), -(-found.row_count // (threads // team))
    if pieces * vector > RESIDENT:
        return
    params = (("team", team), ("vector", vector), ("chunks", pieces), (SUMS, len(found.sums.accs)))
    first = row_column_sums_launch(scheduled(program, FORM, threads, *params, ("blocks", most)))[0]
    resident = int(machine.resident_blocks(threads, first.registers, first.shared))
    if first.shared > SHARED or not resident:
        return
    for blocks in sorted({min(most, -(-quarters * resident * machine.sms // 4)) for quarters in QUARTERS}):
        made = scheduled(program, FORM, threads, *params, ("blocks", blocks))
        yield made, memory_score(made, stats.ROW_COLUMN_SUMS, machine)


FAMILY = ScheduleFamily(
    "row_column_sums",
    FORM,
    "Row reductions with column sums beside them: blocks walk over rows, column sums stay in registers.",
    "docs/kernels/reduction.md",
    (TEMPLATE,),
    lambda problem: row_column_sums(problem.program, problem.machine) if problem.is_row_column_sums else (),
    statistics=stats.ROW_COLUMN_SUMS,
)
