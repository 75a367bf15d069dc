"""Collectives, products, memory and step time: hand counts and properties."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.base.errors import UsageError
from jcuts.plan.calibrate.tables import read_csv, shipped
from jcuts.plan.cost import collectives, compute, memory, training_step
from jcuts.plan.cost.sharded_sizes import sizes
from jcuts.plan.search.plan import Plan, Plans
from jcuts.plan.spec import cluster, model
from jcuts.plan.spec.workload import Training

A100 = cluster.load("dgx-a100").resized(8)
SMALL = model.Transformer("small", 8, 1024, 16, 512, 32000, batch=64).build()


def _time(plan, where=A100, made=SMALL, batch=64):
    return training_step.estimate(
        made, where.resized(plan.gpus) if where is A100 else where, Plans.of([plan]), Training(batch)
    )


def test_ring_all_reduce_by_hand():
    link = cluster.Link(100e9, 0.5, hop=1e-6, call=1e-5)
    took = collectives.all_reduce(link, link, 4, 8, 1e9)
    assert took == pytest.approx(1e-5 + 6e-6 + 1.5 * 1e9 / 50e9)
    assert collectives.all_reduce(link, link, 1, 8, 1e9) == 0
    assert collectives.all_gather(link, link, 4, 4, 1e9) == pytest.approx(1e-5 + 3e-6 + 0.75 * 1e9 / 50e9)


def test_two_levels_reduce_inside_then_between():
    near, far = cluster.Link(100e9, hop=0, call=0), cluster.Link(10e9, hop=0, call=0)
    took = collectives.all_reduce(near, far, 16, 8, 8e9)
    assert took == pytest.approx(2 * 7 / 8 * 8e9 / 100e9 + 2 * 0.5 * 1e9 / 10e9)


def test_all_to_all_sends_between_nodes_what_other_nodes_get():
    near, far = cluster.Link(100e9, hop=0, call=0), cluster.Link(10e9, hop=0, call=0)
    took = collectives.all_to_all(near, far, 16, 8, 8e9)
    assert took == pytest.approx(7 / 8 * 4e9 / 100e9 + 0.5 * 8e9 / 10e9)
    assert collectives.all_to_all(near, far, 8, 8, 8e9) == pytest.approx(7 / 8 * 8e9 / 100e9)


def test_nccl_table_is_reproduced():
    rows = read_csv(shipped("nccl_allreduce_a100.csv"))
    off = [
        abs(
            float(collectives.all_reduce(A100.intra, A100.inter, int(r["num_gpus"]), 8, float(r["bytes"])))
            / (float(r["time_ns_outofplace"]) * 1e-9)
            - 1
        )
        for r in rows
    ]
    assert np.mean(off) < 0.07 and max(off) < 0.25


def test_layer_times_of_the_22b_model():
    """arXiv 2205.05198 Table 4, the ten times that the A100's GEMM efficiency was fitted on."""
    rows = read_csv(shipped("korthikanti_table4.csv"))
    plans = Plans.of(
        [
            Plan(tensor=8, micro=4, recompute=r["recompute"], sequence_parallel=r["sequence_parallel"] == "1")
            for r in rows
        ]
    )
    body, _, _ = training_step.layer_costs(model.load("megatron-22b"), A100, plans)
    passes = training_step._passes(body, plans)
    forward = (body.forward + body.forward_tensor) / 48 * 1e3
    backward = passes["total"] / 48 * 1e3 - forward
    off = [
        abs(ours / float(r[name]) - 1)
        for name, times in (("forward_ms", forward), ("backward_ms", backward))
        for ours, r in zip(times, rows, strict=True)
    ]
    assert np.mean(off) < 0.025 and max(off) < 0.06


@given(m=st.integers(1, 5000), n=st.integers(1, 5000), k=st.integers(1, 5000))
def test_products_never_beat_peak_or_memory(m, n, k):
    took = float(compute.gemm_time(A100.gpu, m, n, k))
    assert took >= 2 * m * n * k / A100.gpu.peak
    assert took >= 2 * (m * k + k * n + m * n) / A100.gpu.bandwidth


def test_wave_quantisation():
    gpu = replace(A100.gpu, multiprocessors=4, gemm_ramp=0.0)
    full, spilled = (float(compute.gemm_time(gpu, 256 * tiles, 128, 4096)) for tiles in (4, 5))
    assert spilled > 1.2 * full


