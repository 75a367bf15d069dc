"""How plans are ordered and compared: ties, exhaustiveness, one change per neighbour, policies, and what is short."""

from dataclasses import replace

import pytest

from jcuts.plan.search import heterogeneous
from jcuts.plan.search.exhaustive import AXES, SAVED, gpu_counts, over_gpu_counts, search
from jcuts.plan.search.neighbours import compare, explain_neighbours, micro_batches, neighbours, outside
from jcuts.plan.search.no_plan import NoPlanError
from jcuts.plan.search.plan import Plan
from jcuts.plan.search.plan_space import Space
from jcuts.plan.search.ranked import cost_plans
from jcuts.plan.spec import cluster, model
from jcuts.plan.spec.cluster import GIB, Gpu, Link, NodeGroup
from jcuts.plan.spec.workload import Training

A100 = cluster.load("dgx-a100")
GPT3, THESIS = model.load("gpt3-175b"), cluster.load("thesis-a")


@pytest.fixture(scope="module")
def large_search():
    """The plans of GPT-3 175B on thesis-a: the largest search of these tests, made once."""
    return search(GPT3, THESIS, Training(1536), top=5, explain=0)


def test_of_equally_fast_plans_the_one_with_least_memory_over_all_tiers_is_first():
    """GPT-3 175B on thesis-a, batch 320000: groups of 71 micro-batches need 27 times less disk than groups of 5000."""
    made, where, work = model.load("gpt3-175b"), cluster.load("thesis-a"), Training(320000)
    space = Space(zero=(1,), schedules=("1f1b",), recompute=("full",), context=1, micro=2, offload=("storage",))
    best = search(made, where, work, space=space, explain=0).best
    count = micro_batches(best.plan, work.batch)
    variants = [replace(best.plan, group=group) for group in {1, round(count**0.5), count}]
    costed = cost_plans(made, where, variants, work)
    equal = [r for r in costed if r.seconds == pytest.approx(best.seconds, rel=1e-7)]
    assert best.total_memory == pytest.approx(min(r.total_memory for r in equal))
    assert best.memory["storage"] < 0.1 * max(r.memory["storage"] for r in costed)


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "batch"), [("gpt3-13b", 24, 2, 64), ("gpt3-6.7b", 16, 4, 32), ("gpt3-1.3b", 80, 8, 64)]
)
def test_no_neighbour_inside_the_space_is_faster(name, gpu, gpus, batch):
    small = replace(A100.gpu, memory=gpu * GIB)
    where = replace(
        cluster.load("thesis-a"), groups=(NodeGroup(1, gpus, small),), storage=cluster.load("thesis-a").storage
    )
    made, work, space = model.load(name), Training(batch), Space()
    found = search(made, where, work, space=space)
    every = explain_neighbours(made, where, work, found.best, space, None)
    assert all(r.gain is None or r.gain <= 1e-7 for r in every), [r for r in every if r.gain and r.gain > 0]
    assert not any("not searched" in r.reason for r in every)


def test_micro_batches_have_no_bound_unless_one_is_set_and_then_the_reason_names_it():
    made = replace(model.preset("gpt3-1.3b"), sequence=16).build()
    work = Training(1024)
    free = search(made, A100, work, gpus=8, space=Space(offload=()))
    assert free.best.plan.micro > 64
    bound = Space(offload=(), micro=16)
    best = search(made, A100, work, gpus=8, space=bound).best
    every = explain_neighbours(made, A100.resized(8), work, best, bound, None)
    (larger,) = [r for r in every if "micro x2" in r.changed]
    assert larger.gain is not None and larger.gain > 0 and "not searched: micro is at most 16" in larger.reason


def test_what_need_not_move_stays_on_the_gpu():
    """A tensor class on the host in the same time, and less memory over all tiers: no reason to move it."""
    made, work = model.load("gpt3-1.3b"), Training(8)
    space = Space(recompute=("full",), tensor=1, context=1, micro=1, schedules=("1f1b",), zero=(0,))
    best = search(made, A100, work, gpus=8, space=space, explain=0).best
    assert best.plan.policy == "resident"
    moved = replace(best.plan, activations="host")
    resident, host = cost_plans(made, A100.resized(8), [best.plan, moved], work)
    tie = replace(host, seconds=resident.seconds, total_memory=0.5 * resident.total_memory)
    assert resident.order < tie.order


