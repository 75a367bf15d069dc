"""Multiple-choice knapsack with one weight limit per clique of items that are live together (workspaces by liveness).

    minimise  sum_k C[k, j_k]   subject to  sum over k in clique of W[k, j_k] <= room(clique),  for every clique

A kernel's workspace is live from one step to another, so the cliques that hold it follow each other.  Cliques that can
never overflow are dropped; connected components are solved one by one, a single clique by
`multiple_choice_knapsack.choose`.  The rest is swept in program order: a state is what the open cliques hold and the
cost so far; a clique that is complete is checked and forgotten.  States go by dominance and by the bound of the linear
relaxation's multipliers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jcuts.microbatch import multiple_choice_knapsack
from jcuts.microbatch.multiple_choice_knapsack import Chosen, Floats, Ints
from jcuts.microbatch.network import Clique

BEAM = 64
"""States per step of the search for a good solution, before the search for the best."""
PAIRWISE = 1024
"""Most states that are compared with each other; of more, only with the cheapest so many."""


def solve_clique_knapsack(
    costs: Sequence[Ints],
    weights: Sequence[Ints],
    cliques: Sequence[Clique],
    *,
    most: int = multiple_choice_knapsack.MOST,
) -> Chosen | None:
    """Solves one problem; as `multiple_choice_knapsack.choose`, with ``cliques`` instead of the limit.

    Every class's cliques must follow each other in ``cliques``, as those of an interval do (`network.cliques`).
    ``weight`` of the result is the sum over all classes.
    Returns: an optimum, or None if even the lightest items do not fit.
    """
    lightest = np.array([int(w.min()) for w in weights], np.int64)
    heaviest = np.array([int(w.max()) for w in weights], np.int64)
    if any(int(lightest[list(clique.members)].sum()) > clique.room for clique in cliques):
        return None
    tight = [clique for clique in cliques if int(heaviest[list(clique.members)].sum()) > clique.room]
    picks = np.array([_first_best(c, w) for c, w in zip(costs, weights, strict=True)], np.int64)
    bound, states, proven = 0.0, 0, True
    apart = _components(tight)
    touched = {k for clique in tight for k in clique.members}
    bound += sum(int(costs[k][picks[k]]) for k in range(len(costs)) if k not in touched)
    for part in apart:
        members = sorted({k for clique in part for k in clique.members})
        mine = [costs[k] for k in members], [weights[k] for k in members]
        place = {k: i for i, k in enumerate(members)}
        local = [Clique(tuple(place[k] for k in clique.members), clique.room) for clique in part]
        if len(local) == 1:
            found = multiple_choice_knapsack.choose(*mine, local[0].room, most=most)
        else:
            found = _Sweep(*mine, local).run(most)
        if found is None:
            return None
        picks[members] = found.items
        bound, states, proven = bound + found.bound, states + found.states, proven and found.proven
    cost = sum(int(c[j]) for c, j in zip(costs, picks, strict=True))
    weight = sum(int(w[j]) for w, j in zip(weights, picks, strict=True))
    return Chosen(tuple(picks.tolist()), cost, weight, bound, states, proven)


def _first_best(costs: Ints, weights: Ints) -> int:
    """The cheapest item, the lightest of equals, the first of those."""
    return int(np.lexsort((weights, costs))[0])


def _components(cliques: Sequence[Clique]) -> list[list[Clique]]:
    """Cliques in groups that share no member, each in the given order."""
    groups: list[tuple[set[int], list[int]]] = []
    for position, clique in enumerate(cliques):
        mine, places = set(clique.members), [position]
        for group in [group for group in groups if group[0] & mine]:
            groups.remove(group)
            mine |= group[0]
            places += group[1]
        groups.append((mine, places))
    return [[cliques[place] for place in sorted(places)] for _, places in groups]


@dataclass
class _Stage:
    """How the states after a class came about."""

    row: int
    items: Ints
    item: Ints
    parent: Ints


class _Sweep:
    """One component of at least two cliques."""

    def __init__(self, costs: Sequence[Ints], weights: Sequence[Ints], cliques: Sequence[Clique]) -> None:
        core = multiple_choice_knapsack.Core.make(costs, weights)
        self.names = core.names
        self.shift = int(core.costs[:, -1].sum())
        self.costs = core.costs - core.costs[:, -1:]
        self.weights = core.weights
        self.rows = np.arange(len(costs))
        self.rooms = np.array([clique.room for clique in cliques], np.int64)
        self.inside = np.zeros((len(costs), len(cliques)), bool)
        for c, clique in enumerate(cliques):
            self.inside[list(clique.members), c] = True
        self.first = self.inside.argmax(axis=1)

    def run(self, most: int) -> Chosen | None:
        """Solves the component."""
        multipliers = self._multipliers()
        value = self.costs + self.weights * (self.inside @ multipliers)[:, None]
        least = value.min(axis=1)
        total = math.fsum(least)
        spent = math.fsum(multipliers * self.rooms)
        bound = total - spent
        slack = 16.0 * np.finfo(float).eps * (abs(total) + abs(spent))
        regret = value - least[:, None]
        regret[:, 1:][self.weights[:, 1:] == self.weights[:, :-1]] = np.inf
        picks = self._fill()
        best = int(self.costs[self.rows, picks].sum())
        states = 0
        proven = best - 1 < bound - slack
        for width in (BEAM, 16 * BEAM, None):
            if proven:
                break
            found, whole, count = self._pass(regret, multipliers, best, bound, slack, width, most)
            states += count
            if found is not None:
                picks = found
                best = int(self.costs[self.rows, picks].sum())
            proven = whole or best - 1 < bound - slack
        items = self.names[self.rows, picks]
        weight = int(self.weights[self.rows, picks].sum())
        return Chosen(tuple(items.tolist()), best + self.shift, weight, bound + self.shift, states, proven)

    def _multipliers(self) -> Floats:
        """Multipliers of the cliques in the linear relaxation; any that are >= 0 give a bound, these the best."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        real = np.ones(self.costs.shape, bool)
        real[:, 1:] = self.weights[:, 1:] != self.weights[:, :-1]
        row, _ = np.nonzero(real)
        cost, weight = self.costs[real].astype(float), self.weights[real].astype(float)
        unit_cost, unit_weight = max(cost.max(), 1.0), max(weight.max(), 1.0)  # well scaled
        limits = csr_array((self.inside[row] * (weight / unit_weight)[:, None]).T)
        one = csr_array((np.ones(len(row)), (row, np.arange(len(row)))), shape=(len(self.costs), len(row)))
        found = linprog(
            cost / unit_cost,
            A_ub=limits,
            b_ub=self.rooms / unit_weight,
            A_eq=one,
            b_eq=np.ones(len(self.costs)),
            method="highs",
        )
        if found.status != 0:  # numerical trouble: a poor bound, still a bound
            return np.zeros(len(self.rooms))
        return np.maximum(-found.ineqlin.marginals, 0.0) * (unit_cost / unit_weight)

    def _fill(self) -> Ints:
        """A solution: from the lightest items on, the exchange that saves most and fits, again and again."""
        picks = np.zeros(len(self.costs), np.int64)
        used = self.weights[:, 0] @ self.inside
        while True:
            free = np.where(self.inside, (self.rooms - used)[None, :], multiple_choice_knapsack.LARGEST).min(axis=1)
            more = self.weights - self.weights[self.rows, picks][:, None]
            saved = np.where(more <= free[:, None], self.costs[self.rows, picks][:, None] - self.costs, 0)
            k, j = divmod(int(saved.argmax()), saved.shape[1])
            if saved[k, j] <= 0:
                return picks
            used = used + self.inside[k] * int(more[k, j])
            picks[k] = j

    def _pass(
        self, regret: Floats, multipliers: Floats, best: int, bound: float, slack: float, width: int | None, most: int
    ) -> tuple[Ints | None, bool, int]:
        """Sweeps once, keeping at most ``width`` states.  Returns (better solution or None, whole search?, states)."""
        lightest = self.weights[:, 0]
        count = len(self.rooms)
        coming = lightest @ self.inside  # what the undecided members of each clique take at least
        used = np.zeros((1, count), np.int64)
        cost, loss = np.zeros(1, np.int64), np.zeros(1)
        history: list[_Stage] = []
        whole, total, closed = True, 0, 0
        keep = best - 1 - bound + slack
        order = np.lexsort((np.where(np.isfinite(regret), regret, 0).max(axis=1), self.first))
        for k in order.tolist():
            while closed < self.first[k]:  # no later class is in this clique
                loss = loss + multipliers[closed] * (self.rooms[closed] - used[:, closed])
                used[:, closed] = 0
                closed += 1
            items = np.flatnonzero(regret[k] <= keep)
            if not len(items):
                return None, whole, total
            if len(cost) * len(items) > most:
                return None, False, total
            coming = coming - self.inside[k] * int(lightest[k])
            new_used = (used + self.weights[k, items][:, None, None] * self.inside[k]).reshape(-1, count)
            new_cost = (cost + self.costs[k, items][:, None]).ravel()
            new_loss = (loss + regret[k, items][:, None]).ravel()
            open_ = slice(closed, count)
            fits = (new_used[:, open_] + coming[open_] <= self.rooms[open_]).all(axis=1)
            alive = np.flatnonzero(fits & (new_loss <= keep))
            alive = alive[_undominated(new_cost[alive], new_used[alive, open_])]
            if width is not None and len(alive) > width:
                alive = alive[np.argsort(new_loss[alive], kind="stable")[:width]]
                whole = False
            item, parent = np.divmod(alive, len(cost))
            used, cost, loss = new_used[alive], new_cost[alive], new_loss[alive]
            history.append(_Stage(k, items, item, parent))
            total += len(alive)
            if not len(alive):
                return None, whole, total
        state = int(cost.argmin())
        if int(cost[state]) >= best:
            return None, whole, total
        picks = np.zeros(len(self.costs), np.int64)
        for stage in reversed(history):
            picks[stage.row] = stage.items[stage.item[state]]
            state = int(stage.parent[state])
        return picks, whole, total


def _undominated(cost: Ints, used: Ints) -> Ints:
    """Indices of states that no other beats in cost and in every open clique (of equals the first)."""
    used = used[:, used.any(axis=0)]
    order = np.lexsort((*used.T, cost))
    if used.shape[1] <= 1:
        low = np.minimum.accumulate(used[order, 0]) if used.shape[1] else np.zeros(len(order), np.int64)
        keep = np.ones(len(order), bool)
        keep[1:] = low[1:] < low[:-1]
        return order[keep]
    keep = np.ones(len(order), bool)
    rows = used[order]
    for i in range(min(len(order), PAIRWISE)):
        if keep[i]:
            later = keep[i + 1 :]
            later &= (rows[i + 1 :] < rows[i]).any(axis=1)
    return order[keep]
