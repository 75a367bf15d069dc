"""Cycle model of the back-to-back GEMM by ``wgmma``.

    cycles = waves * rounds * longer(chunks * longest(tensor cores, shared memory, issue, L2 cache) of all warpgroups,
                                     TILE_WAIT + chunks * (GEMMs + epilogue + waits) of a warpgroup alone),
             at least bytes / (memory bytes per cycle)

A warpgroup waits for itself: its GEMMs and its element-wise operations follow each other.  Only other warpgroups of the
multiprocessor fill the gaps, up to the longest of the limits that they share.
"""

from __future__ import annotations

import math

from jcuts.estimate.time_model import Resource, TimeTerm, overlap, per_sm, repeat, serial, term
from jcuts.schedule import fit
from jcuts.schedule.cpu.time_estimate import SPECIAL, SPECIAL_STEPS
from jcuts.schedule.gpu.b2b_gemm.cost import ALONE, MANY, epilogue_steps, moved_bytes
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import SQUARE, STEP, WARP, B2bWgmmaTile
from jcuts.schedule.gpu.gemm.mma import LATENCY, OVERLAP, bound_rates
from jcuts.schedule.gpu.gemm.wgmma_tile import GROUP, HIGH
from jcuts.schedule.gpu.machine import GpuMachine, unit_rate

_FIT = fit.coefficients("gpu/b2b_gemm", "wgmma")
GROUP_WARPS = GROUP // WARP
"""Warps of a warpgroup: one on every scheduler of a multiprocessor."""


def time(shape: B2bWgmmaTile, machine: GpuMachine) -> TimeTerm:
    """Cycles of a launch by their terms."""
    found, rates = shape.block, bound_rates(machine)
    products = machine.coefficients("gpu/gemm", "wgmma_candidates")
    unit = unit_rate(products, shape.item)
    fragments = shape.groups * shape.high
    queue = -(-shape.blocks // machine.sms)
    beside = min(shape.beside, queue)
    waves = queue / beside
    waves = math.ceil(waves) if waves < MANY else waves
    # -- a chunk of one warpgroup
    terms, depth = shape.k_steps * STEP // shape.item, shape.chunk
    own_products = shape.group_rows * shape.chunk * (terms + shape.results)
    own_issue = (
        shape.group_rows * shape.chunk * _value_instructions(shape) / WARP + GROUP_WARPS * _FIT.chunk_instructions
    )
    own_smem = shape.high * shape.item * (HIGH * terms + shape.chunk * terms + shape.results * depth)
    # -- of the block
    weights = shape.chunk * (found.in_channels + found.out_channels) * shape.item
    copies = weights / (SQUARE * SQUARE) * _FIT.copy_instructions / WARP
    limits = [
        term(Resource.COMPUTE, shape.groups * own_products / unit, 2.0 * shape.groups * own_products),
        term(Resource.SMEM, (shape.groups * own_smem + weights) / rates.smem_bytes_per_cycle),
        term(Resource.ISSUE, (shape.groups * own_issue + copies) / GROUP_WARPS),
        term(Resource.L2, weights / rates.l2_bytes_per_cycle),
    ]
    moved = shape.item * HIGH * fragments * (found.in_channels + 2 * found.out_channels)
    ends = term(Resource.L2, moved / rates.l2_bytes_per_cycle)
    busy = repeat(beside, serial([repeat(shape.chunks, overlap(OVERLAP, limits)), ends]))
    chain = own_products / unit + own_issue / GROUP_WARPS * ALONE
    wait = _FIT.chunk_wait_cycles + _FIT.refill_cycles / (shape.stages - 1)
    chunk = serial([term(Resource.CHAIN, chain), term(Resource.BARRIER, wait)])
    alone = serial([term(Resource.EPILOGUE, _FIT.tile_wait_cycles), repeat(shape.chunks, chunk)])
    tile = repeat(shape.rounds, overlap(OVERLAP, (busy, alone)))
    wave = serial([term(Resource.LATENCY, LATENCY), tile])
    total = per_sm(waves, wave, resident=beside, blocks=shape.blocks, sms=machine.sms)
    dram = moved_bytes(found)
    memory = term(Resource.DRAM, dram / rates.memory_bytes_per_cycle, dram)
    return overlap(OVERLAP, (total, serial([memory, term(Resource.LATENCY, LATENCY)])))


def cycles(shape: B2bWgmmaTile, machine: GpuMachine) -> float:
    """Estimated cycles of a launch."""
    return time(shape, machine).value


def _value_instructions(shape: B2bWgmmaTile) -> float:
    """Instructions of a lane per hidden value."""
    assert shape.block.expand is not None
    first = shape.block.expand.phases[0]
    special = (SPECIAL_STEPS - 1) * sum(n.op in SPECIAL for n in first.exit.nodes)
    return epilogue_steps(first) + special + _FIT.value_instructions
