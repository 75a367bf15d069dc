"""Set partitioning of least time over candidate regions: dynamic programming with LP bounds, else a 0-1 linear program.

One constraint more than the textbook problem: the quotient graph must be acyclic, and two convex subsets may depend on
each other.  The order of attack:

1. Subsets that overlap through no chain of candidates are solved separately (connected components).
2. A component is swept in topological order.  At a node, everything before it is covered; a state is the set of later
   nodes already covered.  On a chain of operations this is the dynamic program over intervals; the number of states
   grows only with the branches that are open at once.  States that a dual bound rules out are dropped: still exact.
3. Where there are too many states, a wider sweep is guided by the prices of the linear relaxation, and the component
   becomes a 0-1 linear program (cvxpy with HiGHS).  A component of more than ``MAX_COLUMNS`` candidates keeps the
   cover of the wide sweep, and its distance from the bound is logged.
4. If the union of the optima has cycles, each becomes a cut (not all of its subsets together), the components that it
   touches become one, and they are solved again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jcuts.base import solver_banner
from jcuts.base.errors import IRError, ModelError
from jcuts.fusion.dag import (
    Dag,
    NodeSet,
    bits,
    is_acyclic_cover,
    outside_between,
    quotient_cycle,
    quotient_order,
    union,
)

log = logging.getLogger(__name__)

MAX_STATES = 256
"""States per node beyond which the sweep hands over to the linear program."""

MAX_COLUMNS = 3_000
"""Candidates of one component beyond which the linear program would take minutes."""

_FIRST_BEAM = 64
"""Width of the first sweep: most components never have more states, and otherwise it gives an upper bound."""

_MAX_ROUNDS = 60
_MAX_TREE = 20_000
"""Branch-and-bound nodes of one program: a limit in seconds would make the choice depend on the machine's load."""

_ROUNDING = 1e-12
"""Relative error of sums of seconds in float64 by which two equal partitions may differ."""

_NO_TIME = 1e-30
"""Seconds far below every kernel's: keeps a divisor and a slack above 0."""


@dataclass(frozen=True)
class _Candidate:
    """A subset as a mask over the topological order, and its seconds."""

    mask: int
    seconds: float
    nodes: NodeSet


_Cut = tuple[int, ...]
"""Masks of subsets that may not all be chosen."""


def exact_partition(dag: Dag, candidates: Mapping[NodeSet, float], *, max_states: int = MAX_STATES) -> list[NodeSet]:
    """The least-time set of candidates that covers every node exactly once and has an execution order.

        min sum_S cost(S) x_S   with   sum_{S containing v} x_S = 1 for every node v,   quotient graph acyclic

    Args:
        candidates: subsets and their seconds; one of infinite time is left out, one that is not convex fits no cover.
        max_states: width of the exact sweep before the linear program is asked.
    Returns: the chosen subsets in an order in which they can run; among covers of equal time one with the fewest
        subsets, always the same.
    Raises:
        IRError: a node is in no usable candidate, a candidate names an unknown node, or no acyclic cover exists.
        ModelError: a time is negative or not a number.
    Source: the subset form of thesis 3.1, Algorithm 1.
    """
    usable = _usable(dag, candidates)
    groups = _components(len(dag.order), usable)
    cuts: list[_Cut] = []
    solved: dict[int, list[_Candidate]] = {}
    cover: list[NodeSet] = []
    for _ in range(_MAX_ROUNDS):
        for group, members in groups.items():
            if group not in solved:
                solved[group] = _solve(members, [c for c in cuts if all(mask & group for mask in c)], max_states)
        cover = [candidate.nodes for group in sorted(solved) for candidate in solved[group]]
        order = quotient_order(dag, cover)
        if order is not None:
            return order
        for cut in _new_cuts(dag, cover):
            cuts.append(cut)
            _join(groups, solved, cut)
    log.warning("subsets that need each other remain after %d rounds of cuts: splitting them", _MAX_ROUNDS)
    return _break_cycles(dag, cover, usable)


def is_exact_cover(dag: Dag, cover: list[NodeSet]) -> bool:
    """Whether a list of subsets covers every node once with an acyclic quotient graph."""
    try:
        return is_acyclic_cover(dag, cover)
    except IRError:
        return False


