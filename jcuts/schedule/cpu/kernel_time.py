"""Time model of a scheduled CPU program: predicted seconds, roofline bound and PUL of any template.

The code's terms are those by which schedules are ranked (`schedule.cpu.cycle_model`), beside the work that no code can
avoid (`schedule.cpu.bound`).
"""

from __future__ import annotations

from dataclasses import replace

from jcuts.arch.cpu import CpuArch
from jcuts.estimate import cpu_kernel
from jcuts.estimate.cpu_kernel import CpuKernelTime
from jcuts.kernel_ir.program import Program
from jcuts.schedule.cpu.bound import machine_of, work_of
from jcuts.schedule.cpu.cycle_model import cycle_terms
from jcuts.schedule.cpu.time_estimate import call_seconds


def kernel_time(program: Program, arch: CpuArch) -> CpuKernelTime:
    """The model of a scheduled program on a CPU: phases that run rarely, such as Winograd's check, take no time."""
    machine = machine_of(arch, arch.simd_bits // 8, arch.vector_registers, arch.cores)
    usual = replace(program, phases=tuple(phase for phase in program.phases if not phase.when))
    return cpu_kernel.kernel_time(
        cycle_terms(usual, machine), work_of(program, arch), program.tiles, arch, call_seconds(arch)
    )
