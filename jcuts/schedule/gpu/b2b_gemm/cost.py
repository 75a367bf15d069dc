"""Cycle model of two fused GEMMs; of the back-to-back GEMM as a whole.

    cycles = waves * longer(blocks * chunks * longest(tensor cores, shared memory, issue, L2 cache),
                            LATENCY + chunks * (GEMMs + barrier) + EXIT),
             at least bytes / (memory bytes per cycle)

with the constants of `gemm.mma` and the coefficients that were fitted to fused inverted residuals, of which this is the
kernel without its depthwise stage: no launch of this family was timed yet.  A chunk has one of their two barriers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from jcuts.estimate.time_model import Resource, TimeTerm, overlap, per_sm, repeat, serial, term
from jcuts.kernel_ir.program import Phase
from jcuts.lower.patterns.b2b_gemm import B2bGemm
from jcuts.lower.patterns.gemm_pair import GemmPair
from jcuts.schedule import fit
from jcuts.schedule.cpu.time_estimate import SPECIAL, SPECIAL_STEPS
from jcuts.schedule.gpu.b2b_gemm.pair_tile import ROW_TILE, WORD, GemmPairTile
from jcuts.schedule.gpu.b2b_gemm.tile import B2bGemmTile
from jcuts.schedule.gpu.gemm.mma import EXIT, LATENCY, OVERLAP, bound_rates
from jcuts.schedule.gpu.machine import WARP, GpuMachine, unit_rate

_FIT = fit.coefficients("gpu/inverted_residual", "cycles")
WAIT = _FIT.barrier_wait_cycles
"""Cycles of a chunk of an inverted residual that a thread block waits for its two barriers and first reads."""
ALONE = _FIT.single_warp_cycles
"""Cycles of a warp's instruction, alone."""
QUARTERS = 4
"""Parts of a multiprocessor, each with warps of its own."""
AROUND = _FIT.chunk_instructions
"""Instructions of a warp per chunk: loop, copies, addresses."""
PIECE = _FIT.copy_instructions
"""Instructions of a copy of a piece of an operand."""
FRAGMENT = 1024
"""Products of an instruction."""
MANY = 4
"""Waves from which on the last one counts for what it is."""
COUNTED = 32
"""Operations of which what no tile changes is kept: one is scheduled at a time."""
Counted = tuple[float, float, float, float]
"""Cycles of a multiprocessor's tensor cores, shared memory and issue; instructions."""


def least(found: B2bGemm, machine: GpuMachine) -> float:
    """Lower bound on any schedule's cycles: memory, tensor cores."""
    rates = bound_rates(machine)
    computed = found.multiply_adds / (machine.sms * unit_rate(rates, found.item))
    return max(moved_bytes(found) / rates.memory_bytes_per_cycle, computed, LATENCY)


def time(shape: B2bGemmTile, machine: GpuMachine) -> TimeTerm:
    """Cycles of a launch by their terms."""
    assert shape.block.expand is not None
    first = shape.block.expand.phases[0]
    steps = epilogue_steps(first) + (SPECIAL_STEPS - 1) * sum(n.op in SPECIAL for n in first.exit.nodes)
    return launch_time(shape, machine, [gemm_cycles(shape, machine, steps)], wait=WAIT / 2)


def cycles(shape: B2bGemmTile, machine: GpuMachine) -> float:
    """Estimated cycles of a launch."""
    return time(shape, machine).value


