"""Data-parallel training: 1 to 4 processes agree with NumPy and each other, last batch uneven; failures."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.mlp import network, training
from benchmarks.mlp.digits import load_digits, write_digits
from benchmarks.mlp.network import GRADING

SHORT = {mode: replace(how, hidden=12, batch=64, epochs=3) for mode, how in GRADING.items()}
LIMITS = {1: 1e-12, 2: 1e-7, 3: 1e-7}
"""Largest relative difference from NumPy; the report asks for 1e-7 in every mode."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """230 digits, 207 of them for training: three batches of 64 and one of 15."""
    made = tmp_path_factory.mktemp("digits")
    write_digits(made, 230)
    return made


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_processes_agree(folder: Path, tmp_path: Path, processes: int) -> None:
    digits = load_digits(folder)
    for mode, found in training.run(training.Job(folder, SHORT), processes, tmp_path).items():
        reference, facts = training.sequential(digits, SHORT[mode])
        assert len(found.params) == processes
        assert found.facts[0]["devices"] == processes
        assert found.facts[0]["local_rows"] == [-(-15 // processes), -(-64 // processes)]
        assert found.rank_difference == 0
        assert network.largest(network.differences(found.params[0], reference)) < LIMITS[mode]
        assert abs(training.validated(found.params[0], digits) - facts["precision"]) < 0.01


def test_the_step_decorated_with_jcuts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(tmp_path / "cache"))
    job = training.Job(folder, {1: SHORT[1]}, "jcuts", {"mode": "fusion", "tune": "off"})
    found = training.run(job, 2, tmp_path)[1]
    reference, _ = training.sequential(load_digits(folder), SHORT[1])
    for facts in found.facts:
        assert facts["chosen"]["chosen"] == "jcuts"
        assert facts["chosen"]["kernels"] > 0
    assert found.rank_difference == 0
    assert network.largest(network.differences(found.params[0], reference)) < LIMITS[1]


def test_a_failure_is_told_and_nobody_waits(tmp_path: Path) -> None:
    with pytest.raises(training.TrainingFailed, match=r"rank \d ended with 1:(.|\n)*cannot be read"):
        training.run(training.Job(tmp_path / "none", SHORT), 2, tmp_path / "work")


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, training.__file__, "--dry", "--out", str(tmp_path), "--processes", "1", "2"]
    subprocess.run([*command, "--modes", "3"], check=True, capture_output=True)
    found = json.loads((tmp_path / "training_jit.json").read_text())
    assert found["samples"] == {"training": 225, "validation": 25}
    mode = found["modes"]["3"]
    assert mode["training"]["learning_rate"] == 0.025
    assert set(mode["parallel"]) == {"1", "2"}
    for row in mode["parallel"].values():
        assert network.largest(row["differences"]) < 1e-7
        assert abs(row["precision"] - mode["sequential"]["precision"]) < 0.01
        assert row["seconds"] > 0
