"""Launch statistics of a GPU kernel for the PUL score: 32-byte sectors moved, bytes in flight, operations.

What a launch moves and keeps in flight is its kernel family's to say (`schedule.gpu.families`, ``statistics``).
"""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.arch.gpu import GpuArch
from jcuts.estimate.gpu_kernel import SECTOR, LaunchScore, LaunchUse, score
from jcuts.kernel_ir.program import Program
from jcuts.schedule.cpu.loop_candidates import work
from jcuts.schedule.gpu.families import family_of
from jcuts.schedule.gpu.family import FamilyStatistics
from jcuts.schedule.gpu.traffic import LINE, WIDEST, compulsory

Taken = tuple[int, int, int, int]
"""Blocks, threads, registers and shared bytes of one launch, as the compiled kernel says."""


def score_of(program: Program, taken: Sequence[Taken], arch: GpuArch) -> LaunchScore:
    """PUL of a compiled program. Args: taken: one entry per launch, in order."""
    return score(launch_stats(program, taken), arch, unit=unit_of(program))


def unit_of(program: Program) -> str:
    """The compute unit that does the work."""
    return family_of(program).statistics.unit(program)


def launch_stats(program: Program, taken: Sequence[Taken]) -> list[LaunchUse]:
    """The launches in numbers: the first does the work; later ones combine partial results of a split."""
    flop = float(sum(work(p) for p in program.phases))
    statistics = family_of(program).statistics
    if statistics.kernels is not None:
        parts = zip(statistics.kernels(program), taken, strict=True)
        return [_independent_kernel(statistics, program, part, one) for part, one in parts]
    found = []
    partial = 0.0
    for number, (blocks, threads, registers, shared) in enumerate(taken):
        if number == 0:
            moved, lines, active = statistics.traffic(program, blocks, threads)
            least = compulsory(program)
            split = int(str(dict(program.params).get("split", 1)))
            if len(taken) > 1:
                partial = float(split * sum(b.size * 4 for b in program.outputs))
                moved, least = moved + partial, least + partial
            under_way = statistics.bytes_in_flight(program) * active
            found.append(LaunchUse(blocks, threads, registers, shared, flop, least, moved, lines, under_way, active))
        else:
            total = partial + float(sum(b.bytes for b in program.outputs))
            found.append(
                LaunchUse(blocks, threads, registers, shared, partial / 4, total, total, total / LINE, float(SECTOR))
            )
    return found


def _independent_kernel(statistics: FamilyStatistics, program: Program, part: Program, taken: Taken) -> LaunchUse:
    """One of several kernels that have operands and results of their own."""
    blocks, threads, registers, shared = taken
    moved = compulsory(part)
    flop = float(sum(work(p) for p in part.phases))
    lines, under_way = moved / LINE, float(WIDEST)
    if statistics.coalescing is not None and any(p.reds for p in part.phases):
        access = statistics.coalescing(program)
        lines, under_way = lines * access.lines, access.under_way
    return LaunchUse(blocks, threads, registers, shared, flop, moved, moved, lines, under_way)
