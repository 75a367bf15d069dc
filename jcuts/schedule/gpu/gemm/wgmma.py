"""Schedules of ``wgmma`` GEMMs (capability 9.0), and the choice among all families that compute contractions.

Only GEMMs with enough to compute have any: their tiles are large, and every candidate costs compiling and measuring.
Cycles are counted by `gemm.cost`, those of pre-rounded weights in many blocks by `gemm.cost_tf32`, of memory-bound
GEMMs by `gemm.memory_bound`, of convolutions with halo reuse by `conv.implicit_gemm`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jcuts.arch.sm_limits import SM_90
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.conv_window import gather_per_copy
from jcuts.lower.patterns.gemm import GemmOperand, k_tiles_per_split, k_vectors, prologue, prologue_is_zero_safe
from jcuts.schedule import fit
from jcuts.schedule.gpu.conv import implicit_gemm, implicit_gemm_cluster
from jcuts.schedule.gpu.gemm import cost as gemm_cost
from jcuts.schedule.gpu.gemm import cost_tf32, wave_tiles
from jcuts.schedule.gpu.gemm import memory_bound as gemm_memory_bound
from jcuts.schedule.gpu.gemm import mma as gemm_mma
from jcuts.schedule.gpu.gemm.mma import LATENCY, MEMORY, GemmProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import HIGH, LINE, SHARED, WgmmaTile, can_swap_lanes, smem_with_dsmem
from jcuts.schedule.gpu.machine import Candidate, GpuMachine
from jcuts.schedule.gpu.warp_specialized import schedules as warp_specialized_schedules

MOST = 6
"""Tilings of one product for warp groups."""
_CANDIDATES = fit.coefficients("gpu/gemm", "wgmma_candidates")
AGAIN = _CANDIDATES.alike_score_factor
"""What every further candidate with the same tile counts."""
RESIDUAL_REGISTERS_PER_ACC = _CANDIDATES.residual_registers_per_accumulator
"""Registers per total for each operand that is added to the results one by one: the assembler asks for it early."""
PLAIN = _CANDIDATES.unspread_score_factor
"""What schedules without copies among the steps of products count where a block has more tiles of terms than stages."""
BEHIND_FIRST = _CANDIDATES.cluster_conv_score_factor
"""What clusters that keep pixels count of the score of the one that they follow."""
STREAMS = 3
"""Tilings of a product that is bound by memory."""
BEHIND = _CANDIDATES.memory_bound_score_limit
"""By how much they may count more than others."""
GROUPED = (9, 0)
"""The compute capability that has warp groups."""
LEAST_POINTS = 1 << 18
"""Outputs (16 tiles of 128x128) from which on there are candidates."""
LEAST_PRODUCTS = 1 << 27
"""Products from which on there are candidates."""
FEW_ROWS = 33
"""Rows from which on there are some for pre-rounded weights, and for 16-bit types in few blocks."""
FEW_PRODUCTS = 1 << 22
"""Products from which on there are such."""
SMALL_GRID_CANDIDATES = 5
"""Tilings of a product of 16-bit types as few blocks: they share terms in clusters, and copy all tiles at once."""
MMA_SCORE_FACTOR = _CANDIDATES.mma_score_factor
"""What schedules without warp groups count of their score beside those: of 17 layers at batch 1 the best schedule was
among them twice, by 5 and 0 %; counted in full, the eight best of both took 8 % more than the fastest (worst 48)."""
FEW_POINTS = 128 * 128
"""Outputs per multiprocessor up to which a product has few blocks."""
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
    (128, 64, 1),
    (128, 128, 1),
    (192, 64, 3),
    (192, 128, 3),
    (192, 192, 3),
    (256, 64, 2),
    (256, 96, 2),
    (256, 128, 2),
    (256, 128, 4),
)
NARROW = ((128, 32, 1), (128, 32, 2), (256, 32, 2), (256, 32, 4))
SHORT = ((64, 32, 1), (64, 96, 1), (192, 96, 3))
"""(rows, columns, groups along the rows) of a block; narrow ones are for rounded weights of few columns, short ones for
products of few blocks."""
COPIED = ((1, 4, 0), (1, 5, 0), (1, 6, 0), (2, 3, 0))
ROUNDED = ((1, 2, 1), (1, 3, 1), (2, 2, 1), (2, 3, 1))
WEIGHTS = ((1, 3, 0), (1, 4, 0), (1, 5, 0), (1, 6, 0), (1, 8, 0))
"""Of 16-bit types, of float32, of float32 with rounded weights: lines of terms per tile, tiles in shared memory, tiles
that wait in registers."""
FRAGMENTS = 16
"""Registers of fragments on their way to the units, per 64 rows of a warpgroup."""
WHOLE = 32
"""The same where all k-steps of a tile are one instruction group."""
MIN_SCORE_RATIO = _CANDIDATES.minimum_score_ratio
"""Scores, over that of the best other schedule, down to which kept pixels are tried, and warps that copy."""
ENOUGH = 3
"""wgmma schedules from which on those of the other family are not looked for."""
SPREAD = 2
"""Schedules of pre-rounded weights that are tried with copies among the k-steps, too."""
SPLITS = (1, 2, 3, 4)
"""Split-K factors."""
CLUSTERS = (2, 4)
"""Blocks of a cluster."""
WIDE_CLUSTERS = (2, 3, 4, 5, 6, 7, 8)
"""Blocks of one whose blocks store into each other's shared memory."""
MOST_UNDER_WAY = 12
"""Tiles of a block that are copied at once."""
MOST_SHARED = 226 << 10
"""Bytes of shared memory of a block."""
MOST_REGISTERS = 248
"""Registers of a thread."""
MOST_WAITING = 80
"""Registers of a thread for tiles in flight."""
FILE = SM_90.registers_per_sm
UNIT = {4: _CANDIDATES.tf32_products_per_cycle, 2: _CANDIDATES.half_products_per_cycle}
"""Products per cycle and multiprocessor that long sums reach, by bytes of an operand."""


