"""Parallel compilation of kernels that a plan needs besides tuned ones, such as one that writes into a larger array.

A compilation keeps one core busy for about a second: the session's processes compile in parallel, while candidates are
checked, into the object cache, where planning finds the kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from jcuts.base import knobs
from jcuts.base.errors import CandidateRejected, CompileRejected
from jcuts.kernel_ir.program import Program
from jcuts.tune.parent.worker_pool import Answer, WorkerPool
from jcuts.tune.parent.worker_session import COMPILE, WorkerSession, current_worker_session, workers_of

_log = logging.getLogger("jcuts.tune")


def submit_extra_kernels(pool: WorkerPool, programs: Iterable[Program]) -> list[Program]:
    """Lets the processes of a pool compile programs for this GPU that nobody has compiled, and gives these."""
    from jcuts.xla import devices as xla_devices
    from jcuts.xla import kernel_cache

    todo = kernel_cache.missing(program for program in programs if kernel_cache.is_for_gpu(program))
    for program in todo:

        def done(answer: Answer | CandidateRejected, program: Program = program) -> None:
            if isinstance(answer, CompileRejected):
                kernel_cache.refuse(program, answer)

        capability = list(xla_devices.target().capability)
        request = {"op": "kernel", "program": program.to_text(), "capability": capability}
        pool.submit(COMPILE, request, knobs.current().tune_timeout_s, done)
    return todo


def compile_ahead(session: WorkerSession, programs: Iterable[Program]) -> None:
    """Lets the processes of a session begin to compile programs, each once."""
    todo = [program for program in programs if program.digest not in session.ahead]
    session.ahead.update(program.digest for program in todo)
    if todo:
        pool = session.pool("cuda", workers_of())
        submit_extra_kernels(pool, todo)
        pool.poll()


def compile_kernels(programs: Iterable[Program]) -> None:
    """Compiles programs at once, if the processes of a session are at hand; else `kernel_for` does, one by one."""
    session = current_worker_session()
    if session is None or (pool := session.made.get(("cuda", workers_of()))) is None:
        return
    start = time.perf_counter()
    if todo := submit_extra_kernels(pool, programs):
        pool.drain()
        told = ", ".join(f"{program.template} {program.digest[:10]}" for program in todo)
        _log.info("%d kernels besides those that were tuned: %.2f s (%s)", len(todo), time.perf_counter() - start, told)
