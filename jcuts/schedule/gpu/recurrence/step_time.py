"""Time model of persistent recurrences: launches, and for every step its barriers or flags, operands, arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jcuts.estimate.time_model import KernelTime, Resource, TimeTerm, repeat, serial, term
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule import fit
from jcuts.schedule.gpu.machine import WARP, GpuMachine
from jcuts.schedule.gpu.recurrence import tensor_core
from jcuts.schedule.gpu.recurrence.exchange import FLAGGED_BYTES, exchanged
from jcuts.schedule.gpu.recurrence.parameters import HELD, REPLICAS, is_flagged
from jcuts.schedule.gpu.recurrence.residency import residents, terms_of_thread
from jcuts.schedule.gpu.recurrence.stage_product import columns_in, is_short, mma_stages

_COST = fit.coefficients("gpu/recurrence", "cost")


def points_of(phase: Phase) -> int:
    """Points of a phase's result, in a step."""
    return math.prod(a.extent for a in phase.axes if a.name != STEP)


def products_of(phase: Phase) -> int:
    """Products that a phase adds up, in a step."""
    return len(phase.accs) * points_of(phase) * math.prod(r.extent for r in phase.reds)


def estimated_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The time of a scheduled loop."""
    params = dict(program.params)
    blocks, threads = int(str(params.get("split", 1))), int(str(params["threads"]))
    each = [number for number, phase in enumerate(program.phases) if not phase.once and not phase.last]
    stages = {stage.number: stage for stage in mma_stages(program, blocks, threads)}
    parts = [*_exchange(program, blocks, threads)]
    for number in each:
        if number in stages:
            parts += tensor_core.step_terms(stages[number], machine)
        else:
            parts += _fused_multiply_adds(program, number, machine, blocks, threads)
    steps = next(g.extent for g in program.grid if g.axis == STEP)
    root = serial([repeat(steps, serial(parts, "step")), term(Resource.LAUNCH, _COST.launch_seconds)])
    moved = sum(b.bytes for b in (*program.inputs, *program.outputs))
    return KernelTime(root, unit=tensor_core.unit_of(program), compulsory=moved)


def _exchange(program: Program, blocks: int, threads: int) -> Iterator[TimeTerm]:
    """What passes between the blocks of a step's stages."""
    stages = len({phase.name for phase in program.phases if not phase.once and not phase.last})
    yield term(Resource.BARRIER, _COST.warp_seconds * threads / WARP)
    if not is_flagged(program):
        barrier = _COST.grid_barrier_seconds if blocks > 1 else _COST.block_barrier_seconds
        yield term(Resource.BARRIER, stages * barrier)
        return
    yield term(Resource.BARRIER, _COST.flag_exchange_seconds)
    replicas = int(str(dict(program.params).get(REPLICAS, 1)))
    yield term(Resource.BARRIER, _COST.replica_seconds * (replicas - 1))
    read = FLAGGED_BYTES * sum(b.size // 2 for b in exchanged(program, blocks))
    yield term(Resource.L2, read / _COST.l2_bytes_per_second_sm, read * blocks)


def _fused_multiply_adds(
    program: Program, number: int, machine: GpuMachine, blocks: int, threads: int
) -> Iterator[TimeTerm]:
    """A phase whose products are column reductions, or points without any."""
    phase, params = program.phases[number], dict(program.params)
    flagged, held = is_flagged(program), params.get(HELD) == 1
    still = residents(program, blocks)
    kept = still if held else still[: int(str(params.get("resident", 0)))]
    yield term(Resource.CHAIN, _COST.point_seconds * -(-points_of(phase) // (blocks * threads)))
    rows = points_of(phase) // columns_in(phase)
    share = -(-columns_in(phase) // blocks) / columns_in(phase)
    read = ITEM_SIZE["float32"] * products_of(phase) / max(1, rows) * share
    inside = min(read, sum(one.buffer.bytes for one in kept if one.phase == number))
    loads = 0 if is_short(phase) else terms_of_thread(phase, blocks, threads) * rows * threads
    shared = (0 if held else inside) + (ITEM_SIZE["float32"] * loads if flagged else 0)
    yield term(Resource.SMEM, shared / _COST.shared_bytes_per_second_sm, shared)
    outside = read - inside
    yield term(Resource.L2, outside / _COST.l2_bytes_per_second_sm, outside * blocks)
    if blocks > 1 and not flagged:  # every warp's loads of rows, which the L1 cache has after the first
        yield term(Resource.ISSUE, loads / WARP * _COST.row_load_seconds, loads / WARP)
    warps = max(1.0, products_of(phase) * share / WARP)
    per_cycle = machine.arch.flop_per_clock_sm["ffma"] / (2 * WARP)
    yield term(Resource.ISSUE, warps / (machine.arch.clock * per_cycle), warps)
