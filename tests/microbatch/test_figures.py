"""mu-cuDNN's figures on recorded times: drawings are those of the committed numbers; what they show."""

from __future__ import annotations

import json
import xml.etree.ElementTree

import pytest

from benchmarks.microbatch.figures import data, draw

PICTURES, RESULTS = draw.FOLDERS


@pytest.fixture(scope="module")
def stored():
    return json.loads((RESULTS / draw.NUMBERS).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def times():
    return data.Times()


def test_drawings_are_those_of_the_numbers(stored):
    made = draw.drawings(stored)
    assert len(made) == 11
    for name, text in made.items():
        assert (PICTURES / name).read_text(encoding="utf-8") == text, (
            f"run benchmarks/microbatch/figures/draw.py: {name}"
        )
        assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")


@pytest.mark.parametrize("key, make", [("one byte less", data.one_byte_less), ("conv2", data.conv2)])
def test_numbers_are_those_of_the_recorded_times(stored, times, key, make):
    assert json.loads(json.dumps(make(times))) == stored[key]


def test_numbers_of_published_times(stored):
    assert json.loads(json.dumps(data.heterogeneous())) == stored["heterogeneous"]
    for row in stored["heterogeneous"].values():
        assert sum(row["sizes"]) == 32 and row["ms"] <= row["even ms"]


def test_a_byte_less_is_never_faster_and_a_division_never_slower(stored):
    for rows in stored["one byte less"].values():
        for row in rows.values():
            assert row["best ms"] <= row["divided, one byte less ms"] <= row["one byte less ms"]


def test_more_policies_and_more_memory_never_cost_time(stored):
    for rows in stored["policies"].values():
        for row in rows.values():
            assert row["all"]["ms"] <= row["powerOfTwo"]["ms"] <= row["undivided"]["ms"]
    for rows in stored["totals"].values():
        for name, row in rows.items():
            total = float(name.split(", ")[2].split()[0])
            assert row["proven"] and row["WD ms"] <= row["WR ms"] <= row["WR undivided ms"] and row["WD MiB"] <= total


def test_every_layer_of_deepbench_is_there(stored):
    for rows in stored["DeepBench by filter"].values():
        assert sum(map(len, rows.values())) == 94 and min(min(gains) for gains in rows.values()) >= 1
    half = stored["half arithmetic"]
    assert half["layers"] == len(half["rows"]) == 94
    for row in half["rows"]:
        assert row["either"] <= min(row["TRUE_HALF"], row["PSEUDO_HALF"])
