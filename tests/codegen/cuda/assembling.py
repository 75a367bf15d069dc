"""Assembles candidates of a fused kernel: most of them, without local memory and within the register file."""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.program import Program


def assert_most_assemble(candidates: Sequence[Program], target: CudaTarget) -> None:
    """At least two of the candidates assemble, in one launch each, and none that does takes local memory."""
    made = 0
    for candidate in candidates:
        try:
            (launch,) = Image.unpack(compiler.compile_program(candidate, target).object_code).launches
        except CompileRejected as error:  # assemblers differ: tuning leaves such schedules out
            assert "local memory" in error.message
            continue
        made += 1
        assert launch.resources.stack == 0 and launch.block[0] * launch.resources.registers <= 65536
    assert made > 1
