"""Split-K GEMV schedules: 128-bit loads of W, K split over the threads of a block, of a cluster or of the grid.

A dense layer at batch 1 (or of `MOST_ROWS` at most) reads every weight once, so memory decides: the schedules differ in
how many bytes are in flight and in how partial sums meet.  W is read as it lies in memory.  Where neighbouring columns
are neighbours (row-major W[k, n]), a thread has a vector of columns and a warp lies along n; where neighbouring k are
(W[n, k]), it has a vector of k of a few columns and a warp lies along k.  Few columns: K is split over the blocks of a
cluster (partial sums by DSMEM, one launch; capability 9.0), or over the grid (scratch memory, two launches).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jcuts.estimate.time_model import Resource, TimeTerm, serial, soft_maximum, term
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, K
from jcuts.schedule import fit
from jcuts.schedule.gpu.coalescing import LINE
from jcuts.schedule.gpu.few_row_gemm import CLUSTER_SIZES, CLUSTERS, FewRowGemm
from jcuts.schedule.gpu.machine import (
    ACCESS,
    MOST_REGISTERS,
    WARP,
    Candidate,
    GpuMachine,
    scheduled,
    tiled,
)

FORM = "gemv"
"""The value of the schedule parameter ``cuda``."""
MOST = 6
"""Schedules that are proposed."""
MOST_ROWS = 4
"""Rows that a thread's register tile has: more FMAs per weight than these take longer than the weight's load."""
OTHER_REGISTERS = 40
"""Of a thread, beside tile and accumulators: addresses, counters (as ptxas uses them)."""
WORD = 4
"""Bytes of a register."""
BLOCKS = (128, 256, 512)
"""Threads of a block."""
LOADS = (4, 8, 16)
"""16-byte loads of W that a thread has in flight."""
_COST = fit.coefficients("gpu/gemv", "cost")
_RANKING = fit.coefficients("gpu/gemv", "ranking")


@dataclass(frozen=True)
class GemvSchedule:
    """One schedule of a GEMV.

    Attributes:
        columns, terms: register tile of a thread along n and k.
        flight: such tiles along k that it loads before it multiplies.
        across: threads of a block along n; the others lie along k.
        threads: of a block.
        cluster, split: blocks that share the sums of their columns, by DSMEM or in a second launch.
    """

    columns: int
    terms: int
    flight: int
    across: int
    threads: int
    cluster: int = 1
    split: int = 1

    @property
    def deep(self) -> int:
        """Threads of a block along k."""
        return self.threads // self.across

    def blocks(self, problem: FewRowGemm) -> int:
        """Blocks of the launch."""
        lanes = -(-problem.columns // (self.columns * self.across))
        return lanes * problem.batch * self.cluster * self.split

    def apply(self, program: Program, problem: FewRowGemm) -> Program:
        """The scheduled program."""
        more = [("across", self.across), ("flight", self.flight)]
        more += [("k_major", 1)] if problem.is_k_major else []
        more += [("cluster", self.cluster)] if self.cluster > 1 else []
        more += [("split", self.split)] if self.split > 1 else []
        made = tiled(program, {ROWS: problem.rows, COLUMNS: self.columns}, {K: self.terms})
        return scheduled(made, FORM, self.threads, *more)


def gemv_schedules(program: Program, machine: GpuMachine) -> list[Candidate]:
    """Schedules of a GEMM with few rows, best first, with the share of the memory's bandwidth they are to reach."""
    return _diverse(schedule_space(program, machine))