# -- two fused GEMMs -------------------------------------------------------------------------------------------------
def launch_time(
    shape: GemmPairTile, machine: GpuMachine, phases: Sequence[Counted], *, wait: float, copied: int = 0
) -> TimeTerm:
    """Cycles of a launch by their terms.

    Args:
        phases: of a chunk, between which there are barriers; wait: cycles of these and of first reads.
        copied: elements per hidden column that are copied besides the weights.
    """
    found, warps, rates = shape.block, math.prod(shape.expand), bound_rates(machine)
    queue = -(-shape.tiles // machine.sms)
    beside = min(shape.beside, queue)
    waves = queue / beside
    waves = math.ceil(waves) if waves < MANY else waves
    units, port, issue = (float(sum(limit)) for limit in zip(*(p[:3] for p in phases), strict=True))
    copied += found.in_channels + found.out_channels
    uneven = -(-warps // QUARTERS) * QUARTERS / warps  # warps of every block lie in the same quarters
    limits = [
        term(Resource.COMPUTE, uneven * units, 2.0 * units * unit_rate(rates, shape.item)),
        term(Resource.SMEM, port),
        term(Resource.ISSUE, uneven * issue),
        term(Resource.L2, shape.item * shape.chunk * copied / rates.l2_bytes_per_cycle),
    ]
    # Barriers keep a block's phases apart, and a warp waits for itself: only blocks beside each other fill the gaps.
    own = sum(max(uneven * p[0], p[1], uneven * p[2], p[3] * ALONE / warps) for p in phases)
    chunk = serial([term(Resource.CHAIN, own), term(Resource.BARRIER, wait)])
    moved = shape.item * (shape.pixels * found.in_channels + 2 * shape.outputs * found.out_channels)
    ends = term(Resource.L2, moved / rates.l2_bytes_per_cycle)
    busy = repeat(beside, serial([repeat(shape.channel_chunks, overlap(OVERLAP, limits)), ends]))
    latency, exit_ = term(Resource.LATENCY, LATENCY), term(Resource.EPILOGUE, EXIT)
    alone = serial([latency, repeat(shape.channel_chunks, chunk), ends, exit_])
    wave = overlap(OVERLAP, (busy, alone))
    total = per_sm(waves, wave, resident=beside, blocks=shape.tiles, sms=machine.sms)
    dram = moved_bytes(found)
    memory = serial([term(Resource.DRAM, dram / rates.memory_bytes_per_cycle, dram), latency])
    return overlap(OVERLAP, (total, memory))


@functools.lru_cache(maxsize=COUNTED)
def moved_bytes(found: GemmPair) -> float:
    """Compulsory bytes: operands and results."""
    return float(sum(b.bytes for b in (*found.program.inputs, *found.program.outputs)))


def gemm_cycles(shape: GemmPairTile, machine: GpuMachine, steps: float) -> Counted:
    """Cycles of both GEMMs of a chunk. Args: steps: instructions per hidden value between the GEMMs."""
    found, chunk, warps, rates = shape.block, shape.chunk, math.prod(shape.expand), bound_rates(machine)
    pixels, outputs = (
        ROW_TILE * shape.m_fragments_in * shape.expand[0],
        ROW_TILE * shape.m_fragments_out * shape.project[0],
    )
    columns = shape.n_per_warp * shape.project[1]
    multiplied = chunk * (pixels * shape.padded_in_channels + outputs * columns)
    words = (
        shape.expand[0] * chunk * shape.padded_in_channels + shape.pixels * chunk + shape.project[1] * outputs * chunk
    )
    words += shape.project[0] * chunk * columns + chunk * (shape.padded_in_channels + columns)
    first, second = (
        0 if s is None or s.item < WORD or found.program.buffer(s.buffer).tf32 else 4 for s in found.weights
    )
    issued = multiplied / (FRAGMENT * shape.lanes) + warps * AROUND
    if found.expand is not None:
        issued += pixels * chunk * (steps + _FIT.expand_instructions / shape.lanes) / WARP
    else:
        issued += shape.pixels * shape.words / 4 * PIECE / WARP
    issued += warps * (chunk / shape.expand[1] / 16) * shape.padded_in_channels / shape.step * (1 + first)
    issued += warps * chunk / shape.step * (shape.m_fragments_out + shape.n_per_warp / 16 * (1 + second))
    if not shape.held and shape.padded_in_channels:
        words += shape.expand[1] * pixels * shape.padded_in_channels
        issued += warps * shape.m_fragments_in * shape.padded_in_channels / shape.step
    unit, port = unit_rate(rates, shape.item), rates.smem_bytes_per_cycle
    return multiplied / unit, shape.item * words / port, issued / 4, issued


def epilogue_steps(phase: Phase) -> float:
    """Instructions per sum of the operations that follow it: bfloat16 is computed in pairs, and rounded with a ReLU."""
    nodes = phase.exit.nodes
    halves = sum(n.dtype == "bfloat16" and n.op in ("convert", "min", "max") for n in nodes)
    relu = any(n.dtype == "bfloat16" and n.op == "max" for n in nodes)
    skipped = ("acc", "load", "const", "widen")
    return sum(n.op not in skipped and n.dtype != "bfloat16" for n in nodes) + (halves - relu) / 2
