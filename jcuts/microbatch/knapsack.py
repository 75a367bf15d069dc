"""The multiple-choice knapsack: one item of every class, least cost under one weight limit, solved exactly.

    minimise  sum_k C[k, j_k]   subject to  sum_k W[k, j_k] <= limit

Costs and weights are integers (picoseconds and bytes), so sums are exact and an optimum is an optimum, not one within a
solver's tolerance.  Floating-point numbers appear in bounds only, and a bound prunes only if it does so by more than
its rounding error.

The way of Pisinger's *A minimal algorithm for the multiple-choice knapsack problem* (1995), on arrays: the linear
relaxation's multiplier, items out by their reduced costs, and dynamic programming over the classes that are left,
those nearest to the break item first, with dominance and a bound per state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LARGEST = 2**61
"""Sums of costs, and of weights, stay below it: no overflow in 64 bits."""
MOST = 2**22
"""Most candidates that one step of the search may make: some hundred MB."""


@dataclass(frozen=True)
class Chosen:
    """A solution: the item of every class, exact totals, and how much work it was.

    ``bound`` is the linear relaxation's value (a lower bound of the cost), ``states`` the dynamic program's states.
    ``proven``: it is an optimum.  False only where the search would have outgrown memory (artificial instances, whose
    bound is far from every solution); then no solution costs less than ``bound``.
    """

    items: tuple[int, ...]
    cost: int
    weight: int
    bound: float
    states: int
    proven: bool = True


def choose(costs: Sequence[Ints], weights: Sequence[Ints], limit: int, *, most: int = MOST) -> Chosen | None:
    """Solves one problem.

    Args: costs, weights: per class its items' integers; costs >= 0, weights >= 0.  limit: most weight in total.
    most: most candidates of one step.
    Returns: an optimum, or None if even the lightest items are too heavy together.
    Raises: UsageError for an empty class, lists of different lengths, or totals of more than 61 bits.

    >>> import numpy as np
    >>> two = [np.array([9, 4, 2]), np.array([5, 2])], [np.array([0, 3, 8]), np.array([0, 6])]
    >>> choose(*two, limit=9).items
    (1, 1)
    >>> choose(*two, limit=8).items
    (2, 0)
    """
    if len(costs) != len(weights) or any(len(c) != len(w) or not len(c) for c, w in zip(costs, weights, strict=False)):
        raise UsageError("every class needs as many weights as costs, and at least one item", classes=len(costs))
    if not costs:
        return Chosen((), 0, 0, 0.0, 0) if limit >= 0 else None
    core = Core.make(costs, weights)
    # What no choice can save is taken off: smaller numbers, closer bounds.
    least_weight, least_cost = int(core.weights[:, 0].sum()), int(core.costs[:, -1].sum())
    if least_weight > limit:
        return None
    found = _solve(core.costs - core.costs[:, -1:], core.weights - core.weights[:, :1], limit - least_weight, most)
    rows = np.arange(len(costs))
    items = core.names[rows, found.picks]
    cost = int(core.costs[rows, found.picks].sum())
    weight = int(core.weights[rows, found.picks].sum())
    return Chosen(tuple(items.tolist()), cost, weight, found.bound + least_cost, found.states, found.proven)


@dataclass(frozen=True)
class Core:
    """Items that no other item of their class dominates, as one row per class: heavier to the right, and cheaper.

    Short rows are filled with copies of their last item, which nobody chooses instead of the item itself: every
    search takes the first of equals.  ``names``: the items' numbers in the caller's lists.
    """

    costs: Ints
    weights: Ints
    names: Ints

    @classmethod
    def make(cls, costs: Sequence[Ints], weights: Sequence[Ints]) -> Core:
        lengths = np.fromiter((len(c) for c in costs), np.int64, len(costs))
        c = np.concatenate(costs, dtype=np.int64)
        w = np.concatenate(weights, dtype=np.int64)
        if c.min() < 0 or w.min() < 0:
            raise UsageError("costs and weights must be >= 0", cost=int(c.min()), weight=int(w.min()))
        top = max(int(c.max()), int(w.max())) + 1
        if top * len(costs) >= LARGEST:
            raise UsageError(f"{len(costs)} classes of items up to {top} are too large to add up", largest=top)
        row = np.repeat(np.arange(len(costs)), lengths)
        number = np.arange(len(c)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        order = np.lexsort((c, w, row))
        c, w, number = c[order], w[order], number[order]
        # Running minimum per class in one sweep: every class lies below the one before by more than the range of costs.
        low = np.minimum.accumulate(c - row * top)
        keep = np.ones(len(c), bool)
        keep[1:] = low[1:] < low[:-1]
        keep[np.cumsum(lengths) - lengths] = True
        c, w, number, row = c[keep], w[keep], number[keep], row[keep]
        count = np.bincount(row, minlength=len(costs))
        begin = np.cumsum(count) - count
        place = np.minimum(begin[:, None] + np.arange(count.max()), (begin + count - 1)[:, None])
        return cls(c[place], w[place], number[place])


@dataclass(frozen=True)
class _Found:
    picks: Ints
    bound: float
    states: int
    proven: bool = True


def _solve(costs: Ints, weights: Ints, limit: int, most: int) -> _Found:
    """Solves a problem whose lightest items (column 0) fit."""
    rows = np.arange(len(costs))
    fastest = np.full(len(costs), costs.shape[1] - 1)
    if int(weights[:, -1].sum()) <= limit:
        return _Found(fastest, 0.0, 0)
    relaxed = _relax(costs, weights, limit)
    multiplier, base = relaxed.multiplier, relaxed.base
    value = costs + multiplier * weights
    least = value.min(axis=1)
    # Any multiplier gives a bound, and integers add up exactly; a product and a sum are rounded per term.
    total = math.fsum(least)
    slack = 16.0 * np.finfo(float).eps * (total + multiplier * limit)
    bound = total - multiplier * limit
    picks = _fill(costs, weights, limit, base)
    best = int(costs[rows, picks].sum())
    if best - 1 < bound - slack:
        return _Found(picks, bound, 0)
    return _search(costs, weights, limit, relaxed, bound, slack, value - least[:, None], picks, best, most)


@dataclass(frozen=True)
class _Relaxed:
    """The linear relaxation: the limit's multiplier, what fits of its optimum, and the class that is broken in it."""

    multiplier: float
    base: Ints
    broken: int


