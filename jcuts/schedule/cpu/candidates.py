"""Enumerates the CPU schedules of a program over all templates (loop nest, packing, Winograd, row reduction, scan),
ranked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jcuts.kernel_ir import loop_transforms
from jcuts.kernel_ir.program import Program
from jcuts.lower import layer_fusion
from jcuts.lower.excess_precision import drop_bf16_round_trips
from jcuts.schedule import fit
from jcuts.schedule.cpu import (
    layer_fusion_candidates,
    loop_candidates,
    loop_schedule,
    row_reduction,
    scan,
    winograd_candidates,
)
from jcuts.schedule.cpu import packing as cpu_packing
from jcuts.schedule.cpu.loop_candidates import Machine
from jcuts.schedule.cpu.loop_schedule import Schedule
from jcuts.schedule.cpu.packing import Packing

EVERY = 1 << 30
LEAST = 8  # candidates that are left whatever the share says: a small space is cheap to measure
KEEP_UP = fit.coefficients("cpu", "candidates").turn_score_ratio
"""Share of the best remaining score that a kind of candidate needs to get a turn."""


@dataclass(frozen=True)
class _Candidate:
    """A candidate before its program is made: ``kind`` is its loop order and whether it packs."""

    score: float
    kind: tuple[object, ...]
    params: Schedule | Packing

    def order(self) -> tuple[float, str]:
        """Best score first; equal scores in a fixed order."""
        return -self.score, str(self.params)


def candidates(program: Program, machine: Machine, limit: int, percent: float = 100) -> list[tuple[Program, float]]:
    """The top ``percent`` of all schedules by ranking score in [0, 1].

    Pruned twice: by share, but never below `LEAST`, and to at most ``limit``. Best first, at least one.
    """
    program = drop_bf16_round_trips(program)
    if len(program.phases) > 1:
        return multi_phase_schedules(program, machine, limit)
    plain = loop_transforms.collapse_program(program)
    options = [
        _Candidate(score, (False, s.order, s.vector), s)
        for s, score in loop_candidates.candidates(plain, machine, EVERY)
    ]
    options += _packed(plain, machine)
    keep = min(limit, max(LEAST, math.ceil(len(options) * percent / 100)))
    direct = [(_program(plain, option.params, machine), option.score) for option in _round_robin(options, keep)]
    return _interleave(direct, winograd_candidates.candidates(program, machine), limit)


def multi_phase_schedules(program: Program, machine: Machine, limit: int) -> list[tuple[Program, float]]:
    """Scheduled programs of a scan, a row reduction or a chain of layers with their scores, best first."""
    if program.template == layer_fusion.TEMPLATE:
        return layer_fusion_candidates.schedules(program, machine, limit)
    if program.template == "scan":
        return scan.schedules(program, machine, limit)
    return row_reduction.schedules(program, machine, limit)


def _interleave(
    direct: list[tuple[Program, float]], others: list[tuple[Program, float]], limit: int
) -> list[tuple[Program, float]]:
    """Both kinds in turns.

    Another algorithm's score counts the multiplications of the direct form, so it may exceed 1: it is cut.  The direct
    form stays first, because without measuring nobody checks how accurate the other is.
    """
    mixed: list[tuple[Program, float]] = []
    for k in range(max(len(direct), len(others))):
        mixed += direct[k : k + 1]
        mixed += [(program, min(1.0, score)) for program, score in others[k : k + 1]]
    return mixed[:limit]


def _program(plain: Program, params: Schedule | Packing, machine: Machine) -> Program:
    if isinstance(params, Packing):
        return cpu_packing.apply(plain, params, machine.threads)
    return loop_schedule.apply(plain, params)


def _packed(plain: Program, machine: Machine) -> list[_Candidate]:
    lanes = loop_candidates.lanes_of(plain, machine)
    options = []
    for packing in cpu_packing.packings(plain, lanes, machine.registers):
        worth = loop_candidates.score(cpu_packing.apply(plain, packing, 1), machine)
        options.append(_Candidate(worth, (True, packing.lane, packing.row), packing))
    return options


def _round_robin(options: list[_Candidate], limit: int) -> list[_Candidate]:
    """Best first, taking turns between loop orders and packing.

    Scores compare register tiles well, but loop orders and packing differ by cache behaviour that only a measurement
    tells: the first few candidates must not all be of one kind.
    """
    kinds: dict[object, list[_Candidate]] = {}
    for option in sorted(options, key=_Candidate.order):
        kinds.setdefault(option.kind, []).append(option)
    queues = sorted(kinds.values(), key=lambda queue: queue[0].order())
    ranked: list[_Candidate] = []
    while queues and len(ranked) < limit:
        # A kind whose next candidate is far behind has had its turns.
        best = max(queue[0].score for queue in queues)
        for queue in queues:
            if queue[0].score >= KEEP_UP * best:
                ranked.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return ranked[:limit]
