"""Two-level kernel cache: scheduled program -> callable kernel from memory, from the object cache on disk, or by
compiling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from jcuts.base.errors import CompileRejected
from jcuts.codegen.artifact import CompiledKernel
from jcuts.kernel_ir.program import Program
from jcuts.xla import object_cache

_kernels: dict[str, CompiledKernel | CompileRejected] = {}
_lock = threading.RLock()


def kernel_for(program: Program) -> CompiledKernel:
    """The compiled kernel of a program; compiled at most once per process, and once per machine while it stays cached.

    Raises: CompileRejected where it does not compile (remembered).
    """
    with _lock:
        known = _kernels.get(program.digest)
        if known is None:
            known = _find(program)
            _kernels[program.digest] = known
    if isinstance(known, CompileRejected):
        raise known
    return known


def missing(programs: Iterable[Program]) -> list[Program]:
    """The programs whose kernels neither this process nor the object cache holds, each once."""
    found: dict[str, Program] = {}
    with _lock:
        for program in programs:
            if program.digest not in _kernels and program.digest not in found:
                cached = object_cache.fetch(_compiler_of(program)[0])
                if cached is None:
                    found[program.digest] = program
                else:
                    _kernels[program.digest] = cached
    return list(found.values())


def compiled() -> dict[str, CompiledKernel]:
    """The kernels that this process holds, by the digest of their scheduled program."""
    with _lock:
        return {digest: kernel for digest, kernel in _kernels.items() if isinstance(kernel, CompiledKernel)}


def refuse(program: Program, error: CompileRejected) -> None:
    """Records that a program does not compile."""
    with _lock:
        _kernels.setdefault(program.digest, error)


def is_for_gpu(program: Program) -> bool:
    """Whether a program is scheduled for a GPU (`schedule.gpu.candidates`)."""
    return "cuda" in dict(program.params)


def source_text(program: Program) -> str:
    """The numba source of a scheduled program, for dumps."""
    if not is_for_gpu(program):
        from jcuts.codegen.cpu.emit import emit_source

        return emit_source(program).text
    from jcuts.codegen.cuda.launch_source import emit_source as emit_cuda
    from jcuts.codegen.cuda.split_kernels import split_into_kernels

    return "\n".join(emit_cuda(part.program).text for part in split_into_kernels(program)[0])


def _compile(program: Program) -> CompiledKernel:
    from jcuts.codegen.cpu.compile import compile_program  # numba: not needed for what the object cache holds

    return compile_program(program)


def _compiler_of(program: Program) -> tuple[str, Callable[[], CompiledKernel]]:
    """Digest of a program's kernel, and the function that compiles it."""
    if is_for_gpu(program):
        from jcuts.codegen.cuda.compile import compile_program as compile_cuda
        from jcuts.codegen.cuda.compile import kernel_digest as cuda_digest
        from jcuts.xla.devices import target as gpu_target

        device = gpu_target()
        return cuda_digest(program, device), lambda: compile_cuda(program, device)
    from jcuts.codegen.cpu.target import host_target, kernel_digest

    return kernel_digest(program, host_target()), lambda: _compile(program)


def _find(program: Program) -> CompiledKernel | CompileRejected:
    digest, compile_ = _compiler_of(program)
    cached = object_cache.fetch(digest)
    if cached is not None:
        return cached
    try:
        kernel = compile_()
    except CompileRejected as error:
        return error
    object_cache.store(kernel)
    return kernel
