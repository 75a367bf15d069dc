"""Memory roof of the roofline model: lower bound on a GPU kernel's time from its compulsory traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jcuts.kernel_ir.program import Program
from jcuts.schedule.gpu.machine import (
    fastest_memory,
    loads_of,
)


@dataclass(frozen=True)
class GpuBound:
    """A lower bound on a kernel's time [s], and the bytes that it rests on."""

    seconds: float
    bytes: int


def memory_bound(program: Program) -> GpuBound:
    """Time of the compulsory traffic (all results, and every operand that is certainly read whole) at the fastest GPU's
    bandwidth.

    It holds where operands and results are not in the L2 cache already.
    """
    moved = sum(b.bytes for b in program.outputs)
    for buffer in program.inputs:
        loads = [(p.ranges(), n) for p in program.phases for n in loads_of(p) if n.buffer == buffer.name]
        if any(n.guards or n.index is None or n.index.values() for _, n in loads):
            continue
        # One load must cover it: several may cover the same part.
        covered = max(
            (math.prod(r.get(a, 1) for a in n.index.axes()) for r, n in loads if n.index is not None), default=0
        )
        if covered >= buffer.size:
            moved += buffer.bytes
    return GpuBound(moved / fastest_memory(), moved)
