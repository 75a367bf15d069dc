"""Schedules of GEMMs by ``mma.sync`` (TF32, 16-bit, FP64) or SIMT FMA (float32 above TF32), ranked by `gemm.cost_mma`.

All tilings of a product are enumerated as arrays, filtered by masks and priced in one vectorised evaluation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from jcuts.arch.sm_limits import SM_90
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import WIDE, gemm_operands, k_tiles_per_split, prologue
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm import cost_mma, smem_layout_f64
from jcuts.schedule.gpu.gemm.problem import GemmProblem, MmaTiles
from jcuts.schedule.gpu.machine import WARP, Candidate, GpuMachine

MOST = 8
"""Candidates of one product on matrix units: each takes a few hundred milliseconds to compile and to measure."""
_CANDIDATES = fit.coefficients("gpu/gemm", "mma_candidates")
AGAIN = _CANDIDATES.alike_score_factor
"""What every further candidate counts that shares terms in the same way, among as many threads: they should differ."""
TILES = (16, 32, 48, 64, 96, 128)
FMA_TILES = (*TILES, 192, 256)
WARP_TILES = (16, 32, 48, 64)
TOTALS = 64
"""Accumulators of a lane, of matrix units."""
FMA_TOTALS = 128
"""The same of fused multiply-adds, which read the less the more a lane has."""
TERMS = (64, 128, 256)
"""Bytes of terms per tile."""
DEEP = (1, 2, 4)
STAGES = (2, 3, 4, 6)
SPLITS = (1, 2, 3, 4, 6, 8)
CLUSTERS = (2, 4, 8)
CLUSTERED = (9, 0)
"""Compute capability from which on blocks form clusters."""
SHORT = 128
"""Terms up to which matrices of float32 that are added are asked for early."""
PLACE = _CANDIDATES.address_registers
FMA_MOST = _CANDIDATES.ffma_registers_maximum
DOUBLE_MOST = _CANDIDATES.float64_registers_maximum
MOST_THREADS = 256
"""Threads of a block that multiplies float64: among more, there are too few registers for each."""
MOST_SHARED = 96 << 10
"""Bytes of shared memory of a block: every GPU since 8.0 has them, most hold two such blocks."""
NOT_SHARED = 8 << 10
"""Bytes of shared memory of an SM that blocks are not counted to share."""
REGISTERS = SM_90.registers_per_sm
BLOCKS = 16
"""Blocks of an SM, of small ones."""
_BOUND = fit.coefficients("gpu/gemm", "mma_bound")
CHAIN = (_BOUND.k_tile_chain_cycles, _BOUND.k_step_chain_cycles, _BOUND.product_chain_cycles)
"""Cycles of one warp, which waits for itself: per k-tile, per instruction step along K, per mma of a k-step."""
OVERLAP = _BOUND.overlap_remainder
"""What of a limit is left beside a larger one: they work at the same time, but not perfectly."""
LATENCY = _BOUND.launch_latency_cycles
"""Cycles to the first products."""
EXIT = _BOUND.epilogue_cycles
"""Cycles of an epilogue without its bytes."""
SECOND = _BOUND.split_k_launch_cycles
"""Cycles of a second launch."""


def bound_rates(machine: GpuMachine) -> fit.Coefficients:
    """Rates of a GPU that lower bounds, and families without rates of their own, count with."""
    return machine.coefficients("gpu/gemm", "mma_bound")


def mma_schedules(
    program: Program,
    machine: GpuMachine,
    most: int = MOST,
    least: float | None = None,
    counter: GemmProblem | None = None,
) -> Iterator[Candidate]:
    """Schedules of a program that `products.as_product` has made, at most so many, the best of every kind of tile.

    Args: least: cycles that scores are counted with, where another family has faster units; counter: of another unit.
    """
    counter = counter or GemmProblem(program, machine)
    least = least or least_cycles(counter)
    tiles = tilings(counter)
    threads = tiles.threads
    seen: dict[tuple[bool, bool, int], int] = {}
    scored = []
    for cycles, place in _best_of_kinds(tiles, cost_mma.warp_times(counter, tiles).value):
        kind = (bool(tiles.split[place] > 1), bool(tiles.cluster[place] > 1), int(threads[place]))
        score = min(1.0, least / cycles) * AGAIN ** seen.get(kind, 0)
        seen[kind] = seen.get(kind, 0) + 1
        scored.append((score, place))
    for rank, (score, place) in enumerate(sorted(scored, key=lambda found: -found[0])[:most]):
        # a prefetch is worth a tenth there, and costs a little elsewhere
        asks = counter.adds_words and counter.terms <= SHORT and rank == 0
        tile = tiles.tile(place)
        yield (replace(tile, early=1) if asks else tile).of(program), score


def _best_of_kinds(tiles: MmaTiles, cycles: Any) -> list[tuple[float, int]]:
    """(cycles, place) of the fastest tile of every kind, fastest first; of equals, those that were enumerated first."""
    kind = np.stack((tiles.rows, tiles.columns, tiles.warps[2], tiles.split, tiles.cluster))
    order = np.lexsort((cycles, *kind))  # stable
    begins = np.ones(len(tiles), bool)
    begins[1:] = (kind[:, order[1:]] != kind[:, order[:-1]]).any(axis=0)
    fastest = order[begins]
    first = np.minimum.reduceat(order, np.flatnonzero(begins)) if len(tiles) else order  # of its kind
    ranked = fastest[np.lexsort((first, cycles[fastest]))]
    return list(zip(cycles[ranked].tolist(), ranked.tolist(), strict=True))


def ffma_schedules(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of a product that asks for more than TF32 (`as_gemm`, ``exact``).

    float32 by fused multiply-adds, float64 by its own matrix units.
    """
    (dtype,) = {side.dtype for side in gemm_operands(program)}
    if dtype in ("float32", WIDE) and prologue(program) is None:
        yield from mma_schedules(program, machine, counter=GemmProblem(program, machine, fma=int(dtype != WIDE)))


