"""Time model of a scheduled GPU program: predicted seconds, roofline bound and PUL of any kernel family.

`kernel_time` asks the family (`schedule.gpu.families`, ``time``); the expression that it returns is the one by which
its enumeration ranks (`estimate.time_model`).
"""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.estimate.gpu_kernel import LaunchUse, resident_blocks
from jcuts.estimate.time_model import KernelTime
from jcuts.kernel_ir.program import Program
from jcuts.schedule.gpu import launch_stats as stats
from jcuts.schedule.gpu.families import family_of
from jcuts.schedule.gpu.launch_stats import Taken
from jcuts.schedule.gpu.machine import GpuMachine


def kernel_time(program: Program, machine: GpuMachine, taken: Sequence[Taken] = ()) -> KernelTime:
    """The model of a scheduled program on a GPU.

    Args: taken: the launches as the assembler reports them; families that are modelled from their tiles ignore them.
    Raises: CompileRejected where the schedule's parameters are no family's.
    """
    family = family_of(program)
    if family.time is not None:
        return family.time(program, machine)
    return stats.memory_time(program, family.statistics, machine, taken)


def fits(taken: Sequence[Taken], machine: GpuMachine) -> bool:
    """COEF_r: whether a multiprocessor holds a block of every launch that the assembler reports."""
    return all(resident_blocks(LaunchUse(*one, 0.0, 0.0, 0.0, 0.0, 0.0), machine.arch) for one in taken)


def launch_stats(program: Program, taken: Sequence[Taken]) -> list[LaunchUse]:
    """The launches of a scheduled program in numbers. Args: taken: one entry per launch, in order."""
    return stats.launch_uses(program, family_of(program).statistics, taken)


def unit_of(program: Program) -> str:
    """The compute unit that does the work, as `GpuArch.flop_per_clock_sm` names it."""
    return family_of(program).statistics.unit(program)
