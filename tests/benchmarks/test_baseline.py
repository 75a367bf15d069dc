"""The baseline command: rows in processes of their own, resumed without measuring again, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.networks import baseline, baseline_tables, flag_search
from benchmarks.networks.interleaved_timing import interleaved
from benchmarks.networks.workload_row import Row
from benchmarks.networks.workloads import WORKLOADS

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "networks" / "baseline.py"
ROWS = ("DLRM:2:closed", "DLRM_training:2:args")
"""None of them is a row that flags are searched at: those are measured by their searches."""


def run(folder: Path) -> str:
    command = [
        sys.executable,
        str(COMMAND),
        "--dry",
        "--seconds",
        "0.05",
        "--trial",
        "0.05",
        "--out",
        str(folder),
        *ROWS,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_two_rows_are_measured_once(tmp_path, capsys):
    assert run(tmp_path).count(": measured") == 4
    files = sorted(tmp_path.glob("DLRM*.json"))
    assert {f.name for f in tmp_path.glob("flags_*")} == {"flags_DLRM.json", "flags_DLRM_training.json"}
    before = [f.stat().st_mtime_ns for f in files]
    assert run(tmp_path).count("already measured") == 2
    assert [f.stat().st_mtime_ns for f in files] == before
    row = json.loads(files[0].read_text(encoding="utf-8"))
    waited = row["programs"]["plain"]["waited"]
    assert 0 < waited["p50"] <= waited["p90"] <= waited["p99"]
    assert "unknown" not in row["flags"]["chosen"]
    assert "xla_no_such_option" in row["flags"]["over_plain"]["unknown"]
    assert row["flags"]["over_plain"]["no_fast_math"] > 0
    assert row["flags"]["searched_at"] == ["DLRM:1:args:float32", "DLRM:2048:args:float32"]
    assert baseline_tables.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| DLRM:2:closed:float32 |" in printed
    assert "refused" in printed


def test_no_row_begins_that_cannot_end(tmp_path):
    options = ["--dry", "--seconds-total", "6", "--search-seconds", "1", "--out", str(tmp_path)]
    assert baseline.main([*options, "DLRM:2:args"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_set_that_compiles_too_long_is_recorded_and_its_process_ends(tmp_path):
    row = Row("DLRM", 1, "args")
    program = "\n".join(
        (
            "import time, sys; from pathlib import Path",
            "from benchmarks.networks.flag_search import Limits, Search",
            "from benchmarks.networks.workload_row import Row",
            f"search = Search(Row('DLRM', 1, 'args'), Path({str(tmp_path / 'f.json')!r}), Limits(compile=0.1), None)",
            "with search.watched('slow', {'a': 1}): time.sleep(60)",
        )
    )
    root = COMMAND.parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == flag_search.SLOW_COMPILE
    flags = json.loads((tmp_path / "f.json").read_text())
    assert flag_search.tried_at(flags, row) == ["slow"]
    assert not flag_search.finished(flags, row)
    assert flag_search.chosen(flags)["over_plain"] == {"slow": "compiled for more than 0.1 s"}


def test_sets_of_all_searches_are_used_together():
    launch = {"a": {"options": {"x": 1}, "over_base": 0.5}, "b": {"options": {"x": 2}, "over_base": 0.6}}
    kernels = {"c": {"options": {"y": 1}, "over_base": 0.9}}
    tuning = {"d": {"options": {"z": 1}, "over_base": 0.8, "process": "own"}}
    searches = {"1": {"alone": launch, "chosen": ["a"]}, "64": {"alone": kernels | tuning, "chosen": ["c"]}}
    found = flag_search.chosen({"searches": searches})
    assert found["chosen"] == ["a", "c", "d"] and found["options"] == {"x": 1, "y": 1, "z": 1}
    assert found["own_process"] and found["over_plain"] == {"a": 0.5, "b": 0.6, "c": 0.9, "d": 0.8}


def test_flags_that_change_autotuning_are_measured_in_a_process_of_their_own(tmp_path):
    options = ["--dry", "--seconds", "0.02", "--trial", "0.02", "--out", str(tmp_path)]
    assert baseline.main([*options, "--autotuning", "DLRM:1:closed"]) == 0
    path = tmp_path / "flags_DLRM.json"
    flags = json.loads(path.read_text())
    alone = flags["searches"]["DLRM:2048:args:float32"]["alone"]["no_concurrency"]
    assert alone["process"] == "own" and alone["over_base"] > 0
    alone["over_base"] = 0.5
    path.write_text(json.dumps(flags))
    assert baseline.main([*options, "DLRM:1:closed:bfloat16"]) == 0
    row = json.loads((tmp_path / "DLRM_1_closed_bfloat16.json").read_text())
    assert row["best_process"] == "own" and "no_concurrency" in row["flags"]["chosen"]
    assert set(row["programs"]) == {"plain", "best"}


def test_programs_take_turns():
    calls = []
    times = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 1e-9, 2, lambda _: None)
    assert "".join(calls) == "aaabbb" + "aaaa" + "bbbb" + "bbbb" + "aaaa"
    assert times["a"]["waited"]["calls"] == 4


def test_rows_have_names_and_files_of_their_own():
    rows = baseline.all_rows("trained") + baseline.all_rows("fresh")
    assert len({r.file for r in rows}) == len(rows)
    assert baseline.Row.parse("DLRM:1:args:bfloat16", "trained").dtype == "bfloat16"
    assert all(r.form == "args" for r in rows if r.name.endswith("_training"))
    with pytest.raises(ValueError, match="is no row"):
        Row.parse("DLRM:1:open")


def test_the_first_rows_are_of_every_workload():
    first = baseline.all_rows("trained")[: len(WORKLOADS)]
    assert {r.name for r in first} == set(WORKLOADS)
