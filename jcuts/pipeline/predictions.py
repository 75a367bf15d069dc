"""Performance model of a chosen kernel for `explain`: predicted time, roofline bound and PUL, beside the score.

GPU: the time model of the kernel's family (`schedule.gpu.kernel_time`); of memory-bound families with the registers,
shared memory and launches that the assembler reports, where the kernel is compiled.  CPU: the cycle model that ranks
schedules, beside the work that no code can avoid (`schedule.cpu.kernel_time`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jcuts.arch.cpu import CpuArch
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.estimate import cpu_kernel
from jcuts.estimate.kernel_pul import pul_ratios
from jcuts.kernel_ir.program import Program
from jcuts.pipeline.outcome import Outcome, Winner
from jcuts.report.function_report import FunctionReport
from jcuts.schedule.cpu import kernel_time as cpu_kernel_time
from jcuts.schedule.cpu.bound import host_arch
from jcuts.schedule.gpu import kernel_time
from jcuts.schedule.gpu.launch_stats import Taken
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.xla import devices as xla_devices


@dataclass(frozen=True)
class Prediction:
    """What the model says of a kernel; None where it has no such kernel.

    Args: seconds: predicted time; bound: no kernel of this schedule is faster [s]; pul: thesis 3.2, in [0, 1].
    """

    seconds: float | None = None
    bound: float | None = None
    pul: float | None = None


def taken_by(image: bytes) -> list[Taken]:
    """Blocks, threads, registers and shared bytes of every launch of a compiled GPU kernel."""
    return [
        (math.prod(x.grid), math.prod(x.block), x.resources.registers, x.resources.shared + x.shared)
        for x in Image.unpack(image).launches
    ]


def with_predictions(outcome: Outcome) -> FunctionReport:
    """An outcome's report with the model of every chosen kernel.

    Counting a GPU kernel's traffic takes milliseconds: `explain` asks for it, planning does not.
    """
    found = [predict(winner) for winner in outcome.winners]
    subsets = tuple(
        replace(
            subset,
            predicted_seconds=made.seconds,
            pul=made.pul,
            bound_seconds=subset.bound_seconds if made.bound is None else made.bound,
        )
        for subset, made in zip(outcome.report.subsets, found, strict=True)
    )
    programs = tuple(program for program, _ in outcome.winners)
    return replace(outcome.report, subsets=subsets, peaks=peaks(outcome.report.platform), programs=programs)


def peaks(platform: str) -> dict[str, float]:
    """Ceilings of the roofline: 'flop' [FLOP/s] in float32, 'bytes' [byte/s] of device memory; none where unknown."""
    if platform == "cpu":
        return {"flop": host_arch().peak(), "bytes": host_arch().ceiling("dram")}
    if platform not in xla_devices.NAMES:
        return {}
    arch, _ = xla_devices.architecture_of(xla_devices.this())
    return {"flop": arch.peak(), "bytes": arch.bw_global}


def predict(winner: Winner) -> Prediction:
    """The model of a chosen kernel."""
    program, kernel = winner
    if program is None:
        return Prediction()
    if "cuda" not in dict(program.params):
        return of_cpu_schedule(program, host_arch())
    arch, _ = xla_devices.architecture_of(xla_devices.this())
    machine = GpuMachine.of(arch)
    return of_schedule(program, machine, () if kernel is None else taken_by(kernel.object_code))


def of_cpu_schedule(program: Program, arch: CpuArch) -> Prediction:
    """The model of a scheduled CPU program."""
    time = cpu_kernel_time.kernel_time(program, arch)
    return Prediction(time.seconds, time.bound(arch), cpu_kernel.ratios(time, arch).pul)


def of_schedule(program: Program, machine: GpuMachine, taken: Sequence[Taken] = ()) -> Prediction:
    """The model of a scheduled GPU program. Args: taken: its launches as the assembler reports them."""
    time = kernel_time.kernel_time(program, machine, taken)
    if not time.root.value:
        return Prediction()
    pul = pul_ratios(time, machine.arch).pul if kernel_time.fits(taken, machine) else 0.0
    # What the kernels before have just written may be in the L2 cache.
    return Prediction(time.seconds, time.bound(machine.arch, resident=time.compulsory), pul)