def schedule_space(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """All schedules, with the same scores."""
    problem = FewRowGemm.of(program)
    for tile in _tiles(problem):
        for made in _shared_k(problem, tile, machine):
            yield (
                made.apply(program, problem),
                problem.moved / machine.bandwidth / estimated_seconds(problem, made, machine),
            )


def _diverse(found: Iterable[Candidate]) -> list[Candidate]:
    """The best schedules, best first, at most two per register tile and split."""
    seen: Counter[object] = Counter()
    kept = []
    for program, score in sorted(found, key=lambda item: (-item[1], item[0].digest)):
        params, phase = dict(program.params), program.phases[0]
        key = (phase.axes[-1].unroll, params["flight"], params.get("cluster"), "split" in params)
        seen[key] += 1
        if seen[key] <= 2:
            kept.append((program, score))
    return kept[:MOST]


def _tiles(problem: FewRowGemm) -> Iterator[GemvSchedule]:
    """Register tiles and shapes of a block, without a split over blocks."""
    wide = max(1, ACCESS // problem.item)
    if problem.is_k_major:
        terms = _divisors(problem.terms, (wide, wide // 2, wide // 4))[0]
        for columns, threads in itertools.product(_divisors(problem.columns, (8, 4, 2)), BLOCKS):
            for deep, loads in itertools.product((WARP, 2 * WARP, 4 * WARP, 8 * WARP), LOADS):
                if deep <= threads and loads % columns == 0:
                    yield GemvSchedule(columns, terms, loads // columns, threads // deep, threads)
            if columns == 1:
                yield from (GemvSchedule(1, terms, flight, 1, threads) for flight in (1, 2))
        return
    terms = _divisors(problem.terms, (4, 2))[0]
    for columns in _divisors(problem.columns, (wide, wide // 2))[:2]:
        for across, threads, loads in itertools.product((8, 16, 32), BLOCKS, LOADS):
            if loads % terms == 0 and across // 2 * columns < problem.columns:
                yield GemvSchedule(columns, terms, loads // terms, across, threads)


def _divisors(extent: int, wanted: Iterable[int]) -> list[int]:
    """Those of the wanted tile sizes that divide an extent, and 1."""
    return list(dict.fromkeys([n for n in wanted if n > 1 and extent % n == 0] + [1]))


def _shared_k(problem: FewRowGemm, tile: GemvSchedule, machine: GpuMachine) -> Iterator[GemvSchedule]:
    """A schedule with all ways in which blocks share K; every thread of every block has some of it."""
    share = problem.terms / (tile.terms * tile.deep * tile.flight)
    if share < 0.5 and tile.deep > WARP:
        return
    if tile.columns * tile.across > tile.threads or not _resident_blocks(problem, tile, machine):
        return
    for cluster in CLUSTER_SIZES if machine.capability >= CLUSTERS else (1,):
        if cluster == 1 or share >= cluster:
            yield GemvSchedule(*_shape(tile), cluster=cluster)
    resident = _resident_blocks(problem, tile, machine)
    split = min(resident // max(1, tile.blocks(problem)), int(share))
    if split > 1:
        yield GemvSchedule(*_shape(tile), split=split)


def _shape(tile: GemvSchedule) -> tuple[int, int, int, int, int]:
    return tile.columns, tile.terms, tile.flight, tile.across, tile.threads


def _resident_blocks(problem: FewRowGemm, made: GemvSchedule, machine: GpuMachine) -> int:
    """Blocks that run at once; 0 where the tiles of several rows do not fit in the registers."""
    resident = max(1, int(_RANKING.resident_threads) // made.threads)
    if problem.rows > 1:
        words = (made.columns + problem.rows) * made.terms * made.flight * problem.item // WORD
        registers = OTHER_REGISTERS + problem.rows * made.columns + words
        if registers > MOST_REGISTERS:
            return 0
        resident = min(resident, machine.resident_blocks(made.threads, registers, 0))
    return machine.sms * resident


def time(problem: FewRowGemm, made: GemvSchedule, machine: GpuMachine) -> TimeTerm:
    """Seconds by their terms: the memory's at the rate that lines and bytes in flight allow, and the fixed parts.

    The rate of loads in flight is Little's law: bytes that all resident threads have asked for, over the latency.
    """
    blocks = made.blocks(problem)
    in_warp = made.deep * made.terms if problem.is_k_major else made.across * made.columns
    line = min(1.0, in_warp * problem.item / LINE)
    rate = machine.bandwidth * _COST.bandwidth_share * (1.0 - min(1.0, _COST.line_share) * (1.0 - line))
    asked = made.columns * made.terms * made.flight * problem.item
    in_flight = asked * made.threads * min(blocks, _resident_blocks(problem, made, machine))
    busy = min(1.0, blocks / machine.sms)
    memory = term(Resource.DRAM, problem.moved / rate / busy, problem.moved)
    latency = term(Resource.LATENCY, problem.moved / in_flight * _COST.memory_latency_seconds)
    parts = [soft_maximum(4, memory, latency), term(Resource.LAUNCH, _COST.fixed_seconds)]
    if problem.rows > 1:
        parts.append(term(Resource.ISSUE, _issue_seconds(problem, made, machine) / busy))
        partial = problem.rows * problem.columns * problem.batch * WORD * made.split
        parts.append(term(Resource.REDUCE, 2 * partial / machine.bandwidth if made.split > 1 else 0.0))
    if made.cluster > 1:
        parts.append(term(Resource.BARRIER, _COST.cluster_seconds))
    if made.split > 1:
        parts.append(term(Resource.LAUNCH, _COST.split_seconds))
    return serial(parts)


def estimated_seconds(problem: FewRowGemm, made: GemvSchedule, machine: GpuMachine) -> float:
    """Estimated time of a launch, and of the second one of a split."""
    return time(problem, made, machine).value


def _issue_seconds(problem: FewRowGemm, made: GemvSchedule, machine: GpuMachine) -> float:
    """Time in which the multiprocessors issue FMAs, conversions of 16-bit operands, and loads of the rows of x."""
    weights = problem.batch * problem.columns * problem.terms
    per_weight = problem.rows + problem.rows / made.columns  # a load of x is for all columns of the tile
    if problem.item < WORD:
        per_weight += 1 + problem.rows / made.columns
    per_cycle = machine.arch.flop_per_clock_sm["ffma"] // 2
    return weights * per_weight / (machine.sms * per_cycle * machine.arch.clock)
