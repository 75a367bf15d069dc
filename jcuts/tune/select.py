"""Deterministic choice of the winning candidate: fastest within the noise margin, ties to XLA, then by content hash.

From measured times, from stored ones alone, or from estimates; XLA where nothing qualifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jcuts.base.errors import UsageError
from jcuts.base.settings import MODES
from jcuts.tune.choice import LIBRARY, OVER_BUDGET, POSTPONED, PROFILED, Choice, Measurement, Rejection
from jcuts.tune.measure.statistics import CONTENDER, margin, standard_error
from jcuts.tune.problem import Problem


def noise_margin(measurements: tuple[Measurement, ...]) -> float:
    """The relative noise margin of one session of measurements (see `noise.margin`), of those that may win."""
    field = [m for m in measurements if m.is_contest]
    limit = CONTENDER * min((m.seconds for m in field), default=0.0)
    return margin([standard_error(m.seconds, m.low, m.high, m.runs) for m in field if m.seconds <= limit])


def fastest(measurements: tuple[Measurement, ...], order: list[str], *, relative_margin: float) -> str:
    """The label that wins: the first in ``order`` of those within the margin of the fastest.

        ties = {m : seconds(m) <= (1 + margin) * min seconds}

    Args: measurements (at least one), labels in order of preference, relative margin >= 0.
    Returns: a label of ``measurements``; the same one for the same times, in whatever order they are given.
    """
    limit = (1.0 + relative_margin) * min(m.seconds for m in measurements)
    rank = {label: position for position, label in enumerate(order)}
    ties = [m for m in measurements if m.seconds <= limit]
    return min(ties, key=lambda m: (rank.get(m.label, len(rank)), m.label)).label


def preference(problem: Problem) -> list[str]:
    """The fixed order of ties: XLA first (a tie is no reason to leave it), then candidates by content hash.

    Content hashes, not times or estimates: every process and every run orders equal candidates alike.
    """
    return [LIBRARY, *(c.label for c in sorted(problem.candidates, key=lambda c: c.digest))]


def select(problem: Problem, choice: Choice, mode: str) -> Choice:
    """The winner for a mode, from the measurements that a choice holds.

    ``mixed``: whoever is fastest, XLA included.  ``fusion`` and ``no_fusion``: the fastest jcuts kernel, one that was
    only screened if no other survived, XLA if none did (the two differ in the subsets they are asked about, not here).

    Raises:
        UsageError: an unknown mode.
    """
    if mode not in MODES:
        raise UsageError(f"mode={mode!r} is unknown: choose one of {MODES}", mode=mode)
    kernels = {c.label for c in problem.candidates if c.kind != "stablehlo"}
    known = {c.label for c in problem.candidates} | {LIBRARY}
    # Times of different methods are not compared; screening only dropped the slow ones.
    field = tuple(m for m in choice.measurements if m.label in known and m.is_contest)
    if mode != "mixed":
        checked = tuple(m for m in choice.measurements if m.label in kernels and m.label in choice.kernels)
        field = tuple(m for m in field if m.label in kernels) or checked or field
    if not field:
        return choice.with_winner(LIBRARY, "")
    winner = fastest(field, preference(problem), relative_margin=choice.margin)
    return choice.with_winner(winner, "" if winner == LIBRARY else problem.candidate(winner).digest)


def select_stored(choice: Choice, mode: str) -> Choice:
    """`select` for a problem whose candidates are not at hand: what was measured stands for them."""
    if mode == "mixed":
        return choice
    checked = tuple(m for m in choice.measurements if m.label in choice.kernels)
    field = tuple(m for m in checked if m.is_contest) or checked
    if not field:
        return choice
    winner = fastest(field, sorted(choice.kernels, key=_by_content(choice)), relative_margin=choice.margin)
    return choice.with_winner(winner, choice.digests.get(winner, ""))


def _by_content(choice: Choice) -> Callable[[str], str]:
    return lambda label: choice.digests.get(label, label)


def estimate(problem: Problem, mode: str) -> Choice:
    """The choice of ``tune="off"``: the candidate with the best estimate, or XLA if there is none.

    Candidates rank by PUL (higher first), then by their bound (shorter first), then by content hash.
    """
    if mode not in MODES:
        raise UsageError(f"mode={mode!r} is unknown: choose one of {MODES}", mode=mode)
    kernels = [c for c in problem.candidates if c.kind != "stablehlo"]
    if not kernels:
        return keep_xla(problem)
    best = min(kernels, key=lambda c: (-c.pul, c.bound_seconds or float("inf"), c.digest))
    return Choice(problem.digest, best.label, best.digest, "estimated", name=problem.name)


def keep_xla(problem: Problem) -> Choice:
    """The choice of ``tune="cached"`` when the database has none: XLA's own code."""
    return Choice(problem.digest, LIBRARY, "", "library", name=problem.name, schedules=dict(problem.schedules))


def keep_xla_for_now(problem: Problem, why: str) -> Choice:
    """The choice of a problem that could not be measured yet: XLA's own code for now; never stored."""
    return replace(keep_xla(problem), rejections=(Rejection(LIBRARY, POSTPONED, f"{why}: tuned at a later call"),))


def keep_xla_over_budget(problem: Problem, profiled: float | None = None) -> Choice:
    """The choice of a problem that the tuning budget did not reach: XLA's own code for this process; never stored.

    Args: profiled: XLA's time by the profile of the whole program [s].
    """
    count = sum(c.kind != "stablehlo" for c in problem.candidates) or problem.expected
    known = (Measurement(LIBRARY, profiled, profiled, profiled, 0, PROFILED),) if profiled else ()
    return replace(keep_xla(problem), measurements=known, rejections=(over_budget(LIBRARY, count),))


def over_budget(label: str, kernels: int = 1) -> Rejection:
    """What stands for candidates that were not measured for want of time."""
    return Rejection(label, OVER_BUDGET, "not measured: tune_seconds was spent", {"kernels": kernels})
