"""The same questions answered without cleverness: by enumeration, literally as the paper writes it, by HiGHS."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jcuts.microbatch.network import Clique
from jcuts.microbatch.timings import Division, MicroConfig, Table


@functools.cache
def compositions(batch: int) -> tuple[tuple[int, ...], ...]:
    """Every ordered way to write a batch as a sum: 2^(B-1) of them."""
    if batch == 0:
        return ((),)
    return tuple((first, *rest) for first in range(1, batch + 1) for rest in compositions(batch - first))


def wr(table: Table, batch: int, limit: int | None) -> int | None:
    """Least ticks over all compositions, each part by its fastest algorithm within the limit; None: none."""
    best: dict[int, int] = {}
    for micro in table.candidates(batch, limit=limit):
        best[micro.batch] = min(micro.ticks, best.get(micro.batch, micro.ticks))
    sums = [sum(best[part] for part in parts) for parts in compositions(batch) if all(part in best for part in parts)]
    return min(sums, default=None)


def configurations(table: Table, batch: int, limit: int | None = None) -> list[Division]:
    """Every multiset of micro-configurations that adds up to the batch (their order changes neither time nor space)."""
    micros = table.candidates(batch, limit=limit)

    def extend(left: int, first: int) -> Iterator[tuple[MicroConfig, ...]]:
        if left == 0:
            yield ()
        for i in range(first, len(micros)):
            if micros[i].batch <= left:
                for rest in extend(left - micros[i].batch, i):
                    yield (micros[i], *rest)

    return [Division.of(parts) for parts in extend(batch, 0)]


def prune(configurations_: Sequence[Division]) -> list[Division]:
    """D(C) by its definition: what no other configuration matches in both; one is kept of equals."""
    first: dict[tuple[int, int], Division] = {}
    for c in configurations_:
        first.setdefault((c.ticks, c.workspace), c)
    points = list(first)
    kept = [p for p in points if all(p == q or p[0] < q[0] or p[1] < q[1] for q in points)]
    return [first[p] for p in sorted(kept, key=lambda p: p[1])]


def desirable(table: Table, batch: int) -> list[Division]:
    """C(b) = D(union over b_mu, c_mu in C_mu(b_mu), c in C(b - b_mu) of {c_mu} + c), set by set."""
    sets: list[list[Division]] = [[Division(())]]
    for b in range(1, batch + 1):
        union = [
            Division.of((*c.parts, micro)) for micro in table.micros if micro.batch <= b for c in sets[b - micro.batch]
        ]
        sets.append(prune(union))
    return sets[batch]


def knapsack(
    costs: Sequence[np.ndarray], weights: Sequence[np.ndarray], cliques: Sequence[Clique]
) -> tuple[int, ...] | None:
    """Items by enumeration: the first cheapest choice that fits."""
    best, found = None, None
    for picks in itertools.product(*[range(len(c)) for c in costs]):
        if all(sum(int(weights[k][picks[k]]) for k in q.members) <= q.room for q in cliques):
            cost = sum(int(c[j]) for c, j in zip(costs, picks, strict=True))
            if best is None or cost < best:
                best, found = cost, picks
    return found


def highs(
    costs: Sequence[np.ndarray], weights: Sequence[np.ndarray], cliques: Sequence[Clique]
) -> tuple[int, ...] | None:
    """Items by the paper's 0-1 program through cvxpy and HiGHS, without its default gap; None: infeasible."""
    import cvxpy as cp

    row = np.repeat(np.arange(len(costs)), [len(c) for c in costs])
    cost, weight = np.concatenate(costs).astype(float), np.concatenate(weights).astype(float)
    unit = max(float(np.gcd.reduce(np.concatenate(weights))), 1.0)
    x = cp.Variable(len(row), boolean=True)
    one = np.zeros((len(costs), len(row)))
    one[row, np.arange(len(row))] = 1
    limits = [one @ x == 1]
    for clique in cliques:
        inside = np.isin(row, clique.members)
        limits.append((weight * inside / unit) @ x <= np.floor(clique.room / unit))
    problem = cp.Problem(cp.Minimize((cost / max(cost.max() * 1e-3, 1.0)) @ x), limits)
    problem.solve(solver=cp.HIGHS, highs_options={"mip_rel_gap": 0.0, "mip_abs_gap": 0.0})
    if x.value is None:
        return None
    chosen = x.value > 0.5
    return tuple(int(np.flatnonzero(chosen[row == k])[0]) for k in range(len(costs)))


def fits(picks: Sequence[int], weights: Sequence[np.ndarray], cliques: Sequence[Clique]) -> bool:
    """Whether a choice obeys every limit, in integers."""
    return all(sum(int(weights[k][picks[k]]) for k in q.members) <= q.room for q in cliques)


def value(picks: Sequence[int], costs: Sequence[np.ndarray]) -> int:
    """Total cost of a choice, in integers."""
    return sum(int(c[j]) for c, j in zip(costs, picks, strict=True))


def best_batch(batch: int, times: Sequence[dict[int, float]]) -> float | None:
    """Least maximum over all ways to deal the batch out; None: none."""
    best: float | None = None
    for sizes in itertools.product(*[(0, *device) for device in times]):
        if sum(sizes) == batch:
            found = max(device[size] for size, device in zip(sizes, times, strict=True) if size)
            best = found if best is None else min(best, found)
    return best
