"""Expected gain of tuning a region (a roofline estimate), by which a limited tuning budget is spent.

    saved = traffic(each equation alone) - traffic(the region in one kernel)
    gain  = max(saved, GUESS * time of the region in one kernel)

The traffic is compulsory: every operand read once, every result written once, at the bandwidth of the level of memory
that holds them (`FREE` moves nothing).  So ``saved`` is what fusion can save if XLA fuses nothing, which is too much
where XLA does; and nothing here knows how good XLA's code for a product or a convolution is, so that of these a
constant share is assumed.  It is an order, not a forecast: it needs no candidate and no schedule, only what planning
has.  What is the same in several places counts as often.
"""

from __future__ import annotations

import math
from typing import Any

from jcuts.kernel_ir.compulsory_traffic import compulsory_bytes
from jcuts.schedule.cpu import loop_candidates, time_estimate
from jcuts.schedule.gpu.machine import fastest_memory

FREE = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
"""What XLA does not write out."""
LOOK_UPS = frozenset({"dynamic_slice", "gather"})
"""What reads as much of its first operand as it gives."""
GUESS = 0.5
"""Share of its time that a kernel is assumed to save by a better schedule alone."""
GPU_BALANCE = 64.0
"""Operations that a GPU does while it moves a byte: between what its plain and its matrix units do."""


def seconds(region: Any, *, on_gpu: bool = False) -> float:
    """Seconds that one region is expected to save in one execution, > 0. Args: see `pipeline.computation.Region`."""
    program = region.program
    moved = compulsory_bytes(program)
    eqns = [eqn for eqn in region.closed.jaxpr.eqns if eqn.primitive.name not in FREE]
    apart = [_moved(eqn) for eqn in eqns]
    if on_gpu:
        work = sum(loop_candidates.work(phase) for phase in program.phases)
        saved = (sum(apart) - moved) / fastest_memory()
        alone = (moved + work / GPU_BALANCE) / fastest_memory()
    else:
        saved = sum(map(_traffic_seconds, apart)) - _traffic_seconds(moved)
        alone = time_estimate.seconds(program)
    return max(saved, GUESS * alone)


def profiled(region: Any, baseline: float) -> float:
    """Seconds that a region on a GPU can save in one execution, >= 0: XLA's time less that of its traffic.

    Args: baseline: XLA's time of it in the whole program [s] (`tune.baseline.xla_profile`).
    """
    return max(0.0, baseline - compulsory_bytes(region.program) / fastest_memory())


def _traffic_seconds(size: float) -> float:
    """Time to move bytes on this CPU [s], without that of a call."""
    return time_estimate.traffic_seconds(size) - time_estimate.CALL_SECONDS


def _moved(eqn: Any) -> int:
    """Bytes that an equation reads and writes: of a table it reads as many as it writes."""
    if eqn.primitive.name in LOOK_UPS:
        return _bytes([*eqn.invars[1:], *eqn.outvars]) + _bytes(eqn.outvars)
    return _bytes([*eqn.invars, *eqn.outvars])


def _bytes(atoms: list[Any]) -> int:
    shaped = {id(a): a.aval for a in atoms if hasattr(a.aval, "shape")}
    return sum(math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0) for aval in shaped.values())
