"""Schedules of recurrences on tensor cores: warps of a block, so many that their registers hold a stage's weights.

A schedule is the form's with a parameter `parameters.MMA`.  float32 is rounded to TF32, which is XLA's default
on GPUs too: a loop that asks for more has none of these schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jcuts.estimate.time_model import Resource, TimeTerm, term
from jcuts.kernel_ir.program import Program
from jcuts.schedule import fit
from jcuts.schedule.gpu.machine import WARP, GpuMachine
from jcuts.schedule.gpu.recurrence.parameters import MMA
from jcuts.schedule.gpu.recurrence.stage_product import (
    M_TILE,
    N_TILE,
    MmaStage,
    mma_stages,
    stage_product,
)

WARPS = range(4, 21)
"""Of a block."""
MOST_POINTS = 4
"""Points that a thread finishes."""
UNITS = {"tf32": "tf32_mma", "bf16": "bf16_mma", "f16": "fp16_mma"}
"""The compute unit of each type of operands."""
_COST = fit.coefficients("gpu/recurrence", "cost")


def on_tensor_cores(program: Program, machine: GpuMachine) -> list[Program]:
    """The unscheduled loop, marked with each type of operands that a stage of it may be multiplied in."""
    if not machine.multiplies or dict(program.params).get("precision"):
        return []
    products = [stage_product(program, phase) for phase in program.phases]
    kinds = sorted({product.kind for product in products if product is not None})
    return [replace(program, params=((MMA, kind),)) for kind in kinds if UNITS[kind] in _units(machine)]


def block_sizes(marked: Program, blocks: int) -> Iterator[int]:
    """Threads of a block whose registers hold the weights: the fewest for each number of terms that a warp has."""
    seen: set[tuple[int, ...]] = set()
    for warps in WARPS:
        stages = mma_stages(marked, blocks, warps * WARP)
        shares = tuple(stage.share for stage in stages)
        busy = all(stage.points <= MOST_POINTS * warps * WARP for stage in stages)
        if shares not in seen and busy and all(stage.at_once for stage in stages):
            seen.add(shares)
            yield warps * WARP


def unit_of(program: Program) -> str:
    """The compute unit that a scheduled loop's products are made by."""
    return UNITS.get(str(dict(program.params).get(MMA)), "ffma")


def step_terms(stage: MmaStage, machine: GpuMachine) -> list[TimeTerm]:
    """What a stage takes in a step: its rows from the L2 cache, products, sums of the warps, points."""
    product, sums = stage.product, 2 * stage.sum_bytes  # written and read
    read = product.rows * product.red.extent * product.item * len(product.lefts)
    steps = 2 * stage.share * stage.multiplied
    flop = steps * stage.warps * M_TILE * N_TILE * stage.group  # half a group in a step, FMAs are 2
    rate = machine.arch.flop_per_clock_sm[UNITS[product.kind]] * machine.arch.clock
    points = -(-stage.points // (stage.warps * WARP))
    if stage.blocks > 1:
        rows = term(Resource.L2, read / _COST.l2_bytes_per_second_sm, read * stage.blocks)
    else:
        rows = term(Resource.SMEM, read / _COST.shared_bytes_per_second_sm, read)
    return [
        rows,
        term(Resource.LATENCY, _COST.load_seconds * len(stage.pieces)),
        term(Resource.COMPUTE, flop / rate, flop),
        term(Resource.CHAIN, _COST.mma_seconds * 2 * stage.share + _COST.point_seconds * points),
        term(Resource.SMEM, sums / _COST.shared_bytes_per_second_sm, sums),
        term(Resource.BARRIER, _COST.block_barrier_seconds),
    ]


def _units(machine: GpuMachine) -> frozenset[str]:
    return frozenset(machine.arch.flop_per_clock_sm)
