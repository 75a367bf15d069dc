"""Cycle model of ``mma.sync`` and SIMT GEMMs, vectorised over all tiles of a product (`gemm.cost` has what is common).

`warp_times` builds one expression (`estimate.time_model`) whose values are arrays of one number per tile; `warp_time`
leaves out what a single tile has not.
"""

from __future__ import annotations

import math
from typing import Any

from jcuts.estimate import batch
from jcuts.estimate.time_model import Resource, TimeTerm, of_schedule, overlap, per_sm, repeat, serial, term
from jcuts.lower.patterns.gemm import GemmOperand, k_tiles_per_split
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm import smem_layout_f64
from jcuts.schedule.gpu.gemm.cluster_exchange import gathered_by_warps, remote_loads
from jcuts.schedule.gpu.gemm.cost import (
    EVEN,
    FMA_EVEN,
    STEP,
    CostCoefficients,
    beside_memory,
    global_bytes,
    l2_amount,
    occupancy,
)
from jcuts.schedule.gpu.gemm.problem import GemmProblem, MmaTile, MmaTiles
from jcuts.schedule.gpu.machine import WARP

LANES = (4, 8)
"""Lanes of a warp that each take a row, and a column."""
OWN_REGISTERS = fit.coefficients("gpu/gemm", "mma_registers")
"""Registers of a thread besides its accumulators."""
FMA_REGISTERS = fit.coefficients("gpu/gemm", "ffma_registers")
DOUBLE_REGISTERS = fit.coefficients("gpu/gemm", "mma_float64_registers")
WARP_COST = fit.coefficients("gpu/gemm", "mma_warp")
"""What one warp waits for itself, and what warps that add up take."""


def rates_of(counter: GemmProblem) -> CostCoefficients:
    """Of products by warps.

    What shared memory gives fused multiply-adds counts for every lane that gets it (`LANES`): it passes the same port
    for each.
    """
    machine = counter.machine
    if counter.fma:
        return machine.record("gpu/gemm", "ffma", CostCoefficients)
    if counter.double:
        return machine.record("gpu/gemm", "mma_float64", CostCoefficients)
    if counter.item == 2:
        return machine.record("gpu/gemm", "mma_16bit", CostCoefficients)
    return machine.record("gpu/gemm", "mma_tf32", CostCoefficients)


def smem_bytes(sides: tuple[GemmOperand, GemmOperand], tiling: MmaTile | MmaTiles) -> Any:
    """Bytes of shared memory of one tile of both operands, with what keeps its lines in different banks."""
    total = 0
    for side, size in zip(sides, (tiling.rows, tiling.columns), strict=True):
        if side.item == smem_layout_f64.ITEM:
            total = total + smem_layout_f64.bytes_of(side, size, tiling.terms)
            continue
        lines, length = (size, tiling.terms) if side.along_terms else (tiling.terms, size)
        words, lone = length * side.item // 4, not side.along_terms and side.item == 4
        total = total + 4 * lines * (words + ((8 if lone else 4) - words) % (32 if lone else 8))
    return total


def block_smem(counter: GemmProblem, tiling: MmaTile | MmaTiles) -> Any:
    """Bytes of shared memory of a block, with padding."""
    alone = tiling.warps[2] * tiling.cluster == 1
    meet = batch.where(alone, 0, counter.total * tiling.rows * tiling.columns * tiling.warps[2])
    return batch.maximum(smem_bytes(counter.sides, tiling) * tiling.stages, meet)


def registers_of(counter: GemmProblem, tiling: MmaTile | MmaTiles) -> Any:
    """Registers that a thread would take, without the addresses of its copies."""
    taken = FMA_REGISTERS if counter.fma else DOUBLE_REGISTERS if counter.double else OWN_REGISTERS
    high, wide = tiling.rows // tiling.warps[0], tiling.columns // tiling.warps[1]
    return taken.base + high * wide / WARP * counter.total / 4 + taken.per_row * high + taken.per_column * wide


def warp_time(counter: GemmProblem, tiling: MmaTile) -> TimeTerm:
    """Cycles of a launch by warps, and of the second one where terms are split."""
    return of_schedule(warp_times(counter, tiling), 0)


