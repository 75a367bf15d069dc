"""Launch statistics of a memory-bound GPU kernel: 32-byte sectors moved, bytes in flight, operations; its time model.

What a launch moves and keeps in flight is its kernel family's to say (`schedule.gpu.families`, ``statistics``).
"""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.estimate.gpu_kernel import SECTOR, LaunchUse, MemoryRates, launch_time, resident_blocks
from jcuts.estimate.time_model import KernelTime, serial
from jcuts.kernel_ir.program import Program
from jcuts.schedule import fit
from jcuts.schedule.cpu.loop_candidates import work
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.family_statistics import FamilyStatistics
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.schedule.gpu.traffic import LINE, WIDEST, compulsory

LEAST_SCORE = fit.coefficients("gpu/reduction", "candidates").score_floor
"""Of a schedule that does not fit, or moves nothing."""
Taken = tuple[int, int, int, int]
"""Blocks, threads, registers and shared bytes of one launch, as the compiled kernel says."""


def memory_rates(machine: GpuMachine) -> MemoryRates:
    """Fitted coefficients of memory-bound launches."""
    return machine.record("gpu/reduction", "memory_bound", MemoryRates)


def memory_time(
    program: Program, statistics: FamilyStatistics, machine: GpuMachine, taken: Sequence[Taken] = ()
) -> KernelTime:
    """Seconds of a memory-bound kernel by their terms (`estimate.gpu_kernel`).

    Args: statistics: of its family; taken: its launches as the assembler reports them, by default estimated.
    """
    rates, unit = memory_rates(machine), statistics.unit(program)
    taken = taken or [shape.taken for shape in statistics.launches(program)]
    uses = launch_uses(program, statistics, taken)
    root = serial([launch_time(use, machine.arch, rates, unit) for use in uses])
    fits = all(resident_blocks(use, machine.arch) for use in uses)
    return KernelTime(root, unit=unit, compulsory=memory_bound(program).bytes, fits=fits)


def memory_score(program: Program, statistics: FamilyStatistics, machine: GpuMachine) -> float:
    """Share of the memory's bandwidth that a schedule of a memory-bound family is to reach, > 0: its ranking score."""
    time = memory_time(program, statistics, machine)
    whole = compulsory(program) / machine.bandwidth
    return whole / time.seconds if whole and time.fits else LEAST_SCORE


def launch_uses(program: Program, statistics: FamilyStatistics, taken: Sequence[Taken]) -> list[LaunchUse]:
    """The launches in numbers: the first does the work; later ones combine partial results of a split."""
    flop = float(sum(work(p) for p in program.phases))
    if statistics.kernels is not None:
        parts = zip(statistics.kernels(program), taken, strict=True)
        return [_independent_kernel(statistics, program, part, one) for part, one in parts]
    found = []
    partial = made = 0.0
    for number, (blocks, threads, registers, shared) in enumerate(taken):
        if number == 0:
            moved, lines, active = statistics.traffic(program, blocks, threads)
            least = compulsory(program)
            if len(taken) > 1:
                partial, made = statistics.partial_results(program, blocks)
                moved, least = moved + partial, least + partial
            under_way = statistics.bytes_in_flight(program) * active
            found.append(LaunchUse(blocks, threads, registers, shared, flop, least, moved, lines, under_way, active))
        else:
            total = partial + made
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
