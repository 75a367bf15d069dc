"""PUL of a generated GPU kernel: the thesis' product of ratios, from the counts of the kernel's time model.

    PUL = GMRatio * SMRatio * WBRatio * COEF_r                                               (thesis 3.2, equation 3.1)

* GMRatio = min(1, OI / (R_peak / BW_global)): operational intensity of the blocks against the machine's balance; the
  bytes are those that all blocks ask the L2 cache for, as the thesis' transactions are.
* SMRatio = min(1, t_compute / t_shared): FLOP per shared-memory byte, bank conflicts included in the bytes; 1 for
  kernels that keep their data in registers.
* WBRatio = (N_TB / N_SM) / ceil(N_TB / N_SM): blocks of the average SM over those of the busiest one.
* COEF_r: 1 where a multiprocessor holds a block, else 0.

`jcuts.estimate.thesis` has the printed formulas with the thesis' own counts.  PUL ranks; it is no bound (a kernel on
half of the SMs may still saturate the memory): that is `KernelTime.bound`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.arch.gpu import GpuArch
from jcuts.estimate.time_model import KernelTime, Resource, amounts, peak_rate


@dataclass(frozen=True)
class PulRatios:
    """The factors of PUL, each in [0, 1]."""

    gm: float
    sm: float
    wb: float
    r: float

    @property
    def pul(self) -> float:
        """Their product."""
        return self.gm * self.sm * self.wb * self.r


def pul_ratios(time: KernelTime, arch: GpuArch) -> PulRatios:
    """The ratios of a kernel on a GPU."""
    found = amounts(time.root)
    busiest, flop = found.get(Resource.COMPUTE.value) or found.get(
        Resource.ALU.value, (time.flop / arch.num_sm, time.flop)
    )
    compute = flop / arch.peak(time.unit)
    moved = max(found.get(name, (0.0, 0.0))[1] for name in (Resource.L2.value, Resource.DRAM.value))
    shared = found.get(Resource.SMEM.value, (0.0, 0.0))[0] / peak_rate(arch, Resource.SMEM.value, time.unit)
    own = busiest / peak_rate(arch, Resource.COMPUTE.value, time.unit)
    return PulRatios(
        gm=_share(compute, moved / arch.bw_global),
        sm=_share(own, shared),
        wb=min(1.0, flop / arch.num_sm / busiest) if busiest else 1.0,
        r=1.0 if time.fits else 0.0,
    )


def _share(useful: float, needed: float) -> float:
    """min(1, useful / needed); 1 where nothing is needed."""
    return min(1.0, useful / needed) if needed else 1.0
