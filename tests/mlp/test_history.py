"""The optimisation history: every variant trains the same weights, each with one cost less."""

from __future__ import annotations

import json
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.mlp import history


def test_every_variant_removes_one_cost() -> None:
    for before, after in pairwise(map(astuple, history.VARIANTS.values())):
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_the_command(tmp_path: Path) -> None:
    history.main(["--dry", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "history.json").read_text())
    assert set(found["variants"]) == set(history.VARIANTS)
    for row in found["variants"].values():
        assert row["difference"] < 1e-12
        assert row["seconds"][0] > 0
    assert sum(row["share"] for row in found["operations"].values()) == pytest.approx(1)
    assert len([name for name in found["operations"] if name.startswith("GEMM")]) == 5
