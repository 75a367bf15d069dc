"""CPU target description (SIMD width, features), and the digests that name kernels; needs no numba."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.base import keys
from jcuts.kernel_ir.program import ITEM_SIZE, Program


@dataclass(frozen=True)
class CpuTarget:
    """A CPU as the emitter sees it.

    Attributes:
        name: LLVM's CPU name.
        features: LLVM's feature string.
        vector_bytes: width of a vector register [B]: 64 with AVX-512, 32 with AVX2, 16 otherwise.
        registers: number of vector registers.
    """

    name: str
    features: str
    vector_bytes: int
    registers: int

    def lanes(self, dtype: str) -> int:
        """Lanes of one register for a storage type; 16-bit floats are computed in float32."""
        width = max(ITEM_SIZE[dtype], 4) if dtype in ("bfloat16", "float16") else ITEM_SIZE[dtype]
        return max(1, self.vector_bytes // width)


def host_target() -> CpuTarget:
    """The CPU of this machine."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        width, registers = 64, 32
    elif features.get("avx2"):
        width, registers = 32, 16
    elif features.get("neon") or features.get("asimd"):
        width, registers = 16, 32
    else:
        width, registers = 16, 16
    return CpuTarget(llvm.get_host_cpu_name(), features.flatten(), width, registers)


def kernel_digest(program: Program, target: CpuTarget) -> str:
    """Names a kernel in HLO and on disk: program, target, compilers."""
    return keys.cpu_kernel(program.digest, (target.name, target.features, target.vector_bytes))