def warp_times(counter: GemmProblem, tiling: MmaTile | MmaTiles) -> TimeTerm:
    """The same of all tiles of a batch: parts that a tile has not take and do nothing there."""
    rates = rates_of(counter)
    rows, columns, deep, count = tiling.rows, tiling.columns, tiling.warps[2], math.prod(tiling.warps)
    alone = bool(counter.fma) or counter.double  # nothing but the products of all warps decides
    registers = batch.minimum(registers_of(counter, tiling), OWN_REGISTERS.maximum)
    tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
    held = batch.maximum(1, counter.machine.resident_blocks(tiling.threads, registers, block_smem(counter, tiling)))
    blocks, even = tiles * tiling.split * tiling.cluster, FMA_EVEN if alone else EVEN
    beside, waves = occupancy(blocks, tiling.cluster, held, counter.machine.sms, even)
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    inner = overlap(rates.overlap_remainder, _warp_limits(counter, tiling, beside, share))
    made, gather = 1.0 * counter.total * rows * columns, gathered_by_warps(tiling, counter.sides[1])
    written = made * batch.where(tiling.split > 1, 1.0, counter.results / max(1.0, counter.partial))
    exchanged = gather * made * deep / rates.dsmem_bytes_per_cycle + WARP_COST.cluster_reduce_cycles_per_warp * count
    summed = beside * (1.0 + gather) * made * deep / rates.smem_bytes_per_cycle
    joined = rates.cluster_reduce_cycles + rates.cluster_reduce_cycles_per_block * tiling.cluster
    waits = WARP_COST.gathered_load_cycles * remote_loads(tiling, gather)

    def shared(sharers: Any, resource: Resource, cycles: Any) -> TimeTerm:
        return term(resource, batch.where(sharers > 1, cycles, 0.0))

    leave = [
        term(Resource.EPILOGUE, rates.epilogue_cycles),
        term(Resource.L2, beside * gather * written / tiling.cluster / rates.l2_bytes_per_cycle),
        shared(deep * tiling.cluster, Resource.REDUCE, WARP_COST.slice_k_reduce_cycles * deep + summed),
        shared(tiling.cluster, Resource.BARRIER, joined),
        shared(tiling.cluster, Resource.LATENCY, waits),
        shared(tiling.cluster, Resource.DSMEM, beside * exchanged),
    ]
    begin = term(Resource.START, rates.block_start_cycles + rates.warp_start_cycles * beside * count)
    fill = term(Resource.LATENCY, rates.pipeline_fill_cycles)
    wave = serial([begin, fill, repeat(share, inner), serial(leave)])
    total = per_sm(waves, wave, resident=beside, blocks=blocks, sms=counter.machine.sms)
    return beside_memory(counter, rates, total, tiling.split)


def _warp_limits(counter: GemmProblem, tiling: MmaTile | MmaTiles, beside: Any, share: Any) -> list[TimeTerm]:
    """What concurrent resources take for a k-tile of all resident blocks of an SM."""
    rates = rates_of(counter)
    rows, columns, (along, across, deep) = tiling.rows, tiling.columns, tiling.warps
    high, wide, count = rows // along, columns // across, along * across * deep
    line = tiling.terms * counter.item
    steps = line / STEP / deep  # instructions along the terms of a warp
    each = (high / 16) * (wide / 8)
    products = 1.0 * rows * columns * tiling.terms
    asked = l2_amount(counter, rows, columns) * counter.terms / (share * tiling.split * tiling.cluster)
    moved = global_bytes(counter.sides, rows, columns, tiling.terms, rates.short_line_exponent)
    if counter.fma or counter.double:
        lanes = LANES if counter.fma else (1, 1)
        quarters = -(-beside * count // 4) * 4 / count
        read = beside * (count * (lanes[0] * high + lanes[1] * wide) / deep + rows + columns) * line
        limits = [
            term(
                Resource.COMPUTE,
                quarters * rows * columns * tiling.terms / rates.products_per_cycle,
                2 * beside * products,
            ),
            term(Resource.SMEM, read / rates.smem_bytes_per_cycle),
            term(Resource.L2, beside * moved / rates.l2_bytes_per_cycle, beside * asked),
        ]
        if counter.double:
            chain = rates.k_tile_overhead_cycles + steps * each * WARP_COST.float64_mma_cycles / 2
            limits.append(term(Resource.CHAIN, chain))
    else:
        issued = beside * count * steps * (2 * each + high * 5 / 16 + wide * 5 / 8)
        read = beside * (count * (high + wide) / deep + rows + columns) * line
        chain = WARP_COST.k_step_chain_cycles + WARP_COST.product_chain_cycles * each
        limits = [
            term(
                Resource.COMPUTE,
                beside * rows * columns * tiling.terms / rates.products_per_cycle,
                2 * beside * products,
            ),
            term(Resource.SMEM, read / rates.smem_bytes_per_cycle),
            term(Resource.ISSUE, WARP_COST.instruction_issue_cycles * issued / 4),
            term(Resource.L2, beside * moved / rates.l2_bytes_per_cycle, beside * asked),
            term(Resource.CHAIN, rates.k_tile_overhead_cycles + steps * chain),
        ]
    waits = batch.where(share > tiling.stages - 1, rates.load_latency_cycles / (tiling.stages - 1), 0.0)
    return [*limits, term(Resource.LATENCY, waits)]
