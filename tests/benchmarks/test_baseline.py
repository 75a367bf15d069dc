"""The baseline command: rows in processes of their own, resumed without measuring again, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.networks import baseline, baseline_tables

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "networks" / "baseline.py"
ROWS = ("DLRM:2:closed", "DLRM_training:2:args")


def run(folder: Path) -> str:
    command = [sys.executable, str(COMMAND), "--dry", "--seconds", "0.05", "--out", str(folder), *ROWS]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_two_rows_are_measured_once(tmp_path, capsys):
    assert run(tmp_path).count(": measured") == 2
    files = sorted(tmp_path.glob("*.json"))
    before = [f.stat().st_mtime_ns for f in files]
    assert run(tmp_path).count("already measured") == 2
    assert [f.stat().st_mtime_ns for f in files] == before
    row = json.loads(files[0].read_text(encoding="utf-8"))
    waited = row["programs"]["plain"]["waited"]
    assert 0 < waited["p50"] <= waited["p90"] <= waited["p99"]
    assert "unknown" not in row["flags"]["chosen"]
    assert "xla_no_such_option" in row["flags"]["alone"]["unknown"]["refused"]
    assert baseline_tables.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| DLRM:2:closed:float32 |" in printed
    assert "| refused |" in printed


def test_quantiles():
    assert baseline.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert baseline.quantile([1.0, 2.0], 0.25) == 1.25
    assert baseline.quantile([5.0], 0.99) == 5.0


def test_rows_have_names_and_files_of_their_own():
    rows = baseline.all_rows("trained") + baseline.all_rows("fresh")
    assert len({r.file for r in rows}) == len(rows)
    assert baseline.Row.parse("DLRM:1:args:bfloat16", "trained").dtype == "bfloat16"
    assert all(r.form == "args" for r in rows if r.name.endswith("_training"))
