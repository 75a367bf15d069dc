"""Candidate schedules of convolutions by warp groups that keep pixels in shared memory, ranked by counted cycles.

Counted as in `region.gpu_rounded`, per step of one tap and 32 channels; what differs is what is copied for it: the
weights, unless they stay in shared memory, and ``1 / taps`` of a run of pixels.  A 3x3 convolution of 192 outputs, 128
features and rows of 28 pixels copies 20 KB in the 768 cycles that the units take, where a tile per tap would be 40 KB;
such tiles were seen to come at 25 bytes per cycle where a multiprocessor has one block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jcuts.dfg.program import Program
from jcuts.region.gpu_group_tiling import GROUP, HIGH, LINE
from jcuts.region.gpu_products import EXIT, MEMORY, PORT, STEP, Counter
from jcuts.region.gpu_rounded import RATES
from jcuts.region.gpu_tiles import Candidate, scheduled
from jcuts.region.group_windows import Window, has_weights, window
from jcuts.region.products import sides

MOST = 5
"""Schedules of one convolution."""
WHOLE = 4
"""Steps of terms of a tile."""
UNROLLED, FEW_COLUMNS = 2, 64
"""Schedules that are tried with code of its own for every tap too, where there are so few columns that instructions
count."""
AGAIN = 0.95
"""What every further candidate counts that differs in little."""
HEIGHTS = ((64, 1), (128, 1), (128, 2), (192, 1), (192, 3), (256, 2), (256, 4))
"""(rows of a block, groups along them)."""
WIDTHS, MOST_TOTALS = (32, 256), 128
"""Least and most columns; totals of a thread."""
STAGES = (6, 5, 4)
MOST_SHARED, SHARED, FILE, OWN = 226 << 10, 227 << 10, 65536, 2048
"""Bytes of shared memory of a block; of a multiprocessor: shared memory, registers; shared memory
that every block takes beside its own."""
MOST_REGISTERS = 248
UNIT = {4: RATES.unit, 2: 1600.0}
"""Products per cycle and multiprocessor, by bytes of an operand."""
GAP = 30.0
"""Cycles of a step in which a multiprocessor's only block waits for all its warps."""
SHARE = 0.9
"""Pixels copied per tap, of those that a tile per tap would copy, up to which keeping them pays."""


