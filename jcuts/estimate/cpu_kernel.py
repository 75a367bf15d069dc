"""Time model of a CPU kernel: predicted time, roofline bound and PUL, all read from one expression of resource terms.

    seconds = launch + longest( busiest core's share of the code's cycles,
                                the work that no code can avoid: FLOP and stores at the ports' peak,
                                compulsory bytes at the likely rate of their level )

The code is the scheduled program's cycle model (`schedule.cpu.cycle_model`), the work that of `estimate.cpu`.

    predicted time   the whole expression
    bound            the amounts of the work at ceilings (`estimate.cpu.bound_of`): never above the predicted time
    PUL              memory ratio * cache ratio * register ratio * SIMD ratio * core balance

    memory ratio     min(1, compute seconds / seconds of the compulsory bytes at the measured rate of their level)
    cache ratio      min(1, compute cycles / cycles of the lines that come from the L2 cache, or from beyond it)
    register ratio   cycles of the FMA ports / cycles of all tiles: load and store ports, latency, spills, tile overhead
    SIMD ratio       compute cycles / cycles of the FMA ports: padded lanes, instructions that are no accumulation
    core balance     even share of the tasks / share of the busiest core

Compute cycles are the useful FLOP at peak; of a kernel without accumulations the FMA ports' cycles.  Source: thesis
3.2, whose shared memory is the core's caches here.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.arch.cpu import CpuArch
from jcuts.estimate import time_model
from jcuts.estimate.cpu import BoundReport, CpuWork, bound_of, busiest_share, work_terms
from jcuts.estimate.time_model import Resource, TimeTerm, longest, on_cores, serial, term

TILES = "tiles"
"""Name of the series of a phase's register tiles in the code's expression: what computes, without cache traffic."""


@dataclass(frozen=True)
class CpuRatios:
    """The factors of a CPU kernel's PUL, each in [0, 1]."""

    memory: float
    cache: float
    register: float
    simd: float
    balance: float

    @property
    def pul(self) -> float:
        """Their product."""
        return self.memory * self.cache * self.register * self.simd * self.balance


@dataclass(frozen=True)
class CpuKernelTime:
    """The model of one call of a kernel.

    Attributes:
        root: the whole expression [cycles]; code: its part that is the scheduled code, of one core for all tasks; work:
            its part that no code can avoid.
        hertz: clock of its cycles [1/s].
    """

    root: TimeTerm
    code: TimeTerm
    work: TimeTerm
    hertz: float

    @property
    def seconds(self) -> float:
        """Predicted time [s]."""
        return self.root.value / self.hertz

    def bound(self, arch: CpuArch) -> float:
        """Lower bound on the time [s]."""
        return self.limits(arch).seconds

    def limits(self, arch: CpuArch) -> BoundReport:
        """The bound with what every resource takes at its ceiling."""
        return bound_of(self.work, arch)


def kernel_time(code: TimeTerm, work: CpuWork, tasks: int, arch: CpuArch, call_seconds: float) -> CpuKernelTime:
    """The model of a kernel.

    Args: code: cycles of one core for all tasks; work: what no code can avoid; tasks: that cores take in turns;
        call_seconds: of a custom call with its hand-over to the thread pool [s].
    """
    share = -(-tasks // arch.cores) / tasks
    least = work_terms(work, arch)
    launch = term(Resource.LAUNCH, call_seconds * arch.frequency)
    root = serial([launch, longest([on_cores(code, share), least])])
    return CpuKernelTime(root, code, least, arch.frequency)


def ratios(time: CpuKernelTime, arch: CpuArch) -> CpuRatios:
    """The factors of PUL of a kernel on a CPU."""
    found = time_model.breakdown(time.code)
    ports = found.get(Resource.COMPUTE.value, 0.0)
    amounts = time_model.amounts_by_unit(time.work)
    flop = {unit: total for (name, unit), (_, total) in amounts.items() if name == Resource.COMPUTE}
    compute = sum(total / arch.flop_per_clock(unit) for unit, total in flop.items()) or ports
    footprint = amounts.get((Resource.DRAM.value, ""), (0.0, 0.0))[1]
    memory = footprint / arch.measured(arch.resident_level(footprint)) * arch.frequency
    moved = max(found.get(name, 0.0) for name in (Resource.L2.value, Resource.L3.value))
    return CpuRatios(
        memory=_share(compute / arch.cores, memory),
        cache=_share(compute, moved),
        register=_share(ports, time_model.named(time.code, TILES)),
        simd=_share(compute, ports),
        balance=_share(1.0 / arch.cores, busiest_share(time.root.parts[1])),
    )


def _share(useful: float, needed: float) -> float:
    """min(1, useful / needed); 1 where nothing is needed."""
    return min(1.0, useful / needed) if needed else 1.0
