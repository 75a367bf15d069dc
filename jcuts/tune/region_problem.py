"""Tuning problem of a region: its key, operands and results, its candidates, and how many of them it may have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jcuts.base import fingerprint, keys, knobs
from jcuts.base.settings import Settings
from jcuts.kernel_ir.compulsory_traffic import compulsory_bytes
from jcuts.schedule.bound import roofline_bound
from jcuts.trace.canonical import canonical_text
from jcuts.tune import expected_gain
from jcuts.tune.input_recipes import FLOATS, degree, input_recipe, reduction_length
from jcuts.tune.problem import Candidate, Input, Output, Problem
from jcuts.tune.problem import label_of as _label

CANDIDATE_BUDGET = 96  # kernels that one session compiles, shared out by the subsets' work
MIN_CANDIDATES = 2
CORES = 8
"""Cores for which a GPU's candidates have that budget: they compile side by side."""
MOST_BUDGETS = 2.0
"""The largest factor of that budget, with more cores.  More candidates are worth it: of 25 products and convolutions at
batch 1 and 16 the best of the first four took 3 % more than the best of eight (worst 26)."""


def with_candidates(problem: Problem, subset: Any, candidates: int) -> Problem:
    """The problem with the subset's best ``candidates`` candidates; its digest stays."""
    return replace(
        problem,
        candidates=tuple(
            Candidate("program", p.to_text(), _label(p), score, roofline_bound(p).seconds)
            for p, score in subset.ranked[:candidates]
        ),
    )


def make_problem(subset: Any, settings: Settings, candidates: int, device: str = "") -> Problem:
    """The tuning problem of a subset; its best ``candidates`` candidates are known by what determines them."""
    reduction = reduction_length(subset.program)
    outputs = tuple(
        Output(tuple(v.aval.shape), v.aval.dtype.name, reduction, v.aval.dtype.name not in FLOATS)
        for v in subset.outputs
    )
    return Problem(
        identity=subset.identity,
        inputs=tuple(
            Input(
                tuple(v.aval.shape),
                v.aval.dtype.name,
                input_recipe(subset.closed, v) + (" tf32" if k in subset.rounded else ""),
            )
            for k, v in enumerate(subset.inputs)
        ),
        outputs=outputs,
        space=f"{subset.space} {candidates}",
        expected=candidates,
        tolerance=settings.tolerance,
        degree=degree(subset.closed),
        name=_name(subset),
        device=device,
        text=canonical_text(subset.closed) if device else "",
        schedules=tuple(keys.schedules("cuda" if device else "cpu", subset.program.template).items()),
    )


def _name(subset: Any) -> str:
    names = [eqn.primitive.name for eqn in subset.closed.jaxpr.eqns]
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]} ({len(names)})"


def candidate_budget(subsets: Sequence[Any], on_gpu: bool = False) -> dict[str, int]:
    """How many candidates each distinct subset may have: in proportion to its share of the whole work.

    On a GPU bytes count as well: most kernels wait for memory, and products have operations for next to nothing.
    """
    weight: dict[str, float] = {}
    for subset in subsets:
        cost = float(_work(subset.program))
        if on_gpu:
            cost = compulsory_bytes(subset.program) + cost / expected_gain.GPU_BALANCE
        weight[subset.identity] = weight.get(subset.identity, 0.0) + cost
    total = sum(weight.values()) or 1.0
    limit, budget = knobs.current().max_candidates, float(CANDIDATE_BUDGET)
    if on_gpu:
        budget *= min(MOST_BUDGETS, max(1.0, (knobs.current().compile_workers or _cores()) / CORES))
    return {k: max(MIN_CANDIDATES, min(limit, round(budget * w / total))) for k, w in weight.items()}


@functools.cache
def _cores() -> float:
    """Cores that compile candidates: those that the process had when it was first asked, within its control group."""
    cores = float(fingerprint.usable_cores())
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # another kind of group, or "max"
        return cores


def _work(program: Any) -> int:
    from jcuts.schedule.cpu.loop_candidates import work

    return sum(work(phase) for phase in program.phases)
