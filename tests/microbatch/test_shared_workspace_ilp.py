"""WD: the knapsack and its liveness-aware form against enumeration and HiGHS."""

from __future__ import annotations

import numpy as np
import pytest

from jcuts.base.errors import UsageError
from jcuts.microbatch import batch_division_dp, liveness_knapsack, multiple_choice_knapsack
from jcuts.microbatch.errors import NoDivisionError
from jcuts.microbatch.network import Clique, cliques, peak
from jcuts.microbatch.pareto import desirable
from jcuts.microbatch.shared_workspace_ilp import divide_network
from jcuts.microbatch.timings import Division, MicroConfig
from tests.microbatch import reference
from tests.microbatch.cases import UNIT, random_sets, random_table


def random_problem(rng, kernels=6, items=5):
    top = int(rng.choice([6, 40, 10**9]))
    costs = [rng.integers(0, top, rng.integers(1, items)) for _ in range(int(rng.integers(1, kernels)))]
    return costs, [rng.integers(0, top, len(c)) for c in costs], top


def check(found, expected, costs, weights, limits):
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.proven and reference.fits(found.items, weights, limits)
        assert found.cost == reference.value(found.items, costs) == reference.value(expected, costs)
        assert found.weight == reference.value(found.items, weights)
        assert found.bound <= found.cost + 1e-3


@pytest.mark.parametrize("seed", range(200))
def test_knapsack_equals_enumeration(seed):
    rng = np.random.default_rng(seed)
    costs, weights, _ = random_problem(rng)
    limit = int(rng.integers(0, sum(int(w.max()) for w in weights) + 2))
    limits = [Clique(tuple(range(len(costs))), limit)]
    check(
        multiple_choice_knapsack.choose(costs, weights, limit),
        reference.knapsack(costs, weights, limits),
        costs,
        weights,
        limits,
    )


