"""Plans of the reference step, measured on four H200s, against predictions that no step time was fitted to."""

from pathlib import Path

import pytest

from benchmarks.planner import measured_plans

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "planner"


@pytest.fixture(scope="module")
def found():
    """The comparison."""
    results = [RESULTS / f"h200_x4_plans_2026-11-21{part}.json" for part in ("", "b")]
    return measured_plans.compare(results, "h200-x4-measured")


@pytest.mark.parametrize("way", ["model", "program"])
def test_predictions_are_within_fifteen_percent_and_choose_the_best(found, way):
    score = found["scores"][way]
    assert len(found["plans"]) >= 15
    assert score["mape"] <= 0.15
    assert score["regret"] <= 1.05
    assert score["spearman"] >= 0.8


@pytest.mark.parametrize("way", ["model", "program"])
def test_memory_of_plans_that_keep_activations(found, way):
    kept = [row for row in found["plans"] if row["recompute"] == "none" and "measured_bytes" in row]
    assert len(kept) == 3
    for row in kept:
        assert row[f"{way}_bytes"] == pytest.approx(row["measured_bytes"], rel=0.15)
    assert found["scores"][way]["out_of_memory"] == found["out_of_memory"] == ["2, 2, 1, 8, kept"]


def test_parts_of_the_cost_model_add_up(found):
    for row in found["plans"]:
        assert sum(row["parts"].values()) == pytest.approx(row["model_s"])
        assert ("tensor" in row["parts"]) == (row["plan"][1] > 1)
        assert ("bubble" in row["parts"]) == (row["plan"][2] > 1)
