"""Cycle model of tensor-core GEMMs: what ``mma.sync`` (`gemm.cost_mma`) and ``wgmma`` have in common, and ``wgmma``'s.

A block is counted together with the other resident blocks of its multiprocessor (terms of `estimate.time_model`):

    cycles = waves * (begin + k-tiles * longest(units, shared memory, issue, L2 cache, loads in flight) + epilogue)
             and memory traffic at its rate: the longer of both, and a fraction of the shorter

Blocks of a cluster are scheduled at once, and clusters lie in groups of multiprocessors: fewer of them run at once than
blocks would.  The constants are fitted to 4,600 schedules of nine GEMMs and convolutions on an H200, drawn without the
model (`docs/gpu_proofs.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jcuts.arch.sm_limits import SM_90
from jcuts.estimate import batch
from jcuts.estimate.time_model import (
    Resource,
    TimeTerm,
    overlap,
    per_sm,
    repeat,
    serial,
    soft_longest,
    term,
)
from jcuts.lower.patterns.gemm import GemmOperand, k_tiles_per_split
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm.cluster_exchange import gathered_by_groups
from jcuts.schedule.gpu.gemm.epilogue_stores import stored_bytes
from jcuts.schedule.gpu.gemm.problem import GemmProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile, WgmmaTiles
from jcuts.schedule.gpu.machine import WARP, GpuMachine

CLUSTERS = fit.coefficients("gpu/gemm", "concurrent_clusters")
_FEW = (CLUSTERS.blocks_1, CLUSTERS.blocks_2, CLUSTERS.blocks_3, CLUSTERS.blocks_4)
_MANY = (CLUSTERS.blocks_5, CLUSTERS.blocks_6, CLUSTERS.blocks_7, CLUSTERS.blocks_8)
AT_ONCE = dict(enumerate((*_FEW, *_MANY), 1))
"""Clusters of so many blocks that 132 SMs run at once, one block each: they lie in groups (GPCs)."""
FILE = SM_90.registers_per_sm
LINE = SM_90.cache_line_bytes
STEP = 32
"""Bytes along K per instruction."""
HIGH = 64
"""Rows of a wgmma instruction."""
OCCUPANCY = fit.coefficients("gpu/gemm", "occupancy")
EVEN = 3
FMA_EVEN = 8
"""Waves up to which the last one takes as long as the others; of fused multiply-adds, whose blocks end together."""


@dataclass(frozen=True)
class CostCoefficients:
    """Coefficients of one family.

    Attributes:
        products_per_cycle: multiply-adds of an SM. smem_bytes_per_cycle, l2_bytes_per_cycle, dsmem_bytes_per_cycle:
            of an SM. memory_bytes_per_cycle: of the whole GPU.
        short_line_exponent: power with which lines of less than 128 bytes count more.
        load_latency_cycles: of a load, over the loads in flight. pipeline_fill_cycles: to the first k-tile.
        k_tile_overhead_cycles: of a k-tile besides its work.
        overlap_remainder: what is left of shorter limits. memory_overlap_remainder: of the shorter of work and memory.
        block_start_cycles, warp_start_cycles: of a block; for every warp of the SM. epilogue_cycles: without its bytes.
        cluster_reduce_cycles, cluster_reduce_cycles_per_block: of a reduction in a cluster; for each of its blocks.
        split_k_launch_cycles, split_k_bytes_factor: of a split-K reduction kernel; what its bytes count.
    """

    products_per_cycle: float
    smem_bytes_per_cycle: float
    l2_bytes_per_cycle: float
    dsmem_bytes_per_cycle: float
    memory_bytes_per_cycle: float
    short_line_exponent: float
    load_latency_cycles: float
    pipeline_fill_cycles: float
    k_tile_overhead_cycles: float
    overlap_remainder: float
    memory_overlap_remainder: float
    block_start_cycles: float
    warp_start_cycles: float
    epilogue_cycles: float
    cluster_reduce_cycles: float
    cluster_reduce_cycles_per_block: float
    split_k_launch_cycles: float
    split_k_bytes_factor: float


def concurrent_clusters(cluster: int, sms: int) -> float:
    """Clusters of so many blocks that a GPU has at once, one block per multiprocessor."""
    return AT_ONCE.get(cluster, max(1, AT_ONCE[1] // cluster - 4)) * sms / AT_ONCE[1]


def occupancy(blocks: Any, cluster: Any, held: Any, sms: int, even: int = EVEN) -> tuple[Any, Any]:
    """Blocks side by side on a multiprocessor, and how often they are replaced; of one schedule or of a batch."""
    at_once = batch.per_distinct(lambda cluster: concurrent_clusters(cluster, sms), cluster)
    waves = blocks / (held * cluster * at_once)
    whole = batch.ceil(waves - OCCUPANCY.whole_wave_tolerance)
    return batch.minimum(held, -(-blocks // sms)), batch.where(waves <= even, whole, waves + 0.5)


def global_bytes(sides: tuple[GemmOperand, GemmOperand], rows: Any, columns: Any, terms: Any, short: float) -> Any:
    """Bytes of a tile of both operands; short lines count more, as whole lines are what moves."""
    total = 0.0
    for side, size in zip(sides, (rows, columns), strict=True):
        line = (terms if side.along_terms else size) * side.item
        longer = batch.per_distinct(lambda line: max(1.0, LINE / line) ** short, line)
        total = total + size * terms * side.item * longer
    return total


def l2_amount(counter: GemmProblem, rows: Any, columns: Any) -> Any:
    """Bytes that a block certainly asks the L2 cache for, per element along K; 0 where copies are guarded.

    Blocks at the edges copy less: what is counted is the mean over all blocks.
    """
    if any(side.guards for side in counter.sides):
        return 0.0
    pairs = zip(counter.sides, (counter.rows, counter.columns), (rows, columns), strict=True)
    return sum(side.item * extent / -(-extent // size) for side, extent, size in pairs)


def beside_memory(counter: GemmProblem, rates: CostCoefficients, total: TimeTerm, split: Any) -> TimeTerm:
    """With what the memory takes, and a second launch where the grid splits K; of one schedule or of a batch."""
    memory = term(Resource.DRAM, counter.moved / rates.memory_bytes_per_cycle, counter.moved)
    start = term(Resource.START, rates.block_start_cycles)
    whole = soft_longest(rates.memory_overlap_remainder, total, memory, start)
    if isinstance(split, int) and split == 1:
        return whole
    partial_rate = counter.machine.coefficients("gpu/gemm", "occupancy").partial_sum_bytes_per_cycle
    second = rates.split_k_launch_cycles + rates.split_k_bytes_factor * (2 * split + 1) * counter.partial / partial_rate
    return serial([whole, term(Resource.REDUCE, batch.where(split > 1, second, 0.0))])


# -- by warp groups ---------------------------------------------------------------------------------------------------
GROUP_COST = fit.coefficients("gpu/gemm", "wgmma_warpgroup")
GAP = {
    "float32": GROUP_COST.float32_group_gap_cycles,
    "copied": GROUP_COST.half_group_gap_cycles,
    "rounded": GROUP_COST.tf32_weights_group_gap_cycles,
}
"""Cycles per instruction group of 64 rows that nothing hides where an SM has one block."""
PUSH_COST = fit.coefficients("gpu/gemm", "wgmma_dsmem_push")
PUSH = {
    "rounded": (PUSH_COST.tf32_weights_cycles, PUSH_COST.tf32_weights_cycles_per_block),
    "copied": (PUSH_COST.half_cycles, PUSH_COST.half_cycles_per_block),
}
"""Cycles of blocks that store into each other's shared memory: of all, of each."""
PROLOGUE_COST = fit.coefficients("gpu/gemm", "wgmma_prologue")
GROUP_REGISTERS = fit.coefficients("gpu/gemm", "wgmma_registers")