@dataclass(frozen=True)
class WindowTiling:
    """One schedule: a block's tile, warp groups along its rows, tiles of weights and runs of pixels in shared memory.

    Attributes:
        rounds: tiles of outputs of a block. spread: whether copies are started among the steps of products.
        steps: of terms, that are one group of instructions. unrolled: whether every tap has code of its own.
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

    @property
    def threads(self) -> int:
        """Of a block."""
        return GROUP * self.groups

    def of(self, program: Program) -> Program:
        """The scheduled program."""
        found = (("rounds", self.rounds, 1), ("spread", self.spread, 0), ("steps", self.steps, 1))
        found += (("unrolled", self.unrolled, 0),)
        more = tuple((name, count) for name, count, least in found if count > least)
        item = sides(program)[0].item
        tile = (self.rows, self.columns, LINE // item)
        params = (("tile", tile), ("groups", (self.groups, 1)), ("stages", self.stages), ("pixels", self.pixels))
        more += (("rounded", 1),) if item == 4 else ()
        return scheduled(program, "product", self.threads, *params, *more)


def windows(counter: Counter, program: Program, most: int = MOST) -> Iterator[tuple[float, WindowTiling]]:
    """Schedules of a product that is such a convolution, with their cycles, best first."""
    found = window(program)
    if found is None or not has_weights(program):
        return
    best: dict[tuple[int, ...], tuple[float, WindowTiling]] = {}
    for tiling in tilings(counter, found):
        spent = cycles(counter, found, tiling)
        key = tiling.rows, tiling.columns, tiling.rounds > 1
        if key not in best or spent < best[key][0]:
            best[key] = (spent, tiling)
    yield from sorted(best.values(), key=lambda pair: pair[0])[:most]


def candidates(counter: Counter, program: Program, most: int = MOST) -> list[Candidate]:
    """The same as programs with scores; the best of few columns also with code of its own for every tap."""
    found: list[Candidate] = []
    for number, (spent, tiling) in enumerate(windows(counter, program, most)):
        score = min(1.0, counter.least / spent) * AGAIN**number
        found.append((tiling.of(program), score))
        if number < UNROLLED and tiling.columns <= FEW_COLUMNS and _repeats(program, tiling):
            found.append((replace(tiling, unrolled=1).of(program), score * AGAIN))
    return found


def _repeats(program: Program, tiling: WindowTiling) -> bool:
    """Whether a convolution has whole rounds of a loop that has code for every tap."""
    found = window(program)
    return found is not None and found.chunks % (2 if tiling.steps == WHOLE and found.taps % 2 else 1) == 0


def tilings(counter: Counter, found: Window) -> Iterator[WindowTiling]:
    """All schedules that fit the convolution and the multiprocessor."""
    for (rows, groups), columns in itertools.product(HEIGHTS, _widths(counter.columns)):
        if rows >= 2 * counter.rows or rows * columns > MOST_TOTALS * GROUP * groups:
            continue
        if found.span(rows) > SHARE * found.taps * rows:
            continue
        high = rows // groups // HIGH
        spread = int(high == 1)  # the assembler has no registers for copies among the products of more rows
        whole = high == 1 and found.steps % 2 == 0
        for steps, stages in [(s, n) for s in ((WHOLE, 2) if whole else (2,)) for n in (*STAGES, found.steps)]:
            if not 3 <= stages <= found.steps or (stages < found.steps and stages - 2 > found.taps):
                continue
            if registers(WindowTiling(rows, columns, groups, stages, 2, 2, 0, steps)) > MOST_REGISTERS:
                continue
            once = WindowTiling(rows, columns, groups, stages, 1 if found.chunks == 1 else 2, 1, spread, steps)
            if shared(found, once) <= MOST_SHARED and stages < found.steps:
                yield once
            tiles, slots = _tiles(counter, once), counter.machine.sms * _resident(found, once)
            along = -(-counter.rows // rows)
            rounds = -(-along // max(1, slots * along // tiles))
            more = WindowTiling(rows, columns, groups, stages, 2, rounds, spread, steps)
            if rounds > 1 and shared(found, more) <= MOST_SHARED:
                yield more


def _widths(columns: int) -> list[int]:
    """Multiples of 8 that columns fall into."""
    counts = range(-(-columns // WIDTHS[1]), max(1, columns // WIDTHS[0]) + 1)
    return sorted({-(-columns // (8 * count)) * 8 for count in counts})


def shared(found: Window, tiling: WindowTiling) -> int:
    """Bytes of shared memory of a block."""
    columns = tiling.columns if found.side.item == 4 else -(-tiling.columns // HIGH) * HIGH
    return tiling.stages * columns * LINE + tiling.pixels * found.span(tiling.rows) * LINE + LINE


def registers(tiling: WindowTiling) -> int:
    """32-bit registers of a thread, roughly."""
    high, totals = tiling.rows // tiling.groups // HIGH, tiling.rows * tiling.columns // tiling.threads
    found = 40 + 14 * (high - 1) + totals * 9 // 8 + (16 if tiling.steps == WHOLE else 0) + 10 * (tiling.rounds > 1)
    return -(-found // 8) * 8


def _resident(found: Window, tiling: WindowTiling) -> int:
    """Blocks side by side on a multiprocessor."""
    by_memory = (SHARED + OWN) // (shared(found, tiling) + OWN)
    return max(1, min(by_memory, FILE // (tiling.threads * registers(tiling)), 2048 // tiling.threads))


def _tiles(counter: Counter, tiling: WindowTiling) -> int:
    return -(-counter.rows // tiling.rows) * -(-counter.columns // tiling.columns)


def cycles(counter: Counter, found: Window, tiling: WindowTiling) -> float:
    """Estimated cycles of a launch."""
    rows, columns, sms = tiling.rows, tiling.columns, counter.machine.sms
    tiles = -(-counter.rows // rows)
    blocks = -(-tiles // tiling.rounds) * -(-counter.columns // columns)
    queue = -(-blocks // sms)
    beside = min(_resident(found, tiling), queue)
    waves = math.ceil(queue / beside)
    stays = tiling.stages == found.steps
    run = found.span(rows) * LINE / found.taps
    copied = run + (0.0 if stays else columns * LINE)
    read = rows // HIGH * (HIGH + columns) * LINE
    limits = [
        beside * rows * columns * found.line / UNIT[found.side.item], beside * (read + copied) / PORT,
        beside * copied / RATES.cache, (0.0 if stays else RATES.fetch / (tiling.stages - 2)) + RATES.round,
    ]  # fmt: skip
    inner = max(limits) + RATES.overlap * (sum(limits) - max(limits))
    if beside == 1:  # nobody else fills the gaps
        inner += RATES.step * LINE / STEP / tiling.steps + (GAP / found.taps if stays else GAP)
    written = 4.0 * rows * columns * counter.results / max(1.0, counter.partial)
    leave = EXIT + beside * written / RATES.cache
    begin = RATES.latency + (tiling.stages * columns * LINE / RATES.cache if stays else 0.0)
    between = (tiling.rounds - 1) * EXIT
    total = waves * (begin + tiling.rounds * (found.steps * inner + leave) + between)
    moved = counter.moved / MEMORY
    return max(total, moved + RATES.latency) + RATES.memory * min(total, moved)
