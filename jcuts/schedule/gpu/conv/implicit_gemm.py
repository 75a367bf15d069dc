"""Schedules of implicit-GEMM convolutions with halo reuse (``wgmma``), ranked by a cycle model.

Counted per step of one tap and one channel chunk, which copies the weights (unless resident) and ``1 / taps`` of a run
of pixels: the longest of tensor cores, shared-memory port and L2 cache, plus the warps' time to fetch and round
fragments, which other warpgroups' ``wgmma`` hide only where several blocks are resident.  The constants are fitted to
126 schedules of 13 convolutions on an H200: 10 % off in the mean square; the schedule with the least cycles was the
fastest of eight, one of the first three within 10 % of it in the others but one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jcuts.arch.sm_limits import SM_90
from jcuts.estimate.time_model import Resource, TimeTerm, longest, per_sm, repeat, scaled, serial, soft_longest, term
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.conv_window import ConvWindow, match_conv_window, weights_need_no_transform
from jcuts.lower.patterns.gemm import gemm_operands
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm.mma import bound_rates
from jcuts.schedule.gpu.gemm.problem import column_sum_registers
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import GROUP, HIGH, LINE, can_swap_lanes
from jcuts.schedule.gpu.machine import Candidate, GpuMachine, scheduled, unit_rate

GROUPED = (9, 0)
"""The compute capability that has wgmma."""
LEAST_PRODUCTS = 1 << 24
"""Products from which on there are schedules."""
MOST = 5
"""Schedules of one convolution."""
_FIT = fit.coefficients("gpu/conv", "implicit_gemm")
_CANDIDATES = fit.coefficients("gpu/conv", "implicit_gemm_candidates")
UNEVEN = 24
"""Registers that a loop of its own for a last line of channels that is not full takes."""
WORTH = _CANDIDATES.short_line_step_limit
"""Share of all k-steps that are left by such a loop, up to which it is tried."""
VARIED = 2
"""Schedules that are tried in other ways, too."""
FEW_COLUMNS = 64
"""Columns up to which every filter tap has code of its own from the start (compiling it takes seconds)."""
RESIDENT = 2
"""k-tiles between a copy of activation rows and their use where weights stay in shared memory."""
AGAIN = _CANDIDATES.alike_score_factor
"""What every further candidate counts that differs in little."""
NEAR = _CANDIDATES.other_weights_cycles_limit
"""Cycles, over the least, up to which the best one whose weights lie elsewhere is the second."""
HEIGHTS = ((64, 1), (128, 2), (192, 3), (256, 4))
"""(rows of a block, warpgroups along them): those of 64 rows were faster wherever they can have whole k-steps."""
TALLER = ((128, 1), (192, 1), (256, 2))
"""The same of more rows per warpgroup."""
WIDTHS = (32, 256)
"""Least and most columns."""
MOST_TOTALS = 128
"""Accumulators of a thread."""
STAGES = (6, 5, 4)
MOST_SHARED = 226 << 10
"""Bytes of shared memory of a block."""
SHARED = SM_90.smem_per_block_bytes
"""Bytes of shared memory that blocks of an SM are counted to share."""
FILE = SM_90.registers_per_sm
OWN = 2048
"""Bytes of shared memory that every block takes beside its own."""
MOST_REGISTERS = 248
"""Registers of a thread."""
ADDRESSES = 120
"""Registers that all taps' addresses take where weights are copied for each of them."""
CHAIN = _FIT.fragment_cycles
"""Cycles of a k-step in which warps fetch and round fragments before the units have work."""
GROUPS = _FIT.fragment_cycles_per_warpgroup
"""More of them for every warpgroup of the SM."""
TALL = _FIT.fragment_cycles_per_64_rows
"""More of them for every 64 rows of a warpgroup beyond the first."""
HIDDEN = _FIT.fragment_exposed_ratio
"""What is left of them where an SM has several blocks."""
HALF = (_FIT.half_step_factor, _FIT.half_step_tall_factor)
"""Their factor where a k-step is two instruction groups: of 64 rows, of more."""
OWN_CODE = _FIT.unrolled_taps_factor
"""Their factor where taps have code of their own."""
FETCHED = _FIT.prefetched_factor
"""Their factor where fragments are prefetched (assumed, not measured)."""
BEGIN = {2: _FIT.block_start_cycles, 4: _FIT.float32_block_start_cycles}
"""Cycles to a launch's first products."""
AGAIN_BEGUN = _FIT.block_restart_ratio
"""What of them later blocks take where an SM has several."""
LEAVE = _FIT.epilogue_cycles
"""Cycles of a tile's results without their bytes."""
LEFT = _FIT.memory_overlap_remainder
"""What is left of the shorter of work and memory time."""
SHARE = _CANDIDATES.halo_share_limit
"""Pixels copied per tap, of those that a tile per tap would copy, up to which keeping them pays."""


