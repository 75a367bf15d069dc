"""Exact multiple-choice knapsack: one item of every class, least cost under one weight limit.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LARGEST = 2**61
"""Sums of costs, and of weights, stay below it: no overflow in 64 bits."""
SPREAD = np.array((1.0, 0.9, 1.1, 0.75, 1.33, 0.5, 2.0))
"""Multipliers that bound a state, relative to the relaxation's."""
MANY = 512
"""States from which on all of them are tried."""
WIDTH = 512
"""States per half of the first search."""
MOST = 2**22
"""Most candidates that one step of the search may make: some hundred MB."""


@dataclass(frozen=True)
class Chosen:
    """A solution: the item of every class, exact totals, and search statistics.

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
    """The undominated items as one row per class: ascending weight, descending cost.

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
    fastest = np.full(len(costs), costs.shape[1] - 1)
    if int(weights[:, -1].sum()) <= limit:
        return _Found(fastest, 0.0, 0)
    relaxed = _relax(costs, weights, limit)
    search = _Search(costs, weights, limit, relaxed, _fill(costs, weights, limit, relaxed.base))
    proven = search.run(most)
    return _Found(search.picks, search.bound, search.states, proven)


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
            added = np.maximum.accumulate(np.cumsum(weights[rows, heavy] - weights[rows, light]))
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


@dataclass(frozen=True)
class _Choice:
    """Items to choose one of: those of a class, or of classes of which at most one leaves its base item.

    ``rows``, ``items``: what they are.  ``costs``, ``weights``: what each changes, against the base.  ``losses``: what
    the base items of these classes lose at each multiplier.
    """

    rows: Ints
    items: Ints
    costs: Ints
    weights: Ints
    losses: Floats


class _Half:
    """Dynamic programming over some of the classes: what choices in them can change, against the base choice.

    A state is a change of (weight, cost) that no other dominates, in ascending weight; costs then descend.

    Args: multipliers: of the limit; every one gives a bound for a state, that of the relaxation the best where the
    state's weight is the base's, others where it is not.  bounds: their bounds of the whole problem.
    """

    def __init__(self, multipliers: Floats, bounds: Floats) -> None:
        self.cost = np.zeros(1, np.int64)
        self.weight = np.zeros(1, np.int64)
        self.history: list[tuple[_Choice, Ints, Ints]] = []
        self.multipliers, self.bounds = multipliers, bounds

    def extend(self, choice: _Choice, most: float) -> None:
        """Adds a choice; states whose bound exceeds ``most`` go."""
        self.bounds = self.bounds + choice.losses
        first = self.multipliers[0]
        value = self.cost + first * self.weight
        left = most - self.bounds[0] - (choice.costs + first * choice.weights)
        parents = [np.flatnonzero(value <= most_here) for most_here in left.tolist()]
        parent = np.concatenate(parents)
        item = np.repeat(np.arange(len(parents)), [len(alive) for alive in parents])
        cost, weight = self.cost[parent] + choice.costs[item], self.weight[parent] + choice.weights[item]
        if len(cost) > MANY:  # more bounds pay where there are many states
            keep = np.ones(len(cost), bool)
            for multiplier, bound in zip(self.multipliers[1:], self.bounds[1:], strict=True):
                keep &= cost + multiplier * weight <= most - bound
            item, parent, cost, weight = item[keep], parent[keep], cost[keep], weight[keep]
        order = np.argsort(weight, kind="stable")  # items' blocks are sorted: a merge
        ascending = cost[order]
        keep = np.ones(len(order), bool)
        keep[1:] = ascending[1:] < np.minimum.accumulate(ascending)[:-1]
        order = order[keep]
        heavier = weight[order]
        last = np.ones(len(order), bool)  # of equal weights the last, which is cheapest
        last[:-1] = heavier[1:] > heavier[:-1]
        order = order[last]
        self.cost, self.weight = cost[order], weight[order]
        self.history.append((choice, item[order], parent[order]))

    def narrow(self, width: int) -> None:
        """Keeps the states with the least bounds."""
        kept = np.sort(np.argpartition(self.cost + self.multipliers[0] * self.weight, width)[:width])
        self.cost, self.weight = self.cost[kept], self.weight[kept]
        choice, item, parent = self.history[-1]
        self.history[-1] = (choice, item[kept], parent[kept])

    def trace(self, state: int, picks: Ints) -> None:
        """Writes the choices that led to a state."""
        for choice, item, parent in reversed(self.history):
            picks[choice.rows[item[state]]] = choice.items[item[state]]
            state = int(parent[state])


