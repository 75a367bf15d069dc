"""The benchmarks of micro-batching, as far as they run without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks.microbatch import conv_chains, gpu_tables, offline, training_steps
from benchmarks.microbatch.fill_database import fill_network, traced
from benchmarks.microbatch.modelled_device import Modelled, training_step
from benchmarks.microbatch.table_run import BATCHES, Run
from benchmarks.microbatch.training_models import gradients, inputs_of
from jcuts.base import knobs
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import Database, Device
from jcuts.microbatch.timings import MicroConfig
from jcuts.tune.cudnn import measurer as cudnn_measurer
from jcuts.xla.cudnn.match import LIBRARY

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name, kernels",
    [
        ("ResNet-18", 59),
        ("AlexNet", 14),
        ("ResNet-50", 158),
        ("DenseNet-40", 116),
    ],
)
def test_the_listed_convolutions_are_those_of_the_step(name, kernels):
    # Times are measured by list and read by what is found in the step.
    listed = [use.convolution for use in training_step(name, BATCHES[name]).uses]
    found = [use.convolution for use in traced(name, BATCHES[name], tiny=False).uses]
    assert len(listed) == len(found) == kernels and set(listed) == set(found)


@pytest.mark.parametrize("name", ["ResNet-50", "DenseNet-40"])
def test_gradients_of_a_tiny_step_are_those_of_differences(name):
    (weights, images, labels), fn = inputs_of(name, 3, tiny=True), gradients(name, "highest", tiny=True)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64) if a.dtype == np.float32 else a, weights)
        run = jax.jit(fn)
        _, found = run(wide, images.astype(np.float64), labels)
        along = jax.tree.map(lambda a: np.random.default_rng(a.size).standard_normal(a.shape), wide)
        moved = [jax.tree.map(lambda a, d, s=s: a + s * d, wide, along) for s in (1e-6, -1e-6)]
        plus, minus = (float(run(w, images.astype(np.float64), labels)[0]) for w in moved)
        slope = sum(float(np.vdot(g, d)) for g, d in zip(jax.tree.leaves(found), jax.tree.leaves(along), strict=True))
    assert slope == pytest.approx((plus - minus) / 2e-6, rel=1e-3)


def test_programs_of_a_network():
    limits = (8 << 20, 64 << 20, 512 << 20)
    device, database = Modelled(), Database(None)
    network = training_step("AlexNet", 64)
    for use in network.uses:
        table = device.table(use.convolution, (8, 16, 32, 64))
        for size in table.sizes:
            micros = [m for m in table.micros if m.batch == size]
            fast = dataclasses.replace(micros[0], algorithm="FFT/slices=2", seconds=1e-6, workspace=60 << 20)
            database.record(device.device, use.convolution, size, [*micros, fast])
    made = conv_chains.programs(network, database, device.device, limits)

    def seconds(name):
        return sum(division.seconds for division in made[name])

    def spaces(name):
        return [division.workspace for division in made[name]]

    for at in ("8 MiB", "64 MiB", "512 MiB"):
        wr, wd, again = f"WR {at}", f"WD at WR's total at {at}", f"WR at WD's largest at {at}"
        assert sum(spaces(wd)) <= sum(spaces(wr)) and max(spaces(again)) <= max(spaces(wd))
        assert seconds(again) <= seconds(wd) <= seconds(wr) <= seconds(f"single calls, {at}")
    assert max(spaces("WR 8 MiB")) <= limits[0]
    only = "WR 64 MiB, pieces of the batch only"
    assert not any("slices" in str(d) for d in [*made[only], *made["single calls, 64 MiB"]])
    assert all("slices" in str(division) for division in made["WR 64 MiB"]) and seconds("WR 64 MiB") < seconds(only)


def test_steps_go_on_where_they_were_cut():
    run = SimpleNamespace(dry=False, options=SimpleNamespace(precisions=["float32", "tf32"], programs=None))
    every = training_steps.bases(run, ["AlexNet"], {})
    assert len(every) == 16 and len({base["id"] for base in every}) == 16
    found = {
        "AlexNet, batch 256, TF32": {
            "plain jax.jit": {"what": "plain", "seconds": 1.0},
            "WR 64 MiB": {"what": "WR", "error": "the budget was spent"},
        }
    }
    left = [(base["precision"], base["what"]) for base in training_steps.bases(run, ["AlexNet"], found)]
    assert len(left) == 15 and ("tf32", "plain") not in left and {("tf32", "WR"), ("float32", "plain")} <= set(left)


def test_measured_times_are_analysed_without_a_device():
    file = ROOT / "benchmarks" / "results" / "microbatch" / "gpu_microbatch_tables_h200_2026-11-22.json"
    database, device = offline.database_of(file)
    found = dict(offline.networks(database, device))
    # Steps of networks have several tables, in three precisions each; DeepBench's layers are one network in each.
    assert {name.split(",")[0] for name in found} == {"AlexNet", "DeepBench", "ResNet-18"}
    found = {name: network for name, network in found.items() if name.startswith("DeepBench")}
    assert len(found) == 3
    run = SimpleNamespace(database=database, device=device, limits=(64 << 20,))
    name, network = next(iter(found.items()))
    row = gpu_tables.compared_network(run, network)
    entry = row["64 MiB"]
    # At the total that WR takes WD is as fast at least; at the largest workspace that WD takes WR is.
    assert entry["WD at 1 of that sum"]["seconds"] <= entry["WR seconds"] < entry["single calls"]
    assert entry["WD at 1 of that sum"]["WR at its largest"] <= entry["WD at 1 of that sum"]["seconds"]
    assert name in offline.lines(name, row)[0]


def test_memory_of_layers_is_that_of_operands_and_the_largest_workspace():
    file = ROOT / "benchmarks" / "results" / "microbatch" / "gpu_microbatch_networks_tables_h200_2026-11-22.json"
    database, device = offline.database_of(file, file)
    network = dict(offline.networks(database, device))["AlexNet, batch 256, TF32"]
    row = offline.memory(network, database, device)
    name = next(name for name in row["layers"] if "27x27x64" in name)
    layer = row["layers"][name]
    # Images, results and filters of conv2.
    assert layer["data"] == 4 * (256 * 27 * 27 * (64 + 192) + 192 * 64 * 25)
    assert layer["WR"] <= 64 << 20 < layer["single"] <= 512 << 20 and len(row["layers"]) == 5
    assert row["ratios"][name] == (layer["data"] + layer["single"]) / (layer["data"] + layer["WR"])
    assert row["most"] == max(row["ratios"].values()) > 1 and row["slower"] > 1


def test_algorithms_that_were_no_candidate_are_not_timed_again():
    kernels = [use.convolution for use in training_step("DenseNet-40", 256).uses]
    like = [c for c in kernels if c.kind == "forward" and c.window == (3, 3)]
    micros = [["cudnn/A", "float32", 1.0, 64], ["cudnn/B", "float32", 2.0, 0], ["cudnn/C", "float32", 3.0, 64]]
    rows = {c.key: {"convolution": c.to_json(), "sizes": {4: micros}} for c in like[:8]}
    never = Run.never
    assert never(SimpleNamespace(kernels=rows), like[8]) == {"cudnn/C float32"}
    assert not never(SimpleNamespace(kernels=dict(list(rows.items())[:7])), like[8])
    other = next(c for c in kernels if c.kind == "backward_data")
    assert not never(SimpleNamespace(kernels=rows), other)
    rows[like[0].key]["sizes"][2] = [["cudnn/C", "float32", 0.5, 64]]
    assert not never(SimpleNamespace(kernels=rows), like[8])


def test_times_of_earlier_runs_do_not_replace_those_of_this_one(host_cudnn, tmp_path):
    c = next(use.convolution for use in training_step("AlexNet", 256).uses)
    options = SimpleNamespace(start=[], dry_run=True, out=tmp_path, budget=10.0)
    with knobs.scope(cache_dir=tmp_path):
        first = Run(options)
        own, newer = MicroConfig(4, LIBRARY, "tf32", 1.0, 64), MicroConfig(4, "cudnn/FFT", "tf32", 2.0, 8)
        first.database.record(first.device, c, 4, [own, newer], remarks={"lacking": "9"})
        files = []
        for k, names in enumerate((("FFT", "GEMM"), ("GEMM", "WINOGRAD"))):
            micros = [[f"cudnn/{name}", "tf32", 5.0 + k, 4] for name in names]
            rows = [{"convolution": c.to_json(), "sizes": {"4": micros, "2": micros}}]
            files.append(tmp_path / f"{k}.json")
            files[-1].write_text(json.dumps({"device": str(first.device), "tables": rows}))
        options.start = files
        again = Run(options)
        found = {(m.batch, m.algorithm): m.seconds for m in again.database.table(again.device, c).micros}
        assert again.database.remarks(again.device, c, 4) == {"lacking": "9"}
        for run in (first, again):
            run.folder.cleanup()
    others = {"cudnn/FFT": 5.0, "cudnn/GEMM": 6.0, "cudnn/WINOGRAD": 6.0}
    mine = {LIBRARY: 1.0, "cudnn/FFT": 2.0}
    assert found == {**{(2, a): s for a, s in others.items()}, **{(4, a): s for a, s in {**others, **mine}.items()}}


def test_only_what_must_be_timed_takes_of_the_budget(monkeypatch, tmp_path):
    file = ROOT / "benchmarks" / "results" / "microbatch" / "gpu_microbatch_networks_tables_h200_2026-11-22.json"
    name, driver, library = re.fullmatch(
        r"(.*?) \(driver (.*?), (.*)\)", json.loads(file.read_text())["device"]
    ).groups()
    monkeypatch.setattr(cudnn_measurer, "this_device", lambda _: Device(name, driver, library))
    options = SimpleNamespace(start=[file], dry_run=False, out=tmp_path, budget=0.0, seconds=0.1, slices=0)
    with knobs.scope(cache_dir=tmp_path):
        run = Run(options)
        assert fill_network(run, "AlexNet")[1] == "" and not run.lacking
        assert fill_network(run, "AlexNet", dtype="float16")[1] == "the budget was spent after 0 of 14 kernels"
        assert fill_network(run, "AlexNet", library=True)[1] == "the budget was spent after 0 of 14 kernels"
        assert len(run.lacking) == 28 and fill_network(run, "AlexNet")[1] == "" and len(run.lacking) == 14
        run.folder.cleanup()
    kept = json.loads((tmp_path / "tables.json").read_text())["tables"]
    assert {row["convolution"]["dtype"] for row in kept} == {"float32"}


def test_sizes_between_are_looked_for_once_also_where_micro_batches_are_of_whole_units(monkeypatch):
    c = Convolution("forward", 3, 4, (5, 5), (3, 3), dtype="float16")
    assert c.unit == 8
    asked, kept, micros = [], Database(None), {}
    device = Device("here", "", "")

    def measured(convolution, size, database, measurer, **_):
        asked.append(size)
        if size not in micros:
            micros[size] = [
                MicroConfig(size, "cudnn/A", "float32", 0.1 * size, 100 * size),
                MicroConfig(size, "cudnn/B", "float32", 1.0 * size, 0),
            ]
            database.record(device, convolution, size, micros[size])
        return database.table(device, convolution)

    monkeypatch.setattr(cudnn_measurer, "measured", measured)
    monkeypatch.setattr(cudnn_measurer, "measured_in_slices", lambda *_, **__: kept.table(device, c))
    run = SimpleNamespace(
        database=kept,
        device=device,
        kernels={},
        options=SimpleNamespace(slices=0),
        never=lambda _: frozenset(),
        note=lambda _: None,
    )
    for sizes in ([20, 8, 16], [20, 8]):
        asked.clear()
        Run.fill(run, SimpleNamespace(), c, 20, (1700,), ("float32",))
        assert asked == sizes


def test_tables_go_on_where_they_were_cut(tmp_path):
    def run(out: str, *more: str) -> Path:
        command = [
            sys.executable,
            str(ROOT / "benchmarks/microbatch/gpu_tables.py"),
            "--out",
            str(tmp_path / out),
        ]
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
