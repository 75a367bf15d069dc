"""Schedules of ``wgmma`` GEMMs (capability 9.0), ranked by counted cycles.

Only GEMMs with enough to compute have any: their tiles are large, and every candidate costs compiling and measuring.
Cycles are counted by `gemm.cost`, those of pre-rounded weights in many blocks by `gemm.cost_tf32`, of memory-bound
GEMMs by `gemm.memory_bound`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jcuts.lower.patterns.gemm import k_tiles_per_split
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm import memory_bound as gemm_memory_bound
from jcuts.schedule.gpu.gemm import wave_tiles
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import LINE, WgmmaTile, WgmmaTiles, can_swap_lanes
from jcuts.schedule.gpu.machine import Candidate

MOST = 6
"""Tilings of one product for warp groups."""
_CANDIDATES = fit.coefficients("gpu/gemm", "wgmma_candidates")
AGAIN = _CANDIDATES.alike_score_factor
"""What every further candidate with the same tile counts."""
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


def wgmma_schedules(counter: WgmmaProblem, most: int = MOST, *, alike: bool = False) -> Iterator[Candidate]:
    """Schedules for warpgroups, at most so many, best first; ``alike``: those that differ in their stages only too."""
    tiles, best = tilings(counter), dict[tuple[int, ...], tuple[float, int]]()
    prices = counter.cycles(tiles).tolist() if len(tiles) else []
    for place, (cycles, key) in enumerate(zip(prices, _kinds(tiles, alike), strict=True)):
        if key not in best or cycles < best[key][0]:
            best[key] = (cycles, place)
    seen: dict[tuple[int, int], int] = {}
    scored = []
    for cycles, place in sorted(best.values(), key=lambda found: found[0]):
        tiling = tiles.tile(place)
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


def _kinds(tiles: WgmmaTiles, alike: bool) -> Iterator[tuple[int, ...]]:
    """What tells schedules apart of which the fastest is taken."""
    kept = [tiles.rows, tiles.columns, tiles.split, tiles.cluster]
    if alike:
        kept += [tiles.terms, tiles.stages, tiles.groups[0]]
    elif tiles.rounded and not tiles.early:
        kept.append(tiles.stages == 3)  # more blocks side by side
    return zip(*(each.tolist() for each in kept), strict=True)


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


def tilings(counter: WgmmaProblem) -> WgmmaTiles:
    """All schedules that fit the product and the multiprocessor."""
    pushes = int(counter.rounded or counter.short)
    steps = 0 if counter.short and counter.rounded else 1
    made = WgmmaTiles.of_rows(
        list(_tiles(counter)), rounded=counter.through, steps=steps, early=int(counter.short), push=pushes
    )
    return made.take(counter.fits(made)) if len(made) else made


def _tiles(counter: WgmmaProblem) -> Iterator[tuple[int, ...]]:
    """Rows of `WgmmaTiles.of_rows`, whether they fit or not."""
    if not _is_worth_wgmma(counter):
        return
    shapes = SHAPES
    if counter.rounded:
        shapes += NARROW
        shapes += wave_tiles.wave_filling_tiles(counter.rows, counter.columns, counter.batch, counter.machine.sms)
    shapes += SHORT if counter.short else ()
    clusters, sms = WIDE_CLUSTERS if counter.short else CLUSTERS, counter.machine.sms
    pipelines: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for rows, columns, along in dict.fromkeys(shapes):
        if rows >= 2 * counter.rows or columns >= 2 * counter.columns:
            continue
        if not counter.copies_are_16_bytes(rows, columns):
            continue
        tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
        few = tiles < 2 * sms and not counter.sums
        # a cluster that stores is faster, where it is large enough
        splits = few and (not counter.short or 2 * clusters[-1] * tiles < sms)
        for way in [*((s, 1) for s in SPLITS if s == 1 or splits), *((1, c) for c in clusters if few)]:
            if way not in pipelines:
                pipelines[way] = list(_k_pipelines(counter, *way))
            for pipeline in pipelines[way]:
                yield rows, columns, along, *pipeline, *way


def _is_worth_wgmma(counter: WgmmaProblem) -> bool:
    """Whether the GPU has warpgroups, and they have enough to do."""
    if counter.machine.capability != GROUPED:
        return False
    points = counter.batch * counter.rows * counter.columns
    if (counter.rounded or counter.short) and counter.rows >= FEW_ROWS and counter.terms * counter.item >= LINE:
        return points * counter.terms >= FEW_PRODUCTS
    return points >= LEAST_POINTS and points * counter.terms >= LEAST_PRODUCTS


def _k_pipelines(counter: WgmmaProblem, split: int, cluster: int) -> Iterator[tuple[int, int, int]]:
    """k-tiles of a block: how long they are, and how many lie in shared memory or are on their way."""
    depths = list(WEIGHTS if counter.rounded else ROUNDED if counter.item == 4 else COPIED)
    share, _ = k_tiles_per_split(counter.terms, LINE // counter.item, split * cluster)
    if counter.short and share <= MOST_UNDER_WAY:
        depths = [(1, share, 0), *(depth for depth in depths if depth[1] < share)]
    pipelines: dict[tuple[int, int, int], None] = {}
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
        pipelines[terms, stages if flight else min(stages, share), flight] = None
    yield from pipelines
