"""Data and model parallelism: both train NumPy's weights; the planner prices the bytes that each sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.mlp import parallelism, plan_model
from benchmarks.mlp.network import GRADING

REPORTED = replace(GRADING[1], hidden=1000)


def test_bytes_that_are_summed() -> None:
    assert parallelism.parameters(1000) == 784 * 1000 + 1000 + 1000 * 10 + 10
    assert parallelism.summed_bytes("data", REPORTED) == 8 * 795_010
    assert parallelism.summed_bytes("model", REPORTED) == 8 * 800 * 10


@pytest.mark.parametrize("devices", [2, 4])
def test_prices(devices: int) -> None:
    data, model = (parallelism.priced(kind, REPORTED, devices) for kind in ("data", "model"))
    for found in (data, model):
        assert 0 < found["products"] < found["seconds"]
        assert sum(found["collectives"].values()) < found["seconds"]
    assert sum(model["collectives"].values()) < sum(data["collectives"].values())


def test_the_planners_model_has_the_networks_shapes() -> None:
    loss, params, x, y = plan_model.net()
    assert sum(p.size for p in params.values()) == parallelism.parameters(plan_model.HIDDEN)
    assert (x.shape, y.shape) == ((800, 784), (800, 10))
    assert callable(loss)


def test_the_command(tmp_path: Path) -> None:
    parallelism.main(["--dry", "--epochs", "1", "--processes", "2", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "parallelism.json").read_text())
    for kind in ("data", "model"):
        assert found[kind]["measured"]["2"]["difference"] < 1e-12
        assert set(found[kind]["priced"]) == {"2", "4"}
