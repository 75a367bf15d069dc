"""The page of baselines is a function of the recorded files: golden page and chart, joins, geometric means."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.networks import baseline_tables as tables

ROWS = Path(__file__).with_name("baseline_rows")
DEVICE = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def rows():
    return tables.joined(ROWS, None)


def test_page_and_charts(golden, rows):
    golden("benchmarks/baselines.md", tables.page(rows, ROWS))
    for name, text in tables.charts(rows).items():
        golden(f"benchmarks/{name}", text)


def test_flags_that_lose_do_not_count(rows):
    loses = next(j for j in rows if j.row == "ResNet50:64:closed:bfloat16")
    assert tables.median(loses.best) == loses.plain == 0.003


def test_older_results_of_jcuts_are_joined_on_the_same_device(tmp_path):
    old = {"network": "ResNet50:1:closed", "times": {"jcuts": {"stream": [0.00025, 0.0, 0.0]}}}
    older = [{**old, "device": DEVICE, "decision": {"chosen": "jcuts"}}, {**old, "device": "NVIDIA H200"}]
    (tmp_path / "gpu_networks_h100_2026-11-01.json").write_text(json.dumps(older))
    ours = next(j for j in tables.joined(ROWS, tmp_path) if j.row == "ResNet50:1:closed:float32").jcuts
    assert tables.median(ours["programs"]["jcuts"]) == 0.00025


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


def test_agreement_of_baselines(rows):
    beside = copy.deepcopy(rows[0].baseline) | {"record": "jcuts"}
    near, far = ([tables.Joined(r.baseline, None, beside)] for r in (rows[0], rows[-1]))
    assert tables.agreement(near) == "1 of 1 rows agree within 2%."
    assert (
        f"not {rows[-1].row} ({tables.median(beside['programs']['plain']) / rows[-1].plain:.3f})"
        in tables.agreement(far)
    )
    assert tables.agreement([tables.Joined(rows[0].baseline, None, None)]) == ""