@dataclass(frozen=True)
class ImplicitGemmTile:
    """One schedule of the implicit-GEMM convolution.

    Attributes:
        rows, columns: outputs of a block's tile.
        groups: warpgroups along its rows.
        stages: weight tiles in shared memory.
        pixels: runs of pixels (halos) in shared memory.
        rounds: output tiles of a block.
        spread: whether copies are issued between the k-steps.
        steps: k-steps of one ``wgmma`` commit group.
        unrolled: whether every tap has code of its own.
        fetched: whether the fragments of a tap are read before the products of the tap before start.
        short: whether the last channel chunk, which is not full, is multiplied only as far as it is.
        paired: whether lanes exchange results before the epilogue, for stores twice as wide.
        cluster: blocks that split the channels of a tile, and push their partial sums (`implicit_gemm_cluster`).
        early: whether epilogue operands are prefetched (`implicit_gemm_cluster`).
        sums: partial results per column of the tile, of column sums in the epilogue.
    """

    rows: int
    columns: int
    groups: int
    stages: int
    pixels: int
    rounds: int = 1
    spread: int = 0
    steps: int = 1
    unrolled: int = 0
    fetched: int = 0
    short: int = 0
    paired: int = 0
    cluster: int = 1
    early: int = 0
    sums: int = 0

    @property
    def threads(self) -> int:
        """Of a block."""
        return GROUP * self.groups

    def of(self, program: Program) -> Program:
        """The scheduled program."""
        found = (("rounds", self.rounds, 1), ("spread", self.spread, 0), ("steps", self.steps, 1))
        found += (("unrolled", self.unrolled, 0), ("fetched", self.fetched, 0), ("short", self.short, 0))
        found += (("paired", self.paired, 0), ("cluster", self.cluster, 1), ("push", int(self.cluster > 1), 0))
        found += (("early", self.early, 0),)
        more = tuple((name, count) for name, count, least in found if count > least)
        item = gemm_operands(program)[0].item
        kept = match_conv_window(program)
        tile = (self.rows, self.columns, LINE // item if kept is None else kept.channels_per_tile)
        params = (("tile", tile), ("groups", (self.groups, 1)), ("stages", self.stages), ("pixels", self.pixels))
        more += (("rounded", 1),) if item == 4 else ()
        return scheduled(program, "product", self.threads, *params, *more)


def implicit_gemm_schedules(
    counter: WgmmaProblem, program: Program, most: int = MOST
) -> Iterator[tuple[float, ImplicitGemmTile]]:
    """Schedules of a product that is such a convolution, with their cycles, best first."""
    if counter.machine.capability != GROUPED or counter.rows * counter.columns * counter.terms < LEAST_PRODUCTS:
        return
    found = match_conv_window(program)
    if found is None or not weights_need_no_transform(program):
        return
    best: dict[tuple[int, ...], tuple[float, ImplicitGemmTile]] = {}
    for tiling in tilings(counter, found):
        spent = cycles(counter, found, tiling)
        key = tiling.rows, tiling.columns, tiling.rounds > 1, _weights_resident(found, tiling), tiling.short
        if key not in best or spent < best[key][0]:
            best[key] = (spent, tiling)
    ranked = sorted(best.values(), key=lambda pair: pair[0])
    other = next(
        (k for k, (_, t) in enumerate(ranked) if _weights_resident(found, t) != _weights_resident(found, ranked[0][1])),
        0,
    )
    if other and ranked[other][0] <= NEAR * ranked[0][0]:  # where weights lie is what estimates know least of
        ranked.insert(1, (ranked[0][0], ranked.pop(other)[1]))
    full = next((k for k, (_, t) in enumerate(ranked) if not t.short), 0)
    if full > 1:  # its groups are under way more evenly
        ranked.insert(1, (ranked[1][0], ranked.pop(full)[1]))
    yield from ranked[:most]


def _full_line_fraction(found: ConvWindow, short: int) -> float:
    """Of all steps of whole lines, those that are multiplied."""
    last = found.short if short else found.whole
    return ((found.channel_tiles - 1) * found.whole + last) / (found.channel_tiles * found.whole)


def _weights_resident(found: ConvWindow, tiling: ImplicitGemmTile) -> bool:
    """Whether a block's weights stay in shared memory."""
    return tiling.stages == found.k_tiles


def candidates(counter: WgmmaProblem, program: Program, most: int = MOST) -> list[Candidate]:
    """The same as programs with scores; the best also in the ways that cost registers or code."""
    found: list[Candidate] = []
    kept = match_conv_window(program)
    pairs = counter.item == 2 and not counter.sides[1].along_terms
    for number, (spent, tiling) in enumerate(implicit_gemm_schedules(counter, program, most)):
        assert kept is not None
        if pairs and not number and can_swap_lanes(tiling.columns, counter.columns):
            found.append((replace(tiling, paired=1).of(program), min(1.0, counter.least / spent) * AGAIN**number))
        lifted = spent / cycles(counter, kept, tiling)
        for other in _variants(kept, tiling) if number < VARIED else [tiling]:
            score = min(1.0, counter.least / (cycles(counter, kept, other) * lifted))
            found.append((other.of(program), score * AGAIN**number))
    return found


def _variants(found: ConvWindow, tiling: ImplicitGemmTile) -> list[ImplicitGemmTile]:
    """A schedule of whole steps also with fragments that come early, and then with code of its own for every tap."""
    ahead = RESIDENT if _weights_resident(found, tiling) else tiling.stages - 2
    if tiling.steps != found.whole or found.side.item != 4 or ahead >= found.taps:
        return [tiling]
    more = {tiling.unrolled, int(_can_unroll_taps(found, tiling))}
    return [*(replace(tiling, unrolled=code, fetched=1) for code in sorted(more)), tiling]


def tilings(counter: WgmmaProblem, found: ConvWindow) -> Iterator[ImplicitGemmTile]:
    """All schedules that fit the convolution and the multiprocessor."""
    ways = (0, 1) if _full_line_fraction(found, 1) < WORTH else (0,)
    for (rows, groups), columns, short in itertools.product((*HEIGHTS, *TALLER), _widths(counter.columns), ways):
        # two tiles' fragments are in registers at once
        whole = found.narrow or (
            found.channel_tiles <= 2 and rows == HIGH * groups if short else found.k_tiles % 2 == 0
        )
        if whole and rows > HIGH * groups:
            continue
        if rows >= 2 * counter.rows or rows * columns > MOST_TOTALS * GROUP * groups:
            continue
        if found.halo_rows(rows) > SHARE * found.taps * rows:
            continue
        spread = int(rows == HIGH * groups)  # the assembler has no registers for copies among products of more rows
        steps, runs = found.whole if whole else 2, 1 if found.channel_tiles == 1 else 2
        codes = (0, 1) if columns <= FEW_COLUMNS else (0,)
        for stages, code in itertools.product((*STAGES, found.k_tiles), codes):
            if not 3 <= stages <= found.k_tiles or (stages < found.k_tiles and stages - 2 > found.taps):
                continue
            once = ImplicitGemmTile(rows, columns, groups, stages, runs, 1, spread, steps, code, 0, short)
            once = replace(once, sums=counter.sums)
            loops, most = UNEVEN * short * (found.channel_tiles > 1), min(MOST_REGISTERS, FILE // once.threads)
            if loops and whole and registers(found, replace(once, unrolled=0)) + loops > most:
                once = replace(once, steps=2)
            if code and not _can_unroll_taps(found, once):
                continue
            if registers(found, replace(once, unrolled=0)) + loops > most:
                continue
            if shared(found, once) <= MOST_SHARED and stages < found.k_tiles:
                yield once
            tiles, slots = _tiles(counter, once), counter.machine.sms * _resident(found, once)
            along = -(-counter.rows // rows)
            rounds = -(-along // max(1, slots * along // tiles))
            more = replace(once, pixels=2, rounds=rounds)
            if rounds > 1 and shared(found, more) <= MOST_SHARED:
                yield more


def _can_unroll_taps(found: ConvWindow, tiling: ImplicitGemmTile) -> bool:
    """Whether every tap may have code of its own: its loop goes round a whole number of times, registers suffice."""
    if tiling.steps != found.whole or (found.channel_tiles > 1 and found.channel_tiles % (1 + found.taps % 2)):
        return False
    if tiling.short and found.channel_tiles > 2:
        return False
    most = min(FILE // tiling.threads, MOST_REGISTERS + 8)
    return _weights_resident(found, tiling) or (
        tiling.groups > 1 and registers(found, replace(tiling, unrolled=0)) + ADDRESSES <= most
    )


def _widths(columns: int) -> list[int]:
    """Multiples of 8 that columns fall into."""
    counts = range(-(-columns // WIDTHS[1]), max(1, columns // WIDTHS[0]) + 1)
    return sorted({-(-columns // (8 * count)) * 8 for count in counts})


def shared(found: ConvWindow, tiling: ImplicitGemmTile) -> int:
    """Bytes of shared memory of a block."""
    columns = tiling.columns if found.side.item == 4 else -(-tiling.columns // HIGH) * HIGH
    apart = tiling.sums * tiling.groups * columns * 16 if tiling.rounds > 1 else 0  # copies are under way
    return (tiling.stages * columns + tiling.pixels * found.halo_rows(tiling.rows)) * found.bytes + LINE + apart


def registers(found: ConvWindow, tiling: ImplicitGemmTile) -> int:
    """32-bit registers of a thread, roughly."""
    high, totals = tiling.rows // tiling.groups // HIGH, tiling.rows * tiling.columns // tiling.threads
    total = 40 + 14 * (high - 1) + totals * 9 // 8 + 10 * (tiling.rounds > 1)
    total += 4 * tiling.steps if tiling.steps == found.whole else 0
    total += column_sum_registers(tiling.sums, tiling.columns)
    if tiling.unrolled:  # addresses of all taps
        total += 24 if _weights_resident(found, tiling) else ADDRESSES
    return -(-total // 8) * 8


def _resident(found: ConvWindow, tiling: ImplicitGemmTile) -> int:
    """Blocks side by side on a multiprocessor."""
    by_memory = (SHARED + OWN) // (shared(found, tiling) + OWN)
    return max(
        1, min(by_memory, FILE // (tiling.threads * registers(found, tiling)), SM_90.threads_per_sm // tiling.threads)
    )


def _tiles(counter: WgmmaProblem, tiling: ImplicitGemmTile) -> int:
    return -(-counter.rows // tiling.rows) * -(-counter.columns // tiling.columns)


def conv_rates(machine: GpuMachine) -> fit.Coefficients:
    """Of a GPU: tensor cores, shared memory, L2 cache."""
    return machine.coefficients("gpu/conv", "implicit_gemm")


def time(counter: WgmmaProblem, found: ConvWindow, tiling: ImplicitGemmTile) -> TimeTerm:
    """Cycles of a launch by their terms."""
    rows, columns, sms = tiling.rows, tiling.columns, counter.machine.sms
    tiles = -(-counter.rows // rows)
    blocks = -(-tiles // tiling.rounds) * -(-counter.columns // columns)
    queue = -(-blocks // sms)
    beside = min(_resident(found, tiling), queue)
    waves = math.ceil(queue / beside)
    stays = _weights_resident(found, tiling)
    rates = conv_rates(counter.machine)
    inner = _k_tile(found, tiling, rates, beside)
    stored = beside * 4 * rows * columns * counter.results / max(1.0, counter.partial) / rates.l2_bytes_per_cycle
    leave = serial([term(Resource.EPILOGUE, LEAVE), term(Resource.L2, stored)])
    weights = tiling.stages * columns * found.bytes / rates.l2_bytes_per_cycle if stays else 0.0
    start = term(Resource.START, BEGIN[found.side.item])
    begin = serial([start, term(Resource.L2, weights)])
    begin = scaled("later waves", 1.0 + (waves - 1) * (AGAIN_BEGUN if beside > 1 else 1.0), begin)
    tile = repeat(tiling.rounds, serial([repeat(found.k_tiles, inner), leave]))
    total = serial([begin, per_sm(waves, tile, resident=beside, blocks=blocks, sms=sms)])
    memory = term(Resource.DRAM, counter.moved / bound_rates(counter.machine).memory_bytes_per_cycle, counter.moved)
    return soft_longest(LEFT, total, memory, start)


def _k_tile(found: ConvWindow, tiling: ImplicitGemmTile, rates: fit.Coefficients, beside: int) -> TimeTerm:
    """What a k-tile of all resident blocks of an SM takes."""
    rows, columns = tiling.rows, tiling.columns
    kept = 0.0 if _weights_resident(found, tiling) else columns * found.bytes
    copied = found.halo_rows(rows) * found.bytes / found.taps + kept
    part = _full_line_fraction(found, tiling.short)
    read = part * (rows // HIGH * (HIGH + columns) * found.bytes)
    products = part * rows * columns * found.channels_per_tile
    limits = [
        term(Resource.COMPUTE, products / unit_rate(rates, found.side.item), 2.0 * products),
        term(Resource.SMEM, (read + copied) / rates.smem_bytes_per_cycle),
        term(Resource.L2, copied / rates.l2_bytes_per_cycle),
    ]
    work = longest(limits)
    high = rows // tiling.groups // HIGH
    waits = CHAIN + GROUPS * tiling.groups * beside + TALL * (high - 1)
    waits *= 1.0 if tiling.steps == found.whole else HALF[high > 1]
    waits *= (OWN_CODE if tiling.unrolled else 1.0) * (FETCHED if tiling.fetched else 1.0)
    alone = serial([work, term(Resource.CHAIN, waits)])
    if beside == 1:
        return alone
    return longest((alone, serial([repeat(beside, work), term(Resource.CHAIN, HIDDEN * waits)])))


def cycles(counter: WgmmaProblem, found: ConvWindow, tiling: ImplicitGemmTile) -> float:
    """Estimated cycles of a launch."""
    return time(counter, found, tiling).value
