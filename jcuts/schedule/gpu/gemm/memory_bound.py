"""Schedules of memory-bound ``wgmma`` GEMMs: small tiles and few stages, so that several blocks per SM hide memory
latency.

Several blocks of a multiprocessor overlap each other's copies, multiplications and epilogues, so tiles are smaller and
stages fewer than where tensor cores are the limit; the epilogue's matrices are prefetched before the mainloop.  Counted
per resident block, with a factor for the variants of epilogue and copies:

    cycles = waves * (CHAIN + resident * work) * exp(sum of the ways)

where work is the longest of tensor cores, shared-memory port and memory, plus a fraction of the others.  Constants come
from 194 schedules of eight GEMMs on an H200 (``benchmarks/gpu_kernels/residual_epilogue.py``); the best that was
measured of the first three took at most 5 % more than the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from jcuts.arch.sm_limits import SM_90
from jcuts.estimate.time_model import Resource, TimeTerm, at_least, overlap, per_sm, repeat, scaled, serial, term
from jcuts.lower.patterns.gemm import k_tiles_per_split
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm.epilogue_smem import LOADED, SENT, STORED, staged_epilogue
from jcuts.schedule.gpu.gemm.mma import bound_rates
from jcuts.schedule.gpu.gemm.problem import column_sum_registers
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, HIGH, WgmmaTile, can_swap_lanes

SHAPES = (
    (64, 64, 1),
    (64, 128, 1),
    (64, 192, 1),
    (64, 256, 1),
    (128, 64, 2),
    (128, 96, 2),
    (128, 128, 2),
    (128, 192, 2),
    (128, 256, 2),
    (192, 64, 3),
    (192, 128, 3),
    (256, 64, 2),
    (256, 128, 2),
)
"""(rows, columns, groups along the rows)."""
ADDED = {False: ((0, 1), (LOADED, 0)), True: ((SENT, 1), (STORED, 0))}
ALONE = {False: ((0, 0),), True: ((SENT, 0),)}
"""(held, early) of exits that add matrices, and of others, by whether lanes would store less than 64 bytes a line."""
PREFETCHED = 2
"""Matrices of an epilogue up to which they are prefetched, or staged; several blocks hide the latency of more."""
MOST_BESIDE = 4
"""Matrices of an epilogue."""
_FIT = fit.coefficients("gpu/gemm", "memory_bound")
_REGISTERS = fit.coefficients("gpu/gemm", "memory_bound_registers")
BOUND = _FIT.memory_share_minimum
"""Share of the units' time that memory must take."""
WHOLE = 4
"""k-tiles of a block up to which all are copied at once."""
DEEPER = (4, 5, 6)
"""k-tiles in shared memory where there are more."""
AGAIN = _FIT.alike_cycles_factor
"""What a schedule's cycles count for each that has the same tile and is better."""
CHAIN = _FIT.exposed_latency_cycles
"""Cycles that nothing hides."""
GAP = _FIT.group_gap_cycles
"""Cycles of an instruction group where an SM has one block."""
SPARE = _FIT.overlap_remainder
"""What is left of work that overlaps."""
ASKED = _FIT.early_residual_log
"""Logarithm of the time of prefetching the residual, in short sums."""
KEPT = _FIT.staged_residual_log
"""Logarithm of the time of staging matrices in shared memory."""
NARROW = _FIT.bulk_store_log
"""Logarithm of the time of bulk copies of results where lanes would store less than 64 bytes in a line."""
AHEAD = _FIT.stage_log
"""Logarithm of the time of every further tile in flight."""
MOST_TOTALS = 128
"""Of a thread: beside so many there are no registers for much else."""
FILE = SM_90.registers_per_sm
SHARED = SM_90.smem_per_block_bytes
MOST_REGISTERS = 240


def memory_bound_tiles(counter: WgmmaProblem) -> Iterator[tuple[float, WgmmaTile]]:
    """(cycles, schedule) of all that fit a product that is bound by memory."""
    units = counter.batch * counter.rows * counter.columns * counter.terms / (counter.machine.sms * counter.unit)
    memory = counter.moved / bound_rates(counter.machine).memory_bytes_per_cycle
    if counter.short or memory < BOUND * units or counter.beside > MOST_BESIDE:
        return
    if not counter.beside and any(side.run != counter.terms for side in counter.sides):  # taps: the L2 cache decides
        return
    for rows, columns, along in SHAPES:
        tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
        if (
            columns >= 2 * counter.columns
            or tiles < 2 * counter.machine.sms
            or not counter.copies_are_16_bytes(rows, columns)
        ):
            continue
        paired = int(counter.narrow and bool(counter.sums) and can_swap_lanes(columns, counter.columns))
        for tiling in _depths(counter, (rows, columns, along)):
            for how, early in _exits(counter):
                found = staged_epilogue(counter.program, rows, columns, how, 0)
                if how and (counter.sums or not (found.stored if how == SENT else found.loaded)):
                    continue
                made = WgmmaTile(*tiling, rounded=counter.through, early=early, held=how, paired=paired)
                share, _ = k_tiles_per_split(counter.terms, made.terms, 1)
                large = rows * columns >= MOST_TOTALS * made.threads
                if large and counter.beside and share > WHOLE:
                    continue
                if counter.through and share > made.stages and not large:
                    made = replace(made, spread=1, steps=2)
                if blocks_per_sm(counter, made):
                    yield time(counter, made).value, made


