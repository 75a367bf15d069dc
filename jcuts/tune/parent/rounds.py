"""Budgeted search order (successive rounds): which problems, and how many of their candidates, are measured next.

All at once where the time will do.  Else first the best-ranked candidates of every problem that nothing is known of,
the problems with the largest expected gain first (`tune.expected_gain`), then all candidates of all problems, in the
same order.  What a problem's candidates take is compared within one measurement, so that a later round times again what
an earlier one found; it compiles nothing again (the object cache has it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jcuts.tune.choice import Choice
from jcuts.tune.problem import Problem
from jcuts.tune.time_budget import TimeBudget

PERCENT = 100
FIRST_ROUND = 2
"""Candidates of each problem in the first round."""
NEGLIGIBLE = 2
"""Percentage of what all problems may gain by a profile of XLA's program, up to which the least are left."""
NEGLIGIBLE_LATER = 20
"""The same of a second round, for the rest of their candidates."""


@dataclass(frozen=True)
class Round:
    """What is measured next.

    Attributes: problems: in their order; candidates: most kernels of each, None for all.
    """

    problems: Sequence[Problem]
    candidates: int | None


def by_gain(problems: Sequence[Problem], gain: Callable[[Problem], float]) -> list[Problem]:
    """The largest expected gain first; behind a problem come its parts, from which XLA's time of it follows."""
    found: dict[str, Problem] = {}
    known = {p.digest: p for p in problems}
    for problem in sorted(problems, key=lambda p: -gain(p)):
        found.setdefault(problem.digest, problem)
        for part in problem.parts:
            if part in known:
                found.setdefault(part, known[part])
    return list(found.values())


def worth_measuring(
    problems: Sequence[Problem], gain: Callable[[Problem], float], negligible: int = NEGLIGIBLE
) -> set[str]:
    """Digests of the problems that are left when the least of them are taken away.

    Args: negligible: percentage of the sum of all gains that those have.
    """
    gains = {p.digest: gain(p) for p in problems}
    if not any(gains.values()):
        return set(gains)
    rest = negligible * sum(gains.values()) / PERCENT
    kept = set(gains)
    for digest in sorted(gains, key=lambda d: gains[d]):
        rest -= gains[digest]
        if rest < 0.0:
            break
        kept.discard(digest)
    return kept


def plan_round(
    problems: Sequence[Problem],
    partial: Mapping[str, Choice],
    budget: TimeBudget,
    workers: int,
    gain: Callable[[Problem], float] | None,
) -> Round:
    """The next round.

    Args:
        problems: those that lack candidates; partial: what is known of them, by digest.
        workers: processes that compile.
        gain: seconds that a problem is expected to save; without it they keep their order.
    """
    counts = [len(p.candidates) or p.expected for p in problems]
    if budget.covers(len(problems), sum(counts), workers):
        return Round(problems, None)
    ordered = list(problems) if gain is None else by_gain(problems, gain)
    fresh = [p for p in ordered if p.digest not in partial]
    return Round(fresh, FIRST_ROUND) if fresh else Round(ordered, None)
