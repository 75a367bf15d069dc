"""Timeline of training steps: the drawing is that of the stored run, phases follow each other, weights are NumPy's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.mlp import timeline

STORED = timeline.ROOT / "benchmarks" / "results" / "mlp" / "timeline_epyc_2026-11-29.json"
DRAWN = timeline.ROOT / "docs" / "figures" / "mlp_timeline.svg"


def check(found: dict, processes: int, steps: int) -> None:
    assert len(found["events"]) == processes and found["difference from NumPy"] <= 1e-12
    for mine in found["events"]:
        assert [(step, phase) for step, phase, _, _ in mine] == [(s, p) for s in range(steps) for p in timeline.PHASES]
        borders = [time for _, _, begin, end in mine for time in (begin, end)]
        assert borders == sorted(borders)
    assert sum(found["shares"].values()) == pytest.approx(100)


def test_the_drawing_is_that_of_the_stored_run():
    found = json.loads(STORED.read_text(encoding="utf-8"))
    check(found, found["processes"], found["steps"])
    assert DRAWN.read_text(encoding="utf-8") == timeline.drawn(found)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run(tmp_path, processes):
    command = [sys.executable, timeline.__file__, "--out", str(tmp_path), "--dry", "--processes", str(processes)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    check(json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8")), processes, 3)
