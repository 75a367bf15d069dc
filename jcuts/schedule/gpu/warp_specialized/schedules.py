"""Schedules of the warp-specialised GEMM and implicit GEMM (producer warps, consumer warpgroups), ranked by a cycle
model.

For TF32-pre-rounded weights.  One block fills a multiprocessor, and blocks are persistent.  Counted per k-tile: the
longest of tensor cores, shared-memory port and L2 cache; fetching and rounding of a warpgroup hide behind the others'
``wgmma``, but for some hundred cycles.  Results are stored while the next tile's copies are in flight, but take the
warpgroups' time.  The constants are roughly those of 45 schedules of 14 GEMMs and convolutions on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jcuts.estimate.time_model import Resource, TimeTerm, longest, per_sm, repeat, serial, soft_longest, term
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.conv_window import ConvWindow, match_conv_window, weights_need_no_transform
from jcuts.lower.patterns.gemm import gemm_operands, k_tiles_per_split
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm.epilogue_smem import LOADED, StagedMatrix, staged_epilogue
from jcuts.schedule.gpu.gemm.mma import bound_rates
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, GROUP, HIGH, LINE
from jcuts.schedule.gpu.machine import WARP, Candidate, scheduled

_FIT = fit.coefficients("gpu/warp_specialized", "cycles")
_STAGED = fit.coefficients("gpu/warp_specialized", "staged_residual")
_CANDIDATES = fit.coefficients("gpu/warp_specialized", "candidates")
MOST = 1
"""Tilings of one product."""
AGAIN = _CANDIDATES.alike_score_factor
"""What every further schedule counts."""
GROUPED = (9, 0)
"""The compute capability that has wgmma."""
LEAST_ROWS = 1024
"""Rows from which on there are schedules."""
LEAST_PRODUCTS = 1 << 28
"""Products from which on there are schedules."""
HEIGHTS = ((128, 2, 256), (192, 3, 128), (256, 2, 64), (256, 4, 64))
"""(rows of a block, groups along them, most columns)."""
WIDTHS = (32, 256)
"""Least and most columns."""
FEW_TOTALS = 64
"""Totals of a thread beside which there are registers for everything."""
OTHERS = {1: 2, 2: 4, 4: 4}
"""Warps that do not multiply, by those that copy: one more may pass proxy fences; whole groups share out registers."""
PRODUCER_WARPS = 4
"""Warps that copy."""
PRODUCER_WARPS_WITH_FENCE_WARP = 2
"""Warps that copy beside a warp that passes proxy fences."""
FENCE_WARP_SCORE_FACTOR = _CANDIDATES.fence_warp_score_factor
"""What such a warp was expected to be worth: three layers took 3 to 6 % more, so that it is tried, and loses."""
COPIED = _CANDIDATES.no_halo_score_factor
"""What schedules without halo reuse count: those of other families are estimated as much too fast."""
RUNS = 2
"""Runs of activation rows in shared memory."""
STAGES = 3
"""Least stages."""
MOST_STAGES = 10
"""Most stages."""
MOST_SHARED = 226 << 10
"""Bytes of shared memory of a block."""
SHARE = _CANDIDATES.halo_share_limit
"""Pixels copied per tap, of those that a tile per tap would copy, up to which keeping them pays."""
CHAIN = _FIT.k_tile_cycles
"""Cycles of a k-tile that are left of what warpgroups wait for."""
GROUPS = _FIT.k_tile_cycles_per_warpgroup
"""More of them for every warpgroup."""
BEGIN = _FIT.block_start_cycles
"""Cycles to a launch's first products."""
LEAVE = _FIT.epilogue_cycles
"""Cycles of a tile's results without their bytes."""
LEFT = _FIT.memory_overlap_remainder
"""What is left of memory's time."""


