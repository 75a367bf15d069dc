"""Schedules of products that are bound by memory: what streams by must never wait for the units, nor for latencies.

Several blocks of a multiprocessor overlap each other's copies, products and exits, so tiles are smaller and stages
fewer than where the units are the limit; the exit's matrices are asked for first of all (`region.gpu_held`).  Counted
per block: a chain of latencies that nobody shortens, and its work at the rate of whatever it needs most:

    cycles = blocks of a multiprocessor / resident * max(chain + work, resident * work) + chain
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jcuts.region.gpu_group_tiling import BARRIER, GroupTiling
from jcuts.region.gpu_held import LOADED, SENT, STORED, held
from jcuts.region.gpu_products import MEMORY, PORT
from jcuts.region.products import shares

if TYPE_CHECKING:
    from jcuts.region.gpu_groups import GroupCounter

SHAPES = (
    (64, 64, 1), (64, 128, 1), (64, 192, 1), (64, 256, 1), (128, 64, 2), (128, 128, 2), (128, 96, 2), (128, 192, 2),
    (192, 64, 3), (192, 128, 3), (256, 64, 2),
)  # fmt: skip
"""(rows, columns, groups along the rows)."""
ADDED, ALONE = ((LOADED, 0), (STORED, 0), (SENT, 1), (0, 1)), ((STORED, 0), (0, 0))
"""(held, early): exits that add matrices, and others."""
BOUND = 0.5
"""Share of the units' time that memory must take."""
MOST_AT_ONCE = 4
"""Tiles of terms of a block up to which all are copied at once."""
START, LATE, EARLY, LEAVE = 2000.0, 1500.0, 700.0, 700.0
"""Cycles: to the first operands under load; for what is added, asked for when it is needed, or from the L2 cache; of an
exit."""
AGAIN = 1.05
"""What a schedule's cycles count for each that has the same tile, or exit, and is better."""
FETCH, CACHE, SPARE = 900.0, 62.0, 0.15
"""A load's cycles; bytes of the L2 cache per cycle; what is left of work that overlaps."""
FILE, SHARED = 65536, 227 << 10
MOST_REGISTERS = 250


def streams(counter: GroupCounter) -> Iterator[tuple[float, GroupTiling]]:
    """(cycles, schedule) of all that fit a product that is bound by memory."""
    units = counter.batch * counter.rows * counter.columns * counter.terms / (counter.machine.sms * counter.unit)
    if counter.short or counter.moved / MEMORY < BOUND * units or counter.beside > 2:
        return
    if not counter.beside and any(side.run != counter.terms for side in counter.sides):  # taps: the L2 cache decides
        return
    for rows, columns, along in SHAPES:
        tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
        if columns >= 2 * counter.columns or tiles < 2 * counter.machine.sms or not counter.whole(rows, columns):
            continue
        for tiling in _depths(counter, (rows, columns, along)):
            for how, early in ADDED if counter.beside else ALONE:
                found = held(counter.program, rows, columns, how, 0)
                if how and not (found.stored if how == SENT or not counter.beside else found.loaded):
                    continue
                made = GroupTiling(*tiling, rounded=counter.rounded, early=early, held=how)
                if resident(counter, made):
                    yield cycles(counter, made), made


def best(counter: GroupCounter, most: int) -> list[tuple[float, GroupTiling]]:
    """The schedules with the fewest cycles, at most so many, of different tiles and exits."""
    chosen: list[tuple[float, GroupTiling]] = []
    found = list(streams(counter)) if most else []
    while found and len(chosen) < most:
        found.sort(key=lambda item: (item[0] * AGAIN ** _alike(item[1], [t for _, t in chosen]), item[1].threads))
        chosen.append(found.pop(0))
    return sorted(chosen, key=lambda item: item[0])


def _alike(tiling: GroupTiling, others: list[GroupTiling]) -> int:
    """How often the tile, and how often the exit, is one of the others'."""
    tile, how = (tiling.rows, tiling.columns), (tiling.held, tiling.early)
    return sum((tile == (o.rows, o.columns)) + (how == (o.held, o.early)) for o in others)


def _depths(counter: GroupCounter, block: tuple[int, int, int]) -> Iterator[tuple]:
    rows, columns, along = block
    terms = 128 // counter.item
    if any(side.run % terms and side.run != counter.terms for side in counter.sides):
        return
    share, _ = shares(counter.terms, terms, 1)
    if counter.before and (not counter.rounded or counter.terms % (terms * share)):
        return
    if counter.item == 4 and not counter.rounded:
        stages = ((2, 1),)
    else:
        stages = ((share, 0),) if share <= MOST_AT_ONCE else ((3, 0), (4, 0))
    for count, flight in stages:
        yield rows, columns, terms, (along, 1), count, flight


def registers(counter: GroupCounter, tiling: GroupTiling) -> float:
    """32-bit registers of a thread, as the assembler takes them."""
    totals = tiling.rows * tiling.columns / tiling.threads
    waiting = tiling.flight * counter.words(tiling)
    return (28 + 1.42 * totals if counter.beside else 36 + 1.12 * totals) + waiting


def resident(counter: GroupCounter, tiling: GroupTiling) -> int:
    """Blocks side by side on a multiprocessor."""
    kept = counter.shared(tiling)
    mine = held(counter.program, tiling.rows, tiling.columns, tiling.held, kept)
    shared = (mine.end + BARRIER if mine.end > kept else kept) + 1024
    each = registers(counter, tiling)
    if each > MOST_REGISTERS:
        return 0
    found = min(SHARED // shared, int(FILE // (tiling.threads * 8 * math.ceil(each / 8))))
    return min(found, counter.machine.threads_per_sm // tiling.threads)


def cycles(counter: GroupCounter, tiling: GroupTiling) -> float:
    """Estimated cycles of a launch."""
    rows, columns, line = tiling.rows, tiling.columns, tiling.terms * counter.item
    sms = counter.machine.sms
    tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
    share, _ = shares(counter.terms, tiling.terms, 1)
    ahead = share if tiling.stages >= share else max(1, tiling.stages - 2)
    chain = START + max(0, share - ahead) * FETCH / ahead + LEAVE
    if counter.beside and tiling.held in (0, SENT):
        chain += EARLY if tiling.early else LATE
    beyond = counter.results / (counter.batch * counter.rows * counter.columns) * rows * columns
    copied = (rows + columns) * line * share
    limits = [
        rows * columns * tiling.terms * share / counter.unit, (copied + beyond) / CACHE,
        (rows // 64 * (64 + columns) * line * share + copied + beyond) / PORT,
        counter.moved / (counter.rows * counter.columns * counter.batch) * rows * columns / (MEMORY / sms),
    ]  # fmt: skip
    work = max(limits) + SPARE * (sum(limits) - max(limits))
    beside = resident(counter, tiling)
    queue = tiles / sms
    rounds = math.ceil(queue) / beside if queue > 2 * beside else math.ceil(math.ceil(queue) / beside)
    beside = min(beside, math.ceil(queue))
    return max(rounds * max(chain + work, beside * work) + START, counter.moved / MEMORY + START)
