"""Which known choices are measured again, and when: another tuning regime, or a machine that was busy."""

from __future__ import annotations

from jcuts.tune.choice import Choice
from jcuts.tune.measure import regime
from jcuts.tune.measure.statistics import MOST_MARGIN
from jcuts.tune.parent.measure_order import is_close_by_profile
from jcuts.tune.parent.session_limits import TuningBudget
from jcuts.tune.problem import Problem


def to_measure(
    known: dict[str, Choice], problems: dict[str, Problem], effort: TuningBudget
) -> tuple[dict[str, Problem], dict[str, Choice]]:
    """Problems without a complete choice, or whose choice is looked at again; and the choices of the latter."""
    missing = {digest: p for digest, p in problems.items() if digest not in known or known[digest].is_open}
    free = {digest: choice for digest, choice in known.items() if not choice.pinned}
    if not effort.time.is_limited:
        missing |= {digest: problems[digest] for digest, choice in free.items() if is_close_by_profile(choice)}
    again = effort.time.again
    anew = {d: choice for d, choice in free.items() if is_measured_anew(choice, problems[d], again=again)}
    return missing | {digest: problems[digest] for digest in anew}, anew


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
