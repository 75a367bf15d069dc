"""Convexity, connectedness, quotient graphs: against plain searches and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.base.errors import IRError
from jcuts.fusion.dag import (
    Dag,
    check_subset,
    depend_on_each_other,
    is_connected,
    is_convex,
    quotient_cycle,
    quotient_edges,
    quotient_order,
)
from tests.fusion.dags import random_dags, reaches, runs_in_some_order

DIAMOND = Dag.of(range(4), [(0, 1), (0, 2), (1, 3), (2, 3)])
# two chains a0 -> b0 and b1 -> a1, crossing: {a0, a1} and {b0, b1} are convex and need each other
CROSSED = Dag.of([0, 1, 10, 11], [(0, 10), (11, 1)])


def test_convexity_by_hand():
    assert is_convex(DIAMOND, {0, 1}) and is_convex(DIAMOND, {1, 2}) and is_convex(DIAMOND, {0, 1, 2, 3})
    assert not is_convex(DIAMOND, {0, 3}) and not is_convex(DIAMOND, {0, 1, 3})
    chain = Dag.of(range(4), [(0, 1), (1, 2), (2, 3)])
    assert not is_convex(chain, {0, 3})  # two nodes lie between, none of which has both as neighbours


def test_refusals_name_the_reason():
    assert check_subset(DIAMOND, {0, 1, 2}) is None
    assert "not convex: node 2" in str(check_subset(DIAMOND, {0, 1, 3}))
    assert "not connected" in str(check_subset(DIAMOND, {1, 2}))
    assert check_subset(DIAMOND, {1, 2}, horizontal=True) is None
    assert "at least one" in str(check_subset(DIAMOND, set()))


def test_shared_outside_input_joins_horizontally():
    dag = Dag.of(range(3), [], {0: ["x"], 1: ["x"], 2: ["w"]})
    assert is_connected(dag, {0, 1}, horizontal=True) and not is_connected(dag, {0, 1})
    assert not is_connected(dag, {0, 2}, horizontal=True)


def test_two_convex_subsets_that_need_each_other():
    x, y = frozenset({0, 1}), frozenset({10, 11})
    assert is_convex(CROSSED, x) and is_convex(CROSSED, y)
    assert depend_on_each_other(CROSSED, x, y)
    assert quotient_order(CROSSED, [x, y]) is None
    assert set(quotient_cycle(CROSSED, [x, y])) == {x, y}
    assert not depend_on_each_other(CROSSED, {0}, y)


def test_shortest_cycle_is_found():
    # a long cycle of three subsets and a short one of two
    dag = Dag.of(range(10), [(0, 2), (3, 4), (5, 1), (6, 8), (9, 7)])
    cover = [frozenset(s) for s in ({0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9})]
    assert set(quotient_cycle(dag, cover)) == {frozenset({6, 7}), frozenset({8, 9})}
    three = quotient_cycle(dag, [*cover[:3], *(frozenset({n}) for n in range(6, 10))])
    assert set(three) == set(cover[:3])


def test_malformed_graphs_and_covers():
    with pytest.raises(IRError, match="cycle") as caught:
        Dag.of(range(3), [(0, 1), (1, 2), (2, 1)])
    assert caught.value.nodes == [1, 2]
    with pytest.raises(IRError, match="does not join"):
        Dag.of(range(2), [(0, 5)])
    with pytest.raises(IRError, match="does not join"):
        Dag.of(range(2), [(1, 1)])
    with pytest.raises(IRError, match="two subsets"):
        quotient_edges(DIAMOND, [frozenset({0, 1}), frozenset({1, 2, 3})])
    with pytest.raises(IRError, match="leaves out"):
        quotient_edges(DIAMOND, [frozenset({0, 1})])
    with pytest.raises(IRError, match="node 9"):
        DIAMOND.mask({9})


@given(random_dags(), st.data())
def test_convexity_against_paths(dag, data):
    subset = frozenset(data.draw(st.sets(st.sampled_from(sorted(dag.nodes)), min_size=1)))
    through = [
        v
        for v in dag.nodes - subset
        if any(reaches(dag, a, v) for a in subset) and any(reaches(dag, v, b) for b in subset)
    ]
    assert is_convex(dag, subset) == (not through)


@given(random_dags(), st.data())
def test_quotient_order_against_plain_search(dag, data):
    labels = {node: data.draw(st.integers(0, 3)) for node in sorted(dag.nodes)}
    cover = [frozenset(n for n in dag.nodes if labels[n] == k) for k in sorted(set(labels.values()))]
    order = quotient_order(dag, cover)
    assert (order is not None) == runs_in_some_order(dag, cover)
    cycle = quotient_cycle(dag, cover)
    assert (cycle is None) == (order is not None)
    if order is None:
        edges = {(cover[a], cover[b]) for a, b in quotient_edges(dag, cover)}
        assert all((cycle[i], cycle[(i + 1) % len(cycle)]) in edges for i in range(len(cycle)))
    else:
        done: set[int] = set()
        for subset in order:
            assert all(a in done or a in subset for a, b in dag.edges if b in subset)
            done |= subset


@given(random_dags())
def test_order_and_masks(dag):
    place = dag.position
    assert all(place[a] < place[b] for a, b in dag.edges)
    assert dag.subset(dag.mask(dag.nodes)) == dag.nodes
    for a in dag.nodes:
        assert dag.subset(dag.descendants[place[a]]) == {b for b in dag.nodes if reaches(dag, a, b)}
        assert dag.subset(dag.ancestors[place[a]]) == {b for b in dag.nodes if reaches(dag, b, a)}
