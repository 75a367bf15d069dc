"""The thesis' formulas by hand count, its Table 5.6, and the figures of its text."""

import json

import pytest

from benchmarks.planner import thesis_table_5_6 as table
from jcuts.base.errors import ModelError, UsageError
from jcuts.plan.cost import thesis


def test_table_as_it_stands_and_with_its_transposed_cells_swapped():
    assert len(table.cells()) == 144
    assert table.score(table.cells())[:2] == (139, 106)
    assert table.score(table.cells(swap=True))[:2] == (141, 108)


def test_json_has_one_object_per_cell(capsys):
    assert table.main(["--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made) == 144
    assert set(made[0]) == {"dp", "wp", "p", "model", "cluster", "policy", "printed", "model_value"}


def test_traffic_by_hand_count():
    model = thesis.ThesisModel("tiny", num_op=4, num_param=100.0, num_act=10.0, num_compute=600.0, batch_mini=8)
    moved = thesis.traffic(model, 2, 2, 2, "PR")
    assert moved.forward_backward == 4 * 10 * 4 * 8 / 4
    assert moved.optimizer == 32 * 100 * 4 / 4
    assert moved.weight_partition == 2 * 2 * 5 * 1 * 8
    assert moved.data_parallel == 2 * 50 * 1
    assert moved.pipeline == 2 * 5 * 8
    assert moved.storage == 320 + 3200 and moved.gpu == 160 + 100 + 80
    assert thesis.traffic(model, 2, 2, 2, "AR").forward_backward == 2 * 100 * 4 * 8 / 4
    assert thesis.traffic(model, 2, 2, 2, "AR", all_gradients=True).data_parallel == 2 * 50 * 2


@pytest.mark.parametrize(("name", "stages", "low"), [("Turing-NLG", 4, 39), ("GPT-3", 1, 192)])
def test_printed_gradient_traffic_is_39_to_192_times_too_small(name, stages, low):
    model = thesis.MODELS[name]
    printed, whole = (
        thesis.traffic(model, 4, 1, stages, "PR", all_gradients=flag).data_parallel for flag in (False, True)
    )
    assert whole / printed == low


def test_corrected_optima():
    gpt, turing = thesis.MODELS["GPT-3"], thesis.MODELS["Turing-NLG"]
    best = thesis.optima(gpt, thesis.CLUSTERS["B"], as_tabulated=False)
    assert {entry[1] for entry in best[:2]} == {(1, 1, 32), (2, 1, 16)} and best[0][2] == best[1][2] == "PR"
    assert best[0][0] / thesis.NORMALISER["GPT-3", "B"] == pytest.approx(3.66, abs=0.01)
    assert thesis.optima(turing, thesis.CLUSTERS["A"], as_tabulated=False, max_stages=4)[0][1:] == ((8, 1, 4), "PR")
    assert thesis.optima(turing, thesis.CLUSTERS["B"], as_tabulated=False, max_stages=4)[0][1:] == ((4, 2, 4), "PR")


def test_text_figures_over_the_ideal_case():
    turing = thesis.MODELS["Turing-NLG"]
    dense = {"A": 142.74e12, "B": 125e12}  # RTX 3090 without 2:4 sparsity; V100
    for cluster, printed, tolerance in (("A", 4.25, 0.02), ("B", 3.61, 0.06)):
        ideal = turing.num_compute * turing.num_op * turing.batch_mini / (32 * dense[cluster])
        assert thesis.NORMALISER["Turing-NLG", cluster] / ideal == pytest.approx(printed, rel=tolerance)


def test_gpt3_on_c_is_bounded_by_storage_as_the_text_says():
    gpt, cluster = thesis.MODELS["GPT-3"], thesis.CLUSTERS["C"]
    storage = thesis.traffic(gpt, 2, 1, 8, "PR").storage / cluster.storage
    dense = 0.5  # the tabulated peak is the one with 2:4 sparsity
    assert storage / thesis.compute_time(gpt, cluster, 16, dense) == pytest.approx(4.85, abs=0.01)
    assert storage / thesis.compute_time(gpt, cluster, 16, dense * 0.836) == pytest.approx(4.05, abs=0.01)
    times = {
        dims: seconds for seconds, dims, policy in thesis.optima(gpt, cluster, as_tabulated=False) if policy == "PR"
    }
    assert times[2, 1, 8] <= min(times.values()) * 1.01


def test_figure_5_4_top_ten_are_storage_bound():
    layers, hidden, sequence, micro, count = 32, 4096, 2048, 8, 100
    model = thesis.ThesisModel.transformer("GPT-3 6.7B", layers, hidden, sequence, micro * count)
    cluster = thesis.CLUSTERS["C"]
    times = []
    for d, w, p in thesis.factorisations(16):
        weights = 2 * model.num_param * model.num_op / (w * p)
        # Forward only: every activation is written and read once, or the weights are read once per micro-batch.
        activations = 4 * model.num_act * model.num_op * model.batch_mini / (d * p)
        compute = thesis.compute_time(model, cluster, 16, 0.5) / 3
        for moved in (weights + activations, weights * count / d):
            times.append((moved / cluster.storage, compute))
    best = sorted(times)[:10]
    assert all(storage > compute for storage, compute in best)


def test_total_is_the_longer_of_computation_and_communication():
    gpt, cluster = thesis.MODELS["GPT-3"], thesis.CLUSTERS["A"]
    assert thesis.total_time(gpt, cluster, (4, 1, 8), "PR", efficiency=0.4) == thesis.compute_time(
        gpt, cluster, 32, 0.4
    )
    assert thesis.total_time(gpt, cluster, (32, 1, 1), "AR") == thesis.communication_time(
        gpt, cluster, (32, 1, 1), "AR"
    )


def test_bad_input_is_refused():
    gpt, cluster = thesis.MODELS["GPT-3"], thesis.CLUSTERS["A"]
    with pytest.raises(UsageError, match="PX"):
        thesis.traffic(gpt, 1, 1, 1, "PX")
    with pytest.raises(UsageError, match="at least 1"):
        thesis.traffic(gpt, 0, 1, 1, "PR")
    with pytest.raises(UsageError, match="efficiency"):
        thesis.compute_time(gpt, cluster, 32, 0)
    with pytest.raises(UsageError, match="0 GPUs"):
        thesis.factorisations(0)
    with pytest.raises(ModelError, match="storage"):
        thesis.ThesisCluster("x", 1, 1.0, -1.0, 1.0)
    with pytest.raises(ModelError, match="positive"):
        thesis.ThesisModel.transformer("x", 0, 1, 1, 1)
