"""Which known choices are measured again, and when: another tuning regime, or a machine that was busy."""

from __future__ import annotations

from jcuts.tune.choice import Choice
from jcuts.tune.measure import regime
from jcuts.tune.measure.statistics import MOST_MARGIN
from jcuts.tune.problem import Problem


def is_measured_anew(choice: Choice, problem: Problem, *, again: bool) -> bool:
    """Whether a known choice is measured again.

    Its caches are not those that are asked for; or, where the user asked for tuning (``.tune()``), its regime is
    another one, or the machine was too busy to tell the fastest two apart.

    Args: again: whether the user asked for tuning.
    """
    if choice.origin != "measured" or not choice.measurements:
        return False
    if not regime.is_as_asked(choice.regime, problem.platform):
        return True
    return again and (bool(regime.distance(choice.regime, problem.platform)) or is_noisy(choice))


def is_noisy(choice: Choice) -> bool:
    """Whether times scattered so much that another candidate may be faster than the one that seemed to be."""
    times = sorted(m.seconds for m in choice.measurements if m.is_contest)
    return choice.margin >= MOST_MARGIN and len(times) > 1 and times[1] <= times[0] * (1 + choice.margin)
