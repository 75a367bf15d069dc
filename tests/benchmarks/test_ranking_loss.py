"""Ranking quality on recorded schedules: losses by hand, random draws by enumeration, both GPUs' records."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from benchmarks import ranking_loss

PAIRS = [(3.0, 1.0), (1.0, 2.0), (2.0, 1.5), (4.0, 5.0)]
"""(cycles, seconds): the model's order is 2.0, 1.5, 1.0, 5.0."""


def test_loss_of_the_first():
    assert [ranking_loss.loss(PAIRS, k) for k in (1, 2, 3, 4)] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_random_draws_are_all_subsets(first):
    draws = [min(s for _, s in drawn) for drawn in itertools.combinations(PAIRS, first)]
    assert ranking_loss.random_loss(PAIRS, first) == pytest.approx(statistics.mean(draws) - 1.0)


@pytest.mark.parametrize("gpu", ["H200", "H100"])
def test_recorded_gemv_schedules_are_ranked_better_than_at_random(gpu, capsys):
    assert ranking_loss.main(["gemv", "--gpu", gpu, "--first", "1", "4"]) == 0
    one, four = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["rates"] == gpu and one["operations"] == four["operations"] == 40
    assert one["mean_loss_percent"] < one["random_mean_loss_percent"] / 5 and one["median_rank_correlation"] > 0.7
    assert four["within_4_percent"] >= 38 and four["mean_loss_percent"] < four["random_mean_loss_percent"] / 2


def test_what_is_not_recorded_is_refused():
    with pytest.raises(SystemExit, match="nothing is recorded on 'A100'"):
        ranking_loss.main(["gemv", "--gpu", "A100"])