@dataclass(frozen=True)
class WarpSpecializedTile:
    """One schedule of the warp-specialised kernel.

    Attributes:
        rows, columns: outputs of a block's tile.
        groups: consumer warpgroups along its rows.
        stages: stages of the ring.
        carriers: producer warps.
        pixels: runs of pixels (halos) that are kept for all taps; 0 where none are.
        rounds: output tiles of a block.
        early: whether epilogue operands are prefetched.
        beside: whether a residual matrix comes through the stages.
    """

    rows: int
    columns: int
    groups: int
    stages: int
    carriers: int
    pixels: int = 0
    rounds: int = 1
    early: int = 0
    beside: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return GROUP * self.groups + WARP * OTHERS[self.carriers]

    def of(self, program: Program) -> Program:
        """The scheduled program."""
        found = (
            ("pixels", self.pixels, 0),
            ("rounds", self.rounds, 1),
            ("early", self.early, 0),
            ("beside", self.beside, 0),
        )
        more = tuple((name, count) for name, count, least in found if count > least)
        tile = (self.rows, self.columns, LINE // gemm_operands(program)[0].item)
        params = (("tile", tile), ("groups", (self.groups, 1)), ("stages", self.stages), ("fed", self.carriers))
        return scheduled(program, "product", self.threads, *params, ("rounded", 1), *more)


def staged_residual(program: Program, rows: int, columns: int, groups: int, carriers: int) -> StagedMatrix | None:
    """The residual matrix that can go through the pipeline stages: each stage holds the rows of one warpgroup."""
    kept = (k for k in staged_epilogue(program, rows, columns, LOADED, 0).loaded if k.item == 4)
    found = next((replace(k, pitch=columns * k.item) for k in kept), None)
    whole = columns % (LINE // 4) == 0 and WARP * carriers % columns == 0  # a row each of the swizzle
    fits = rows // groups * columns * 4 <= (rows + columns) * LINE
    return found if whole and fits else None


def candidates(counter: WgmmaProblem, program: Program, most: int = MOST) -> list[Candidate]:
    """The best schedules, scored as a cycle bound over estimated cycles."""
    found = sorted(tile_candidates(counter, program), key=lambda pair: pair[0])
    most += not any(node.op == "load" for node in program.phases[0].exit.nodes)  # the best one may spill
    chosen: list[tuple[float, WarpSpecializedTile]] = []
    for spent, tiling in found:
        if all((tiling.rows, tiling.columns) != (t.rows, t.columns) for _, t in chosen):
            chosen.append((spent, tiling))
    made: list[tuple[float, WarpSpecializedTile]] = []
    for number, (spent, tiling) in enumerate(chosen[:most]):
        score = counter.least / spent * AGAIN**number
        made.append((score * (1.0 if tiling.pixels else COPIED), tiling))
        if tiling.pixels:  # two warps that copy have too few registers for tiles of both operands
            made.append(
                (
                    FENCE_WARP_SCORE_FACTOR * score,
                    replace(tiling, carriers=PRODUCER_WARPS_WITH_FENCE_WARP, early=int(counter.beside > 0)),
                )
            )
    made.sort(key=lambda pair: -pair[0])
    return [(tiling.of(program), min(1.0, score)) for score, tiling in made]


def tile_candidates(counter: WgmmaProblem, program: Program) -> Iterator[tuple[float, WarpSpecializedTile]]:
    """(cycles, schedule) of all that fit the GEMM and the multiprocessor."""
    products = counter.rows * counter.columns * counter.terms
    if counter.machine.capability != GROUPED or not counter.rounded:
        return
    if counter.batch > 1 or counter.rows < LEAST_ROWS or products < LEAST_PRODUCTS:
        return
    if counter.before and counter.terms * counter.item % LINE:
        return
    if any(s.width * s.item != LINE // 8 for s in counter.sides):
        return
    found = match_conv_window(program)
    ways: list[ConvWindow | None] = [found] if found is not None and weights_need_no_transform(program) else []
    terms, run = LINE // counter.item, counter.sides[0].run
    if counter.terms > terms and (run % terms == 0 or run == counter.terms):
        ways.append(None)
    for rows, groups, widest in HEIGHTS:
        if rows >= 2 * counter.rows or (counter.beside and groups > 2):
            continue
        for columns in _widths(counter.columns, widest):
            totals = rows * columns / (GROUP * groups)
            wide = totals > FEW_TOTALS
            if counter.beside > 1 and totals > FEW_TOTALS / counter.beside:
                continue  # nor are there for what several matrices hold
            if wide and (counter.beside or counter.columns % columns):
                continue  # there are no registers for what is added, nor for single addresses of copies
            for way in ways:
                if way is not None and (way.halo_rows(rows) > SHARE * way.taps * rows or rows == 2 * HIGH * groups):
                    continue  # and the assembler has no registers for their places
                kept = way is None and staged_residual(program, rows, columns, groups, PRODUCER_WARPS) is not None
                tiles = -(-counter.rows // rows) * -(-counter.columns // columns)
                rounds, pixels = -(-tiles // counter.machine.sms), RUNS if way is not None else 0
                stages = _stages(counter, way, rows, columns)
                early = int(not wide)  # a thread with more totals needs the registers of those that copy
                made = WarpSpecializedTile(
                    rows, columns, groups, stages, PRODUCER_WARPS, pixels, rounds, early, int(kept)
                )
                if stages >= max(STAGES, kept * groups):
                    yield cycles(counter, way, made), made


def _widths(columns: int, widest: int) -> list[int]:
    """Multiples of 8 that columns fall into."""
    counts = range(-(-columns // widest), max(1, columns // WIDTHS[0]) + 1)
    return sorted({-(-columns // (8 * count)) * 8 for count in counts})


def _stages(counter: WgmmaProblem, way: ConvWindow | None, rows: int, columns: int) -> int:
    """Pipeline stages: as many as fit in shared memory."""
    free = MOST_SHARED - 3 * MOST_STAGES * BARRIER
    if way is None:
        free -= 4 * counter.vectors * counter.terms
        return min(MOST_STAGES, free // ((rows + columns) * LINE))
    free -= RUNS * way.halo_rows(rows) * LINE + LINE
    return min(MOST_STAGES, (RUNS - 1) * way.taps + 1, free // (columns * LINE))


def time(counter: WgmmaProblem, way: ConvWindow | None, tiling: WarpSpecializedTile) -> TimeTerm:
    """Cycles of a launch by their terms."""
    rows, columns = tiling.rows, tiling.columns
    terms = LINE // counter.item
    share = k_tiles_per_split(counter.terms, terms, 1)[0] if way is None else way.k_tiles
    rates = counter.machine.coefficients("gpu/warp_specialized", "cycles")
    products = rows * columns * terms
    units = term(Resource.COMPUTE, products / rates.products_per_cycle, 2.0 * products)
    memory = term(Resource.DRAM, counter.moved / bound_rates(counter.machine).memory_bytes_per_cycle, counter.moved)
    copied = (rows + columns) * LINE if way is None else way.halo_rows(rows) * LINE / way.taps + columns * LINE
    start = term(Resource.START, BEGIN)
    tiles = -(-counter.rows // rows) * -(-counter.columns // columns)
    if tiling.beside:
        staged = counter.machine.coefficients("gpu/warp_specialized", "staged_residual")
        work = longest((units, term(Resource.L2, copied / staged.operand_bytes_per_cycle)))
        stored = term(Resource.L2, 8 * rows * columns / staged.result_bytes_per_cycle)
        left = 0.0
    else:
        read = rows // HIGH * (HIGH + columns) * LINE
        limits = [
            units,
            term(Resource.SMEM, (read + copied) / rates.smem_bytes_per_cycle),
            term(Resource.L2, copied / rates.l2_bytes_per_cycle),
            term(Resource.CHAIN, CHAIN + GROUPS * tiling.groups),
        ]
        work = longest(limits)
        written = 4 * rows * columns * counter.results / max(1.0, counter.partial)
        stored = term(Resource.L2, written / rates.result_bytes_per_cycle)
        left = LEFT
    tile = serial([repeat(share, work), serial([term(Resource.EPILOGUE, LEAVE), stored])])
    waves = per_sm(tiling.rounds, tile, resident=1, blocks=tiles, sms=counter.machine.sms)
    return soft_longest(left, serial([start, waves]), memory, start)


def cycles(counter: WgmmaProblem, way: ConvWindow | None, tiling: WarpSpecializedTile) -> float:
    """Estimated cycles of a launch."""
    return time(counter, way, tiling).value
