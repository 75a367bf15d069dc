"""The benchmark of partitions plans without a GPU: with made-up times, and with those of results."""

from __future__ import annotations

import json

import pytest

from benchmarks.networks import partition_gpu
from jcuts.pipeline import passes
from jcuts.tune import session

SPEC = "octave:1:closed"


@pytest.fixture
def planning(monkeypatch):
    monkeypatch.setattr(passes, "PASSES", passes.PASSES)
    passes.forget()
    yield
    passes.forget()
    session.set_store(None)


def test_a_plan_says_what_was_searched_and_is_restored(planning):
    row = partition_gpu.plan(SPEC, dry=True)
    assert row["searched"].endswith("searched") and row["restored"] and row["problems"] > 0
    assert any("subsets explored" in note for note in row["notes"])
    assert SPEC in partition_gpu.line(row)


def test_recorded_times_of_regions_are_used(planning, tmp_path):
    made = partition_gpu.plan(SPEC, dry=True)
    assert made["recorded"] == 0
    path = tmp_path / "results.json"
    row = {"operations": {"conv_general_dilated": 1}, "bytes": 7, "seconds": 1.0, "xla_seconds": 2.0}
    others = {**row, "bytes": 8, "seconds": None}
    path.write_text(json.dumps([{"network": SPEC, "subsets": [row, others]}, {"network": "x", "subsets": [row]}]))
    times = partition_gpu.RecordedTimes(SPEC, [path])
    assert list(times.known.values()) == [(1.0, 2.0)]
    assert partition_gpu.key_of({"conv_general_dilated": 1}, 7) in times.known
    passes.forget()
    again = partition_gpu.plan(SPEC, dry=True, recorded=[path])
    assert again["restored"] and again["problems"] == made["problems"]


def test_factors_are_within_a_half_and_two_and_the_same_each_time():
    found = [partition_gpu.factor(str(n)) for n in range(200)]
    assert min(found) >= 0.5 and max(found) <= 2.0 and max(found) > 1.5 and min(found) < 0.7
    assert found == [partition_gpu.factor(str(n)) for n in range(200)]