def _exits(counter: WgmmaProblem) -> tuple[tuple[int, int], ...]:
    """(held, early) that are tried: exits with column sums keep their results in registers, and do not stage them."""
    if counter.beside > PREFETCHED:
        return ((0, 0),)
    return (ADDED if counter.beside else ALONE)[counter.narrow and not counter.sums]


def best(counter: WgmmaProblem, most: int) -> list[tuple[float, WgmmaTile]]:
    """The schedules with the fewest cycles, at most so many, of different tiles and exits."""
    chosen: list[tuple[float, WgmmaTile]] = []
    found = list(memory_bound_tiles(counter)) if most else []
    while found and len(chosen) < most:
        tiles = [(t.rows, t.columns) for _, t in chosen]
        found.sort(key=lambda item: (item[0] * AGAIN ** tiles.count((item[1].rows, item[1].columns)), item[1].threads))
        chosen.append(found.pop(0))
    return sorted(chosen, key=lambda item: item[0])


def _depths(counter: WgmmaProblem, block: tuple[int, int, int]) -> Iterator[tuple]:
    rows, columns, along = block
    terms = 128 // counter.item
    if any(side.run % terms and side.run != counter.terms for side in counter.sides):
        return
    share, _ = k_tiles_per_split(counter.terms, terms, 1)
    if not counter.fits_prologue(terms * share):
        return
    if counter.item == 4 and not counter.rounded:
        stages = ((2, 1), (3, 1)) if share <= WHOLE else ()  # longer sums are for tiles that are rounded less often
    else:
        stages = ((share, 0),) if share <= WHOLE else tuple((n, 0) for n in DEEPER)
    for count, flight in stages:
        yield rows, columns, terms, (along, 1), count, flight


def registers(counter: WgmmaProblem, tiling: WgmmaTile) -> float:
    """32-bit registers of a thread, as the assembler takes them."""
    totals = tiling.rows * tiling.columns / tiling.threads
    waiting = tiling.flight * counter.staging_registers(tiling)
    waiting += column_sum_registers(counter.sums, tiling.columns // tiling.groups[1])
    if counter.beside:
        return _REGISTERS.residual_base + _REGISTERS.residual_per_accumulator * totals + waiting
    return _REGISTERS.plain_base + _REGISTERS.plain_per_accumulator * totals + waiting


def blocks_per_sm(counter: WgmmaProblem, tiling: WgmmaTile) -> int:
    """Blocks side by side on a multiprocessor."""
    kept = counter.shared(tiling)
    mine = staged_epilogue(counter.program, tiling.rows, tiling.columns, tiling.held, kept)
    shared = (mine.end + BARRIER if mine.end > kept else kept) + 1024
    each = registers(counter, tiling)
    if each > MOST_REGISTERS:
        return 0
    found = min(SHARED // shared, int(FILE // (tiling.threads * 8 * math.ceil(each / 8))))
    return min(found, counter.machine.threads_per_sm // tiling.threads)


def time(counter: WgmmaProblem, tiling: WgmmaTile) -> TimeTerm:
    """Cycles of a launch by their terms."""
    rows, columns, line = tiling.rows, tiling.columns, tiling.terms * counter.item
    tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, 1)
    read, copied = rows // HIGH * (HIGH + columns) * line * share, (rows + columns) * line * share
    machine = counter.machine
    memory = machine.coefficients("gpu/gemm", "memory_bound").memory_bytes_per_cycle
    products = rows * columns * tiling.terms * share
    moved = counter.moved / tiles
    limits = [
        term(Resource.COMPUTE, products / counter.unit, 2.0 * products),
        term(Resource.SMEM, (read + copied) / bound_rates(machine).smem_bytes_per_cycle),
        term(Resource.DRAM, moved * machine.sms / memory, moved),
    ]
    work = overlap(SPARE, limits)
    queue = tiles / machine.sms
    beside = min(blocks_per_sm(counter, tiling), math.ceil(queue))
    if beside == 1:
        gap = GAP * 4 * share / tiling.group * (rows // HIGH / tiling.groups[0])
        work = serial([work, term(Resource.GAP, gap)])
    waves = math.ceil(math.ceil(queue) / beside) if queue <= 3 * beside else queue / beside
    ways = ASKED if tiling.early and share <= WHOLE else 0.0
    ways += KEPT if tiling.held in (LOADED, STORED) and counter.beside else 0.0
    ways += NARROW if tiling.held in (STORED, SENT) else 0.0
    ways += AHEAD * (tiling.stages - DEEPER[0]) if share > WHOLE and not tiling.flight else 0.0
    wave = serial([term(Resource.LATENCY, CHAIN), repeat(beside, work)])
    total = per_sm(waves, wave, resident=beside, blocks=tiles, sms=machine.sms)
    return at_least(counter.least, scaled("epilogue and copies", math.exp(ways), total))
