"""Ranks and prunes the GPU schedules of a program over all kernel families, best estimate first.

`schedule.gpu.enumeration.RULES` says which kernel families are asked.  A schedule is data in the program: ``params``
name the form (``cuda``), the threads of a block and how work is shared; ``unroll`` of the axes is the register tile.
Programs that no family takes get no candidate and stay with XLA: integer products, convolutions with groups; on GPUs
older than compute capability 8.0 every sum of more than a few values per output that is not one of rows or columns.
"""

from __future__ import annotations

from jcuts.kernel_ir.program import Program
from jcuts.lower.excess_precision import drop_bf16_round_trips
from jcuts.schedule import fit
from jcuts.schedule.gpu.enumeration import enumerate_schedules, has_schedules
from jcuts.schedule.gpu.machine import Candidate, GpuMachine
from jcuts.schedule.gpu.ranking import distinct_best_first

_CANDIDATES = fit.coefficients("gpu/reduction", "candidates")
LEAST = 4
"""Candidates that are left whatever the percentage says."""
MOST = 8
"""The most of those that are near the best, at `SHARE` percent."""
SHARE = _CANDIDATES.pruned_percent
NEAR = _CANDIDATES.near_score_ratio
"""Scores, over the best one, of what is near it: estimates of the best are off by so much."""


def candidates(program: Program, machine: GpuMachine, limit: int, percent: float = 100) -> list[Candidate]:
    """Scheduled programs with a ranking score in (0, 1], best first; none where the GPU has no form for the program.

    Pruned: to those near the best, at least `LEAST` and at most `MOST` of them, and to at most ``limit``; all, up to
    ``limit``, where ``percent`` is 100.
    """
    found = enumerate_schedules(drop_bf16_round_trips(program), machine)
    scored = ((made, min(1.0, max(_CANDIDATES.score_floor, score))) for made, score in found)
    if percent >= 100:
        return distinct_best_first(scored, limit)
    pruned = round(MOST * percent / SHARE)
    ranked = distinct_best_first(scored, min(limit, max(LEAST, pruned)))
    near = sum(score >= NEAR * ranked[0][1] for _, score in ranked)
    return ranked[: max(LEAST, min(near, pruned))]


def has_candidates(program: Program, machine: GpuMachine) -> bool:
    """Whether `candidates` has any for a program; ranks none."""
    return has_schedules(drop_bf16_round_trips(program), machine)
