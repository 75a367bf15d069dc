"""Pages of baselines and of partitions are functions of the recorded files: golden pages and charts, joins, means."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.networks import baseline_tables as tables
from benchmarks.networks import joined_rows, partition_tables
from benchmarks.networks.workload_row import Row

ROWS = Path(__file__).with_name("baseline_rows")
DEVICE = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def rows():
    return joined_rows.joined(ROWS, None)


@pytest.fixture
def gpt(rows):
    """Its jcuts row is of the same sitting and runs XLA's own program with an option that no flag set has."""
    return next(j for j in rows if j.row == "GPT_training:8:args:float32")


@pytest.fixture
def resnet(rows):
    """Its jcuts row is of another sitting; XLA's graphs raced there."""
    return next(j for j in rows if j.row == "ResNet50:64:closed:float32")


def with_ours(j, **changes):
    """The row with another row of jcuts."""
    return joined_rows.Joined(j.baseline, j.torch, {**copy.deepcopy(j.jcuts), **changes})


def test_page_and_charts(golden, rows):
    registry = [Row.parse(spec) for spec in ("ResNet50:1:closed", "ResNet50:256:closed", "GPT_training:1:args")]
    golden("benchmarks/baselines.md", tables.page(rows, ROWS, registry))
    for name, text in tables.charts(rows).items():
        golden(f"benchmarks/{name}", text)


def test_flags_that_lose_do_not_count(rows):
    loses = next(j for j in rows if j.row == "ResNet50:64:closed:bfloat16")
    assert loses.best.seconds == loses.plain == 0.003


def test_best_xla_is_what_jcuts_runs_where_that_is_xla(gpt):
    assert (gpt.best.name, gpt.best.seconds, gpt.ours) == ("xla:library (run by jcuts)", 0.01, 0.01)
    assert gpt.best.plain / gpt.best.seconds == pytest.approx(1.2)  # both of jcuts' process


def test_raced_xla_counts_with_the_longer_estimate(resnet):
    raced = next(p for p in resnet.beside if p.name == "xla:graphs (race of jcuts)")
    assert raced.seconds == pytest.approx(0.00468)  # the ratio 0.9 to plain, as plain takes the same in the race
    seconds = {"xla": 0.0104, "xla:graphs": 0.00468}  # a race in which plain waits for its launches
    waits = with_ours(resnet, decision={**resnet.jcuts["decision"], "seconds": seconds})
    assert next(p.seconds for p in waits.beside if "graphs" in p.name) == pytest.approx(0.00468)
    seconds = {"xla": 0.0026, "xla:graphs": 0.00234}
    hurries = with_ours(resnet, decision={**resnet.jcuts["decision"], "seconds": seconds})
    assert next(p.seconds for p in hurries.beside if "graphs" in p.name) == pytest.approx(0.00468)


def test_plain_xla_beside_jcuts_is_an_xla_program_too(resnet):
    programs = copy.deepcopy(resnet.jcuts["programs"])
    programs["plain"]["back_to_back"]["median"] = 0.004
    faster = with_ours(resnet, programs=programs, decision={"chosen": "jcuts"})
    assert (faster.best.name, faster.fastest_plain) == ("none (beside jcuts)", 0.004)


def test_sittings_are_told_by_the_gap_between_processes(gpt, resnet):
    assert gpt.is_one_sitting and not resnet.is_one_sitting
    assert with_ours(resnet, process_seconds=1600.0).is_one_sitting
    assert not with_ours(gpt, date="2026-11-26T09:00:00+00:00").is_one_sitting  # before its baseline
    undated = {k: v for k, v in gpt.jcuts.items() if k != "date"}
    assert not joined_rows.Joined(gpt.baseline, None, undated).is_one_sitting


def test_older_results_of_jcuts_are_joined_on_the_same_device(tmp_path):
    old = {"network": "ResNet50:1:closed", "times": {"jcuts": {"stream": [0.00025, 0.0, 0.0]}}}
    older = [{**old, "device": DEVICE, "decision": {"chosen": "jcuts"}}, {**old, "device": "NVIDIA H200"}]
    (tmp_path / "gpu_networks_h100_2026-11-01.json").write_text(json.dumps(older))
    ours = next(j for j in joined_rows.joined(ROWS, tmp_path) if j.row == "ResNet50:1:closed:float32").jcuts
    assert joined_rows.median(ours["programs"]["jcuts"]) == 0.00025


