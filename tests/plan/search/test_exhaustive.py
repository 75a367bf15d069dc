"""The search against brute force, its Pareto list, its explanations, uneven clusters and placement."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.base.errors import UsageError
from jcuts.plan.search import heterogeneous, tier_placement
from jcuts.plan.search.exhaustive import pareto, search
from jcuts.plan.search.neighbours import neighbours
from jcuts.plan.search.no_plan import NoPlanError
from jcuts.plan.search.plan import Plan
from jcuts.plan.search.plan_space import Space
from jcuts.plan.search.ranked import cost_plans
from jcuts.plan.search.stage_layout import of_training
from jcuts.plan.spec import cluster, model
from jcuts.plan.spec.workload import Training

A100 = cluster.load("dgx-a100")
TINY = model.Transformer("tiny", 4, 512, 8, 256, 1024, batch=16).build()
ON_GPU = Space(offload=())


def test_search_equals_brute_force():
    space = Space(offload=(), context=1, zero=(0, 1), recompute=("none", "full"), schedules=("1f1b",), micro=16)
    found = search(TINY, A100, Training(16), gpus=8, space=space)
    best = []
    for d, t, p, micro, z, rc, sp in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8, 16), (0, 1), ("none", "full"), (False, True)
    ):
        if d * t * p != 8 or 16 % (d * micro) or (sp and t == 1) or (z and d == 1):
            continue
        best.append(Plan(data=d, tensor=t, pipeline=p, micro=micro, zero=z, recompute=rc, sequence_parallel=sp))
    costed = cost_plans(TINY, A100.resized(8), best, Training(16))
    assert found.considered == len(best)
    assert found.best.seconds == pytest.approx(min(r.seconds for r in costed))


def test_ranking_and_rejections():
    found = search(TINY, A100, Training(16), gpus=8)
    seconds = [r.seconds for r in found.ranked]
    assert seconds == sorted(seconds) and found.rejected
    for ranked in found.ranked:
        assert sum(ranked.parts.values()) == pytest.approx(ranked.seconds)
        assert ranked.plan.gpus == 8
    assert all(r.reason for r in found.rejected)


def test_pareto_plans_are_not_dominated():
    found = search(model.load("gpt3-1.3b"), A100, Training(64), gpus=8, space=Space(context=1))
    front = [(r.seconds, r.memory["gpu"]) for r in found.pareto]
    assert len(front) > 3 and front[0][0] == pytest.approx(found.best.seconds)
    for a, b in itertools.permutations(front, 2):
        assert not (a[0] <= b[0] and a[1] <= b[1])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_pareto_keeps_exactly_what_nothing_beats(points):
    one = cost_plans(TINY, A100.resized(1), [Plan()], Training(16))[0]
    plans = [replace(one, seconds=float(s), memory=one.memory | {"gpu": float(m)}) for s, m in points]
    kept = {(r.seconds, r.memory["gpu"]) for r in pareto(plans)}
    want = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert kept == want


def test_nothing_fits_says_what_is_short_and_what_helps():
    with pytest.raises(NoPlanError) as caught:
        search(model.load("gpt3-175b"), A100, Training(64), gpus=8, space=ON_GPU)
    assert caught.value.short["gpu"] > 200 * 2**30
    assert "offloaded to host" in caught.value.change
    bare = replace(A100, host=None, storage=None).resized(8)
    with pytest.raises(NoPlanError, match=r"it fits on [0-9]+ GPUs"):
        search(model.load("gpt3-175b"), bare, Training(64))


def test_nothing_divides():
    with pytest.raises(NoPlanError, match="no plan divides"):
        search(
            replace(TINY, tensor_limit=1, blocks=(replace(TINY.blocks[0], count=1),), context_limit=1),
            A100,
            Training(3),
            gpus=8,
        )


def test_neighbours_keep_the_gpu_count():
    plan = Plan(data=4, tensor=2, pipeline=2)
    assert all(other.gpus == plan.gpus and other != plan for _, other in neighbours(plan, 16))


def test_plans_that_do_not_divide_are_refused():
    for plan in (Plan(micro=3), Plan(pipeline=8), Plan(tensor=16), Plan(expert=1, context=3)):
        with pytest.raises(UsageError):
            cost_plans(TINY, A100.resized(plan.gpus if plan.gpus % 8 == 0 else 1), [plan], Training(16))


def _per_dimension(made, where, batch):
    """Chooses each axis alone, the others at one: what a planner does that treats dimensions as independent."""
    chosen = {}
    for axis in ("data", "tensor", "pipeline"):
        times = {}
        for size in (1, 2, 4, 8, 16, 32):
            if (axis == "tensor" and made.tensor_limit % size) or (axis == "pipeline" and made.layers < size):
                continue
            plan = Plan(**{axis: size})
            ranked = cost_plans(made, where.resized(size), [plan], Training(batch))[0]
            times[size] = ranked.seconds
        chosen[axis] = times
    # With every GPU to be used, the axis that helps most alone takes them all.
    return min(chosen, key=lambda axis: chosen[axis].get(32, np.inf))


@pytest.mark.parametrize(
    ("name", "where"), [("gpt3-6.7b", "thesis-a"), ("turing-nlg-17b", "thesis-a"), ("gpt3-13b", "dgx-a100")]
)
def test_independence_trap(name, where):
    """Axis by axis, all-data-parallel looks best; it does not even fit. Ours chooses all axes together."""
    made, place = model.load(name), cluster.load(where).resized(32)
    assert _per_dimension(made, place, 512) == "data"
    alone = cost_plans(made, place, [Plan(data=32)], Training(512))[0]
    assert alone.memory["gpu"] > place.gpu.memory
    best = search(made, place, Training(512), space=Space(offload=(), zero=(0, 1))).best
    assert best.plan.data < 32 and best.memory["gpu"] <= place.gpu.memory


def test_chosen_data_parallelism_still_wins_where_it_should():
    assert search(model.load("bert-base"), A100, Training(256), gpus=8, space=ON_GPU).best.plan.data == 8


@given(st.integers(3, 40), st.lists(st.floats(0.5, 4.0), min_size=1, max_size=3))
def test_uneven_split_is_optimal(count, slots):
    dealt = heterogeneous.allocate(count, slots)
    assert sum(dealt) == count and min(dealt) >= 0
    ours = max(n * s for n, s in zip(dealt, slots, strict=True))
    best = (
        min(
            max(n * s for n, s in zip(split, slots, strict=True))
            for split in itertools.product(range(count + 1), repeat=len(slots))
            if sum(split) == count
        )
        if len(slots) < 3 or count < 15
        else ours
    )
    assert ours == pytest.approx(best)


def test_a_mixed_cluster_gives_faster_nodes_more():
    fast, slow = A100.gpu, replace(A100.gpu, peak=A100.gpu.peak / 2, bandwidth=A100.gpu.bandwidth / 2)
    mixed = replace(A100, groups=(cluster.NodeGroup(1, 4, fast), cluster.NodeGroup(1, 4, slow)))
    found = search(TINY, mixed, Training(240), space=Space(offload=(), context=1, micro=4))
    assert sum(found.best.split) == 240 and found.best.split[0] > 1.4 * found.best.split[1]
    all_slow = search(
        TINY,
        replace(A100, groups=(cluster.NodeGroup(2, 4, slow),)),
        Training(240),
        space=Space(offload=(), context=1, micro=4),
    )
    assert found.best.seconds < all_slow.best.seconds
    with pytest.raises(UsageError, match="cannot be resized"):
        mixed.resized(4)


def test_placement_fills_the_fast_tier_first():
    where = replace(cluster.load("thesis-a").resized(1), overlap_tiers=0.0)
    tensors = [tier_placement.Tensor("cold", 8 * 2**30, 1e9, 1e9), tier_placement.Tensor("hot", 8 * 2**30, 1e11, 1e11)]
    found = tier_placement.place(where, tensors, fixed=where.gpu.memory - 10 * 2**30, busy=0.0)
    assert found.fractions["hot"]["gpu"] == pytest.approx(1, abs=1e-4)
    # What does not fit is dealt to both tiers so that both finish at once: x/12 (duplex) = 2 y/4, x + y = 0.75.
    assert found.fractions["cold"] == pytest.approx({"gpu": 0.25, "host": 9 / 14, "storage": 1.5 / 14}, abs=1e-4)
    assert found.exposed == pytest.approx(9 / 14 * 1e9 / 12e9, rel=1e-3)


def test_placement_is_never_worse_than_the_plans_whole_classes():
    made, where, work = model.load("gpt3-6.7b"), cluster.load("thesis-a").resized(4), Training(64)
    best = search(made, where, work).best
    found = tier_placement.refine(made, where, best.plan, work)
    bare = Plan(**(best.plan.to_json() | dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), "gpu")))
    resident = cost_plans(made, where, [bare], work)[0]
    waits = best.parts["tiers"] + best.parts["optimizer"] - resident.parts["optimizer"]
    assert found.exposed <= waits * 1.001
    assert found.memory["gpu"] <= where.gpu.memory * (1 + 1e-6)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_placement_is_of_whole_layers_and_has_each_once(chunks):
    """Fractions that no program executes are no placement: every layer's tensors lie in one tier."""
    made, where, work = model.load("gpt3-6.7b"), cluster.load("thesis-a").resized(4), Training(64)
    plan = Plan(data=2, pipeline=2, micro=2, recompute="full", chunks=chunks, group=16)
    plan = replace(plan, schedule="interleaved" if chunks > 1 else "1f1b", optimizer="host")
    made = replace(made, blocks=tuple(replace(block, count=30) for block in made.blocks))
    placed = tier_placement.refine(made, where, plan, work)
    assert all(sum(counts.values()) == 15 for counts in placed.layers.values()) and len(placed.layers) == 4
    for name, counts in placed.layers.items():
        assert {t: n / 15 for t, n in counts.items()} == pytest.approx(placed.fractions[name], abs=1e-6)
    layout = of_training(plan, placed, made.layers)
    assert [stage.gpus for stage in layout.stages] == [(0, 1), (2, 3)]
    assert len(layout.stages[0].layers) == chunks
    brief, full = layout.rows(brief=True), layout.rows()
    assert brief[-1][0] == "2-3" and brief[-1][2] == "as above" and len(full) == 2 * (len(brief) - 1)
    for name in placed.layers:
        held = [held for stage in layout.stages for held in stage.held if held.tensors == name]
        layers = [layer for part in held for first, last in part.layers for layer in range(first, last + 1)]
        assert sorted(layers) == list(range(30))


def test_placement_that_cannot_be():
    where = replace(cluster.load("thesis-a").resized(1), host=None, storage=None)
    with pytest.raises(NoPlanError, match="do not fit"):
        tier_placement.place(where, [tier_placement.Tensor("x", 2**50, 0, 0)], 0.0, 1.0)
    with pytest.raises(UsageError):
        tier_placement.place(where, [], 0.0, 1.0)