def _usable(dag: Dag, candidates: Mapping[NodeSet, float]) -> list[_Candidate]:
    usable: list[_Candidate] = []
    for nodes, seconds in candidates.items():
        if math.isnan(seconds) or seconds < 0:
            raise ModelError(f"the subset {sorted(nodes)} takes {seconds} seconds: must be >= 0", seconds=seconds)
        mask = dag.mask(nodes)
        if mask and not math.isinf(seconds) and not outside_between(dag, mask):
            usable.append(_Candidate(mask, float(seconds), frozenset(nodes)))
    covered = 0
    for candidate in usable:
        covered |= candidate.mask
    left = dag.nodes - dag.subset(covered)
    if left:
        raise IRError(f"no usable candidate covers the nodes {sorted(left)[:10]}", nodes=sorted(left))
    # by first node, then larger subsets first: among equal covers the sweep keeps what it met first
    usable.sort(key=lambda c: (c.mask & -c.mask, -c.mask.bit_count(), c.mask))
    return usable


def _components(count: int, usable: list[_Candidate]) -> dict[int, list[_Candidate]]:
    """Connected components of candidates that overlap; keys are node masks."""
    leader = list(range(count))

    def find(place: int) -> int:
        while leader[place] != place:
            leader[place] = leader[leader[place]]
            place = leader[place]
        return place

    for candidate in usable:
        places = list(bits(candidate.mask))
        for place in places[1:]:
            leader[find(place)] = find(places[0])
    masks: dict[int, int] = {}
    for place in range(count):
        root = find(place)
        masks[root] = masks.get(root, 0) | 1 << place
    groups: dict[int, list[_Candidate]] = {mask: [] for mask in masks.values()}
    for candidate in usable:
        groups[masks[find(candidate.mask.bit_length() - 1)]].append(candidate)
    return groups


def _new_cuts(dag: Dag, cover: list[NodeSet]) -> list[_Cut]:
    """Disjoint cycles of a cover, each as its strongest cut: two mutually dependent subsets, else all of the cycle."""
    cuts: list[_Cut] = []
    left = list(cover)
    while (cycle := quotient_cycle(dag, left)) is not None:
        masks = [dag.mask(subset) for subset in cycle]
        pairs = ((x, y) for i, x in enumerate(masks) for y in masks[i + 1 :])
        mutual = next((p for p in pairs if _reaches(dag, *p) and _reaches(dag, p[1], p[0])), None)
        cuts.append(tuple(sorted(mutual or masks)))
        # the subsets of this cycle fall apart, and the search goes on among the others
        left = [s for s in left if s not in cycle] + [frozenset({node}) for s in cycle for node in s]
    return cuts


def _reaches(dag: Dag, x: int, y: int) -> bool:
    return bool(union(dag.descendants, x) & y)


def _join(groups: dict[int, list[_Candidate]], solved: dict[int, list[_Candidate]], cut: _Cut) -> None:
    """Merges the components that a cut touches into one, to be solved again."""
    touched = [group for group in groups if any(mask & group for mask in cut)]
    joined, members = 0, []
    for group in touched:
        joined |= group
        members += groups.pop(group)
        solved.pop(group, None)
    groups[joined] = sorted(members, key=lambda c: (c.mask & -c.mask, -c.mask.bit_count(), c.mask))


def _solve(members: list[_Candidate], cuts: list[_Cut], max_states: int) -> list[_Candidate]:
    """The best cover of one component that violates no cut."""
    if len(members) == 1:
        return members
    found, complete = _topological_dp(
        members, cuts, _lagrangian_prices(members), math.inf, min(_FIRST_BEAM, max_states)
    )
    if complete:
        if found is None:
            raise IRError("no cover of the component avoids every cycle: are all singletons among the candidates?")
        return found
    price = _lagrangian_prices(members, _linear_program(members, [], relaxed=True)[1])
    better, complete = _topological_dp(members, cuts, price, _time(found)[0] if found else math.inf, max_states)
    found = _better(found, better)
    if complete and found is not None:
        return found
    if len(members) <= MAX_COLUMNS:
        found = _better(found, _linear_program(members, cuts)[0])
    elif found is not None:
        gap = _time(found)[0] / max(sum(price.values()), _NO_TIME) - 1
        log.info("a component of %d candidates: the cover is within %.1f%% of the best", len(members), 100 * gap)
    if found is None:
        raise IRError("no cover of the component was found: are all singletons among the candidates?")
    return found


