"""Schedules of products whose blocks compute several tiles, each of which is finished beside the products of the next
(`codegen.cuda.product_steady`).

Counted as other products with rounded weights, but for one launch and one exit in all:

    cycles = latency + tiles of a block * (terms + turn) + exit

Totals of two tiles are in registers, and every tile of terms has code of its own, which takes seconds to compile: at
most two are tried.  No constant is fitted to such schedules yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jcuts.region import gpu_fitted
from jcuts.region.gpu_group_tiling import LINE, GroupTiling
from jcuts.region.gpu_products import EXIT, MEMORY
from jcuts.region.gpu_rounded import RATES, step
from jcuts.region.products import shares

if TYPE_CHECKING:
    from jcuts.region.gpu_groups import GroupCounter

MOST = 2
"""Schedules of a product."""
SHAPES = ((128, 96, 2), (128, 128, 2), (128, 192, 2), (192, 96, 3))
"""(rows, columns, groups along the rows) beside fitted ones."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 6
"""Tiles of a block: one tile is finished behind its own products; of many, launches and exits are little."""
MOST_TERMS, DEPTHS = 32, (6, 5, 4)
"""Tiles of terms that have code of their own; tiles in shared memory."""
BESIDE = 58
"""Registers of a thread beside the totals of two tiles."""
MOST_REGISTERS, MOST_SHARED, FILE = 255, 226 << 10, 65536
"""Of a thread; bytes of a block; registers of a multiprocessor."""
TURN = 400.0
"""Cycles from the last products of a tile to the first of the next."""


def steady(counter: GroupCounter) -> Iterator[tuple[float, GroupTiling]]:
    """(cycles, schedule) of all that fit."""
    if not counter.rounded or counter.short or counter.before or counter.batch > 1:
        return
    terms = LINE // counter.item
    share, _ = shares(counter.terms, terms, 1)
    if share > MOST_TERMS or any(side.run % terms and side.run != counter.terms for side in counter.sides):
        return
    sms = counter.machine.sms
    fitted = gpu_fitted.shapes(counter.rows, counter.columns, 1, sms, MOST_ROUNDS)
    for rows, columns, along in dict.fromkeys((*SHAPES, *fitted)):
        tiles = -(-counter.rows // rows) * -(-counter.columns // columns)
        rounds = -(-tiles // sms)
        whole = counter.whole(rows, columns) and columns < 2 * counter.columns
        if not LEAST_ROUNDS <= rounds <= MOST_ROUNDS or along == 1 or not whole:
            continue
        made = GroupTiling(rows, columns, terms, (along, 1), 0, rounded=1, steps=2, rounds=rounds)
        if 2 * rows * columns // made.threads + BESIDE > min(MOST_REGISTERS, FILE // made.threads // 8 * 8):
            continue
        stages = next((n for n in DEPTHS if n <= share and (rows + columns) * LINE * n <= MOST_SHARED), 0)
        if stages and share > stages:
            made = GroupTiling(rows, columns, terms, (along, 1), stages, rounded=1, steps=2, rounds=rounds)
            yield cycles(counter, made), made


def best(counter: GroupCounter, most: int = MOST) -> list[tuple[float, GroupTiling]]:
    """Those with the fewest cycles."""
    return sorted(steady(counter), key=lambda found: found[0])[:most]


def cycles(counter: GroupCounter, tiling: GroupTiling) -> float:
    """Estimated cycles of a launch."""
    share, _ = shares(counter.terms, tiling.terms, 1)
    written = 4.0 * tiling.rows * tiling.columns * counter.results / max(1.0, counter.partial)
    total = RATES.latency + EXIT + written / RATES.cache
    total += tiling.rounds * (share * step(counter, tiling, 1, RATES) + TURN)
    moved = counter.moved / MEMORY
    return max(total, moved + RATES.latency) + RATES.memory * min(total, moved)
