"""The model against measured steps: the figures that the planner promises, and how they are scored."""

import numpy as np
import pytest

from jcuts.base.errors import UsageError
from jcuts.plan.calibrate import memory_table, releases, validate
from jcuts.plan.calibrate.tables import read_csv, shipped
from jcuts.plan.cost import inference
from jcuts.plan.cost.inference import serve
from jcuts.plan.cost.serving_plan import Serving
from jcuts.plan.spec import cluster, model


def _named_rows():
    lines = shipped("vtrain_calibration_rows.txt").read_text().splitlines()
    return {int(word) for line in lines if not line.startswith("#") for word in line.split()}


def test_megatron_rows_without_any_fit():
    cases = validate.read_cases(shipped("megatron_seqsel_table5.csv"))
    where = cluster.load("dgx-a100")
    found = validate.score(cases, validate.Bench(cases).predict(where))
    assert found.rows == 8 and found.mape <= 0.035 and found.worst <= 0.08
    naive = validate.score(cases, validate.constant_efficiency(cases, where, cases))
    assert naive.mape > 2 * found.mape


def test_every_constant_matters_on_the_megatron_rows():
    made = validate.ablation(validate.read_cases(shipped("megatron_seqsel_table5.csv")), cluster.load("dgx-a100"))
    assert made["none"] <= 0.035
    assert made["gemm_efficiency"] > 3 * made["none"] and made["intra.efficiency"] > made["none"]


def test_vtrain_rows_that_calibration_never_saw():
    """The preset vtrain-a100 and its overhead per step hold the fit on the 59 named rows (`jcuts validate` makes it
    anew)."""
    cases = validate.read_cases(shipped("vtrain_singlenode_a100.csv"))
    named = _named_rows()
    assert len(named) <= 60
    rest = [case for case in cases if case.row not in named]
    assert len(rest) == len(cases) - len(named) == 649
    where = cluster.load("vtrain-a100")
    found = validate.score(rest, validate.Bench(rest).predict(where, overhead=releases.vtrain_overhead()))
    assert found.mape <= 0.12 and found.spearman >= 0.8 and found.regret <= 1.03 and len(found.groups) >= 50
    seen = [case for case in cases if case.row in named]
    naive = validate.score(rest, validate.constant_efficiency(rest, where, seen))
    assert naive.mape > 0.3 and naive.regret > 1.5


def test_calibration_recovers_constants_it_is_given():
    cases = validate.read_cases(shipped("vtrain_singlenode_a100.csv"))[:8]
    where = cluster.load("vtrain-a100")
    truth = validate.CONSTANTS["launch"].put(where, 8e-5)
    made = validate.Bench(cases).predict(truth, 2e-3)
    cases = [
        validate.Case(c.row, c.network, c.plan, c.batch, c.gpus, float(t), c.work)
        for c, t in zip(cases, made, strict=True)
    ]
    found = validate.calibrate(cases, where, ("launch",))
    assert found.values["launch"] == pytest.approx(8e-5, rel=0.02)
    assert np.allclose(validate.Bench(cases).predict(found.cluster, found.overhead), made, rtol=0.01)
    with pytest.raises(UsageError, match="cannot calibrate"):
        validate.calibrate(cases[:1], where)


def test_scores_by_hand():
    case = validate.read_cases(shipped("megatron_seqsel_table5.csv"))[0]
    measured = [1.0, 2.0, 3.0, 4.0, 5.0]
    cases = [
        validate.Case(i, case.network, case.plan, case.batch, case.gpus, m, case.work) for i, m in enumerate(measured)
    ]
    found = validate.score(cases, np.array([2.0, 1.0, 3.0, 4.0, 5.0]))
    assert found.groups[0].spearman == pytest.approx(0.9) and found.regret == 2.0
    assert found.mape == pytest.approx((1 + 0.5) / 5) and found.worst == 1.0
    assert validate.rank_correlation(np.ones(3), np.arange(3.0)) == 0.0


def test_other_tables_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="iter_time_ms"):
        validate.read_cases(path)
    path.write_text("a,b\n1\n")
    with pytest.raises(UsageError, match="line 2"):
        read_csv(path)
    text = shipped("megatron_seqsel_table5.csv").read_text().replace("6144", "many", 1)
    path.write_text(text)
    with pytest.raises(UsageError, match="row 1"):
        validate.read_cases(path)


T4 = cluster.load("t4-gcp")


def test_flexgen_throughput_on_a_t4():
    rows = releases.flexgen()
    assert len(rows) == 4
    for predicted, measured in rows:
        assert predicted == pytest.approx(measured, rel=0.25)


def test_full_weight_offload_beats_partial_because_the_batch_grows():
    made = model.load("opt-30b", sequence=544)
    found = [inference.largest_batch(made, T4, Serving(512, 32, 1, weights_on_gpu=f)) for f in (0.0, 0.1, 0.2)]
    batches = [cost.plan.batch for cost in found if cost]
    speeds = [cost.tokens_per_second for cost in found if cost]
    assert (
        batches == sorted(batches, reverse=True)
        and speeds == sorted(speeds, reverse=True)
        and speeds[0] > 2 * speeds[2]
    )
    # At equal batch, keeping weights is of course better: it is the batch that decides.
    equal = [serve(made, T4, Serving(512, 32, 2, weights_on_gpu=f)).tokens_per_second for f in (0.0, 0.2)]
    assert equal[1] > equal[0]


def test_no_error_is_worse_than_the_last_release_had():
    """The table of errors by release: MAPE, largest error, Spearman, regret, memory."""
    recorded, now = releases.recorded(), releases.current()
    last = list(recorded)[-1]
    assert releases.worse(now, recorded[last], releases.SLACK) == []
    assert set(now) == set(recorded[last])


def test_what_is_worse_is_named():
    before = {("t", "mape"): 0.1, ("t", "spearman"): 0.9, ("gone", "mape"): 0.1}
    now = {("t", "mape"): 0.12, ("t", "spearman"): 0.95}
    assert releases.worse(now, before, 0.01) == [("t", "mape"), ("gone", "mape")]
    assert releases.worse({**before, ("t", "spearman"): 0.8}, before, 0.01) == [("t", "spearman")]


def test_measured_memory_that_nothing_was_fitted_on():
    """15 layouts of Llama 3 on 8 B200 (tensor, pipeline and context axes, ZeRO 1)."""
    cases = memory_table.read_cases(shipped("simumax_b200_llama3.csv"))
    found = memory_table.score(cases, memory_table.predict(cases))
    assert found.rows == 15 and found.mape <= 0.035 and found.worst <= 0.08


def test_memory_tables_with_mistakes(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text(shipped("simumax_b200_llama3.csv").read_text().replace(",66.55", ",much", 1))
    with pytest.raises(UsageError, match="row 1"):
        memory_table.read_cases(path)
