"""Candidate schedules of matrix products and convolutions over all tensor-core families, interleaved by score.

`contraction_schedules` asks `gemm.wgmma` (warpgroups), `conv.implicit_gemm` (implicit GEMM with a halo in shared
memory), `warp_specialized` (producer and consumer warps) and `gemm.mma` (``mma.sync``) in this order, and decides how
many of each are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import gemm_operands
from jcuts.schedule import fit
from jcuts.schedule.gpu.conv import implicit_gemm, implicit_gemm_cluster
from jcuts.schedule.gpu.gemm import mma as gemm_mma
from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.machine import Candidate, GpuMachine
from jcuts.schedule.gpu.ranking import best_first
from jcuts.schedule.gpu.reduction import column as reduction_column
from jcuts.schedule.gpu.reduction.row import row_reduction
from jcuts.schedule.gpu.warp_specialized import schedules as warp_specialized_schedules
from jcuts.schedule.gpu.window.schedules import windows

_CANDIDATES = fit.coefficients("gpu/reduction", "candidates")
MULTIPLIERS = 128
"""Products per cycle of a multiprocessor without matrix units."""
PLAIN = _CANDIDATES.simt_compute_factor
"""What sums by threads on their own take, over their products at the peak (measured)."""
FEW = _CANDIDATES.simt_memory_limit
"""The same over the memory's time, up to which they are tried beside matrix units."""


def contraction_schedules(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of all families for a program that `lower.patterns.gemm.as_gemm` has made, the best of each tile.

    Scores are a bound over counted cycles: what must move at the memory's rate, or what must be multiplied at that of
    the fastest units that the program has schedules for.
    """
    counter = WgmmaProblem(program, machine)
    found = list(gemm_wgmma.wgmma_schedules(counter))
    kept = implicit_gemm.candidates(counter, program)
    if kept and found:
        best, other = max(score for _, score in found), max(score for _, score in kept)
        kept = [pair for pair in kept if pair[1] >= gemm_wgmma.MIN_SCORE_RATIO * best]
        if kept and other >= best:
            found = sorted(found, key=lambda pair: -pair[1])[: gemm_wgmma.ENOUGH]
        elif kept:  # the best of either form comes first
            kept = [(p, score / other * best) for p, score in kept]
    few = list(gemm_wgmma.wgmma_schedules(counter.small_grid, gemm_wgmma.SMALL_GRID_CANDIDATES)) if counter.few else []
    if counter.short and not counter.sums:
        few += _interleave_cluster_conv(found, implicit_gemm_cluster.candidates(counter, program))
    if kept and not found:  # few outputs: blocks of both families are as small, and of the other one more share a sum
        found = list(gemm_mma.mma_schedules(program, machine, gemm_mma.MOST, counter.least))
        best = max((score for _, score in found), default=0.0)
        kept = [pair for pair in kept if pair[1] >= gemm_wgmma.MIN_SCORE_RATIO * best][: gemm_wgmma.ENOUGH]
        yield from (*few, *kept)
        yield from _append_mma(few, found[: gemm_mma.MOST - len(kept)])
        return
    found = kept + found
    fed = warp_specialized_schedules.candidates(counter, program) if found and not counter.sums else []
    if fed:
        best = max(score for _, score in found)
        yield from ((made, min(score, best)) for made, score in fed if score >= gemm_wgmma.MIN_SCORE_RATIO * best)
    yield from (*found, *few)
    enough = len(found) >= gemm_wgmma.ENOUGH and not counter.sums
    if counter.before or enough:  # the other family has no prologues, and hardly ever wins
        return
    least = counter.least if found else None
    yield from _append_mma(few, gemm_mma.mma_schedules(program, machine, gemm_mma.MOST - len(found), least))


def _append_mma(few: Sequence[Candidate], others: Iterable[Candidate]) -> Iterator[Candidate]:
    """Schedules of the other family beside those of few blocks."""
    return ((made, score * (gemm_wgmma.MMA_SCORE_FACTOR if few else 1.0)) for made, score in others)


def _interleave_cluster_conv(found: list[Candidate], others: list[Program]) -> list[Candidate]:
    """Clusters that keep pixels, in turns with those that do not: which are faster is not for estimates to say."""
    scores = sorted((score for _, score in found), reverse=True)
    if not scores:
        return []
    places = [scores[min(2 * number, len(scores) - 1)] for number in range(len(others))]
    return [(made, gemm_wgmma.BEHIND_FIRST * place) for made, place in zip(others, places, strict=True)]


def simt_reductions(program: Program, machine: GpuMachine, best: float) -> list[Candidate]:
    """Sums of few terms by threads on their own, the best two, where products do not decide. Args: best: score."""
    phase = program.phases[0]
    products = math.prod(x.extent for x in (*phase.axes, *phase.reds))
    moved = sum(b.bytes for b in (*program.inputs, *program.outputs))
    clock = machine.coefficients("gpu/window", "cost").clock_hertz
    if PLAIN * products / (machine.sms * MULTIPLIERS * clock) > FEW * moved / machine.bandwidth:
        return []
    found = best_first(windows(collapse_program(program), machine), 2)
    return [(p, score / found[0][1] * best * gemm_mma.AGAIN) for p, score in found]


def matvec_reductions(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """A matrix times one vector as a sum of rows or of columns: the best few schedules."""
    sums = (
        row_reduction(program, machine)
        if gemm_operands(program)[1].along_terms
        else reduction_column.columns(program, machine)
    )
    yield from best_first(sums, gemm_mma.MOST // 2)
