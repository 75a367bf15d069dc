"""Roofline bound of a scheduled program: the dispatch over CPU and GPU."""

from __future__ import annotations

from jcuts.arch.cpu import CpuArch
from jcuts.estimate.cpu import BoundReport
from jcuts.estimate.cpu import bound as cpu_bound
from jcuts.kernel_ir.program import Program
from jcuts.schedule.cpu.bound import host_arch, work_of
from jcuts.schedule.gpu.bound import GpuBound, memory_bound


def roofline_bound(program: Program, arch: CpuArch | None = None) -> BoundReport | GpuBound:
    """Roofline lower bound on the kernel's time [s]."""
    if "cuda" in dict(program.params):
        return memory_bound(program)
    arch = arch or host_arch()
    return cpu_bound(work_of(program, arch), arch)
