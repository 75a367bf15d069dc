"""The device function of a kernel family's tile, apart from its launch: what every kernel class has in common.

`families.FAMILIES` has the class of each family.  A launch decodes block and thread numbers into the task record and
emits one tile per task; a persistent kernel may emit the same tile in a loop over tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program


class TileKernel(Protocol):
    """Emits what one thread does for one tile, at the builder's position.

    Args:
        builder: of the LLVM function that the tile becomes part of.
        program: the scheduled program (one kernel of it, see `split_kernels`).
        tile: the family's record of the block or thread tile, as `CudaSource.variants` has it.
        buffers: operands and results by name.
        pointers: the address (i64) of each.
        integers: the task record (i32): the numbers that say which tile and which thread of it, by the names of
            `CudaSource.record`.
        symbol: prefix of the names of static shared memory; different for each tile of a module.
        shared: address (i32) of ``CudaSource.shared`` bytes of dynamic shared memory, aligned to
            ``CudaSource.alignment``; 0 where the family has static shared memory alone, or none.
    """

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: Any,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None: ...

    def emit(self) -> None:
        """The whole tile; emission ends in the block where the threads go on."""
        ...
