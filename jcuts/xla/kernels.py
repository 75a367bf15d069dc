"""Scheduled program -> kernel that this process can call: from memory, the object cache, or the compiler."""

from __future__ import annotations

import threading

from jcuts.base.errors import CompileRejected
from jcuts.codegen.artifact import CompiledKernel
from jcuts.dfg.program import Program
from jcuts.xla import objects

_kernels: dict[str, CompiledKernel | CompileRejected] = {}
_lock = threading.RLock()


def kernel_for(program: Program) -> CompiledKernel:
    """The compiled kernel of a program; compiled at most once per process, and once per machine while the cache lasts.

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


def _find(program: Program) -> CompiledKernel | CompileRejected:
    from jcuts.codegen.compile import compile_program, kernel_digest
    from jcuts.codegen.target import host_target

    target = host_target()
    cached = objects.fetch(kernel_digest(program, target))
    if cached is not None:
        return cached
    try:
        kernel = compile_program(program, target)
    except CompileRejected as error:
        return error
    objects.store(kernel)
    return kernel