def _relax(costs: Ints, weights: Ints, limit: int) -> _Relaxed:
    """Solves the linear relaxation of a problem whose heaviest items do not fit together.

    The dual is concave and piecewise linear: the line through a choice that fits and one that does not gives the next
    multiplier, until no choice lies below the line.  Then both ends are optimal for the multiplier, and so is any
    mixture of them: as many classes take the heavy end's item as fit, one after the other.
    """
    rows = np.arange(len(costs))

    def totals(picks: Ints) -> tuple[int, int]:
        return int(costs[rows, picks].sum()), int(weights[rows, picks].sum())

    light = np.zeros(len(costs), np.int64)
    light_cost, light_weight = totals(light)
    heavy = weights.argmax(axis=1)
    heavy_cost, heavy_weight = totals(heavy)
    while True:
        multiplier = (light_cost - heavy_cost) / (heavy_weight - light_weight)
        picks = (costs + multiplier * weights).argmin(axis=1)
        cost, weight = totals(picks)
        # In integers: does the new choice lie on or above the line through both ends?
        if (light_cost - cost) * (heavy_weight - light_weight) <= (weight - light_weight) * (light_cost - heavy_cost):
            added = np.cumsum(weights[rows, heavy] - weights[rows, light])
            broken = int(np.searchsorted(added, limit - light_weight, side="right"))
            return _Relaxed(multiplier, np.where(rows < broken, heavy, light), broken)
        if weight <= limit:
            light, light_cost, light_weight = picks, cost, weight
        else:
            heavy, heavy_cost, heavy_weight = picks, cost, weight


def _fill(costs: Ints, weights: Ints, limit: int, picks: Ints) -> Ints:
    """Improves a choice that fits: again and again the exchange in one class that saves most and still fits."""
    rows = np.arange(len(costs))
    picks = picks.copy()
    room = limit - int(weights[rows, picks].sum())
    gain = costs[rows, picks][:, None] - costs
    more = weights - weights[rows, picks][:, None]
    while True:
        saved = np.where(more <= room, gain, 0)
        k, j = divmod(int(saved.argmax()), costs.shape[1])
        if saved[k, j] <= 0:
            return picks
        picks[k] = j
        room -= int(more[k, j])
        gain[k] = costs[k, j] - costs[k]
        more[k] = weights[k] - weights[k, j]