@functools.cache
def _warp_tiles(step: int, item: int, least: int, most: int, tiles: tuple[int, ...]) -> np.ndarray:
    """Columns (rows, columns, terms, warps along, across, deep) of all tiles that fall into whole warps' tiles.

    Args: step, item: bytes of an instruction along K, of an element; least, most: accumulators of a warp.
    """
    found = []
    for rows, columns in itertools.product(tiles, tiles):
        for high, wide, deep, size in itertools.product(WARP_TILES, WARP_TILES, DEEP, TERMS):
            if rows % high or columns % wide or size % (step * deep) or not least <= high * wide <= most:
                continue
            warps = (rows // high, columns // wide, deep)
            if 2 <= math.prod(warps) <= (16 if deep > 1 else 8):
                found.append((rows, columns, size // item, *warps))
    return np.array(found, np.int64).reshape(-1, 6).T


def tilings(counter: GemmProblem) -> MmaTiles:
    """All schedules that fit the product and the multiprocessor."""
    left, right = counter.sides
    kinds = FMA_TILES if counter.fma else TILES
    least = smem_layout_f64.LEAST if counter.double else 0
    most = WARP * (FMA_TOTALS if counter.fma else TOTALS)
    table = _warp_tiles(counter.step, left.item, least, most, kinds)
    rows, columns, terms = table[:3]
    kept = _is_near(rows, counter.rows, kinds[0]) & _is_near(columns, counter.columns, kinds[0])
    kept &= (terms <= counter.terms) | (terms * left.item <= TERMS[0])
    for side, across in ((left, rows), (right, columns)):
        kept &= (side.run % terms == 0) | (side.run == counter.terms)
        kept &= (terms if side.along_terms else across) % side.width == 0
    if counter.sums:  # every warp has whole columns of its rows
        kept &= table[5] == 1
    table = table[:, kept]
    rows, columns, terms = table[:3]
    few = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns) < 2 * counter.machine.sms
    clusters = CLUSTERS if counter.machine.capability >= CLUSTERED else ()
    ways = [*((s, 1) for s in SPLITS if s == 1 or not counter.double), *((1, c) for c in clusters)]
    ways = ways[:1] if counter.sums else ways
    stages, split, cluster = np.array([(s, *way) for s, way in itertools.product(STAGES, ways)], np.int64).T
    shared = split * cluster
    share, groups = k_tiles_per_split(counter.terms, terms[:, None], shared)
    fits = (groups == shared) & (stages <= share + 1) & ((stages > 2) | (share <= 1))
    fits &= (shared == 1) | (few[:, None] & (share >= 2))
    tile, way = np.nonzero(fits)
    rows, columns, terms, *warps = table[:, tile]
    along, across, deep = warps
    found = MmaTiles(rows, columns, terms, (along, across, deep), stages[way], split[way], cluster[way], counter.fma)
    found = found.take(cost_mma.block_smem(counter, found) <= MOST_SHARED)
    return found.take(fits_registers(counter, found))


def _is_near(size: np.ndarray, extent: int, smallest: int) -> np.ndarray:
    """Whether tiles are less than twice as long as the axis, or the smallest that there are."""
    return (size == smallest) | (size < 2 * extent)


def least_cycles(counter: GemmProblem) -> float:
    """A lower bound on the cycles of any schedule: what must move, what must be multiplied, the latency."""
    products = float(counter.batch * counter.rows * counter.columns * counter.terms)
    unit = cost_mma.rates_of(counter).products_per_cycle
    memory = bound_rates(counter.machine).memory_bytes_per_cycle
    return max(counter.moved / memory, products / (counter.machine.sms * unit), LATENCY)


def fits_registers(counter: GemmProblem, tiles: MmaTiles) -> np.ndarray:
    """Whether the registers of a thread should do, where its totals take most of them."""
    if not (counter.fma or counter.double):
        return np.ones(len(tiles), bool)
    places = np.zeros(len(tiles))  # of copies whose addresses a thread keeps
    for side, size, extent in zip(
        counter.sides, (tiles.rows, tiles.columns), (counter.rows, counter.columns), strict=True
    ):
        if side.along_terms:
            apart = bool(side.guards) or side.index.stride(side.outer) is None
            places += ((extent % size > 0) | apart) * (size * tiles.terms / side.width / tiles.threads)
    fits = cost_mma.registers_of(counter, tiles) + PLACE * places <= (FMA_MOST if counter.fma else DOUBLE_MOST)
    return fits & (tiles.threads <= MOST_THREADS) if counter.double else fits
