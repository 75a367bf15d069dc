"""Schedules of persistent recurrences: one block where a step is small, else a block per SM and a grid barrier a stage.

Blocks are never more than the GPU has SMs, one on each: all must be resident at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jcuts.estimate.time_model import KernelTime, Resource, repeat, serial, term
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.lower.recurrence.program import STEP, TEMPLATE
from jcuts.schedule import fit
from jcuts.schedule.gpu.machine import SHARED, WARP, Candidate, GpuMachine, scheduled
from jcuts.schedule.gpu.recurrence.residency import (
    columns_of,
    is_short,
    residents,
    shared_layout,
    terms_at_once,
    terms_of_thread,
)

FORM = "recurrence"
"""The value of the schedule parameter ``cuda``."""
THREADS = (256, 512)
"""Of a block of a grid."""
ALONE = (32, 128, 256, 512)
"""Of a block that runs all steps."""
FLIGHT = (4, 16, 64)
"""Terms of a product that a thread loads at once."""
PARTIAL = 48 << 10
"""Bytes of shared memory that sums of a block's threads may take beside what is resident."""
COLUMNS = (1, 2, 4, 8, 16)
"""Columns of a block of a grid."""
MOST_SUMS = 64
"""Sums of a thread: rows times products side by side."""
MOST_ALONE = 1 << 16
"""Products of a step, at most, that one block is tried for."""
_COST = fit.coefficients("gpu/recurrence", "cost")


def recurrence_schedules(program: Program, machine: GpuMachine) -> list[Candidate]:
    """Schedules of a loop, best first, with the share of the best's speed."""
    wide = (phase for phase in program.phases if not is_short(phase) and _sums(phase) > MOST_SUMS)
    if program.template != TEMPLATE or any(wide):
        return []
    found = [(made, estimated_time(made, machine).seconds) for made in _space(program, machine)]
    found.sort(key=lambda pair: (pair[1], pair[0].digest))
    return [(made, found[0][1] / seconds) for made, seconds in found]


def _space(program: Program, machine: GpuMachine) -> Iterator[Program]:
    products = sum(_work(phase) for phase in program.phases)
    few = any(p.reds and is_short(p) for p in program.phases)
    most = THREADS[0] if few else THREADS[-1]  # a thread's own loops over few terms are unrolled, and want registers
    small = products <= MOST_ALONE and sum(buffer.bytes for buffer in program.locals) <= SHARED
    widest = max(_columns(phase) for phase in program.phases)
    grids = [n for columns in COLUMNS if 1 < (n := -(-widest // columns)) <= machine.sms]
    for blocks in (1, *(grids or [machine.sms])):
        if (blocks == 1 and not small) or max(columns_of(phase, blocks) for phase in program.phases) > most:
            continue
        for threads in ALONE if blocks == 1 else THREADS:
            if threads <= most and all(_fits(phase, blocks, threads) for phase in program.phases):
                for flight in _flights(program, blocks, threads):
                    yield scheduled(program, FORM, threads, *_parameters(program, machine, blocks, flight))


def _fits(phase: Phase, blocks: int, threads: int) -> bool:
    """Whether a block has a thread for every point of its columns."""
    return is_short(phase) or _points(phase) // _columns(phase) * columns_of(phase, blocks) <= threads


def _flights(program: Program, blocks: int, threads: int) -> list[int]:
    """Terms that threads load at once, those that make a difference."""
    products = [phase for phase in program.phases if not is_short(phase)]
    found = {tuple(terms_at_once(p, blocks, threads, flight) for p in products): flight for flight in reversed(FLIGHT)}
    return sorted(found.values())


def _parameters(program: Program, machine: GpuMachine, blocks: int, flight: int) -> list[tuple[str, object]]:
    """Of a schedule besides its threads; of what does not change as much is resident as shared memory holds."""
    most, count = machine.limits.smem_per_block_bytes - PARTIAL, len(residents(program, blocks))
    while count and shared_layout(program, blocks, resident=count)[1] > most:
        count -= 1
    split = [("split", blocks)] if blocks > 1 else []
    return [("flight", flight), *split, *([("resident", count)] if count else [])]


def _columns(phase: Phase) -> int:
    return phase.axes[-1].extent if phase.axes and phase.axes[-1].name != STEP else 1


def _points(phase: Phase) -> int:
    return math.prod(a.extent for a in phase.axes if a.name != STEP)


def _sums(phase: Phase) -> int:
    """Sums of a thread that has all rows of a column."""
    return len(phase.accs) * _points(phase) // _columns(phase)


def _work(phase: Phase) -> int:
    return len(phase.accs) * _points(phase) * math.prod(r.extent for r in phase.reds)


def _steps(program: Program) -> int:
    return next(g.extent for g in program.grid if g.axis == STEP)


def _stages(program: Program) -> int:
    return len({phase.name for phase in program.phases if not phase.once and not phase.last})


def estimated_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The model: launches, and for every step its stages' barriers, operands from the L2 cache and arithmetic."""
    params = dict(program.params)
    blocks, threads = int(str(params.get("split", 1))), int(str(params["threads"]))
    each = [(n, phase) for n, phase in enumerate(program.phases) if not phase.once and not phase.last]
    flight = int(str(params["flight"]))
    kept = residents(program, blocks)[: int(str(params.get("resident", 0)))]
    barrier = _COST.grid_barrier_seconds if blocks > 1 else _COST.block_barrier_seconds
    parts = [term(Resource.BARRIER, barrier * _stages(program))]
    for number, phase in each:
        waves = -(-_points(phase) // (blocks * threads))
        if not is_short(phase) and phase.reds:
            trips = -(-terms_of_thread(phase, blocks, threads) // terms_at_once(phase, blocks, threads, flight))
            parts.append(term(Resource.LATENCY, _COST.load_seconds * trips))
        parts.append(term(Resource.CHAIN, _COST.point_seconds * waves))
        columns = -(-_columns(phase) // blocks)
        share = columns / _columns(phase)
        read = ITEM_SIZE["float32"] * _work(phase) / max(1, _points(phase) // _columns(phase)) * share
        inside = min(read, sum(one.buffer.bytes for one in kept if one.phase == number))
        parts.append(term(Resource.SMEM, inside / _COST.shared_bytes_per_second_sm, inside))
        parts.append(term(Resource.L2, (read - inside) / _COST.l2_bytes_per_second_sm, (read - inside) * blocks))
        warps = max(1.0, _work(phase) * share / WARP)
        per_cycle = machine.arch.flop_per_clock_sm["ffma"] / (2 * WARP)
        parts.append(term(Resource.ISSUE, warps / (machine.arch.clock * per_cycle), warps))
    root = serial([repeat(_steps(program), serial(parts, "step")), term(Resource.LAUNCH, _COST.launch_seconds)])
    moved = sum(b.bytes for b in (*program.inputs, *program.outputs))
    return KernelTime(root, compulsory=moved)
