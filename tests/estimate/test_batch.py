"""Elementwise helpers give arrays what they give single numbers."""

from __future__ import annotations

import numpy as np
import pytest

from jcuts.estimate import batch, time_model
from jcuts.estimate.time_model import Resource, term

LEFT, RIGHT = np.array([1.5, 2.0, 7.25]), np.array([2, 2, 3])


def test_arrays_as_single_numbers():
    for function in (batch.maximum, batch.minimum):
        assert function(LEFT, RIGHT, 2.5).tolist() == [function(a, b, 2.5) for a, b in zip(LEFT, RIGHT, strict=True)]
    assert batch.ceil(LEFT).tolist() == [batch.ceil(float(a)) for a in LEFT] == [2, 2, 8]
    assert batch.where(LEFT > RIGHT, LEFT, RIGHT).tolist() == [2, 2, 7.25]
    assert batch.where(True, 1, 2) == 1 and batch.pick(LEFT, 2) == 7.25 and batch.pick(3, 2) == 3


def test_scalar_functions_are_called_once_per_combination():
    calls = []

    def of(a: int, b: int) -> float:
        calls.append((a, b))
        return a / b

    first, second = np.array([3, 1, 3, 1, 0]), np.array([7, 7, 7, 2, 2])
    assert batch.per_distinct(of, first, second).tolist() == [3 / 7, 1 / 7, 3 / 7, 0.5, 0.0]
    assert len(calls) == len(set(calls)) == 4
    assert batch.per_distinct(of, 3, 7) == 3 / 7
    assert batch.per_distinct(of, np.zeros(0, np.int64), 1).shape == (0,)


@pytest.mark.parametrize("place", range(3))
def test_one_schedule_of_a_batch(place):
    def tree(work, wait, second):
        parts = [term(Resource.COMPUTE, work, 2.0 * work), term(Resource.LATENCY, wait)]
        wave = time_model.repeat(RIGHT[place] if work is not LEFT else RIGHT, time_model.overlap(0.25, parts))
        total = time_model.per_sm(2.0, wave, resident=2, blocks=7 * work, sms=3)
        memory, start = term(Resource.DRAM, 4.0, 8.0), term(Resource.START, 1.0)
        whole = time_model.soft_longest(0.5, total, memory, start)
        return time_model.serial([whole, term(Resource.REDUCE, second)])

    waits, seconds = np.array([0.0, 2.0, 0.0]), np.array([0.0, 0.0, 3.0])
    picked = time_model.of_schedule(tree(LEFT, waits, seconds), place)
    single = time_model.of_schedule(tree(float(LEFT[place]), float(waits[place]), float(seconds[place])), 0)
    assert time_model.text(picked) == time_model.text(single)
    assert time_model.amounts(picked) == time_model.amounts(single)
    assert ("load latency" in time_model.text(picked)) == (waits[place] > 0)
    assert ("partial sums" in time_model.text(picked)) == (seconds[place] > 0)
