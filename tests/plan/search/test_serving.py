"""Inference on many GPUs: meshes, scheduling policies, latency targets, and the setting of Figure 5.4."""

from dataclasses import replace

import pytest

from jcuts.base.errors import UsageError
from jcuts.cli.main import main
from jcuts.plan.cost import thesis
from jcuts.plan.cost.inference import Serving, serve
from jcuts.plan.search.no_plan import NoPlanError
from jcuts.plan.search.serving import Demand, search
from jcuts.plan.spec import cluster, model

T4, H100, THESIS_C = (cluster.load(name) for name in ("t4-gcp", "dgx-h100", "thesis-c"))
SMALL = model.load("gpt3-6.7b")


def test_one_gpu_is_ranked_by_throughput_and_shown_once_per_policy():
    found = search(model.load("opt-6.7b", sequence=544), T4, Demand(512, 32))
    speeds = [cost.tokens_per_second for cost in found.ranked]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > 25 and not any(cost.short for cost in found.ranked)
    assert len({(cost.plan.policy.split()[0], cost.plan.gpus) for cost in found.ranked}) == len(found.ranked)


@pytest.mark.parametrize(("axis", "least"), [("data", 3.9), ("tensor", 1.3), ("pipeline", 1.8)])
def test_four_gpus_of_each_axis_serve_more(axis, least):
    made = model.load("opt-30b")
    one = serve(made, H100, Serving(512, 128, 8, count=4, group=1))
    four = serve(made, H100, replace(one.plan, **{axis: 4}))
    assert four.plan.gpus == 4 and four.tokens_per_second > least * one.tokens_per_second
    if axis != "data":
        weights = 2 * made.total_parameters
        assert one.memory["gpu"] - four.memory["gpu"] > 0.6 * weights
    if axis == "tensor":
        assert four.step < one.step and four.prefill < one.prefill


def test_a_pipeline_without_micro_batches_gains_nothing():
    one = serve(SMALL, H100, Serving(512, 128, 8))
    assert serve(SMALL, H100, replace(one.plan, pipeline=4)).tokens_per_second <= 1.05 * one.tokens_per_second


def test_parameter_resident_reads_weights_once_and_activation_resident_once_per_micro_batch():
    plan = Serving(512, 0, 8, count=16, weights_on_gpu=0.0, weights="storage", activations="storage")
    resident, one_by_one, mixed = (serve(SMALL, THESIS_C, replace(plan, group=g)) for g in (0, 1, 4))
    found = {"p": resident, "a": one_by_one, "m": mixed}
    moved = {name: cost.parts["prefill transfers"] for name, cost in found.items()}
    weights = 2 * SMALL.total_parameters / 0.4e9
    hidden = 2 * 2 * 4096 * 512 * 8 * 32 / 0.4e9  # of a micro-batch: out and in, every layer
    assert moved["a"] == pytest.approx(16 * weights)
    assert moved["p"] == pytest.approx(weights + 16 * hidden)
    assert moved["m"] == pytest.approx(4 * weights + 16 * hidden)
    assert (resident.plan.policy, one_by_one.plan.policy, mixed.plan.policy) == ("PR", "AR", "PR by 4")


def test_latency_targets_bound_the_choice():
    made, where = model.load("llama3-70b"), H100.resized(8)
    free = search(made, where, Demand(2048, 256)).ranked[0]
    tight = search(made, where, Demand(2048, 256, token_latency=0.040)).ranked[0]
    assert tight.step <= 0.040 < free.step and tight.tokens_per_second < free.tokens_per_second
    fastest = search(made, where, Demand(2048, 256, rank="latency")).ranked[0]
    assert fastest.step <= tight.step and fastest.plan.tensor == 8
    with pytest.raises(NoPlanError, match="no plan meets the latency targets"):
        search(made, where, Demand(2048, 256, token_latency=1e-4))
    with pytest.raises(NoPlanError, match="short of gpu memory"):
        search(made, replace(where, host=None, storage=None).resized(1), Demand(2048, 256))