@pytest.mark.parametrize("seed", range(200))
def test_liveness_equals_enumeration(seed):
    rng = np.random.default_rng(seed)
    costs, weights, top = random_problem(rng)
    lives = [(b, b + int(rng.integers(0, 3))) for b in rng.integers(0, 4, len(costs)).tolist()]
    held = tuple(rng.integers(0, max(1, top // 2), rng.integers(0, 6)).tolist())
    total = int(rng.integers(0, 3 * top))
    every_step = [
        Clique(members, total - (held[step] if step < len(held) else 0))
        for step in range(8)
        if (members := tuple(k for k, (b, e) in enumerate(lives) if b <= step <= e))
    ]
    expected = reference.knapsack(costs, weights, every_step)
    found = liveness_knapsack.solve_clique_knapsack(costs, weights, cliques(lives, held, total))
    check(found, expected, costs, weights, every_step)


@pytest.mark.parametrize("seed", range(150))
def test_the_exhaustive_passes_equal_enumeration(seed, monkeypatch):
    # Such short lists in the first passes that the second ones must do the work; every bound is tried.
    for module, name, value in (
        (multiple_choice_knapsack, "WIDTH", 1),
        (multiple_choice_knapsack, "MANY", 0),
        (liveness_knapsack, "BEAM", 1),
        (liveness_knapsack, "PAIRWISE", 2),
    ):
        monkeypatch.setattr(module, name, value)
    rng = np.random.default_rng(10_000 + seed)
    costs, weights = random_sets(rng, 6, 24, ("uncorrelated", "weak", "strong")[seed % 3])
    share = rng.uniform(0.05, 0.95)
    limit = int(sum(w[0] for w in weights) * (1 - share) + sum(w[-1] for w in weights) * share)
    limits = [Clique(tuple(range(6)), limit)]
    check(
        multiple_choice_knapsack.choose(costs, weights, limit),
        reference.knapsack(costs, weights, limits),
        costs,
        weights,
        limits,
    )
    lives = [(k, k + 2) for k in range(6)]
    limits = cliques(lives, (), limit // 2)
    check(
        liveness_knapsack.solve_clique_knapsack(costs, weights, limits),
        reference.knapsack(costs, weights, limits),
        costs,
        weights,
        limits,
    )


@pytest.mark.parametrize("kind", ["uncorrelated", "weak", "strong"])
@pytest.mark.parametrize("size", [(20, 90), (159, 562)])
def test_knapsack_equals_highs(kind, size):
    rng = np.random.default_rng(7)
    costs, weights = random_sets(rng, *size, kind)
    least, most = sum(int(w[0]) for w in weights), sum(int(w[-1]) for w in weights)
    limit = least + (most - least) // 3 // UNIT * UNIT
    limits = [Clique(tuple(range(len(costs))), limit)]
    found = multiple_choice_knapsack.choose(costs, weights, limit)
    other = reference.highs(costs, weights, limits)
    assert found is not None and found.proven and other is not None
    assert reference.fits(found.items, weights, limits)
    # HiGHS is right within its tolerance, 1e-6 of the objective's unit per variable; ours is exact.
    assert found.cost <= reference.value(other, costs) or not reference.fits(other, weights, limits)
    assert found.cost == pytest.approx(reference.value(other, costs), rel=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_branches_that_overlap_equal_highs(seed):
    # Three branches per block run side by side; their workspaces are live for one step or two.
    rng = np.random.default_rng(seed)
    costs, weights, lives = [], [], []
    for block in range(4):
        for _ in range(3):
            for depth in range(int(rng.integers(1, 4))):
                weight = np.sort(rng.choice(500, int(rng.integers(2, 7)), replace=False)) * UNIT
                weight[0] = 0
                weights.append(weight.astype(np.int64))
                costs.append(np.sort(rng.integers(10**5, 10**8, len(weight)))[::-1].astype(np.int64))
                begin = 3 * block + depth
                lives.append((begin, begin + int(rng.integers(0, 2))))
    limits = cliques(lives, (), 700 * UNIT)
    found, other = (
        liveness_knapsack.solve_clique_knapsack(costs, weights, limits),
        reference.highs(costs, weights, limits),
    )
    assert found is not None and other is not None and found.proven
    assert reference.fits(found.items, weights, limits) and reference.fits(other, weights, limits)
    assert found.cost == reference.value(other, costs)


def test_a_search_that_may_not_grow_says_so():
    costs, weights = random_sets(np.random.default_rng(0), 60, 300, "weak")
    limit = sum(int(w[-1]) for w in weights) // 2
    whole, cut = (
        multiple_choice_knapsack.choose(costs, weights, limit),
        multiple_choice_knapsack.choose(costs, weights, limit, most=4),
    )
    assert whole is not None and cut is not None
    assert whole.proven and not cut.proven
    assert cut.bound <= whole.cost <= cut.cost
    assert reference.fits(cut.items, weights, [Clique(tuple(range(60)), limit)])


@pytest.mark.parametrize("seed", range(25))
def test_desirable_sets_lose_nothing(seed):
    rng = np.random.default_rng(seed)
    tables, batch = [], int(rng.integers(2, 5))
    for _ in range(int(rng.integers(1, 4))):
        tables.append(random_table(rng, batch, algorithms=2, missing=0.0))
    every = [reference.configurations(table, batch) for table in tables]
    sets = [desirable(table, batch) for table in tables]
    total = UNIT * int(rng.integers(0, 600))
    costs, weights = (
        [np.array([getattr(d, name) for d in found], np.int64) for found in every] for name in ("ticks", "workspace")
    )
    expected = reference.highs(costs, weights, [Clique(tuple(range(len(every))), total)])
    if expected is None:
        with pytest.raises(NoDivisionError) as caught:
            divide_network(sets, total)
        assert caught.value.least == sum(int(w.min()) for w in weights) > total
        return
    found = divide_network(sets, total)
    assert found.ticks == reference.value(expected, costs) == divide_network(every, total).ticks
    assert found.total <= total and found.proven and found.variables == sum(map(len, sets))
    assert found.bound <= found.seconds * (1 + 1e-9)


def test_alone_at_every_step_wd_is_wr_with_the_whole_limit():
    rng = np.random.default_rng(3)
    tables = [random_table(rng, 6, missing=0.0) for _ in range(5)]
    sets = [desirable(table, 6) for table in tables]
    total = max(s[len(s) // 2].workspace for s in sets)
    alone = divide_network(sets, total, constraint="liveness")
    assert [d.ticks for d in alone.divisions] == [batch_division_dp.divide(table, 6, total).ticks for table in tables]
    assert alone.peak <= total
    together = divide_network(sets, total, constraint="liveness", lives=[(0, 4)] * 5)
    paper = divide_network(sets, total)
    assert together.ticks == paper.ticks >= alone.ticks
    assert together.peak == together.total <= total


def test_what_is_held_takes_room():
    sets = [
        [Division((MicroConfig(1, "A", "float32", 3e-6, 0),)), Division((MicroConfig(1, "B", "float32", 1e-6, 60),))]
    ] * 2
    assert divide_network(sets, 100, constraint="liveness", held=(0, 50)).seconds == pytest.approx(4e-6)
    assert divide_network(sets, 100, constraint="liveness", held=(0, 40)).seconds == pytest.approx(2e-6)
    with pytest.raises(NoDivisionError):
        divide_network(sets, 100, constraint="liveness", held=(0, 101))
    assert peak([60, 60], [(0, 0), (1, 1)], (0, 40)) == 100


def test_cliques():
    assert cliques([(0, 2), (1, 1), (2, 3)], (), 9) == [Clique((0, 1), 9), Clique((0, 2), 9)]
    assert cliques([(0, 3)], (0, 0, 4, 2), 9) == [Clique((0,), 5)]
    assert cliques([], (), 9) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: divide_network([[]], 1),
        lambda: divide_network([], -1),
        lambda: divide_network([], 1, constraint="none"),
        lambda: divide_network([], 1, lives=[(0, 1)]),
        lambda: multiple_choice_knapsack.choose([np.array([1])], [], 1),
        lambda: multiple_choice_knapsack.choose([np.array([], int)], [np.array([], int)], 1),
        lambda: multiple_choice_knapsack.choose([np.array([-1])], [np.array([0])], 1),
        lambda: multiple_choice_knapsack.choose([np.array([2**60])] * 4, [np.array([0])] * 4, 1),
    ],
)
def test_bad_input_is_a_usage_error(call):
    with pytest.raises(UsageError):
        call()


def test_nothing_to_choose():
    assert divide_network([], 0).seconds == 0.0
