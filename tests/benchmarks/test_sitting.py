"""A sitting: baseline, PyTorch and jcuts of a row in one folder, each once; PyTorch where it is installed."""

from __future__ import annotations

import importlib.util
import json

from benchmarks.networks import sitting, torch_compile


def test_all_parts_of_a_row_once(tmp_path, capfd):
    options = ["--dry", "--seconds", "0.02", "--seconds-total", "400", "--out", str(tmp_path), "DLRM:1:args"]
    assert sitting.main(options) == 0
    baseline, jcuts, torch = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("DLRM_1_args_float32", "jcuts_DLRM_1_args_float32", "torch_DLRM_1_float32")
    )
    assert baseline["flags"]["searched_at"] == ["DLRM:1:args:float32", "DLRM:2048:args:float32"]
    assert set(jcuts["programs"]) == {"plain", "jcuts"} and jcuts["decision"]["chosen"]
    assert "skipped" in torch if importlib.util.find_spec("torch") is None else torch["modes"]
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*DLRM_*.json") if "torch" not in p.name}
    capfd.readouterr()
    assert sitting.main(options) == 0
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_rows_of_pytorch_have_one_calling_form():
    assert {torch_compile.file_of(torch_compile.row_of(f"DLRM:1:{form}")) for form in ("closed", "args")} == {
        "torch_DLRM_1_float32.json"
    }
    assert str(torch_compile.row_of("bert:8:bfloat16")) == "bert:8:args:bfloat16"
