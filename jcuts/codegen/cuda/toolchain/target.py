"""The CUDA target: compute capability, architecture name (``sm_90``), shared-memory limit of a block."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.arch.sm_limits import LIMITS, SM_90, limits_of
from jcuts.base.errors import UsageError

LEAST_SHARED = min(limits.smem_static_bytes for limits in LIMITS.values())
"""Bytes of shared memory that every GPU allows a block."""
REGISTERS = SM_90.registers_per_sm
"""32-bit registers of a multiprocessor, the same for every compute capability; a block must fit into them."""
GROUPED = (9, 0)
"""The only compute capability with ``wgmma``."""
OLDEST = (7, 5)
"""Oldest compute capability that code is made for: the assembler of CUDA 13 takes no older one."""
AMPERE = (8, 0)
"""From here on there are asynchronous copies, products of TF32, maximum with NaN and rounding to bfloat16.  What is
made for older GPUs is never run by jcuts: nobody has compared it with XLA on one."""


@dataclass(frozen=True)
class CudaTarget:
    """A GPU as the emitter sees it: compute capability (major, minor)."""

    capability: tuple[int, int]

    def __post_init__(self) -> None:
        if self.capability < OLDEST:
            raise UsageError(
                f"compute capability {self.capability[0]}.{self.capability[1]} is older than {OLDEST[0]}.{OLDEST[1]}, "
                "the oldest that the assembler of CUDA 13 takes: no machine code is made for it",
                capability=self.capability,
                oldest=OLDEST,
            )

    @property
    def arch(self) -> str:
        """The assembler's name of the architecture, e.g. ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def max_shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        limits = limits_of(self.capability)
        return LEAST_SHARED if limits is None else limits.smem_per_block_bytes