def group_rates(machine: GpuMachine, kind: str) -> CostCoefficients:
    """Of products by warp groups.

    Args: kind: "float32" (threads round and store), "copied" (16-bit types), "rounded" (float32 with pre-rounded
        weights, few blocks).
    """
    if kind == "float32":
        return machine.record("gpu/gemm", "wgmma_float32", CostCoefficients)
    if kind == "copied":
        return machine.record("gpu/gemm", "wgmma_16bit", CostCoefficients)
    return machine.record("gpu/gemm", "wgmma_tf32_weights", CostCoefficients)


def coefficient_set(counter: GemmProblem, tiling: WgmmaTile | WgmmaTiles) -> str:
    """Which constants are a schedule's."""
    return "copied" if counter.item == 2 else "rounded" if tiling.rounded else "float32"


def group_registers(counter: GemmProblem, tiling: WgmmaTile | WgmmaTiles) -> Any:
    """32-bit registers of a thread, as the assembler takes them on average."""
    totals = tiling.rows * tiling.columns / tiling.threads
    high = tiling.rows / tiling.groups[0] / HIGH
    if counter.item == 2:
        return GROUP_REGISTERS.half_base + totals + GROUP_REGISTERS.half_per_64_rows * high
    most = batch.minimum(FILE / tiling.threads, GROUP_REGISTERS.maximum)
    if tiling.rounded:
        fragments = GROUP_REGISTERS.tf32_weights_per_64_rows * high * tiling.group
        return batch.minimum(most, GROUP_REGISTERS.tf32_weights_base + totals + fragments)
    total = GROUP_REGISTERS.float32_base + GROUP_REGISTERS.float32_per_accumulator * totals
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    for side, size in zip(counter.sides, (tiling.rows, tiling.columns), strict=True):
        words = size * tiling.terms / tiling.threads  # of a tile on its way
        word = GROUP_REGISTERS.float32_contiguous_word if side.along_terms else GROUP_REGISTERS.float32_strided_word
        ahead = batch.maximum(0, batch.minimum(tiling.flight, share) - 1)
        total = total + (0.0 if side.along_terms else GROUP_REGISTERS.float32_strided_operand)
        total = total + batch.where(share > 1, words * word, 0.0)
        total = total + batch.where(share > 1, words * GROUP_REGISTERS.float32_word_in_flight * ahead, 0.0)
        if side.along_terms and side.run != counter.terms:  # taps: addresses
            total = total + (GROUP_REGISTERS.float32_gathered_base + GROUP_REGISTERS.float32_gathered_word * words)
    return batch.minimum(most, total)


