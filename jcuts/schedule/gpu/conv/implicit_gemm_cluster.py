"""Schedules of split-K implicit-GEMM convolutions for small outputs: the blocks of a cluster split the channels
(DSMEM).

float32 with TF32-pre-rounded weights alone: 16-bit floats were faster without in 10 of 11 layers.

At batch 1 a layer has one output tile for every tenth multiprocessor, and its time is that of loading operands.  A
block of a cluster takes a few channel chunks of its tile (`implicit_gemm`), for all taps: their pixels are copied once,
not once per tap as by the split-K clusters of `gemm.wgmma`, with which these schedules compete.

Cycles are counted with the constants of both: L2 rate, resident blocks and DSMEM stores of `gemm.cost`, the steps of
`implicit_gemm`.  Of 13 layers on an H200 they were 2 to 10 % faster than the others where taps and channels are many
(7x7x512, 8x8x448, 16 images), as fast in most, slower where there are few outputs per block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from jcuts.estimate.time_model import Resource, TimeTerm, longest, per_sm, repeat, serial, soft_longest, term
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.conv_window import ConvWindow, match_conv_window, weights_need_no_transform
from jcuts.schedule import fit
from jcuts.schedule.gpu.conv import implicit_gemm as kept
from jcuts.schedule.gpu.conv.implicit_gemm import ImplicitGemmTile
from jcuts.schedule.gpu.gemm import cost as gemm_cost
from jcuts.schedule.gpu.gemm.cluster_exchange import FRAGMENT, gathered
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, GROUP, HIGH, dsmem_tile_bytes
from jcuts.schedule.gpu.machine import WARP, unit_rate

LEAST_PRODUCTS = 1 << 22
"""From which on there are schedules."""
MOST = 2
"""Schedules of one convolution."""
SIZES = (2, 3, 4, 5, 6, 7, 8)
"""Blocks of a cluster."""
HEIGHTS = ((64, 1), (128, 2))
"""(rows of a block, warpgroups along them)."""
WIDTHS = (32, 64, 96, 128)
"""Columns of a block."""
WAVES = 2
"""Blocks per multiprocessor up to which there are few."""
RING = (8, 6, 4)
"""Tiles of weights in shared memory where not all of them stay there."""
STAY = 9
"""Tiles of weights up to which all stay there."""
PUSH = gemm_cost.PUSH["rounded"]


def candidates(counter: WgmmaProblem, program: Program) -> list[Program]:
    """Scheduled programs, best first; none for products that are no such convolutions, or not small."""
    found = match_conv_window(program)
    if (
        counter.machine.capability != kept.GROUPED
        or counter.batch != 1
        or found is None
        or not weights_need_no_transform(program)
    ):
        return []
    if counter.rows * counter.columns * counter.terms < LEAST_PRODUCTS:
        return []
    best: dict[tuple[int, ...], tuple[float, ImplicitGemmTile]] = {}
    for tiling in cluster_tiles(counter, found):
        spent = cycles(counter, found, tiling)
        key = tiling.rows, tiling.columns, tiling.cluster
        if key not in best or spent < best[key][0]:
            best[key] = spent, tiling
    return [tiling.of(program) for _, tiling in sorted(best.values(), key=lambda pair: pair[0])[:MOST]]


def cluster_tiles(counter: WgmmaProblem, found: ConvWindow) -> Iterator[ImplicitGemmTile]:
    """All schedules that fit the convolution and the multiprocessor."""
    for (rows, groups), columns, cluster in itertools.product(HEIGHTS, WIDTHS, SIZES):
        tiles = -(-counter.rows // rows) * -(-counter.columns // columns)
        if found.channel_tiles % cluster or rows >= 2 * counter.rows or columns >= 2 * counter.columns:
            continue
        if tiles * cluster > WAVES * counter.machine.sms or found.narrow:
            continue
        lines = found.channel_tiles // cluster
        steps = lines * found.taps
        whole = found.whole if steps % 2 == 0 else min(2, found.whole)
        rings = [s for s in RING if 3 <= s < steps and s - 2 <= found.taps and steps > STAY]
        for stages in (*rings, *((steps,) if steps >= 3 else ())):
            tiling = ImplicitGemmTile(
                rows, columns, groups, stages, 1 if lines == 1 else 2, steps=whole, cluster=cluster, early=1
            )
            more = replace(tiling, unrolled=1)
            for made in (tiling, more) if columns <= kept.FEW_COLUMNS and _repeats(found, more) else (tiling,):
                if shared(found, made) <= kept.MOST_SHARED and _registers(found, made) <= kept.MOST_REGISTERS:
                    yield made


def shared(found: ConvWindow, tiling: ImplicitGemmTile) -> int:
    """Bytes of shared memory of a block, of what is pushed into it, too."""
    pushed = dsmem_tile_bytes(tiling.rows // tiling.groups, tiling.columns, tiling.cluster, tiling.threads)
    return kept.shared(found, tiling) + pushed + BARRIER


def time(counter: WgmmaProblem, found: ConvWindow, tiling: ImplicitGemmTile) -> TimeTerm:
    """Cycles of a launch by their terms."""
    rows, columns, cluster = tiling.rows, tiling.columns, tiling.cluster
    rates, own = gemm_cost.group_rates(counter.machine, "rounded"), kept.conv_rates(counter.machine)
    lines, size = found.channel_tiles // cluster, found.bytes
    steps, resident = lines * found.taps, tiling.stages == lines * found.taps
    tiles = -(-counter.rows // rows) * -(-counter.columns // columns)
    held = counter.machine.resident_blocks(tiling.threads, _registers(found, tiling), shared(found, tiling))
    held = max(1, held)
    beside, waves = gemm_cost.occupancy(tiles * cluster, cluster, held, counter.machine.sms)
    once = gemm_cost.concurrent_clusters(cluster, counter.machine.sms)
    beside = max(beside, min(held, math.ceil(tiles / once)))  # some of them share multiprocessors
    moved = beside * (found.halo_rows(rows) * lines + columns * steps) * size
    copied = term(Resource.L2, moved / rates.l2_bytes_per_cycle)
    mainloop = repeat(steps, _k_tile(found, tiling, own, beside))
    terms = serial([copied, mainloop]) if resident else longest((copied, mainloop))
    gather = gathered(rows // tiling.groups // HIGH, columns // FRAGMENT[1], cluster, step=2)
    leave = serial(
        [
            term(Resource.EPILOGUE, rates.epilogue_cycles),
            term(Resource.BARRIER, PUSH[0]),
            term(Resource.BARRIER, PUSH[1] * cluster),
            term(Resource.DSMEM, gather * beside * 4 * rows * columns / rates.dsmem_bytes_per_cycle),
        ]
    )
    begin = serial(
        [
            term(Resource.START, rates.block_start_cycles),
            term(Resource.START, rates.warp_start_cycles * beside * tiling.threads / WARP),
            term(Resource.LATENCY, rates.load_latency_cycles),
        ]
    )
    wave = serial([begin, terms, leave])
    total = per_sm(waves, wave, resident=beside, blocks=tiles * cluster, sms=counter.machine.sms)
    memory = term(Resource.DRAM, counter.moved / rates.memory_bytes_per_cycle, counter.moved)
    return soft_longest(rates.memory_overlap_remainder, total, memory, begin)


def _k_tile(found: ConvWindow, tiling: ImplicitGemmTile, own: fit.Coefficients, beside: int) -> TimeTerm:
    """What a k-tile of all resident blocks of an SM takes."""
    rows, columns = tiling.rows, tiling.columns
    products, read = rows * columns * found.channels_per_tile, rows // HIGH * (HIGH + columns) * found.bytes
    limits = [
        term(Resource.COMPUTE, products / unit_rate(own, found.side.item), 2.0 * products),
        term(Resource.SMEM, read / own.smem_bytes_per_cycle),
    ]
    work = longest(limits)
    waits = kept.CHAIN + kept.GROUPS * tiling.groups * beside
    waits *= 1.0 if tiling.steps == found.whole else kept.HALF[0]
    waits *= kept.OWN_CODE if tiling.unrolled else 1.0
    alone = serial([work, term(Resource.CHAIN, waits)])
    if beside == 1:
        return alone
    return longest((alone, serial([repeat(beside, work), term(Resource.CHAIN, kept.HIDDEN * waits)])))


def cycles(counter: WgmmaProblem, found: ConvWindow, tiling: ImplicitGemmTile) -> float:
    """Estimated cycles of a launch."""
    return time(counter, found, tiling).value


def _repeats(found: ConvWindow, tiling: ImplicitGemmTile) -> bool:
    """Whether every tap may have code of its own: its loop goes round a whole number of times."""
    lines = found.channel_tiles // tiling.cluster
    return lines == 1 or tiling.steps < found.whole or lines % (1 + found.taps % 2) == 0


def _registers(found: ConvWindow, tiling: ImplicitGemmTile) -> int:
    """32-bit registers of a thread, roughly."""
    own = kept.ADDRESSES if tiling.unrolled else 0
    return kept.registers(found, replace(tiling, unrolled=0)) + own // (1 if tiling.threads == GROUP else 2)