def _better(one: list[_Candidate] | None, other: list[_Candidate] | None) -> list[_Candidate] | None:
    """The faster of two covers; the first on equal terms."""
    if one is None or other is None:
        return one or other
    return other if _time(other) < _time(one) else one


def _time(cover: list[_Candidate]) -> tuple[float, int]:
    return math.fsum(c.seconds for c in cover), len(cover)


def _lagrangian_prices(members: list[_Candidate], start: Mapping[int, float] | None = None) -> dict[int, float]:
    """Dual-feasible price per node (no candidate costs less than its nodes): their sum is a lower bound.

    Starts from given prices, lowered where a candidate is cheaper, or from each node's cheapest share; then raises
    prices one by one as far as every candidate allows.
    """
    containing: dict[int, list[int]] = {}
    for index, candidate in enumerate(members):
        for place in bits(candidate.mask):
            containing.setdefault(place, []).append(index)
    if start is None:
        price = {
            place: min(members[i].seconds / members[i].mask.bit_count() for i in indices)
            for place, indices in containing.items()
        }
    else:
        price = dict(start)
        for candidate in members:
            excess = sum(price[place] for place in bits(candidate.mask)) - candidate.seconds
            if excess > 0:
                price[candidate.mask.bit_length() - 1] -= excess
    slack = [c.seconds - sum(price[place] for place in bits(c.mask)) for c in members]
    for place in sorted(containing):
        room = min(slack[i] for i in containing[place])
        if room > 0:
            price[place] += room
            for index in containing[place]:
                slack[index] -= room
    return price


def _topological_dp(
    members: list[_Candidate], cuts: list[_Cut], price: Mapping[int, float], limit: float, width: int
) -> tuple[list[_Candidate] | None, bool]:
    """Dynamic programming over the topological order.

    Args: limit: seconds of a known cover: states that cannot beat it are dropped; width: states kept per node.
    Returns: the best cover found (None if none), and whether it is certainly the best (no state was cut for width).
    """
    places = sorted(price)
    rank = {place: i for i, place in enumerate(places)}
    starts: list[list[tuple[int, float, float, int, int]]] = [[] for _ in places]
    member_bit = {mask: 1 << i for i, mask in enumerate(sorted({mask for cut in cuts for mask in cut}))}
    cut_masks = [sum(member_bit[mask] for mask in cut) for cut in cuts]
    for index, candidate in enumerate(members):
        local = 0
        for place in bits(candidate.mask):
            local |= 1 << rank[place]
        low = (local & -local).bit_length() - 1
        reduced = candidate.seconds - sum(price[place] for place in bits(candidate.mask))
        used = member_bit.get(candidate.mask, 0)
        starts[low].append((local >> low, candidate.seconds, reduced, used, index))
    base = sum(price.values())
    spare = limit - base + _ROUNDING * (base + _NO_TIME)

    # (covered nodes from here on, members of cuts used) -> (seconds, subsets, seconds above the dual bound, trail)
    states: dict[tuple[int, int], tuple[float, int, float, object]] = {(0, 0): (0.0, 0, 0.0, None)}
    complete = True
    for low in range(len(places)):
        following: dict[tuple[int, int], tuple[float, int, float, object]] = {}
        for (covered, used), (seconds, subsets, above, trail) in states.items():
            if covered & 1:
                _offer(following, (covered >> 1, used), (seconds, subsets, above, trail))
                continue
            for local, own, reduced, bit, index in starts[low]:
                if local & covered or above + reduced > spare:
                    continue
                now_used = used | bit
                if bit and any(now_used & cut == cut for cut in cut_masks):
                    continue
                state = (seconds + own, subsets + 1, above + reduced, (index, trail))
                _offer(following, ((covered | local) >> 1, now_used), state)
        if len(following) > width:
            complete = False
            ranked = sorted(following.items(), key=lambda item: (item[1][2], item[1][1], item[0]))
            following = dict(ranked[:width])
        states = following
    if not states:
        return None, complete
    best = min(states.items(), key=lambda item: (item[1][0], item[1][1], item[0]))[1]
    chosen: list[_Candidate] = []
    trail = best[3]
    while trail is not None:
        index, trail = trail  # pyright: ignore[reportGeneralTypeIssues]
        chosen.append(members[index])
    return chosen[::-1], complete


