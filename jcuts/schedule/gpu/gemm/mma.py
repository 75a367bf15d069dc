"""Schedules of GEMMs by ``mma.sync`` (TF32, 16-bit, FP64) or SIMT FMA (float32 above TF32), ranked by `gemm.cost`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from jcuts.arch.sm_limits import SM_90
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import WIDE, GemmOperand, gemm_operands, k_tiles_per_split, prologue
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm import cost as gemm_cost
from jcuts.schedule.gpu.gemm import smem_layout_f64
from jcuts.schedule.gpu.gemm.problem import GemmProblem, MmaTile
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
    best: dict[tuple[int, ...], tuple[float, MmaTile]] = {}
    for tiling in _tilings(program, counter):
        cycles = gemm_cost.warp_time(counter, tiling).value
        key = (tiling.rows, tiling.columns, tiling.warps[2], tiling.split, tiling.cluster)
        if key not in best or cycles < best[key][0]:
            best[key] = (cycles, tiling)
    seen: dict[tuple[int, ...], int] = {}
    scored = []
    for cycles, tiling in sorted(best.values(), key=lambda found: found[0]):
        kind = (tiling.split > 1, tiling.cluster > 1, tiling.threads)
        score = min(1.0, least / cycles) * AGAIN ** seen.get(kind, 0)
        seen[kind] = seen.get(kind, 0) + 1
        scored.append((score, tiling))
    for place, (score, tiling) in enumerate(sorted(scored, key=lambda found: -found[0])[:most]):
        # a prefetch is worth a tenth there, and costs a little elsewhere
        asks = counter.adds_words and counter.terms <= SHORT and place == 0
        yield (replace(tiling, early=1) if asks else tiling).of(program), score


def ffma_schedules(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of a product that asks for more than TF32 (`as_gemm`, ``exact``).

    float32 by fused multiply-adds, float64 by its own matrix units.
    """
    (dtype,) = {side.dtype for side in gemm_operands(program)}
    if dtype in ("float32", WIDE) and prologue(program) is None:
        yield from mma_schedules(program, machine, counter=GemmProblem(program, machine, fma=int(dtype != WIDE)))


def _tilings(program: Program, counter: GemmProblem) -> Iterator[MmaTile]:
    left, right = counter.sides
    item, most = left.item, WARP * (FMA_TOTALS if counter.fma else TOTALS)
    tiles = FMA_TILES if counter.fma else TILES
    for rows, columns in itertools.product(_sizes(counter.rows, tiles), _sizes(counter.columns, tiles)):
        for high, wide, deep, size in itertools.product(WARP_TILES, WARP_TILES, DEEP, TERMS):
            terms = size // item
            if rows % high or columns % wide or size % (counter.step * deep) or high * wide > most:
                continue
            if counter.double and high * wide < smem_layout_f64.LEAST:
                continue
            warps = (rows // high, columns // wide, deep)
            if not 2 <= math.prod(warps) <= (16 if deep > 1 else 8) or (terms > counter.terms and size > TERMS[0]):
                continue
            if any(side.run % terms and side.run != counter.terms for side in counter.sides):
                continue
            if not all(_fits(side, terms, across) for side, across in ((left, rows), (right, columns))):
                continue
            blocks = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
            few = blocks < 2 * counter.machine.sms
            clusters = [(1, c) for c in CLUSTERS] if few and counter.machine.capability >= CLUSTERED else []
            splits = [*((s, 1) for s in SPLITS if s == 1 or (few and not counter.double)), *clusters]
            for stages, (split, cluster) in itertools.product(STAGES, splits):
                ways = split * cluster
                share, groups = k_tiles_per_split(counter.terms, terms, ways)
                if groups != ways or (ways > 1 and share < 2) or stages > share + 1 or (stages == 2 and share > 1):
                    continue
                tiling = MmaTile(rows, columns, terms, warps, stages, split, cluster, fma=counter.fma)
                if gemm_cost.block_smem(counter, tiling) <= MOST_SHARED and fits_registers(counter, tiling):
                    yield tiling


def _sizes(extent: int, tiles: tuple[int, ...]) -> list[int]:
    """Tiles along an axis: none is more than twice as long as the axis."""
    return [size for size in tiles if size == tiles[0] or size < 2 * extent]


def _fits(side: GemmOperand, terms: int, across: int) -> bool:
    return (terms if side.along_terms else across) % side.width == 0


def least_cycles(counter: GemmProblem) -> float:
    """A lower bound on the cycles of any schedule: what must move, what must be multiplied, the latency."""
    products = float(counter.batch * counter.rows * counter.columns * counter.terms)
    unit = gemm_cost.rates_of(counter).products_per_cycle
    memory = bound_rates(counter.machine).memory_bytes_per_cycle
    return max(counter.moved / memory, products / (counter.machine.sms * unit), LATENCY)


def fits_registers(counter: GemmProblem, tiling: MmaTile) -> bool:
    """Whether the registers of a thread should do, where its totals take most of them."""
    if not (counter.fma or counter.double):
        return True
    places = 0.0  # of copies whose addresses a thread keeps
    for side, size, extent in zip(
        counter.sides, (tiling.rows, tiling.columns), (counter.rows, counter.columns), strict=True
    ):
        apart = bool(side.guards) or side.index.stride(side.outer) is None or extent % size > 0
        places += size * tiling.terms / side.width / tiling.threads if apart and side.along_terms else 0.0
    if counter.double and tiling.threads > MOST_THREADS:
        return False
    return gemm_cost.registers_of(counter, tiling) + PLACE * places <= (FMA_MOST if counter.fma else DOUBLE_MOST)