OFFLOADED = Plan(data=4, micro=4, zero=1, parameters="host", activations="host", group=16)


def test_a_neighbour_changes_one_thing_only():
    for label, other in neighbours(OFFLOADED, 256):
        same = {"parameters", "gradients", "optimizer", "activations", "recompute"} - {label.split()[0]}
        assert all(getattr(other, name) == getattr(OFFLOADED, name) for name in same)
        if not label.startswith("policy"):  # all micro-batches together stay all together
            assert other.group == micro_batches(other, 256), label


@pytest.mark.xdist_group("large search")
def test_the_scheduling_policy_is_a_neighbour_with_a_price(large_search):
    """Parameter-resident against activation-resident, where parameters stream from storage (audit: 8.9 times)."""
    best = large_search.best
    assert best.plan.group > 1
    reasons = {r.changed: r for r in explain_neighbours(GPT3, THESIS, Training(1536), best, Space(), None)}
    policy = reasons["policy activation-resident"]
    assert policy.gain is not None and policy.gain < -1 and "tiers" in policy.reason
    assert "equal time" not in policy.reason


def test_reasons_of_equal_times_say_which_takes_more_memory():
    made, work = model.load("gpt3-1.3b"), Training(8)
    best = search(made, A100, work, gpus=8, space=Space(offload=(), context=1, tensor=1, pipeline=1))
    every = explain_neighbours(made, A100.resized(8), work, best.best, Space(), None)
    equal = [r.reason for r in every if r.reason.startswith("equal")]
    assert equal and all("less memory" not in reason for reason in equal)
    assert outside(Plan(recompute="full"), Space(recompute=("none",))) == "recompute is one of none"


def test_the_nearest_plan_is_short_of_the_tier_that_lacks_least_of_its_capacity():
    """GPT-3 175B on 4 GPUs: a disk that is too small, not a GPU memory that is 961 GiB too small."""
    where = cluster.load("thesis-a").resized(4)
    assert where.storage is not None
    tight = replace(where, storage=replace(where.storage, capacity=1000 * GIB), host=None)
    with pytest.raises(NoPlanError) as caught:
        search(model.load("gpt3-175b"), tight, Training(64))
    assert set(caught.value.short) == {"storage"} and "GiB of storage per node" in caught.value.change
    more = float(caught.value.change.split("with ")[1].split(" GiB")[0].replace(",", ""))
    enough = replace(tight, storage=replace(where.storage, capacity=(more + 0.1) * GIB))
    assert search(model.load("gpt3-175b"), enough, Training(64), space=Space(micro=1), explain=0).best.seconds > 0


@pytest.mark.xdist_group("large search")
def test_plans_that_differ_in_a_variant_only_are_listed_once(large_search):
    found = large_search.ranked
    assert len({ranked.kind for ranked in found}) == len(found) == 5


def test_slower_plans_of_the_same_axes_are_listed_only_where_they_save_memory():
    """GPT-3 1.3B fits on 8 GPUs: the same mesh with one class on the host is no plan of its own."""
    found = search(model.load("gpt3-1.3b"), A100, Training(64), gpus=8, top=8, explain=0)
    assert len(found.ranked) == 8
    for i, slow in enumerate(found.ranked):
        for fast in found.ranked[:i]:
            if slow.kind[:AXES] == fast.kind[:AXES]:
                assert min(slow.memory["gpu"] / fast.memory["gpu"], slow.total_memory / fast.total_memory) < 1 - SAVED


def test_pareto_over_gpu_counts():
    made, work = model.load("gpt3-1.3b"), Training(64)
    assert gpu_counts(A100.resized(16)) == [1, 2, 4, 8, 16]
    front = over_gpu_counts(made, A100, work, [2, 4, 8], space=Space(offload=(), context=1))
    assert {ranked.plan.gpus for ranked in front} == {2, 4, 8}
    fastest = {n: min(r.seconds for r in front if r.plan.gpus == n) for n in (2, 4, 8)}
    assert fastest[8] < fastest[4] < fastest[2]


TINY = model.Transformer("tiny", 4, 512, 8, 256, 1024, batch=16).build()


def _gpu(name: str, speed: float, memory: float = 16.0) -> Gpu:
    return Gpu(name, 20e12 * speed, memory * GIB, 300e9 * speed, multiprocessors=1, reserved=GIB)


