"""Algorithm 1 and its subset form."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcuts.base.errors import ModelError, Refusal
from jcuts.fusion.dag import Dag, is_connected, is_convex
from jcuts.fusion.exact_cover import is_exact_cover
from jcuts.fusion.partition_search import UNLIMITED, Limits, algorithm_1, grow_subsets, search
from tests.fusion.dags import brute_force, random_dags, sparse_dag


def yes(subset):
    return True


def saving(subset):
    """Every fusion gains."""
    return 1.0 + 0.1 * len(subset)


CHAIN = Dag.of([0, 1, 2], [(0, 1), (1, 2)])


def test_the_thesis_example():
    # A -> B -> C where every fusion gains: R = {A,B,C}, {AB,C}, {A,BC}, {ABC}
    found = algorithm_1(CHAIN, yes, saving)
    expected = [
        [{0}, {1}, {2}],
        [{0, 1}, {2}],
        [{0}, {1, 2}],
        [{0, 1, 2}],
    ]
    assert set(found.partitions) == {frozenset(map(frozenset, partition)) for partition in expected}
    assert found.best == [{0, 1, 2}] and found.seconds == pytest.approx(1.3)
    assert search(CHAIN, yes, saving, limits=UNLIMITED).best == found.best


def test_a_merge_that_gains_nothing_is_not_grown_further():
    cost = {frozenset({0, 1}): 2.0, frozenset({1, 2}): 2.5, frozenset({0, 1, 2}): 0.1}
    found = algorithm_1(CHAIN, yes, lambda s: cost.get(s, 1.0))
    # X + Y + Z would win, but neither X + Y nor Y + Z does: excluded, as the thesis says
    assert found.best == [{0}, {1}, {2}]
    growth = grow_subsets(CHAIN, yes, lambda s: cost.get(s, 1.0), limits=UNLIMITED)
    assert set(growth.costs) == {frozenset({n}) for n in range(3)}
    assert growth.rejected == {frozenset({0, 1}): 2.0, frozenset({1, 2}): 2.5}


def test_refusals_are_kept():
    def rule(subset):
        return Refusal("conv", "two convolutions") if {0, 1} <= subset else True

    growth = grow_subsets(CHAIN, rule, saving, limits=UNLIMITED)
    assert frozenset({1, 2}) in growth.costs and frozenset({0, 1}) not in growth.costs
    assert growth.refusals[frozenset({0, 1})] == Refusal("conv", "two convolutions")
    assert algorithm_1(CHAIN, rule, saving).best == search(CHAIN, rule, saving).best == [{0}, {1, 2}]


def test_cost_is_asked_once_per_subset():
    asked = []
    dag = sparse_dag(random.Random(0), 9)

    def cost(subset):
        asked.append(subset)
        return saving(subset)

    grow_subsets(dag, yes, cost, limits=UNLIMITED)
    assert len(asked) == len(set(asked))
    asked.clear()
    algorithm_1(CHAIN, yes, cost)
    assert len(asked) == len(set(asked)) == 6


def test_horizontal_merges_only_when_asked():
    dag = Dag.of(range(3), [(0, 1), (0, 2)])
    apart = {frozenset({0}), frozenset({1}), frozenset({2}), frozenset({0, 1}), frozenset({0, 2}), frozenset({0, 1, 2})}
    assert set(grow_subsets(dag, yes, saving, limits=UNLIMITED).costs) == apart
    assert set(grow_subsets(dag, yes, saving, limits=UNLIMITED, horizontal=True).costs) == apart | {frozenset({1, 2})}
    outside = Dag.of(range(2), [], {0: ["x"], 1: ["x"]})
    assert search(outside, yes, saving, horizontal=True).best == [{0, 1}]
    assert algorithm_1(outside, yes, saving, horizontal=True).best == [{0, 1}]
    assert search(outside, yes, saving).best == [{0}, {1}]


def random_cost(seed, gain):
    known = {}

    def cost(subset):
        if subset not in known:
            rng = random.Random(f"{seed}-{sorted(subset)}")
            known[subset] = len(subset) * (1.0 + gain * rng.random()) ** -1 if len(subset) > 1 else 1.0
            known[subset] *= rng.choice([0.8, 1.0, 1.1])
        return known[subset]

    return cost


@given(random_dags(6), st.integers(0, 10_000), st.booleans())
@settings(max_examples=80, deadline=None)
def test_literal_and_subset_form_agree(dag, seed, horizontal):
    cost = random_cost(seed, gain=0.6)
    literal = algorithm_1(dag, yes, cost, horizontal=horizontal)
    subsets = search(dag, yes, cost, limits=UNLIMITED, horizontal=horizontal)
    assert subsets.seconds == pytest.approx(literal.seconds, rel=1e-9)
    assert is_exact_cover(dag, literal.best) and is_exact_cover(dag, subsets.best)
    assert sum(map(cost, literal.best)) == pytest.approx(literal.seconds)
    # and the grown subsets are those of R's partitions
    grown = set(grow_subsets(dag, yes, cost, limits=UNLIMITED, horizontal=horizontal).costs)
    assert {subset for partition in literal.partitions for subset in partition} == grown


@given(random_dags(6), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_equals_brute_force_where_every_merge_gains(dag, seed):
    rng = random.Random(seed)
    weight = {node: rng.uniform(1, 2) for node in sorted(dag.nodes)}

    def cost(subset):
        # a launch plus the work: merging always gains, so Algorithm 1's assumption holds
        return 1.0 + sum(weight[n] for n in subset)

    every = {}
    for mask in range(1, 1 << len(dag.nodes)):
        subset = dag.subset(mask)
        if is_convex(dag, subset) and is_connected(dag, subset):
            every[subset] = cost(subset)
    found = search(dag, yes, cost, limits=UNLIMITED)
    assert found.seconds == pytest.approx(brute_force(dag, every))


@given(random_dags(9), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_grown_subsets_are_legal_and_the_result_runs(dag, seed):
    growth = grow_subsets(dag, yes, random_cost(seed, 0.5), limits=Limits(max_size=5, beam=3))
    for subset in growth.costs:
        assert is_convex(dag, subset) and is_connected(dag, subset) and len(subset) <= 5
    assert {frozenset({n}) for n in dag.nodes} <= set(growth.costs)
    assert is_exact_cover(dag, search(dag, yes, random_cost(seed, 0.5), limits=Limits(max_size=5, beam=3)).best)


def test_limits_are_obeyed_and_told():
    dag = Dag.of(range(60), [(i, i + 1) for i in range(59)])
    small = grow_subsets(dag, yes, saving, limits=Limits(max_size=4))
    assert max(map(len, small.costs)) == 4 and small.truncated and len(small.costs) == 60 + 59 + 58 + 57
    few = grow_subsets(dag, yes, saving, limits=Limits(max_subsets=100))
    assert len(few.costs) == 160 and few.truncated
    asked = []
    counted = grow_subsets(dag, yes, lambda s: asked.append(s) or saving(s), limits=Limits(max_evaluations=70))
    assert counted.truncated and len([s for s in asked if len(s) > 1]) == 70
    assert not grow_subsets(CHAIN, yes, saving).truncated
    narrow = grow_subsets(sparse_dag(random.Random(2), 40, 3, 9), yes, saving, limits=Limits(beam=1))
    assert narrow.truncated
    with pytest.raises(ModelError, match="beam"):
        Limits(beam=0)


def test_impossible_cost_and_too_many_partitions():
    with pytest.raises(ModelError, match="must be seconds"):
        grow_subsets(CHAIN, yes, lambda s: -1.0)
    dag = Dag.of(range(12), [(i, i + 1) for i in range(11)])
    with pytest.raises(ModelError, match="more than 50 partitions") as caught:
        algorithm_1(dag, yes, saving, max_partitions=50)
    assert caught.value.max_partitions == 50


def test_a_thousand_nodes():
    dag = sparse_dag(random.Random(5), 1000, fan_in=2, reach=4)

    def rule(subset):
        # at most one heavy operation (every fifth) per kernel, as in a network
        return sum(node % 5 == 0 for node in subset) <= 1

    found = search(dag, rule, saving, limits=Limits(max_size=6, max_subsets=2500))
    assert is_exact_cover(dag, found.best)
    assert len(found.best) < 500 and all(rule(subset) for subset in found.best)
