"""Cycle model of ``wgmma`` GEMMs with TF32-pre-rounded float32 weights on large grids (several waves).

Small grids are counted by `gemm.cost`.  As there, a k-tile takes the longest of the resources that work concurrently,
and a fraction of the others:

    tensor cores, shared-memory port, L2 cache, a load's latency over the tiles in flight

plus, where a multiprocessor has one resident block, an unhidden gap per ``wgmma`` commit group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jcuts.estimate import batch
from jcuts.estimate.time_model import Resource, TimeTerm, overlap, per_sm, repeat, serial, soft_longest, term
from jcuts.lower.patterns.gemm import k_tiles_per_split
from jcuts.schedule.gpu.gemm.cluster_exchange import gathered_by_groups
from jcuts.schedule.gpu.gemm.cost import l2_amount
from jcuts.schedule.gpu.gemm.mma import EXIT, SECOND, bound_rates
from jcuts.schedule.gpu.gemm.problem import STEP, GemmProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import HIGH, WgmmaTile, WgmmaTiles
from jcuts.schedule.gpu.machine import GpuMachine


@dataclass(frozen=True)
class Tf32CostCoefficients:
    """Coefficients of pre-rounded weights: products and L2 bytes per cycle of an SM, cycles, what is left of overlaps.

    ``group_gap_cycles`` is that of an instruction group that nothing hides, ``cluster_reduce_cycles`` of a reduction in
    a cluster, ``cluster_push_cycles`` where its blocks store into each other's shared memory,
    ``late_residual_cycles`` of a residual that is loaded when it is needed.
    """

    products_per_cycle: float
    l2_bytes_per_cycle: float
    load_latency_cycles: float
    k_tile_overhead_cycles: float
    group_gap_cycles: float
    block_start_cycles: float
    cluster_reduce_cycles: float
    cluster_push_cycles: float
    late_residual_cycles: float
    overlap_remainder: float
    memory_overlap_remainder: float


def rates_of(machine: GpuMachine) -> Tf32CostCoefficients:
    """Of a GPU."""
    return machine.record("gpu/gemm", "tf32_weights", Tf32CostCoefficients)


def time(
    counter: GemmProblem, tiling: WgmmaTile | WgmmaTiles, beside: Any, waves: Any, rates: Tf32CostCoefficients
) -> TimeTerm:
    """Cycles of a launch, and of the second one where terms are split; of one schedule or of a batch.

    Args: beside: blocks of a multiprocessor; waves: how often they are replaced.
    """
    rows, columns = tiling.rows, tiling.columns
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    inner, bound = k_tile_time(counter, tiling, beside, rates), bound_rates(counter.machine)
    written = 4 * rows * columns * batch.where(tiling.split > 1, 1.0, counter.results / max(1.0, counter.partial))
    gather = gathered_by_groups(tiling)
    leave = [
        term(Resource.EPILOGUE, EXIT),
        term(Resource.L2, beside * gather * written / tiling.cluster / rates.l2_bytes_per_cycle),
        term(Resource.LATENCY, 0.0 if tiling.early else rates.late_residual_cycles),
    ]
    shares = tiling.cluster > 1
    if batch.is_any(shares):
        joined = rates.cluster_push_cycles if batch.is_any(tiling.push) else rates.cluster_reduce_cycles
        spent = gather * beside * 4 * rows * columns * (2 / bound.smem_bytes_per_cycle + 1 / rates.l2_bytes_per_cycle)
        leave.append(term(Resource.BARRIER, batch.where(shares, joined, 0.0)))
        leave.append(term(Resource.DSMEM, batch.where(shares, spent, 0.0)))
    start = term(Resource.START, rates.block_start_cycles)
    wave = serial([start, repeat(share, inner), serial(leave)])
    blocks = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns) * tiling.split * tiling.cluster
    total = per_sm(waves, wave, resident=beside, blocks=blocks, sms=counter.machine.sms)
    memory = term(Resource.DRAM, counter.moved / bound.memory_bytes_per_cycle, counter.moved)
    whole = soft_longest(rates.memory_overlap_remainder, total, memory, start)
    splits = tiling.split > 1
    if not batch.is_any(splits):
        return whole
    partial = batch.where(splits, (2 * tiling.split + 1) * counter.partial / bound.memory_bytes_per_cycle, 0.0)
    return serial([whole, term(Resource.LAUNCH, batch.where(splits, SECOND, 0.0)), term(Resource.REDUCE, partial)])


def k_tile_time(
    counter: GemmProblem, tiling: WgmmaTile | WgmmaTiles, beside: Any, rates: Tf32CostCoefficients
) -> TimeTerm:
    """Cycles of a k-tile of all blocks of a multiprocessor."""
    rows, columns, line = tiling.rows, tiling.columns, tiling.terms * counter.item
    copied, read = 1.0 * ((rows + columns) * line), rows // HIGH * (HIGH + columns) * line
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    ahead = batch.where(tiling.stages >= share, share, tiling.stages - 2)
    asked = l2_amount(counter, rows, columns) * counter.terms / (share * tiling.split * tiling.cluster)
    limits = [
        term(
            Resource.COMPUTE,
            beside * rows * columns * tiling.terms / rates.products_per_cycle,
            2.0 * beside * rows * columns * tiling.terms,
        ),
        term(Resource.SMEM, beside * (read + copied) / bound_rates(counter.machine).smem_bytes_per_cycle),
        term(Resource.L2, beside * copied / rates.l2_bytes_per_cycle, beside * asked),
        term(Resource.LATENCY, rates.load_latency_cycles / ahead + rates.k_tile_overhead_cycles),
    ]
    inner = overlap(rates.overlap_remainder, limits)
    alone = beside <= 1
    if not batch.is_any(alone):
        return inner
    # nobody else fills the gaps between groups of instructions
    gap = rates.group_gap_cycles * line / STEP / tiling.group * (rows // HIGH / tiling.groups[0])
    return serial([inner, term(Resource.GAP, batch.where(alone, gap, 0.0))])