def test_what_was_written_is_not_stale(tmp_path):
    folder = tmp_path / "rows"
    shutil.copytree(ROWS, folder)
    options = [str(folder), "--results", str(tmp_path), "--docs", str(tmp_path)]
    assert tables.main([*options, "--check"]) == 1
    assert tables.main([*options, "--write"]) == 0
    assert tables.main([*options, "--check"]) == 0


def test_geometric_means_of_recorded_results(tmp_path, capsys):
    def row(network, plain, flags, ours, chosen):
        times = {n: {"stream": [t, t, t]} for n, t in (("plain", plain), ("flags", flags), ("jcuts", ours))}
        return {"network": network, "times": times, "decision": {"chosen": chosen}}

    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps([row("A:1:closed", 8.0, 4.0, 1.0, "jcuts"), row("B:1:args", 9.0, 9.0, 1.0, "jcuts")]))
    second.write_text(json.dumps([row("B:1:args", 2.0, 2.0, 2.0, "xla")]))
    assert tables.main(["--geomeans", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert "| all | 2 | 1 | 2.83 | 2.00 | 2.00 |" in printed
    assert "| float32, args | 1 | 1 | 1.00 | 1.00 | 1.00 |" in printed


def test_agreement_of_baselines_by_sitting(rows, gpt, resnet):
    text = tables.agreement(rows)
    assert "| the same | 1 | 1 of 1 | 1 of 1 | 0 of 0 | 0 of 0 | 1 of 1 |" in text
    assert "| another | 1 | 0 of 1 | 0 of 1 | 0 of 0 | 0 of 0 | 0 of 1 |" in text
    assert f"Not within 2% in another sitting: {resnet.row} (1.040)." in text
    assert "in the same sitting" not in text
    assert tables.agreement([joined_rows.Joined(gpt.baseline, None, None)]) == ""


def test_rows_bound_by_launches_are_those_that_graphs_help(rows):
    assert [j.row for j in rows if j.is_bound_by_launches] == ["ResNet50:1:closed:float32"]


# -- partitions -----------------------------------------------------------------------------------------------------
def older_result(network, log):
    """What `partition_gpu.py` writes of a network whose search ends with the greedy partition."""
    decision = {"chosen": "jcuts/scales+rounds:graphs"}
    return {"network": network, "device": DEVICE, "log": log, "decision": decision, "pairs": {}, "times": {}}


def test_page_of_partitions(golden, tmp_path):
    log = [
        "partition: 173 subsets explored, 0 measured beyond the greedy cover; sum of subsets 273.0 -> 273.0 us",
        "partition of jcuts/scales+rounds/searched searched in 0.52 s",
    ]
    for network, lines in (("ResNet50:1:closed", log), ("ResNet50:64:closed", log), ("InceptionV3:1:closed", [])):
        file = tmp_path / f"{network.replace(':', '_')}.json"
        file.write_text(json.dumps(older_result(network, lines)), encoding="utf-8")
    golden("benchmarks/partitions.md", partition_tables.page(*partition_tables.read([ROWS, tmp_path])))


def test_searched_rows_without_a_record_are_named(tmp_path):
    row = json.loads((ROWS / "jcuts_GPT_training_8_args_float32.json").read_text(encoding="utf-8"))
    del row["partition"]
    (tmp_path / "jcuts_row.json").write_text(json.dumps(row), encoding="utf-8")
    assert partition_tables.read([tmp_path]) == ([], ["GPT_training:8:args:float32"])


def test_page_of_partitions_is_not_stale_once_written(tmp_path):
    options = [str(ROWS), "--page", str(tmp_path / "partitions.md")]
    assert partition_tables.main([*options, "--check"]) == 1
    assert partition_tables.main([*options, "--write"]) == 0
    assert partition_tables.main([*options, "--check"]) == 0
