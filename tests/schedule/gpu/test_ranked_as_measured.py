"""The ranking of products and convolutions of few outputs against times that were measured on an H200."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_kernels.small_convs import TRIED, behind

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "gpu_kernels"


@pytest.mark.parametrize(
    ("name", "first", "four"),
    [
        ("gpu_small_filters_bfloat16_h200_2026-11-23.json", 1.1, 1.02),
        ("gpu_small_filters_h200_2026-11-23.json", np.inf, 1.05),
    ],
)
def test_the_first_schedules_are_near_the_best(name, first, four):
    """The best of the first one, and of the first four, over the best that was measured: geometric means, no times."""
    found = np.asarray(list(behind(RESULTS / name).values()))
    means = dict(zip(TRIED, np.exp(np.mean(np.log(found), axis=0)), strict=True))
    assert means[1] <= first and means[4] <= four, means
