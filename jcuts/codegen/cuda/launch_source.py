"""numba.cuda source of a launch: grid and thread index decoding in Python around one intrinsic with the
thread's code.
"""

from __future__ import annotations

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.families import kernel_family_of
from jcuts.codegen.cuda.launch_writer import CudaSource, LaunchSourceWriter
from jcuts.codegen.cuda.ptx.global_memory import LIMIT
from jcuts.kernel_ir.program import Program

MAX_THREADS = 1024


def emit_source(program: Program) -> CudaSource:
    """The numba.cuda source of one kernel (a part, see `codegen.cuda.split_kernels`)."""
    family, threads = kernel_family_of(program), int(str(dict(program.params).get("threads", 0)))
    if not 1 <= threads <= MAX_THREADS:
        raise CompileRejected(f"{program.name}: no schedule for a GPU ({program.params})")
    for buffer in program.buffers:
        if buffer.size > LIMIT:
            raise CompileRejected(f"{program.name}: {buffer.name} has {buffer.size} elements, indices reach {LIMIT}")
    return family.launch(LaunchSourceWriter(program, threads))
