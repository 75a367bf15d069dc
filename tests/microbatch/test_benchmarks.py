"""The benchmarks of micro-batching, as far as they run without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_microbatch_tables, microbatch_offline
from benchmarks.gpu_microbatch_tables import BATCHES, traced
from benchmarks.microbatch_networks import training_step

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name, kernels", [("ResNet-18", 59), ("AlexNet", 14)])
def test_the_listed_convolutions_are_those_of_the_step(name, kernels):
    # Times are measured by list and read by what is found in the step.
    listed = [use.convolution for use in training_step(name, BATCHES[name]).uses]
    found = [use.convolution for use in traced(name, BATCHES[name], tiny=False).uses]
    assert len(listed) == len(found) == kernels and set(listed) == set(found)


def test_measured_times_are_analysed_without_a_device():
    file = ROOT / "benchmarks" / "results" / "gpu_microbatch_tables_h200_2026-11-22.json"
    database, device = microbatch_offline.database_of(file)
    found = dict(microbatch_offline.networks(database, device))
    assert {name.split(",")[0] for name in found} == {"DeepBench"} and len(found) == 3
    run = SimpleNamespace(database=database, device=device, limits=(64 << 20,))
    name, network = next(iter(found.items()))
    row = gpu_microbatch_tables.compared_network(run, network)
    entry = row["64 MiB"]
    # At the total that WR takes WD is as fast at least; at the largest workspace that WD takes WR is.
    assert entry["WD at 1 of that sum"]["seconds"] <= entry["WR seconds"] < entry["single calls"]
    assert entry["WD at 1 of that sum"]["WR at its largest"] <= entry["WD at 1 of that sum"]["seconds"]
    assert name in microbatch_offline.lines(name, row)[0]


def test_tables_go_on_where_they_were_cut(tmp_path):
    def run(out: str, *more: str) -> Path:
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_microbatch_tables.py"), "--out", str(tmp_path / out)]
        options = ["--dry-run", "--items", "deepbench", "--layers", "0", "3", "--seconds", "0.002", *more]
        env = {name: value for name, value in os.environ.items() if not name.startswith("JCUTS_")}
        done = subprocess.run([*command, *options], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return tmp_path / out

    first = run("first")
    found = json.loads((first / "deepbench.json").read_text())["deepbench"]["modes"]
    assert set(found) == {"float32 HIGHEST", "TF32", "half"}
    for mode in found.values():
        assert mode["summary"]["compared"] == len(mode["layers"]) == 2
        for row in mode["layers"]:
            assert row["gain"] >= 1 and row["single"][2] <= 64 << 10 and row["divided"][2] <= 64 << 10
            assert row["left"] == pytest.approx(row["lost"] / row["gain"])
    second = run("second", "--start", str(first / "tables.json"))
    again = json.loads((second / "deepbench.json").read_text())["deepbench"]
    assert again["modes"] == found  # the very times