def test_parts_add_up_and_are_never_negative():
    plans = [
        Plan(data=2, tensor=2, pipeline=2, micro=4, recompute=r, zero=z, sequence_parallel=sp, schedule=s)
        for r in ("none", "selective", "full")
        for z in (0, 1, 2, 3)
        for sp in (False, True)
        for s in ("gpipe", "1f1b")
    ]
    found = training_step.estimate(SMALL, A100, Plans.of(plans), Training(64))
    parts = np.stack([getattr(found.time, part) for part in training_step.PARTS])
    assert (parts >= 0).all()
    np.testing.assert_allclose(parts.sum(0), found.time.total)
    memory_parts = sum(
        getattr(found.memory, n) for n in ("parameters", "gradients", "optimizer", "activations", "working")
    )
    np.testing.assert_allclose(memory_parts + A100.gpu.reserved, found.memory.gpu)


def test_bubble_of_pipeline_schedules():
    base = Plan(pipeline=4, micro=4)
    bubbles = {}
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        bubbles[schedule] = float(_time(replace(base, schedule=schedule, chunks=chunks)).time.bubble[0])
    assert bubbles["gpipe"] == bubbles["1f1b"]
    assert bubbles["interleaved"] == pytest.approx(bubbles["1f1b"] / 2, rel=0.05)


def test_activations_in_flight():
    plans = Plans.of(
        [Plan(pipeline=4, schedule=s, chunks=c) for s, c in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))]
    )
    assert memory.in_flight(plans, np.array([64])).tolist() == [64, 4, 5.5]
    # A loop over ticks keeps idle ones too, and a tick's own once more; a single tick is no loop.
    assert memory.in_flight(plans, np.array([64]), autodiff=True).tolist() == [68, 4, 5.5]
    alone = Plans.of([Plan(micro=4, schedule="gpipe")])
    assert memory.in_flight(alone, np.array([1]), autodiff=True).tolist() == [1]


def test_what_loops_keep_is_moved():
    """Under autodiff a step moves 3 bytes per byte that its layers keep, and 5 more in GPipe's loop over ticks."""
    base = Plan(data=4, micro=2, schedule="1f1b")
    made = {
        (schedule, autodiff): training_step.estimate(
            SMALL, A100, Plans.of([replace(base, schedule=schedule)]), Training(64, autodiff=autodiff)
        )
        for schedule in ("gpipe", "1f1b")
        for autodiff in (False, True)
    }
    held = sizes(SMALL, Plans.of([base]), autodiff=True)
    kept, head = float(held.layers[0] * held.saved_layer[0]), float(held.head_saved[0])
    speed = A100.gpu.bandwidth * A100.gpu.memory_efficiency
    for schedule, moved in (("gpipe", 3 * kept + 5 * (kept + head)), ("1f1b", 3 * kept)):
        more = made[schedule, True].time.total - made[schedule, False].time.total
        assert float(more[0]) == pytest.approx(8 * moved / speed, rel=1e-6)


def test_memory_of_states_by_hand():
    made = model.Transformer("t", 4, 256, 4, 64, 1024, tied=False).build()
    plans = Plans.of([Plan(data=4, zero=z) for z in (0, 1, 2, 3)])
    found = memory.training_memory(made, A100, plans, sizes(made, plans), Training(4))
    n = made.total_parameters
    np.testing.assert_allclose(found.parameters, [2 * n, 2 * n, 2 * n, n / 2])
    np.testing.assert_allclose(found.gradients, [4 * n, 4 * n, n, n])
    np.testing.assert_allclose(found.optimizer, [12 * n, 3 * n, 3 * n, 3 * n])


def test_gradient_reduction_covers_every_layer():
    """The published model's COMM_DP counts one operator: 39 to 192 times too little."""
    no_latency = cluster.Link(1e9, hop=0, call=0)
    where = replace(A100, intra=no_latency, inter=no_latency)
    found = _time(Plan(data=8, micro=8), where)
    values = SMALL.total_parameters
    assert float(found.time.gradients[0]) == pytest.approx(2 * 7 / 8 * 4 * values / 1e9, rel=0.01)


def test_parameters_are_reused_by_the_micro_batches_of_a_group():
    where = replace(cluster.load("thesis-a").resized(1), overlap_tiers=0.0)
    times = [
        _time(Plan(micro=1, recompute="full", parameters="host", group=g), where).time.tiers[0] for g in (1, 8, 64)
    ]
    assert times[0] == pytest.approx(8 * times[1]) and times[1] == pytest.approx(8 * times[2])