def contraction_schedules(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of both families for a program that `products.as_product` has made, the best of every kind of tile.

    Scores are a bound over counted cycles: what must move at the memory's rate, or what must be multiplied at that of
    the fastest units that the program has schedules for.
    """
    counter = WgmmaProblem(program, machine)
    found = list(wgmma_schedules(counter))
    kept = implicit_gemm.candidates(counter, program)
    if kept and found:
        best, other = max(score for _, score in found), max(score for _, score in kept)
        kept = [pair for pair in kept if pair[1] >= MIN_SCORE_RATIO * best]
        if kept and other >= best:
            found = sorted(found, key=lambda pair: -pair[1])[:ENOUGH]
        elif kept:  # the best of either form comes first
            kept = [(p, score / other * best) for p, score in kept]
    few = list(wgmma_schedules(counter.small_grid, SMALL_GRID_CANDIDATES)) if counter.few else []
    if counter.short:
        few += _interleave_cluster_conv(found, implicit_gemm_cluster.candidates(counter, program))
    if kept and not found:  # few outputs: blocks of both families are as small, and of the other one more share a sum
        found = list(gemm_mma.mma_schedules(program, machine, gemm_mma.MOST, counter.least))
        best = max((score for _, score in found), default=0.0)
        kept = [pair for pair in kept if pair[1] >= MIN_SCORE_RATIO * best][:ENOUGH]
        yield from (*few, *kept)
        yield from _append_mma(few, found[: gemm_mma.MOST - len(kept)])
        return
    found = kept + found
    fed = warp_specialized_schedules.candidates(counter, program) if found else []
    if fed:
        best = max(score for _, score in found)
        yield from ((made, min(score, best)) for made, score in fed if score >= MIN_SCORE_RATIO * best)
    yield from (*found, *few)
    if counter.before or len(found) >= ENOUGH:  # the other family has no prologues, and hardly ever wins
        return
    least = counter.least if found else None
    yield from _append_mma(few, gemm_mma.mma_schedules(program, machine, gemm_mma.MOST - len(found), least))


def _append_mma(few: Sequence[Candidate], others: Iterable[Candidate]) -> Iterator[Candidate]:
    """Schedules of the other family beside those of few blocks."""
    return ((made, score * (MMA_SCORE_FACTOR if few else 1.0)) for made, score in others)


def _interleave_cluster_conv(found: list[Candidate], others: list[Program]) -> list[Candidate]:
    """Clusters that keep pixels, in turns with those that do not: which are faster is not for estimates to say."""
    scores = sorted((score for _, score in found), reverse=True)
    if not scores:
        return []
    places = [scores[min(2 * number, len(scores) - 1)] for number in range(len(others))]
    return [(made, BEHIND_FIRST * place) for made, place in zip(others, places, strict=True)]


def wgmma_schedules(counter: WgmmaProblem, most: int = MOST, *, alike: bool = False) -> Iterator[Candidate]:
    """Schedules for warpgroups, at most so many, best first; ``alike``: those that differ in their stages only too."""
    best: dict[tuple[int, ...], tuple[float, WgmmaTile]] = {}
    for tiling in tilings(counter):
        cycles = counter.cycles(tiling)
        key = (tiling.rows, tiling.columns, tiling.split, tiling.cluster)
        three = tiling.rounded and not tiling.early and tiling.stages == 3  # more blocks side by side
        key += (tiling.terms, tiling.stages, *tiling.groups) if alike else (three,)
        if key not in best or cycles < best[key][0]:
            best[key] = (cycles, tiling)
    seen: dict[tuple[int, int], int] = {}
    scored = []
    for cycles, tiling in sorted(best.values(), key=lambda found: found[0]):
        tile = tiling.rows, tiling.columns
        scored.append((min(1.0, counter.least / cycles) * AGAIN ** seen.get(tile, 0), tiling))
        seen[tile] = seen.get(tile, 0) + 1
    known = frozenset((*SHAPES, *NARROW, *(SHORT if counter.short else ())))
    scored = wave_tiles.interleave_standard_tiles(scored, known, 2 if counter.short else 1)
    chosen = sorted(scored, key=lambda found: -found[0])[:most]
    plain = counter.item == 4 and not counter.rounded and not counter.beside  # the same tilings, counted by the same
    streams = gemm_memory_bound.best(counter, STREAMS if _is_worth_wgmma(counter) and not plain else 0)
    if streams and best and streams[0][0] > BEHIND * min(cycles for cycles, _ in best.values()):
        streams = []
    for cycles, tiling in streams:
        yield tiling.of(counter.program), counter.least / cycles
    if streams and chosen:  # the others are counted for units that are busy all the time
        scale = min(1.0, AGAIN * counter.least / streams[0][0] / chosen[0][0])
        chosen = [(scale * score, tiling) for score, tiling in chosen]
    for place, (score, tiling) in enumerate(chosen):
        for factor, other in _variants(counter, tiling, place < (SPREAD if counter.rounded else 1)):
            yield other.of(counter.program), factor * score


def _variants(counter: WgmmaProblem, tiling: WgmmaTile, first: bool) -> list[tuple[float, WgmmaTile]]:
    """(share of its score, schedule) of what can be done with a tile.

    Args: first: whether all of it is worth a trial.
    """
    if not counter.rounded:
        whole = can_swap_lanes(tiling.columns, counter.columns)
        if not (first and counter.narrow and whole and tiling.cluster == tiling.split == 1 and not tiling.held):
            return [(1.0, tiling)]
        return [(1.0, replace(tiling, paired=1)), (AGAIN, tiling)]
    spread, whole = replace(tiling, spread=1, steps=2), replace(tiling, steps=0)
    if not counter.short and counter.k_tiles_per_block(tiling) > tiling.stages and counter.fits(spread):
        others = [(PLAIN, tiling), (PLAIN, whole)] if first else []
        found = [(1.0, spread), *others]
    else:
        others = [spread]
        if tiling.steps:
            others.append(whole)
        elif tiling.stages >= counter.k_tiles_per_block(tiling):  # no copies are left to be spread
            others = [replace(tiling, steps=2)]
        found = [(1.0, tiling), *((AGAIN, other) for other in others if first)]
    return [(factor, other) for factor, other in found if other is tiling or counter.fits(other)]


def tilings(counter: WgmmaProblem) -> Iterator[WgmmaTile]:
    """All schedules that fit the product and the multiprocessor."""
    if not _is_worth_wgmma(counter):
        return
    shapes = SHAPES
    if counter.rounded:
        shapes += NARROW
        shapes += wave_tiles.wave_filling_tiles(counter.rows, counter.columns, counter.batch, counter.machine.sms)
    shapes += SHORT if counter.short else ()
    for rows, columns, along in dict.fromkeys(shapes):
        if rows >= 2 * counter.rows or columns >= 2 * counter.columns:
            continue
        if not counter.copies_are_16_bytes(rows, columns):
            continue
        tiles, sms = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns), counter.machine.sms
        few = tiles < 2 * sms
        clusters = WIDE_CLUSTERS if counter.short else CLUSTERS
        # a cluster that stores is faster, where it is large enough
        splits = few and (not counter.short or 2 * clusters[-1] * tiles < sms)
        for split, cluster in [*((s, 1) for s in SPLITS if s == 1 or splits), *((1, c) for c in clusters if few)]:
            for tiling in _k_pipelines(counter, (rows, columns, along), split, cluster):
                if counter.fits(tiling):
                    yield tiling


def _is_worth_wgmma(counter: WgmmaProblem) -> bool:
    """Whether the GPU has warpgroups, and they have enough to do."""
    if counter.machine.capability != GROUPED:
        return False
    points = counter.batch * counter.rows * counter.columns
    if (counter.rounded or counter.short) and counter.rows >= FEW_ROWS and counter.terms * counter.item >= LINE:
        return points * counter.terms >= FEW_PRODUCTS
    return points >= LEAST_POINTS and points * counter.terms >= LEAST_PRODUCTS


def _k_pipelines(counter: WgmmaProblem, block: tuple[int, int, int], split: int, cluster: int) -> Iterator[WgmmaTile]:
    """k-tiles of a block: how long they are, and how many lie in shared memory or are on their way."""
    rows, columns, along = block
    depths = list(WEIGHTS if counter.rounded else ROUNDED if counter.item == 4 else COPIED)
    share, _ = k_tiles_per_split(counter.terms, LINE // counter.item, split * cluster)
    if counter.short and share <= MOST_UNDER_WAY:
        depths = [(1, share, 0), *(depth for depth in depths if depth[1] < share)]
    for lines, stages, flight in depths:
        terms = lines * LINE // counter.item
        if any(side.run % terms and side.run != counter.terms for side in counter.sides) and (
            split > 1 or not counter.pieces
        ):
            continue
        share, found = k_tiles_per_split(counter.terms, terms, split * cluster)
        if not counter.fits_prologue(terms * share * (found if split == 1 else 1), split):
            continue
        if found != split * cluster or (lines > 1 and share < 3) or (flight and stages > max(2, share)):
            continue
        if found > 1 and share < (2 if counter.short and split == 1 else 4):
            continue
        yield WgmmaTile(
            rows,
            columns,
            terms,
            (along, 1),
            stages,
            flight,
            split,
            cluster,
            counter.through,
            steps=0 if counter.short and counter.rounded else 1,
            push=int((counter.rounded or counter.short) and cluster > 1),
            early=int(counter.short),
        )


def _fits(side: GemmOperand, size: int) -> bool:
    """Whether a tile can be copied in whole pieces of 16 bytes (float32 across terms: in squares)."""
    if side.width * side.item != 16:
        return False
    return side.along_terms or (size % 32 == 0 and not side.guards)


class WgmmaProblem(GemmProblem):
    """Counts shared memory, registers and cycles of a GEMM's ``wgmma`` schedules."""

    def __init__(self, program: Program, machine: GpuMachine) -> None:
        super().__init__(program, machine)
        used = {n.buffer for n in program.phases[0].exit.nodes if n.op == "load"}
        self.beside = sum(b.name in used and b.size >= program.outputs[0].size for b in program.inputs)
        self.program = program
        self.narrow = self.item == 2 and not self.sides[1].along_terms  # lanes have two columns side by side
        by_terms = all(side.along_terms for side in self.sides)
        self.rounded = int(by_terms and program.buffer(self.sides[1].buffer).tf32)
        self.before, self.vectors = prologue(program) is not None, len(k_vectors(program))
        self.through = int(self.rounded or (self.before and self.item == 2))
        self.ragged = self.before and prologue_is_zero_safe(program)
        self.pieces = gather_per_copy(program, *self.sides)
        products = float(self.batch * self.rows * self.columns * self.terms)
        few = self.batch * self.rows * self.columns <= machine.sms * FEW_POINTS
        self.short, self.few = bool(self.rounded) and few, self.item == 2 and few
        self.rates = replace(cost_tf32.RATES, products_per_cycle=UNIT[2]) if self.item == 2 else cost_tf32.RATES
        self.unit = self.rates.products_per_cycle if self.rounded else UNIT[self.item]
        self.least = max(self.moved / MEMORY, products / (machine.sms * self.unit), LATENCY)

    @property
    def small_grid(self) -> WgmmaProblem:
        """The same for schedules of few blocks."""
        made = copy.copy(self)
        made.short, made.few = True, False
        return made

    def fits_prologue(self, terms: int, split: int = 1) -> bool:
        """Whether what stands before the product allows for blocks of so many terms, and so many parts of the grid."""
        if not self.before:
            return True
        whole = self.terms % (terms * split) == 0
        return bool(self.through) and (whole or (self.ragged and split == 1))

    def k_tiles_per_block(self, tiling: WgmmaTile) -> int:
        """k-tiles of a block."""
        return k_tiles_per_split(self.terms, tiling.terms, tiling.split * tiling.cluster)[0]

    def fits(self, tiling: WgmmaTile) -> bool:
        """Whether a multiprocessor has a block's shared memory and registers."""
        registers = min(MOST_REGISTERS, FILE // tiling.threads)
        return self.shared(tiling) <= MOST_SHARED and self.registers(tiling) <= registers

    def shared(self, tiling: WgmmaTile) -> int:  # type: ignore[override]
        """Bytes of shared memory of a block."""
        rows, columns = (
            size if side.along_terms or side.item == 4 else -(-size // HIGH) * HIGH
            for side, size in zip(self.sides, (tiling.rows, tiling.columns), strict=True)
        )
        kept = (rows + columns) * tiling.terms * self.item * tiling.stages
        kept += 4 * self.vectors * self.k_tiles_per_block(tiling) * tiling.terms
        if not tiling.push:
            return max(kept, 4 * rows * columns if tiling.cluster > 1 else 0)
        return smem_with_dsmem(kept, tiling.room)

    def copies_are_16_bytes(self, rows: int, columns: int) -> bool:
        """Whether such tiles are copied in whole pieces."""
        return all(_fits(side, size) for side, size in zip(self.sides, (rows, columns), strict=True))

    def staging_registers(self, tiling: WgmmaTile) -> int:
        """What a thread takes of a tile of float32: whole pieces, or squares, of each operand."""
        total = 0
        for side, size in zip(self.sides, (tiling.rows, tiling.columns), strict=True):
            piece = side.width if side.along_terms else 16
            total += -(-size * tiling.terms // (piece * tiling.threads)) * piece
        return total

    def registers(self, tiling: WgmmaTile) -> int:
        """32-bit registers of a thread, roughly."""
        total = tiling.rows * tiling.columns // tiling.threads
        waiting = tiling.flight * self.staging_registers(tiling)
        if tiling.rounded:
            waiting = (FRAGMENTS if tiling.steps else WHOLE) * tiling.rows // tiling.groups[0] // HIGH
        total += int(RESIDUAL_REGISTERS_PER_ACC * total) * self.beside if tiling.rounded else 0
        return 56 + total + (waiting or 8) + (0 if waiting <= MOST_WAITING else MOST_REGISTERS)

    def _blocks(self, tiling: WgmmaTile) -> tuple[int, int]:
        """Blocks side by side on a multiprocessor, and how often they are replaced."""
        tiles = self.batch * -(-self.rows // tiling.rows) * -(-self.columns // tiling.columns)
        resident = min(SHARED // (self.shared(tiling) + 1024), FILE // (tiling.threads * self.registers(tiling)))
        resident = max(1, min(resident, self.machine.threads_per_sm // tiling.threads))
        queue = -(-tiles * tiling.split * tiling.cluster // self.machine.sms)
        if tiling.cluster == 1:
            return min(resident, queue), -(-queue // resident)
        once = gemm_cost.concurrent_clusters(tiling.cluster, self.machine.sms)
        return min(resident, queue), math.ceil(tiles / (resident * once))

    def cycles(self, tiling: WgmmaTile) -> float:  # type: ignore[override]
        """Estimated cycles of a launch, and of the second one where terms are split."""
        if tiling.rounded and not self.short:
            beside, waves = self._blocks(tiling)
            return cost_tf32.cycles(self, tiling, beside, waves, self.rates)
        return gemm_cost.group_cycles(self, tiling, self.shared(tiling), before=self.before)
