"""Schedules of online softmax: blocks of 128 to 1,024 threads read a long row twice, and the time of those reads.

    seconds = time of a memory-bound launch (`estimate.gpu_kernel`) that also takes from DRAM what the L2 cache has lost

The second read goes backwards: a point at the share p of a row is read again after 2 (1 - p) passes.  Meanwhile the
resident blocks, half of them in their first pass and half in their second, fill the cache with (1 - p) times their rows
and results.  Where that exceeds it the point is lost: of all points the share 1 - L2 / (rows + results).  Results that
are written by ``st.global.cs`` leave the cache first, and are taken to displace no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from jcuts.estimate.gpu_kernel import launch_time, resident_blocks
from jcuts.estimate.time_model import KernelTime
from jcuts.kernel_ir.program import Program
from jcuts.schedule.gpu import family_statistics as stats
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.coalescing import online_passes
from jcuts.schedule.gpu.family import ScheduleFamily
from jcuts.schedule.gpu.launch_shapes import row_shape
from jcuts.schedule.gpu.launch_stats import launch_uses, memory_rates
from jcuts.schedule.gpu.machine import ACCESS, Candidate, GpuMachine, narrowest, scheduled, vectors
from jcuts.schedule.gpu.traffic import compulsory

LONG_ROW = 8 << 10
"""Bytes of a row above which one pass competes: shorter rows stay in registers at a good occupancy."""
ONLINE = "online"
"""The parameter that tells its schedules from others of the form."""
STREAMING = ("streaming", 1)
"""The parameter of those that write results by ``st.global.cs``: these leave the L2 cache first."""
TEAMS = (128, 256, 512, 1024)
POINTS = (4, 8, 16)
"""Points that a thread loads at once, and adds to its maximum and sum together."""
MOST = 4


def online_softmax(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of one pass for a maximum and its sum of exponentials, and a second one for the results.

    At most `MOST`, which must not crowd out those of `reduction.row`, whose rows stay in registers or are read more
    often: the best of every team, which decides how many rows are under way at once, and as many with streaming stores
    as without where operands and results do not fit into the L2 cache.
    """
    if row_shape(program)[1] * narrowest(program) <= LONG_ROW:
        return
    kinds: tuple[tuple[tuple[str, object], ...], ...] = ((),)
    if compulsory(program) > machine.arch.l2_bytes and online_passes(program) > 1:
        kinds = ((), (STREAMING,))
    for more in kinds:
        best = [one for team in TEAMS for one in _best(_of_team(program, machine, team, more), 1)]
        yield from _best(best, MOST // len(kinds))


def _of_team(
    program: Program, machine: GpuMachine, team: int, more: tuple[tuple[str, object], ...]
) -> Iterator[Candidate]:
    """Schedules of so many threads per row, as far as a multiprocessor holds them."""
    (_, length), size = row_shape(program), narrowest(program)
    vector = min(vectors(length, size), key=lambda v: (v * size > ACCESS, -v))
    for points in POINTS:
        if points < vector or team * points > length:
            continue
        params = (("team", team), ("vector", vector), ("chunks", points // vector), (ONLINE, 1), *more)
        made = scheduled(program, "team", team, *params)
        time = online_softmax_time(made, machine)
        if time.fits:
            yield made, compulsory(program) / machine.bandwidth / time.seconds


def _best(found: Iterable[Candidate], most: int) -> list[Candidate]:
    return sorted(found, key=lambda candidate: -candidate[1])[:most]


def online_softmax_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Seconds of a scheduled program by their terms, as above."""
    arch, unit = machine.arch, stats.ONLINE_ROWS.unit(program)
    (use,) = launch_uses(program, stats.ONLINE_ROWS, [shape.taken for shape in stats.ONLINE_ROWS.launches(program)])
    fitting = resident_blocks(use, arch)
    read = float(sum(b.bytes for b in program.inputs))
    filling = read if STREAMING[0] in dict(program.params) else compulsory(program)
    between = filling * min(1.0, max(1, fitting) * arch.num_sm / use.blocks)
    lost = max(0.0, 1.0 - arch.l2_bytes / between) * read * (online_passes(program) - 1)
    root = launch_time(replace(use, compulsory=use.compulsory + lost), arch, memory_rates(machine), unit)
    return KernelTime(root, unit=unit, compulsory=memory_bound(program).bytes, fits=fitting > 0)


FAMILY = ScheduleFamily(
    "online_softmax",
    "team",
    "Online softmax of long rows: running maximum and rescaled sum in one pass, merged by `shfl.sync`.",
    "docs/kernels/reduction.md",
    ("rows",),
    lambda problem: online_softmax(problem.program, problem.machine) if problem.is_online_softmax else (),
    required=(ONLINE,),
    statistics=stats.ONLINE_ROWS,
    time=online_softmax_time,
)