def group_time(counter: GemmProblem, tiling: WgmmaTile | WgmmaTiles, shared: Any, *, before: bool = False) -> TimeTerm:
    """Cycles of a launch by warpgroups, and of the second one where terms are split; of one schedule or of a batch.

    Args: shared: bytes of a block; before: whether something is computed before the product.
    """
    kind = coefficient_set(counter, tiling)
    rates = group_rates(counter.machine, kind)
    rows, columns = tiling.rows, tiling.columns
    tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
    registers = group_registers(counter, tiling)
    held = batch.maximum(1, counter.machine.resident_blocks(tiling.threads, registers, shared))
    blocks = tiles * tiling.split * tiling.cluster
    beside, waves = occupancy(blocks, tiling.cluster, held, counter.machine.sms)
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    inner, gather = _group_k_tile(counter, tiling, beside, before), gathered_by_groups(tiling)
    written = gather * stored_bytes(counter, tiling) / tiling.cluster
    leave = [
        term(Resource.EPILOGUE, rates.epilogue_cycles),
        term(Resource.L2, beside * written / rates.l2_bytes_per_cycle),
        term(Resource.LATENCY, GROUP_COST.late_residual_cycles if tiling.rounded and not tiling.early else 0.0),
    ]
    shares = tiling.cluster > 1
    if batch.is_any(shares):
        own = rates.cluster_reduce_cycles, rates.cluster_reduce_cycles_per_block
        meet, member = PUSH[kind] if batch.is_any(tiling.push) else own
        joined = batch.where(shares, meet + member * tiling.cluster, 0.0)
        spent = batch.where(shares, gather * beside * 4 * rows * columns / rates.dsmem_bytes_per_cycle, 0.0)
        leave.append(serial([term(Resource.BARRIER, joined), term(Resource.DSMEM, spent)]))
    begin = term(Resource.START, rates.block_start_cycles + rates.warp_start_cycles * beside * tiling.threads / WARP)
    fill = term(Resource.LATENCY, rates.pipeline_fill_cycles)
    wave = serial([begin, fill, repeat(share, inner), serial(leave)])
    total = per_sm(waves, wave, resident=beside, blocks=blocks, sms=counter.machine.sms)
    return beside_memory(counter, rates, total, tiling.split)


def _group_k_tile(counter: GemmProblem, tiling: WgmmaTile | WgmmaTiles, beside: Any, before: bool) -> TimeTerm:
    """What a k-tile of all resident blocks of an SM takes."""
    kind = coefficient_set(counter, tiling)
    rates, raw = group_rates(counter.machine, kind), kind == "float32"
    rows, columns, line = tiling.rows, tiling.columns, tiling.terms * counter.item
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    ahead = batch.where(tiling.stages >= share, batch.minimum(share, tiling.stages), tiling.stages - (1 if raw else 2))
    port = (rows / HIGH * (HIGH + columns) + (rows + columns) * (2 if raw else 1)) * line
    moved = global_bytes(counter.sides, rows, columns, tiling.terms, rates.short_line_exponent)
    asked = l2_amount(counter, rows, columns) * counter.terms / (share * tiling.split * tiling.cluster)
    products = 2.0 * beside * rows * columns * tiling.terms
    limits = [
        term(Resource.COMPUTE, beside * rows * columns * tiling.terms / rates.products_per_cycle, products),
        term(Resource.SMEM, beside * port / rates.smem_bytes_per_cycle),
        term(Resource.L2, beside * moved / rates.l2_bytes_per_cycle, beside * asked),
        term(Resource.LATENCY, rates.load_latency_cycles / batch.maximum(1, ahead) + rates.k_tile_overhead_cycles),
    ]
    parts = [overlap(rates.overlap_remainder, limits)]
    if raw:
        sizes = zip(counter.sides, (rows, columns), strict=True)
        stored = sum(
            size * line * (1.0 if side.along_terms else GROUP_COST.transposed_store_factor) for side, size in sizes
        )
        parts.append(term(Resource.ISSUE, beside * GROUP_COST.store_passes * stored / LINE))
    high = rows // tiling.groups[0] // HIGH
    if batch.is_any(beside == 1):  # nobody else fills the gaps between instructions
        parts.append(term(Resource.GAP, batch.where(beside == 1, GAP[kind] * line / STEP / tiling.group * high, 0.0)))
    if before and kind == "copied":
        parts.append(term(Resource.ISSUE, PROLOGUE_COST.norm_cycles * beside * line / LINE * high))
    return serial(parts)
