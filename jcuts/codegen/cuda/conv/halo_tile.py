"""Base tile of the persistent ``wgmma`` kernels: halo of activation pixels in shared memory, several output tiles per
block.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernelTile
from jcuts.codegen.cuda.gemm.wgmma_smem_tile import WgmmaSmemTile
from jcuts.codegen.cuda.ptx import wgmma


@dataclass(frozen=True)
class HaloTile(MmaKernelTile):
    """Block tile of a kernel with a resident halo, or several output tiles per block (persistent), or both.

    Attributes:
        left, right: shared-memory tiles of the operands; the left one as its results lie.
        span: pixels of one run (the halo); 0 where none are kept.
        kept: runs in shared memory.
        rounds: output tiles that a block computes one after the other.
    """

    left: WgmmaSmemTile
    right: WgmmaSmemTile
    span: int
    kept: int
    rounds: int

    @property
    def run(self) -> int:
        """Bytes of a run of pixels (halo)."""
        return self.span * wgmma.LINE

    @property
    def ring(self) -> int:
        """Bytes of all pipeline stages in shared memory."""
        return self.stage * self.stages

    @property
    def kept_until(self) -> int:
        """End offset [B] of stages, runs of pixels and the line of zeros."""
        return self.ring + (self.run * self.kept + wgmma.LINE if self.span else 0)

    @property
    def alignment(self) -> int:
        """Alignment [B] of the shared memory."""
        return wgmma.ATOM

    @property
    def rows(self) -> int:
        """Output tiles along the rows."""
        return -(-self.left.extent // self.left.size)

    @property
    def columns(self) -> int:
        """Output tiles along the columns."""
        return -(-self.right.extent // self.right.size)
