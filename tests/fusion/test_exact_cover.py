"""Exact cover: against brute force, by every way of solving it; acyclic on random graphs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcuts.base.errors import IRError, ModelError
from jcuts.fusion import exact_cover as cover_module
from jcuts.fusion.dag import Dag, is_convex
from jcuts.fusion.exact_cover import exact_partition, is_exact_cover
from tests.fusion.dags import brute_force, random_dags, runs_in_some_order, sparse_dag


def single(dag, cost=1.0):
    return {frozenset({node}): cost for node in dag.nodes}


@st.composite
def problems(draw, max_nodes=7):
    """A graph, all singletons, and random further candidates, some of them not convex."""
    dag = draw(random_dags(max_nodes))
    costs = {frozenset({n}): draw(st.integers(1, 20)) * 1e-6 for n in sorted(dag.nodes)}
    for _ in range(draw(st.integers(0, 12))):
        subset = frozenset(draw(st.sets(st.sampled_from(sorted(dag.nodes)), min_size=1, max_size=5)))
        costs[subset] = draw(st.integers(1, 30)) * 1e-6
    return dag, costs


@given(problems())
def test_equals_brute_force(problem):
    dag, costs = problem
    cover = exact_partition(dag, costs)
    assert runs_in_some_order(dag, cover) and is_exact_cover(dag, cover)
    assert sum(costs[s] for s in cover) == pytest.approx(brute_force(dag, costs), rel=1e-9)
    done: set[int] = set()
    for subset in cover:
        assert all(a in done or a in subset for a, b in dag.edges if b in subset)
        done |= subset


@given(problems())
@settings(max_examples=25, deadline=None)
def test_linear_program_equals_brute_force(problem):
    dag, costs = problem
    # no room for the sweep: every component of some size goes to the solver
    cover = exact_partition(dag, costs, max_states=1)
    assert runs_in_some_order(dag, cover)
    assert sum(costs[s] for s in cover) == pytest.approx(brute_force(dag, costs), rel=1e-6)


def test_chain_by_hand():
    dag = Dag.of(range(4), [(0, 1), (1, 2), (2, 3)])
    costs = {**single(dag), frozenset({0, 1}): 1.5, frozenset({1, 2}): 1.1, frozenset({2, 3}): 1.5}
    # 1 + 1.1 + 1 = 3.1 loses to 1.5 + 1.5
    assert exact_partition(dag, costs) == [{0, 1}, {2, 3}]
    costs[frozenset({1, 2})] = 0.9
    assert exact_partition(dag, costs) == [{0}, {1, 2}, {3}]


CROSSED = Dag.of([0, 1, 2, 3], [(0, 2), (3, 1)])


def test_subsets_that_need_each_other_are_not_chosen_together():
    # {0, 1} and {2, 3} are convex, share nothing, and are both cheap: only one may win
    x, y = frozenset({0, 1}), frozenset({2, 3})
    assert is_convex(CROSSED, x) and is_convex(CROSSED, y)
    cover = exact_partition(CROSSED, {**single(CROSSED), x: 1.0, y: 0.5})
    assert set(cover) == {frozenset({0}), frozenset({1}), y}
    assert exact_partition(CROSSED, {**single(CROSSED), x: 1.0, y: 0.5}, max_states=1) == cover
    with pytest.raises(IRError, match="no cover"):
        exact_partition(CROSSED, {x: 1.0, y: 1.0})


def test_cycle_of_three_subsets():
    dag = Dag.of(range(6), [(0, 2), (3, 4), (5, 1)])
    triple = {frozenset({0, 1}): 1.0, frozenset({2, 3}): 1.0, frozenset({4, 5}): 1.5}
    cover = exact_partition(dag, {**single(dag), **triple})
    assert frozenset({4, 5}) not in cover and len(cover) == 4


def test_many_cycles_still_end(monkeypatch):
    # k crossings that can all be chosen but not together; with the cuts capped the fallback must still be sound
    edges, costs = [], {}
    for k in range(12):
        a, b, c, d = range(4 * k, 4 * k + 4)
        edges += [(a, c), (d, b)]
        costs.update({frozenset({a, b}): 1.0, frozenset({c, d}): 0.5})
    dag = Dag.of(range(48), edges)
    costs.update(single(dag))
    exact = exact_partition(dag, costs)
    assert sum(costs[s] for s in exact) == 12 * 2.5
    monkeypatch.setattr(cover_module, "_MAX_ROUNDS", 1)
    capped = exact_partition(dag, costs)
    assert is_exact_cover(dag, capped) and sum(costs[s] for s in capped) <= 12 * 3.0


def test_ties_prefer_fewer_subsets_and_are_stable():
    dag = Dag.of(range(3), [(0, 1), (1, 2)])
    costs = {**single(dag), frozenset({0, 1}): 2.0, frozenset({1, 2}): 2.0, frozenset({0, 1, 2}): 3.0}
    assert exact_partition(dag, costs) == [{0, 1, 2}]
    del costs[frozenset({0, 1, 2})]
    expected = exact_partition(dag, costs)
    assert len(expected) == 2
    for seed in range(5):
        items = list(costs.items())
        random.Random(seed).shuffle(items)
        assert exact_partition(dag, dict(items)) == expected


def test_unusable_candidates():
    dag = Dag.of(range(3), [(0, 1), (1, 2)])
    costs = {**single(dag), frozenset({0, 2}): 0.0, frozenset({0, 1, 2}): math.inf}
    assert exact_partition(dag, costs) == [{0}, {1}, {2}]
    with pytest.raises(IRError, match=r"covers the nodes \[1\]") as caught:
        exact_partition(dag, {frozenset({0}): 1.0, frozenset({2}): 1.0, frozenset({1}): math.inf})
    assert caught.value.nodes == [1]
    for wrong in (-1.0, math.nan):
        with pytest.raises(ModelError, match="must be >= 0"):
            exact_partition(dag, {**single(dag), frozenset({0, 1}): wrong})
    with pytest.raises(IRError, match="node 9"):
        exact_partition(dag, {**single(dag), frozenset({9}): 1.0})
    assert exact_partition(Dag.of([], []), {}) == []


def test_without_cvxpy_the_sweep_stands(monkeypatch, caplog):
    import sys

    rng = random.Random(1)
    dag, costs = laminar_free(rng, 14)
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    cover = exact_partition(dag, costs, max_states=2)
    assert is_exact_cover(dag, cover) and "needs cvxpy" in caplog.text
    assert sum(costs[s] for s in cover) >= sum(costs[s] for s in exact_partition(dag, costs)) - 1e-9


def laminar_free(rng, count):
    dag = sparse_dag(rng, count)
    costs = {frozenset({n}): rng.uniform(1, 2) for n in dag.nodes}
    order = dag.order
    for _ in range(6 * count):
        subset = frozenset(rng.sample(order, rng.randint(2, 4)))
        costs[subset] = sum(costs[frozenset({n})] for n in subset) * rng.uniform(0.5, 1.0)
    return dag, costs


@pytest.mark.parametrize("seed", range(6))
def test_sweep_and_linear_program_agree(seed):
    dag, costs = laminar_free(random.Random(seed), 24)
    swept, solved = exact_partition(dag, costs), exact_partition(dag, costs, max_states=1)
    assert is_exact_cover(dag, swept) and is_exact_cover(dag, solved)
    assert sum(costs[s] for s in swept) == pytest.approx(sum(costs[s] for s in solved), rel=1e-9)


def test_large_graph_of_windows():
    rng = random.Random(3)
    dag = Dag.of(range(600), [(i, i + 1) for i in range(599)])
    costs = {
        frozenset(range(i, j)): rng.uniform(1, 1.5) * (j - i) ** 0.5
        for i in range(600)
        for j in range(i + 1, min(i + 9, 601))
    }
    cover = exact_partition(dag, costs)
    # the same by textbook dynamic programming over intervals
    best = [0.0] + [math.inf] * 600
    for j in range(1, 601):
        best[j] = min(best[i] + costs[frozenset(range(i, j))] for i in range(max(0, j - 8), j))
    assert sum(costs[s] for s in cover) == pytest.approx(best[600])