def _uneven(*gpus: tuple[int, Gpu]) -> cluster.Cluster:
    groups = tuple(NodeGroup(1, count, gpu) for count, gpu in gpus)
    return cluster.Cluster("uneven", groups, Link(300e9), Link(300e9))


def test_an_uneven_batch_over_unequal_nodes():
    """Batch 32 on 2 + 1 GPUs: no multiple of three is needed, and the slower GPU gets less."""
    where = _uneven((2, _gpu("fast", 2)), (1, _gpu("slow", 1.4)))
    best = search(TINY, where, Training(32), space=Space(offload=())).best
    assert sum(best.split) == 32 and best.plan.gpus == 3 and best.split == (24, 8)


def test_eight_twelve_twelve_of_thirty_two_and_a_device_left_out():
    """Three unequal GPUs (arXiv 1804.04806, Figure 13: 8 + 12 + 12 of 32 samples)."""
    where = _uneven((1, _gpu("a", 2)), (1, _gpu("b", 3)), (1, _gpu("c", 3)))
    best = search(TINY, where, Training(32), space=Space(offload=(), micro=4)).best
    assert best.split == (8, 12, 12)
    even = heterogeneous.even(TINY, where, replace(best.plan, micro=1), Training(33))
    assert even > best.seconds
    slow = _uneven((2, _gpu("fast", 2)), (1, _gpu("very slow", 0.01)))
    left_out = search(TINY, slow, Training(32), space=Space(offload=())).best
    assert left_out.split == (32, 0) and left_out.plan.gpus == 2


def test_a_group_whose_memory_is_too_small_is_left_out():
    where = _uneven((1, _gpu("large", 1)), (1, _gpu("small", 1, memory=1.05)))
    best = search(TINY, where, Training(8), space=Space(offload=())).best
    assert best.split == (8, 0) and best.memory["gpu"] > 1.05 * GIB
    with pytest.raises(NoPlanError, match="does not fit"):
        search(TINY, _uneven((1, _gpu("x", 1, 1.01)), (1, _gpu("y", 2, 1.01))), Training(8), space=Space(offload=()))


def _reasons(made, best, work, where=A100):
    return {
        r.changed: r.reason for r in explain_neighbours(made, where.resized(best.plan.gpus), work, best, Space(), None)
    }


def test_a_setting_without_effect_is_no_neighbour():
    """Selective recomputation repeats the attention core: of a convolutional network it is the same program."""
    made, work = model.load("resnet50"), Training(256)
    best = search(made, A100, work, gpus=8, space=Space(offload=()), explain=0).best
    assert best.plan.recompute == "none" and "recompute selective" not in _reasons(made, best, work)
    gpt = model.load("gpt3-1.3b")
    (given,) = cost_plans(gpt, A100, [Plan(data=8, micro=1)], Training(64))
    assert "recompute selective" in _reasons(gpt, given, Training(64))


def test_a_reason_names_what_a_change_costs_and_what_it_saves():
    """4 GPUs as a tensor axis: its reductions, against gradients that need none; the parts explain the sum."""
    made, work = model.load("gpt3-1.3b"), Training(64)
    (given,) = cost_plans(made, A100, [Plan(data=8, micro=8, recompute="full")], work)
    reason = _reasons(made, given, work)["tensor x2, data /2"]
    assert "+" in reason and "gradients -" in reason


def test_equal_plans_are_told_apart_by_the_mechanism_that_one_needs_more_of():
    made, work = model.load("gpt3-1.3b"), Training(64)
    (given,) = cost_plans(made, A100, [Plan(data=8, micro=8, recompute="full")], work)
    sentence = lambda plan: compare(given, plan, given.seconds, given.parts, given.total_memory, Space())  # noqa: E731
    assert sentence(replace(given.plan, zero=1)) == "equal time and memory; a higher ZeRO stage"
    assert sentence(replace(given.plan, recompute="none")) == "equal time and memory"


def test_tables_rows_and_experts_have_neighbours_where_a_model_has_them():
    plan = Plan(data=8, table=4, expert=2)
    labels = dict(neighbours(plan, 64, tables=True, experts=True))
    assert labels["table x2"].table == 8 and labels["row x2, table /2"].row == 2 and labels["expert /2"].expert == 1
    whole = labels["row x4, table /4"]
    assert (whole.table, whole.row) == (1, 4)
    assert not {label for label, _ in neighbours(plan, 64) if label.startswith(("table", "row", "expert"))}
    assert all(other.data % (other.table * other.row) == 0 for other in labels.values())
