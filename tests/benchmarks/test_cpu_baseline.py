"""CPU baselines: rows in processes of their own, resumed; turns on a quiet machine; exported models; their tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.networks import cpu_baseline, cpu_processes, cpu_runtimes, cpu_tables, cpu_workers
from benchmarks.networks.workloads import SMALL_TRAINING, WORKLOADS

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "networks" / "cpu_baseline.py"
PACKAGES = ("jax2onnx", "onnx", "onnxruntime", "openvino")
LACKING = cpu_runtimes.lacking(PACKAGES)
converters = pytest.mark.skipif(bool(LACKING), reason=LACKING)
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # what a runtime starts when it is imported
INFERENCE = sorted(n for n, spec in WORKLOADS.items() if spec.kind != "training")
BY_RUNTIME = {"openvino_latency": cpu_runtimes.openvino, "onnxruntime": cpu_runtimes.onnxruntime}


def job(folder, name, **more):
    found = {"name": name, "batch": 2 if WORKLOADS[name].kind != "decode" else 1, "dtype": "float32", "form": "closed"}
    return found | {"dry": True, "training": False, "folder": str(folder), "cores": 1, **more}


def test_two_rows_are_measured_once(tmp_path):
    command = [sys.executable, str(COMMAND), "--dry", "--out", str(tmp_path), "DLRM:2", "DLRM_training:2"]

    def run():
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert run().count(": measured") == 2
    files = sorted(tmp_path.glob("*.json"))
    before = [f.stat().st_mtime_ns for f in files]
    assert run().count("already measured") == 2
    assert [f.stat().st_mtime_ns for f in files] == before
    row = json.loads(files[0].read_text(encoding="utf-8"))
    assert set(cpu_tables.measured(row)) >= {"plain", "jcuts"} and not row["not_a_peer"]
    waited = row["peers"]["plain"]["waited"]
    assert 0 < waited["p50"] <= waited["p90"] <= waited["p99"]
    assert "xla_no_such_option" in row["flags"]["alone"]["unknown"]["refused"]
    for peer in ("openvino_latency", "onnxruntime"):
        assert "back_to_back" in row["peers"][peer] or row["peers"][peer]["skipped"].startswith("needs ")
    assert "| DLRM b2" in cpu_tables.report(cpu_tables.load(tmp_path))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_workload_has_a_row_of_each_type(name):
    rows = [r for r in cpu_baseline.all_rows() if r.name == name]
    assert [r.dtype for r in rows] == ["float32", "bfloat16"]
    assert {r.form for r in rows} == {WORKLOADS[name].forms[0]}
    assert [cpu_baseline.Row.parse(f"{r.name}:{r.batch}:{r.dtype}:{r.form}") for r in rows] == rows


def test_small_training_steps_have_a_row_in_float32():
    rows = [r for r in cpu_baseline.all_rows() if r.name in SMALL_TRAINING]
    assert sorted(r.name for r in rows) == sorted(SMALL_TRAINING)
    assert {(r.dtype, r.form) for r in rows} == {("float32", "args")}


@converters
@pytest.mark.parametrize("name", INFERENCE)
def test_exported_models_compute_what_jax_does(tmp_path, name):
    asked = job(tmp_path, name)
    conversion = cpu_workers.convert(asked)
    assert "skipped" not in conversion
    for peer, runtime in BY_RUNTIME.items():
        side = runtime({**asked, "peer": peer, "conversion": conversion})
        error = cpu_workers.agreement(side.call(), asked | {"peer": peer}, side.facts.get("results_left_out", []))
        assert error["l2"] < 1e-4, peer


@converters
def test_models_have_the_operators_that_runtimes_optimise(tmp_path):
    def operators(name):
        found = cpu_workers.convert(job(tmp_path, name))
        return found["nodes"], found["rewritten"]

    nodes, rewritten = operators("MobileNetV2")
    assert rewritten["clips"] == nodes["Clip"] == 35 and nodes["Transpose"] <= 2 and nodes["Conv"] == 52
    nodes, rewritten = operators("Whisper_tiny_encoder")
    assert rewritten["layer_norms"] == nodes["LayerNormalization"] == 3
    assert nodes["MatMul"] == 6 and "Einsum" not in nodes
    nodes, rewritten = operators("InceptionV3")
    assert nodes["MaxPool"] == 4 and rewritten["pools_of_images"] >= 4 + nodes["AveragePool"]  # of constants: folded


@converters
def test_decoding_steps_carry_their_caches(tmp_path):
    asked = job(tmp_path, "Llama_decode")
    conversion = cpu_workers.convert(asked)
    form = cpu_workers.form_of(asked)
    following = form.following(form.arguments, jax.jit(form.function)(*form.arguments))
    wanted = jax.tree.leaves(jax.jit(form.function)(*following))[-1]
    for peer, runtime in BY_RUNTIME.items():
        side = runtime({**asked, "peer": peer, "conversion": conversion})
        side.call()
        assert np.allclose(side.call()[-1], wanted, atol=1e-4), peer


def test_turns_beside_load_do_not_count():
    def turn(stream, calibration=0.1, others=0.0):
        memory = {"resident": 1, "peak": 1}
        return {
            "stream": stream,
            "waited": [stream],
            "calibration": [0.1, calibration],
            "others": others,
            "memory": memory,
        }

    found = cpu_baseline.summary([turn(1.0), turn(9.0, calibration=0.12), turn(9.0, others=0.5), turn(2.0)], 0.1)
    assert found["back_to_back"]["median"] == 1.5 and found["turns"] == 2 and found["turns_taken"] == 4
    assert found["quiet"]
    assert not cpu_baseline.summary([turn(9.0, others=0.5)], 0.1)["quiet"]
    assert cpu_processes.calibrate(1) > 0 and cpu_processes.busy() > 0


def peer(seconds, **more):
    quantiles = {"p50": seconds, "p90": 1.1 * seconds, "p99": 1.5 * seconds}
    return {
        "back_to_back": {"median": seconds, "q1": 0.9 * seconds, "q3": 1.2 * seconds},
        "waited": quantiles,
        "quiet": True,
        "memory": {"peak": 300 << 20},
        "first_call_seconds": 2.0,
        **more,
    }


def test_tables(golden):
    host = {"model name": "A", "cpu family": "1", "model": "2", "cores": 4}
    row = {
        "workload": "ResNet50",
        "batch": 1,
        "dtype": "float32",
        "form": "closed",
        "peers": {
            "plain": peer(0.04),
            "best": peer(0.03),
            "openvino_latency": peer(0.016),
            "openvino_throughput": {"skipped": "a reason"},
            "onnxruntime": peer(0.002),
            "jcuts": peer(0.008, chosen="jcuts"),
        },
        "not_a_peer": {"onnxruntime": {"l2": 0.5}},
        "flags": {
            "alone": {"one": {"over_plain": 0.75}, "two": {"refused": "No such option"}, "three": {"skipped": "late"}},
            "chosen": ["one"],
        },
        "jcuts_cold": {"first_call_seconds": 61.0},
        "host": host,
        "versions": {"jax": "0.10", "onnx": ""},
        "date": "2026-01-02T03:04:05",
    }
    loud = row | {"dtype": "bfloat16", "flags": {}, "jcuts_cold": {"failed": "late"}, "not_a_peer": {}}
    loud["peers"] = {"plain": peer(0.2, quiet=False), "jcuts": peer(0.1), "onnxruntime": {"skipped": "a reason"}}
    golden("cpu_tables.txt", cpu_tables.report([row, loud]) + "\n")