def test_optimizer_traffic_is_never_hidden():
    where = replace(cluster.load("thesis-a").resized(1), overlap_tiers=1.0)
    here, away = (_time(Plan(optimizer=t), where) for t in ("gpu", "storage"))
    moved = 12 * SMALL.total_parameters * 2 / 4e9
    assert float(away.time.optimizer[0] - here.time.optimizer[0]) == pytest.approx(moved)
    assert away.memory.gpu[0] < here.memory.gpu[0] and away.memory.storage[0] > 0


def test_experts_exchange_tokens_and_share_memory():
    made = model.load("mixtral-8x7b")
    where = cluster.load("dgx-h100").resized(8)
    plans = Plans.of([Plan(data=8, expert=e) for e in (1, 8)])
    found = training_step.estimate(made, where, plans, Training(64))
    assert found.time.expert[0] == 0 and found.time.expert[1] > 0
    assert found.memory.parameters[1] < found.memory.parameters[0] / 4


@pytest.mark.parametrize(
    "change", [{"micro": 0}, {"zero": 4}, {"schedule": "x"}, {"recompute": "x"}, {"optimizer": "tape"}, {"expert": 3}]
)
def test_impossible_plans_are_refused(change):
    with pytest.raises(UsageError):
        Plan(**({"data": 2} | change))


def test_plans_survive_json_and_arrays():
    plan = Plan(
        data=4, tensor=2, micro=3, zero=2, recompute="selective", sequence_parallel=True, optimizer="host", group=2
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert Plans.of([plan]).plan(0) == plan
    with pytest.raises(UsageError, match="depth"):
        Plan.from_json({"depth": 1})


def test_gpipe_keeps_every_micro_batch_with_one_stage_too():
    made = model.Transformer("t", 4, 256, 4, 128, 1024).build()
    plans = Plans.of([Plan(micro=2, schedule=name, recompute="full") for name in ("1f1b", "gpipe")])
    found = training_step.estimate(made, A100.resized(1), plans, Training(16)).memory
    kept, logits = 4 * 2 * 128 * 256 * 2, 2 * (4 * 128 * 1024 + 4 * 128 * 256)  # of one micro-batch
    assert found.activations.tolist() == [kept, 8 * kept]
    assert found.working[1] - found.working[0] == 7 * logits


def test_a_compiled_recomputation_leaves_out_the_last_product_and_its_reduction():
    made = model.load("gpt3-1.3b")
    plans = Plans.of([Plan(tensor=4, recompute="full"), Plan(tensor=4)])
    times = {
        pruned: training_step.estimate(made, A100.resized(4), plans, Training(1, pruned=pruned)).time
        for pruned in (False, True)
    }
    full, again = times[False], times[True]
    # A layer's products are 12 h^2 but for attention; the last of them is 4 h^2.
    assert 0.6 < again.recompute[0] / full.recompute[0] < 0.8
    assert again.tensor[0] == pytest.approx(full.tensor[0] - (full.tensor[0] - full.tensor[1]) / 2)
    assert again.total[1] == full.total[1]


def test_casts_cost_their_bytes_in_every_micro_batch():
    made = model.load("gpt3-1.3b")
    plans = Plans.of([Plan(micro=2), Plan(micro=1)])
    plain = training_step.estimate(made, A100.resized(1), plans, Training(8)).time.compute
    cast = training_step.estimate(made, A100.resized(1), plans, Training(8, micro_traffic=30)).time.compute
    once = 30 * made.total_parameters / (A100.gpu.bandwidth * A100.gpu.memory_efficiency)
    assert (cast - plain).tolist() == pytest.approx([4 * once, 8 * once])


def test_an_undivided_vocabulary_is_done_by_every_gpu_of_the_tensor_axis():
    sizes = ("t", 2, 1024, 8, 512, 32768)
    plans, work = Plans.of([Plan(tensor=4)]), Training(1)
    divided, whole = (
        training_step.estimate(model.Transformer(*sizes, vocabulary_divided=flag).build(), A100.resized(4), plans, work)
        for flag in (True, False)
    )
    assert whole.time.compute[0] > 1.3 * divided.time.compute[0]
    assert whole.memory.parameters[0] - divided.memory.parameters[0] == 2 * 0.75 * 1024 * 32768