class _Search:
    """Finds an optimum of a problem whose relaxation is known, or a better choice than the one given.

    An item (or a state) is out when its bound says that no solution with it costs less than the best so far.  The
    classes go to two halves, each with a list of states; a pair of states is a solution, and the best partner of a
    state is found by bisection.  So n pairs cost about sqrt(n) states.
    """

    def __init__(self, costs: Ints, weights: Ints, limit: int, relaxed: _Relaxed, picks: Ints) -> None:
        rows = np.arange(len(costs))
        self.base, self.picks = relaxed.base, picks
        base_cost, base_weight = costs[rows, self.base], weights[rows, self.base]
        self.costs, self.weights = costs - base_cost[:, None], weights - base_weight[:, None]
        self.base_cost, self.room = int(base_cost.sum()), limit - int(base_weight.sum())
        self.best = int(costs[rows, picks].sum())
        self.multipliers = relaxed.multiplier * SPREAD
        values = [costs + weights * multiplier for multiplier in self.multipliers]
        least = [value.min(axis=1) for value in values]
        self.losses = np.stack([value[rows, self.base] - low for value, low in zip(values, least, strict=True)], axis=1)
        totals = np.array([math.fsum(low) for low in least])
        self.bounds = totals - self.multipliers * limit
        self.bound = float(self.bounds[0])
        # Any multiplier gives a bound, and integers add up exactly; a product and a sum are rounded per term.
        self.slack = 16.0 * np.finfo(float).eps * float((totals + self.multipliers * limit).max())
        regret = values[0] - least[0][:, None]
        regret[:, 1:][weights[:, 1:] == weights[:, :-1]] = np.inf  # the fillers of short rows
        regret[rows, self.base] = np.inf  # the base itself: only the others are looked at
        self.regret, self.nearest = regret, regret.min(axis=1)
        # Of equally near classes those beside the broken one: they change the weight in both directions.
        self.order = np.lexsort((abs(rows - relaxed.broken), self.nearest))
        self.states = 0

    @property
    def room_for_regret(self) -> float:
        """What a better solution can lose against the bound at most; negative if there is none."""
        return self.best - 1 - self.bound + self.slack

    def run(self, most: int) -> bool:
        """Searches until the best is proven to be an optimum; False if a step would exceed ``most`` candidates.

        The nearest classes first find good solutions, with short lists.  If these lists do not hold everything, the
        whole is searched with what was found: the nearest classes last, so that lists are short for long.
        """
        if self.room_for_regret < 0 or self._pass(self._groups(), WIDTH, most):
            return True
        # Farthest first, but equally far ones in the order that they have.
        groups = sorted(self._groups(), key=lambda rows: -self.nearest[rows[0]] if len(rows) else 0.0)
        return self._pass(iter(groups), None, most)

    def _groups(self) -> Iterator[Ints]:
        """Classes to choose from together, the nearest first; the last: those of which no two leave their bases."""
        for position, k in enumerate(self.order):
            if self.nearest[k] > self.room_for_regret / 2:
                rest = self.order[position:]
                yield rest[self.nearest[rest] <= self.room_for_regret]
                return
            yield np.array([k])

    def _pass(self, groups: Iterator[Ints], width: int | None, most: int) -> bool:
        """Goes through the classes once, with at most ``width`` states a half; True if that was everything."""
        halves = (_Half(self.multipliers, self.bounds), _Half(self.multipliers, self.bounds))
        whole, joined = True, 1
        for number, rows in enumerate(groups):
            if not len(rows):
                continue
            row, item = np.nonzero(self.regret[rows] <= self.room_for_regret)
            row, item = np.append(rows[row], rows[0]), np.append(item, self.base[rows[0]])
            choice = _Choice(row, item, self.costs[row, item], self.weights[row, item], self.losses[rows].sum(axis=0))
            half = min(halves, key=lambda h: len(h.cost))
            if len(half.cost) * len(item) > most:
                whole = False
                break
            half.extend(choice, self.best - 1 + self.slack)
            self.states += len(half.cost)
            if width is not None and len(half.cost) > width:
                half.narrow(width)
                whole = False
            pairs = len(halves[0].cost) * len(halves[1].cost)
            if pairs >= 4 * joined or number < 8 or (width is not None and number % 4 == 0):
                joined = pairs
                self._join(*halves)
                if self.room_for_regret < 0:
                    return True
        self._join(*halves)
        return whole or self.room_for_regret < 0

    def _join(self, one: _Half, two: _Half) -> None:
        """Takes the best pair of states, if it is better than what is known."""
        partner = np.searchsorted(two.weight, self.room - one.weight, side="right") - 1
        together = np.where(partner >= 0, self.base_cost + one.cost + two.cost[partner], self.best)
        if not len(together):
            return
        state = int(together.argmin())
        if together[state] < self.best:
            self.best = int(together[state])
            self.picks = self.base.copy()
            one.trace(state, self.picks)
            two.trace(int(partner[state]), self.picks)