def test_figure_5_4_setting():
    """GPT-3 6.7B on cluster C, micro-batches of 8, 100 of them, everything in storage: the ten best plans are bound by
    storage, as the text says, with both policies among them."""
    demand = Demand(2048, 0, micro=8, batches=100, weights="storage", activations="storage")
    found = search(SMALL, THESIS_C, demand, top=10)
    assert len(found.ranked) == 10 and all(cost.bound == "storage link" for cost in found.ranked)
    assert {cost.plan.policy[:2] for cost in found.ranked} == {"PR", "AR"}
    assert all(cost.plan.gpus == 16 and cost.plan.micro == 8 for cost in found.ranked)
    times = [cost.prefill for cost in found.ranked]
    assert times == sorted(times)


def test_activation_resident_plans_read_what_the_published_formula_reads():
    """Weights read once per micro-batch: the published forward term, and the planner's, over every mesh of 16 GPUs."""
    layers, hidden, sequence, micro, count = 32, 4096, 2048, 8, 100
    published = thesis.ThesisModel.transformer("GPT-3 6.7B", layers, hidden, sequence, micro * count)
    ours, theirs = [], []
    for d, w, p in thesis.factorisations(16):
        if count % d or p > 4:  # an end stage of a deep pipeline is mostly vocabulary, which the formula leaves out
            continue
        plan = Serving(
            sequence, 0, micro, count // d, 0.0, "storage", data=d, tensor=w, pipeline=p, group=1, activations="storage"
        )
        ours.append(serve(SMALL, THESIS_C, plan).parts["prefill transfers"])
        weights = 2 * published.num_param * published.num_op / (w * p)
        theirs.append(weights * (count // d) / thesis.CLUSTERS["C"].storage)
    assert ours == pytest.approx(theirs, rel=0.25)


def test_the_command_line_serves_on_many_gpus(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["plan", "--model", "gpt3-6.7b", "--cluster", "thesis-c", "--serve", "2048", "0", "--micro", "8"]
    assert main([*arguments, "--micro-batches", "100", "--weights", "storage", "--activations", "storage"]) == 0
    text = capsys.readouterr().out
    assert "16 GPUs of thesis-c" in text and "PR" in text and max(map(len, text.splitlines())) <= 80
    assert main(["plan", "--model", "opt-6.7b", "--cluster", "t4-gcp", "--serve", "512", "32", "--json", "-"]) == 0
    assert '"tokens_per_second"' in capsys.readouterr().out
    for wrong, said in (
        (
            ["--model", "bert-large", "--cluster", "thesis-c", "--serve", "64", "8"],
            "bert-large is no transformer decoder",
        ),
        (["--model", "resnet50", "--cluster", "thesis-c", "--serve", "64", "0"], "resnet50 is no transformer"),
        (["--model", "opt-6.7b", "--cluster", "thesis-c", "--serve", "0", "8"], "tokens in must be positive"),
    ):
        assert main(["plan", *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "--model", "bert-large", "--cluster", "thesis-c", "--serve", "512", "0"]) == 0


def test_impossible_configurations():
    made = model.load("opt-6.7b", sequence=544)
    assert "gpu memory" in serve(model.load("opt-30b"), T4, Serving(512, 32, 1)).short
    with pytest.raises(UsageError, match="weights_on_gpu"):
        Serving(1, 1, 1, weights_on_gpu=2)
    with pytest.raises(UsageError, match="no transformer"):
        serve(model.load("resnet50"), T4, Serving(1, 1, 1))
    with pytest.raises(UsageError, match="scan_gbs"):
        serve(made, T4, Serving(1, 1, 1, host_attention=True))
    with pytest.raises(UsageError, match=r"has no \[storage\]"):
        search(made, replace(T4, storage=None), Demand(8, 8, weights="storage"))
