"""The benchmark of online tuning: its phases, and a dry run of all of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.networks import online_tuning

SCRIPT = Path(online_tuning.__file__)


def test_phases():
    windows = [
        {"at": 2.0, "steps_per_second": 10.0, "state": "tuning", "share": 0.0},
        {"at": 4.0, "steps_per_second": 8.0, "state": "tuning", "share": 0.05},
        {"at": 6.0, "steps_per_second": 30.0, "state": "decided", "share": 0.04},
        {"at": 8.0, "steps_per_second": 40.0, "state": "decided", "share": 0.03},
    ]
    assert online_tuning.phases(windows) == {
        "compiling": [10.0] * 3,
        "measuring": [8.0] * 3,
        "after": [40.0] * 3,
        "largest_share": 0.05,
        "share_at_end": 0.03,
    }
    assert online_tuning.spread([]) is None
    assert online_tuning.spread([1.0, 2.0, 3.0]) == pytest.approx([2.0, 1.5, 2.5])


def test_dry_run(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry", "--out", str(tmp_path / "found.json")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        check=True,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == json.loads(done.stdout)
    rows = found["rows"]
    assert [len(rows[name]) for name in ("jit", "auto", "online", "warm")] == [2, 0, 1, 1]
    plain = rows["jit"][0]["losses"]
    for row in (*rows["jit"], *rows["online"], *rows["warm"]):
        both = min(len(plain), len(row["losses"]))
        assert row["losses"][:both] == pytest.approx(plain[:both], rel=1e-4)
        assert row["windows"][0]["steps_per_second"] > 0
    for row in (*rows["online"], *rows["warm"]):
        assert row["phases"]["largest_share"] <= 0.05
