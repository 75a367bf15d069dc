"""``jcuts diff``: two reports side by side."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from jcuts.base.errors import UsageError
from jcuts.cli.comparisons import diff
from jcuts.cli.main import main
from jcuts.report.compare import compare, from_dict, read
from jcuts.report.function_report import FunctionReport
from jcuts.report.report_data import GraphNode, RefusalReport, SubsetReport


def region(operation, chosen="map/1", seconds=2e-5, xla=4e-5, count=1):
    where = [f"m.py:{len(operation)} (f)"]
    times = seconds, xla, count, 1e6, 1e5
    return SubsetReport(operation, {operation: 1}, where, "none", "simple", chosen, "measured", {}, 0.5, 1e-6, *times)


A = FunctionReport(
    "f",
    "mixed",
    "cpu",
    (region("tanh"), region("sort_like", "xla"), region("sine")),
    (RefusalReport("sort", "no rule", "m.py:1"),),
    4,
    graph=(GraphNode("tanh", "m.py:4", 0, 0), GraphNode("add", "m.py:5", -1, -1, "small", (0,))),
).with_guard({"chosen": "jcuts", "reason": "", "speed": {"jcuts": [2.0, 1.9, 2.1]}})
B = replace(
    A,
    subsets=(region("tanh", "map/2", 1e-5), region("sort_like", "xla"), region("cosine", seconds=None)),
    refusals=(RefusalReport("sort", "no rule", "m.py:1", 3),),
).with_guard({"chosen": "jcuts", "reason": "", "speed": {"jcuts": [1.5, 1.5, 1.5]}})


def test_reports_survive_json():
    assert from_dict(json.loads(json.dumps(A.to_dict()))) == A


def test_regions_are_matched_by_operations_and_lines():
    found = compare(A, B)
    changes = {p.operations: (p.change, p.ratio) for p in found.regions}
    assert changes == {"tanh": ("map/1 -> map/2", 0.5), "sine": ("only in A", None), "cosine": ("only in B", None)}
    assert found.same == 1 and found.gains == (2.0, 1.5) and found.kernels == (2, 2)
    assert found.refusals == (("sort", "no rule", 1, 3),)
    assert compare(A, A).regions == () and compare(A, A).refusals == ()


def test_the_command(tmp_path, capsys):
    for name, report in (("a.json", A), ("b.json", B)):
        (tmp_path / name).write_text(json.dumps(report.to_dict()))
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "out.json")]
    assert main(["diff", paths[0], paths[1], "--json", paths[2]]) == 0
    assert "B is 0.75 times A's gain" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["regions"][0]["operations"] in ("tanh", "sine")
    assert main(["diff", paths[0], paths[0]]) == 0
    assert "nothing differs" in capsys.readouterr().out


def test_it_fits_80_columns():
    out = io.StringIO()
    diff.show(compare(A, B), Console(width=80, file=out, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80 and "map/1 -> map/2" in out.getvalue()


@pytest.mark.parametrize(
    "text, message", [("[1]", "is no report"), ("{", "is no JSON"), ('{"name": 1}', "is no report")]
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read(path)
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "none.json")