class _Half:
    """Dynamic programming over some of the classes: what choices in them can change, against the base choice.

    A state is a change of (weight, cost) that no other dominates, in ascending weight; costs then descend.
    """

    def __init__(self) -> None:
        self.cost = np.zeros(1, np.int64)
        self.weight = np.zeros(1, np.int64)
        self.history: list[tuple[int, Ints, Ints, Ints]] = []

    def extend(self, row: int, items: Ints, costs: Ints, weights: Ints, keep: float, multiplier: float) -> None:
        """Adds a class: ``items`` with their changes of cost and weight; states of more regret than ``keep`` go."""
        cost = (self.cost + costs[:, None]).ravel()
        weight = (self.weight + weights[:, None]).ravel()
        alive = np.flatnonzero(cost + multiplier * weight <= keep)
        order = alive[np.lexsort((cost[alive], weight[alive]))]
        cost = cost[order]
        front = np.ones(len(order), bool)
        front[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
        order = order[front]
        item, parent = np.divmod(order, len(self.cost))
        self.cost, self.weight = cost[front], weight[order]
        self.history.append((row, items, item, parent))

    def trace(self, stage: int, state: int, picks: Ints) -> None:
        """Writes the choices that led to a state after ``stage`` classes."""
        for row, items, item, parent in reversed(self.history[:stage]):
            picks[row] = items[item[state]]
            state = int(parent[state])


def _search(
    costs: Ints, weights: Ints, limit: int, relaxed: _Relaxed, bound: float, slack: float, regret: Floats,
    picks: Ints, best: int, most: int,
) -> _Found:  # fmt: skip
    """Finds an optimum, given a solution ``picks`` of cost ``best``.

    An item (or a state) is out when its bound says that no solution with it costs less than ``best``.  The classes go,
    nearest first, to two halves, each with a list of states; a pair of states is a solution, and the best partner of a
    state is found by bisection.  So n pairs cost about sqrt(n) states.
    """
    rows = np.arange(len(costs))
    base = relaxed.base
    change_cost = costs - costs[rows, base][:, None]
    change_weight = weights - weights[rows, base][:, None]
    room = limit - int(weights[rows, base].sum())
    base_cost = int(costs[rows, base].sum())
    regret = regret.copy()
    regret[:, 1:][weights[:, 1:] == weights[:, :-1]] = np.inf  # the fillers of short rows
    regret[rows, base] = np.inf  # the base itself: only the others are looked at
    nearest = regret.min(axis=1)
    # Of equally near classes those beside the broken one: they change the weight in both directions.
    order = np.lexsort((abs(rows - relaxed.broken), nearest))
    halves = (_Half(), _Half())
    found: tuple[int, int, int, int] | None = None
    total, joined, proven = 0, 1, True
    for number, k in enumerate((*order.tolist(), -1)):
        keep = best - 1 - bound + slack
        last = k < 0 or nearest[k] > keep
        if not last:
            half = min(halves, key=lambda h: len(h.cost))
            items = np.append(np.flatnonzero(regret[k] <= keep), base[k])
            if len(half.cost) * len(items) > most:
                proven, last = False, True
            else:
                half.extend(k, items, change_cost[k, items], change_weight[k, items], keep, relaxed.multiplier)
                total += len(half.cost)
        one, two = halves
        pairs = len(one.cost) * len(two.cost)
        if last or pairs >= 4 * joined or number < 8:
            joined = pairs
            partner = np.searchsorted(two.weight, room - one.weight, side="right") - 1
            together = np.where(partner >= 0, base_cost + one.cost + two.cost[partner], best)
            state = int(together.argmin())
            if together[state] < best:
                best = int(together[state])
                found = (len(one.history), state, len(two.history), int(partner[state]))
        if best - 1 < bound - slack:
            proven = True
            break
        if last:
            break
    if found is not None:
        picks = base.copy()
        for half, stage, state in ((halves[0], *found[:2]), (halves[1], *found[2:])):
            half.trace(stage, state, picks)
    return _Found(picks, bound, total, proven)
