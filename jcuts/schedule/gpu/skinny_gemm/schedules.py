"""Skinny GEMM schedules: 2 to 16 rows on ``mma.sync`` with W as the 16-row operand, a ``cp.async`` ring per warp.

Every weight is read once, so memory decides, as in `schedule.gpu.gemv`: schedules differ in the bytes that are in
flight (tiles of k in a warp's ring in shared memory), in the columns of a block (x is read again for each block of
columns, from the L2 cache) and in how K is split: over the warps of a block, over a cluster (DSMEM; capability 9.0) or
over the grid (two launches).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jcuts.estimate.time_model import KernelTime, Resource, TimeTerm, on_sms, serial, soft_maximum, term
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, K, gemm_operands, prologue
from jcuts.schedule import fit
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.coalescing import LINE
from jcuts.schedule.gpu.few_row_gemm import CLUSTER_SIZES, CLUSTERS, FewRowGemm
from jcuts.schedule.gpu.machine import ACCESS, MOST_REGISTERS, WARP, Candidate, GpuMachine, scheduled
from jcuts.schedule.gpu.traffic import mma_unit

FORM = "skinny"
"""The value of the schedule parameter ``cuda``."""
MOST = 6
"""Schedules that are proposed."""
MOST_ROWS = 16
"""Rows of x: two tiles of ``mma``."""
N_TILE = 8
"""Rows of x that an ``mma`` takes."""
M_TILE = 16
"""Columns of W that an ``mma`` takes."""
LANES = 4
"""Lanes of a warp with different k."""
WORD = 4
"""Bytes of a register."""
WARPS = (4, 8, 16)
"""Warps of a block."""
FLIGHTS = (1, 2, 3, 4, 6, 8)
"""Tiles of k in a warp's ring."""
MOST_COLUMNS = 256
"""Of a block."""
OTHER_REGISTERS = 40
"""Of a thread, beside a tile of k and accumulators: addresses, counters, operands of ``mma`` that are being rounded."""
SEGMENTS = (LINE // 2, LINE)
"""Bytes of a row of W[k, n] that eight lanes read of one or of two k."""
LINE_BYTES = WARP * ACCESS
"""Of an access of a warp."""
_COST = fit.coefficients("gpu/skinny_gemm", "cost")


class SkinnyProblem(FewRowGemm):
    """A product of few rows with the tiles that ``mma.sync`` makes of it."""

    @property
    def padded_rows(self) -> int:
        """Rows in whole tiles."""
        return N_TILE * -(-self.rows // N_TILE)

    @property
    def depth(self) -> int:
        """k of a tile."""
        return LANES * ACCESS // self.item

    def group(self, segment: int) -> int:
        """Columns of a warp that one set of accesses covers. Args: segment: bytes of a row of W[k, n] among them."""
        return M_TILE if self.is_k_major else segment // self.item


@dataclass(frozen=True)
class SkinnySchedule:
    """One schedule of a skinny GEMM.

    Attributes:
        columns: of a warp.
        across, deep: warps of a block along the columns, and along K.
        flight: tiles of k in a warp's ring.
        cluster, split: blocks that share the sums of their columns, by DSMEM or in a second launch.
        segment: bytes of a row of W[k, n] that a warp reads together: fewer make blocks of fewer columns.
    """

    columns: int
    across: int
    deep: int
    flight: int
    cluster: int = 1
    split: int = 1
    segment: int = LINE

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARP * self.across * self.deep

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return self.columns * self.across

    def step(self, problem: SkinnyProblem) -> int:
        """k of a block's step."""
        return self.deep * self.flight * problem.depth

    def blocks(self, problem: SkinnyProblem) -> int:
        """Blocks of the launch."""
        return -(-problem.columns // self.block_columns) * problem.batch * self.cluster * self.split

    def registers(self, problem: SkinnyProblem) -> int:
        """Estimated registers of a thread."""
        tiles, rows = self.columns // M_TILE, problem.padded_rows // N_TILE
        words = (2 * tiles + rows) * (ACCESS // WORD)  # of a tile of k
        lines = 2 * tiles if problem.is_k_major else self.columns // problem.group(self.segment)
        ragged = problem.columns % self.block_columns != 0
        return OTHER_REGISTERS + words + tiles * rows * (ACCESS // WORD) + 2 * (rows + (lines if ragged else 1))

    def shared(self, problem: SkinnyProblem) -> int:
        """Bytes of shared memory of a block: the rings of its warps, later their partial sums."""
        stage = (problem.padded_rows + self.columns) // N_TILE * LINE_BYTES
        partial = WORD * self.deep * problem.padded_rows * (self.block_columns + WORD)
        sums = WORD * problem.padded_rows * self.block_columns if self.cluster > 1 else 0
        return max(self.across * self.deep * self.flight * stage, partial) + sums

    def apply(self, program: Program, problem: SkinnyProblem) -> Program:
        """The scheduled program."""
        more: list[tuple[str, object]] = [("flight", self.flight)]
        more += [("k_major", 1)] if problem.is_k_major else [("segment", self.segment)]
        more += [("cluster", self.cluster)] if self.cluster > 1 else []
        more += [("split", self.split)] if self.split > 1 else []
        tile = (problem.padded_rows, self.block_columns, self.step(problem))
        return scheduled(program, FORM, self.threads, ("tile", tile), ("warps", (self.across, self.deep)), *more)

    @classmethod
    def of(cls, program: Program) -> SkinnySchedule:
        """The schedule of a scheduled program."""
        return cls.from_params(dict(program.params))

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> SkinnySchedule:
        """The schedule of a scheduled program's parameters."""
        (_, columns, _), (across, deep) = params["tile"], params["warps"]
        more = {name: params[name] for name in ("cluster", "split", "segment") if name in params}
        return cls(columns // across, across, deep, params["flight"], **more)


def matches(program: Program) -> bool:
    """Whether the kernel computes a GEMM (`lower.patterns.gemm.as_gemm`): 2 to 16 rows, operands as they lie."""
    return 1 < program.phases[0].ranges()[ROWS] <= MOST_ROWS and reads_as_it_lies(program)


def reads_as_it_lies(program: Program) -> bool:
    """Whether both operands are plain arrays whose k are evenly spaced, those of x side by side."""
    left, right = gemm_operands(program)
    even = all(not s.guards and s.index.stride(K) is not None for s in (left, right))
    return even and left.along_terms and right.index.stride(COLUMNS) is not None and prologue(program) is None


def skinny_schedules(program: Program, machine: GpuMachine) -> list[Candidate]:
    """Schedules of a GEMM with few rows, best first, with the share of the memory's bandwidth they are to reach.

    The best of each way to split K over blocks, which estimates cannot tell apart, then the best of different kinds.
    """
    problem = SkinnyProblem.of(program)
    space = best_of_kinds(problem, machine)
    ways = [(made.cluster > 1, made.split > 1) for made, _ in space]
    first = sorted({ways.index(way) for way in set(ways)})
    others = [number for number in range(len(space)) if number not in first]
    kept = sorted([*first, *others[: MOST - len(first)]])
    return [(space[number][0].apply(program, problem), space[number][1]) for number in kept]


def best_of_kinds(problem: SkinnyProblem, machine: GpuMachine) -> list[tuple[SkinnySchedule, float]]:
    """The best schedule of every kind, best first: of others of its kind, measured times differ little.

    A kind is a way to split K, the columns of a block, and the bytes in flight (as a power of two): more of them help a
    short loop over K, a long one runs up to 5 % faster with half of what fits.
    """
    found: dict[object, tuple[SkinnySchedule, float]] = {}
    for made, score in schedule_space(problem, machine):
        in_flight = _in_flight(problem, made, machine) / machine.sms
        kind = (made.cluster > 1, made.split > 1, made.block_columns, round(math.log2(in_flight)))
        found.setdefault(kind, (made, score))
    return list(found.values())


def schedule_space(problem: SkinnyProblem, machine: GpuMachine) -> list[tuple[SkinnySchedule, float]]:
    """All schedules, best first, with the same scores."""
    bound = problem.moved / machine.bandwidth
    found = [(s, bound / estimated_seconds(problem, s, machine)) for s in _schedules(problem, machine)]
    return sorted(found, key=lambda item: (-item[1], item[0].threads, str(item[0])))


def _schedules(problem: SkinnyProblem, machine: GpuMachine) -> Iterator[SkinnySchedule]:
    sizes = [(size * problem.group(LINE), LINE) for size in (1, 2, 4)]
    if not problem.is_k_major:
        sizes = [(problem.group(segment), segment) for segment in SEGMENTS] + [sizes[1]]
    for (columns, segment), across, warps, flight in itertools.product(sizes, (1, 2, 4), WARPS, FLIGHTS):
        made = SkinnySchedule(columns, across, warps // across, flight, segment=segment)
        if _fits(problem, made, machine):
            yield from _shared_k(problem, made, machine)


def _fits(problem: SkinnyProblem, made: SkinnySchedule, machine: GpuMachine) -> bool:
    """Whether registers, shared memory and threads of a block suffice, and every warp has work."""
    columns, beside = made.block_columns, made.threads // made.block_columns
    if columns > min(MOST_COLUMNS, made.threads) or columns >= 2 * max(problem.columns, made.columns):
        return False
    if made.registers(problem) > MOST_REGISTERS:
        return False
    whole = any(problem.rows % n == 0 and problem.rows // n <= beside for n in range(1, problem.rows + 1))
    return whole and made.step(problem) < 2 * problem.terms and _resident(problem, made, machine) > 0


def _shared_k(problem: SkinnyProblem, tile: SkinnySchedule, machine: GpuMachine) -> Iterator[SkinnySchedule]:
    """A schedule with all ways in which blocks share K; every block has a step of its own."""
    steps = -(-problem.terms // tile.step(problem))
    for cluster in CLUSTER_SIZES if machine.capability >= CLUSTERS else (1,):
        if _slices(steps, cluster) == cluster:
            yield replace(tile, cluster=cluster)
    blocks, resident = tile.blocks(problem), _resident(problem, tile, machine)
    wanted = {min(steps, machine.sms * n // blocks) for n in {1, 2, resident}}
    yield from (replace(tile, split=n) for n in sorted({_slices(steps, n) for n in wanted if n > 1}) if n > 1)


def _slices(steps: int, count: int) -> int:
    """Slices of K that have steps, of at most so many."""
    return -(-steps // -(-steps // count))


def _resident(problem: SkinnyProblem, made: SkinnySchedule, machine: GpuMachine) -> int:
    """Blocks that a multiprocessor holds at once."""
    if made.shared(problem) > machine.limits.smem_per_block_bytes:
        return 0
    return machine.resident_blocks(made.threads, made.registers(problem), made.shared(problem))


def _in_flight(problem: SkinnyProblem, made: SkinnySchedule, machine: GpuMachine) -> int:
    """Bytes of W that all blocks that run at once have asked for."""
    asked = made.block_columns * made.step(problem) * problem.item
    return asked * min(made.blocks(problem), _resident(problem, made, machine) * machine.sms)


def time(problem: SkinnyProblem, made: SkinnySchedule, machine: GpuMachine) -> TimeTerm:
    """Seconds by their terms: the memory's at the rate that lines and bytes in flight allow, and the fixed parts.

    Little's law gives the rate of the bytes in flight; x passes once per block of columns from the L2 cache, of whose
    bandwidth a multiprocessor has its share: few blocks with much in flight may keep the memory busy.  Clusters leave
    multiprocessors empty whose group has no place for another one; where some have a block more than others (wave
    quantisation), less is in flight at the end.
    """
    blocks, resident = made.blocks(problem), _resident(problem, made, machine)
    beside = problem.depth * made.flight if problem.is_k_major else problem.group(made.segment)
    line = min(1.0, beside * problem.item / LINE)
    rate = machine.bandwidth * _COST.bandwidth_share * (1.0 - min(1.0, _COST.line_share) * (1.0 - line))
    rate *= 1.0 - min(1.0, _COST.cluster_share) * (1.0 - 1.0 / made.cluster)
    most = -(-blocks // machine.sms)  # blocks of a multiprocessor
    rate *= 1.0 - min(1.0, _COST.uneven_share) * (1.0 - max(1.0, blocks / machine.sms) / most)
    at_once = min(blocks, resident * machine.sms)
    waves = blocks / (at_once * -(-blocks // at_once))  # share of the time in which the last wave's places are taken
    cache = machine.arch.bw_l2 * min(1.0, blocks / machine.sms)
    again = -(-problem.columns // made.block_columns) * problem.rows * problem.terms * problem.item * problem.batch
    products = 2.0 * problem.padded_rows * made.block_columns * made.step(problem)
    steps = -(-problem.terms // (made.step(problem) * made.cluster * made.split))
    work = soft_maximum(
        4,
        term(Resource.DRAM, problem.moved / (min(rate, cache) * waves), problem.moved),
        term(Resource.LATENCY, problem.moved / _in_flight(problem, made, machine) * _COST.memory_latency_seconds),
        term(Resource.L2, (problem.moved + again) / (cache * waves), problem.moved + again),
    )
    units = on_sms(term(Resource.COMPUTE, 0.0, products * steps), blocks=blocks, sms=machine.sms)
    parts = [work, term(Resource.LAUNCH, _COST.fixed_seconds), units]
    if made.cluster > 1:
        parts.append(term(Resource.BARRIER, _COST.cluster_seconds))
    if made.split > 1:
        partial = WORD * problem.rows * problem.columns * problem.batch * made.split
        parts.append(term(Resource.LAUNCH, _COST.split_seconds))
        parts.append(term(Resource.REDUCE, 2 * partial / machine.bandwidth))
    return serial(parts)


def estimated_seconds(problem: SkinnyProblem, made: SkinnySchedule, machine: GpuMachine) -> float:
    """Estimated time of a launch, and of the second one of a split."""
    return time(problem, made, machine).value


def skinny_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The model of a scheduled skinny GEMM."""
    root = time(SkinnyProblem.of(program), SkinnySchedule.of(program), machine)
    return KernelTime(root, unit=mma_unit(program), compulsory=memory_bound(program).bytes)
