"""Tile widths against wave quantisation: widths that divide a GEMM's columns evenly, so that blocks fill whole waves.

A GEMM of 3072 rows and 2304 columns has 216 tiles of 128x256: two waves of 132, the second one two thirds full.  256
tiles of 192x144 are two waves as well, of tiles 16 % smaller.  Few tiles are large for a GPU, so widths between powers
of two matter; their number is small, as a width is worth trying only where one tile less would be wider.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile

STEP = 16
"""Columns of two instructions' fragments side by side (stores of 16 bytes)."""
LEAST = 80
"""The tiles' least columns."""
WIDEST = 256
"""The tiles' most columns."""
HEIGHTS = ((64, 1), (128, 2), (192, 3))
"""(rows, warp groups along them) of fitted tiles."""
MOST_WAVES = 4
"""Waves from which on what the last one lacks is little."""

KNOWN = fit.coefficients("gpu/gemm", "wave_tiles").standard_tile_score_floor
"""What the best tiles of known sizes, to which constants were fitted, score at least over the best of all."""


def wave_filling_tiles(
    rows: int, columns: int, batch: int, sms: int, waves: int = MOST_WAVES
) -> tuple[tuple[int, int, int], ...]:
    """(rows, columns, groups along the rows) of tiles of even widths for products of few waves.

    Args: waves: of blocks of one tile each, at most.

    >>> wave_filling_tiles(3072, 768, 1, 132)[-3:]
    ((192, 128, 3), (192, 112, 3), (192, 96, 3))
    >>> wave_filling_tiles(200704, 256, 1, 132)
    ()
    """
    found = []
    for high, groups in HEIGHTS:
        for wide in even_widths(columns):
            tiles = batch * -(-rows // high) * -(-columns // wide)
            if tiles <= waves * sms:
                found.append((high, wide, groups))
    return tuple(found)


def even_widths(columns: int) -> tuple[int, ...]:
    """The widths into which columns divide with the least that is left over, widest first.

    >>> even_widths(768), even_widths(100)
    ((256, 192, 160, 128, 112, 96), (112,))
    """
    counts = range(-(-columns // WIDEST), max(1, columns // LEAST) + 1)
    found = (-(-columns // (count * STEP)) * STEP for count in counts)
    return tuple(dict.fromkeys(wide for wide in found if LEAST <= wide <= WIDEST))


def interleave_standard_tiles(
    scored: Sequence[tuple[float, WgmmaTile]], known: Collection[tuple[int, int, int]], most: int
) -> list[tuple[float, WgmmaTile]]:
    """(score, schedule), in the order of their cycles, with so many of known sizes near the best of all.

    Few of them are measured: estimates of other widths alone must not decide that what was fast is not tried.
    """
    best, seen, found = max((score for score, _ in scored), default=0.0), set[tuple[int, int, int]](), []
    for score, tiling in scored:
        size = (tiling.rows, tiling.columns, tiling.groups[0])
        if size in known and size not in seen and len(seen) < most:
            seen.add(size)
            score = max(score, KNOWN * best)
        found.append((score, tiling))
    return found