def _offer(table: dict, key: tuple[int, int], state: tuple[float, int, float, object]) -> None:
    known = table.get(key)
    if known is None or state[:2] < known[:2]:
        table[key] = state


def _linear_program(
    members: list[_Candidate], cuts: list[_Cut], *, relaxed: bool = False
) -> tuple[list[_Candidate] | None, dict[int, float] | None]:
    """Set partitioning as a 0-1 linear program for HiGHS: chosen candidates, or (``relaxed``) dual prices.

    Both are None (logged) if cvxpy is missing or gives up: then the swept cover stands.
    """
    try:
        import cvxpy
        import numpy as np
        from scipy import sparse
    except ImportError as error:
        log.warning("the exact cover needs cvxpy for this graph (%s): keeping the best cover of the sweep", error)
        return None, None
    places = sorted({place for candidate in members for place in bits(candidate.mask)})
    row = {place: i for i, place in enumerate(places)}
    entries = [(row[place], column) for column, c in enumerate(members) for place in bits(c.mask)]
    rows, columns = zip(*entries, strict=True)
    incidence = sparse.csr_matrix((np.ones(len(entries)), (rows, columns)), shape=(len(places), len(members)))
    chosen = cvxpy.Variable(len(members), boolean=not relaxed, nonneg=relaxed)
    # seconds are micro-seconds here: scaled to about one, or the solver's absolute tolerances would swallow them
    cost = np.array([c.seconds for c in members])
    scale = float(cost[cost > 0].mean()) if (cost > 0).any() else 1.0
    once: Any = incidence @ chosen == 1
    column_of = {c.mask: i for i, c in enumerate(members)}
    cut_rows = [cvxpy.sum(chosen[[column_of[mask] for mask in cut]]) <= len(cut) - 1 for cut in cuts]
    problem = cvxpy.Problem(cvxpy.Minimize((cost / scale) @ chosen), [once, *cut_rows])  # pyright: ignore[reportArgumentType]
    options = {} if relaxed else {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "mip_max_nodes": _MAX_TREE}
    solver_banner.keep_off_stdout()
    try:
        problem.solve(solver=cvxpy.HIGHS, **options)
    except cvxpy.SolverError as error:
        log.warning("HiGHS did not solve the exact cover (%s): keeping the best cover of the sweep", error)
        return None, None
    if chosen.value is None:
        return None, None
    if relaxed:
        return None, {place: -scale * float(once.dual_value[row[place]]) for place in places}
    picked = [c for c, value in zip(members, chosen.value, strict=True) if value > 0.5]
    exact = sum(c.mask.bit_count() for c in picked) == len(places)
    exact = exact and sum(c.mask for c in picked) == sum(1 << place for place in places)
    return (picked, None) if exact else (None, None)


def _break_cycles(dag: Dag, cover: list[NodeSet], usable: list[_Candidate]) -> list[NodeSet]:
    """Splits one subset of every cycle into singletons, the one that saves least: always ends, sound, not optimal."""
    single = {c.nodes: c.seconds for c in usable if len(c.nodes) == 1}
    seconds = {c.nodes: c.seconds for c in usable}
    while (cycle := quotient_cycle(dag, cover)) is not None:
        apart = {s: [frozenset({node}) for node in s] for s in cycle if len(s) > 1}
        apart = {s: parts for s, parts in apart.items() if all(part in single for part in parts)}
        if not apart:
            raise IRError("no acyclic cover was found, and not every node has a singleton candidate to fall back on")
        split = min(apart, key=lambda s: (sum(single[part] for part in apart[s]) - seconds[s], sorted(s)))
        cover = [s for s in cover if s != split] + apart[split]
    return quotient_order(dag, cover) or []
