"""The uneven split against enumeration, and on published times."""

from __future__ import annotations

import numpy as np
import pytest

import jcuts
from jcuts.base.errors import UsageError
from jcuts.microbatch import deepbench
from jcuts.microbatch.best_batch import DeviceTimes, best_batch_size
from jcuts.microbatch.errors import NoSplitError
from tests.microbatch import reference


def random_times(rng: np.random.Generator, batch: int, shape: str) -> dict[int, float]:
    """Seconds by size [in whole us]; convex, without order, or in steps of some size; sometimes with gaps."""
    sizes = np.arange(1, batch + 1)
    speed, start = rng.uniform(1, 20), rng.uniform(0, 30)
    if shape == "convex":
        us = start + speed * sizes**1.2
    elif shape == "stepped":
        step = int(rng.integers(2, 6))
        us = start + speed * step * np.ceil(sizes / step)
    else:
        us = start + speed * sizes * rng.uniform(0.3, 2.0, batch)
    kept = rng.random(batch) > rng.choice((0.0, 0.4))
    return {int(n): round(float(t)) / 1e6 + 1e-6 for n, t, keep in zip(sizes, us, kept, strict=True) if keep}


@pytest.mark.parametrize("shape", ["convex", "scattered", "stepped"])
@pytest.mark.parametrize("seed", range(60))
def test_equals_enumeration(shape, seed):
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 13))
    times = [random_times(rng, batch, shape) for _ in range(int(rng.integers(1, 5)))]
    expected = reference.best_batch(batch, times)
    if expected is None:
        with pytest.raises(NoSplitError):
            best_batch_size(batch, times)
        return
    found = best_batch_size(batch, times)
    assert sum(found.sizes) == batch
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    each = [times[g][b] if b else 0.0 for g, b in enumerate(found.sizes)]
    assert list(found.each) == pytest.approx(each, rel=1e-9) and max(each) == pytest.approx(found.seconds)
    assert found.alone is None or found.alone >= found.seconds * (1 - 1e-9)
    assert found.even is None or found.even >= found.seconds * (1 - 1e-9)
    assert found.interpolated == ()


def test_a_device_that_only_delays_is_left_out():
    fast = {8: 10e-3, 16: 20e-3, 24: 30e-3, 32: 40e-3}
    slow = {8: 500e-3, 16: 1.0}
    found = best_batch_size(32, [DeviceTimes("fast", fast), DeviceTimes("slow", slow), DeviceTimes("fast", fast)])
    assert found.sizes == (16, 0, 16) and found.used == 2 and found.seconds == pytest.approx(20e-3)
    assert found.even is None and found.alone == pytest.approx(40e-3)


def test_of_equal_maxima_the_fewest_devices_then_the_least_time():
    step = {8: 10e-3, 16: 10e-3}  # a second half costs nothing
    assert best_batch_size(16, [step, step]).used == 1
    cheap = {8: 4e-3, 16: 9e-3}
    assert best_batch_size(16, [step, cheap]).sizes == (0, 16)


def test_multiples_and_the_even_split():
    times = {n: n * 1e-3 for n in range(1, 13)}
    slow = {n: 2.5 * t for n, t in times.items()}
    found = best_batch_size(12, [times, slow], multiple=4)
    assert found.sizes == (8, 4) and found.seconds == pytest.approx(10e-3)
    assert found.even == pytest.approx(10e-3)  # 8 and 4: the first gets the multiple that does not divide
    finer = best_batch_size(12, [times, slow])
    assert finer.sizes == (9, 3) and finer.even == pytest.approx(15e-3)


def test_interpolation_is_said_and_does_not_leave_the_measured_range():
    one, two = {4: 4e-3, 16: 16e-3}, {4: 8e-3, 16: 32e-3}
    assert best_batch_size(20, [one, two]).sizes == (16, 4)
    found = best_batch_size(18, [DeviceTimes("one", one), DeviceTimes("two", two)], interpolate=True)
    assert found.sizes == (12, 6) and found.interpolated == ("one", "two")
    assert found.seconds == pytest.approx(12e-3)
    with pytest.raises(NoSplitError):
        best_batch_size(3, [one], interpolate=True)
    with pytest.raises(NoSplitError):
        best_batch_size(18, [one, two])


def test_published_times():
    # 128 = 4 x 32 is the only split of 128; 64 is better uneven.
    times = [deepbench.times(gpu) for gpu in ("P100", "V100", "T4", "1080Ti")]
    assert all(sorted(device.seconds) == [4, 8, 16, 32] for device in times)
    assert times[1].seconds[4] == pytest.approx((0.205 + 1.463) * 1e-3)  # the sheet's rows 0 and 4
    uneven = best_batch_size(64, times)
    assert uneven.sizes == (8, 32, 8, 16) and uneven.interpolated == ()
    assert uneven.even is not None and uneven.even / uneven.seconds > 1.2
    assert uneven.seconds == reference.best_batch(64, [dict(device.seconds) for device in times])
    assert best_batch_size(128, times).sizes == (32, 32, 32, 32)
    slow = DeviceTimes("ten times a T4", {n: 10 * t for n, t in times[2].seconds.items()})
    assert best_batch_size(64, [*times, slow]).sizes == (8, 32, 8, 16, 0)


def test_deepbench_layers():
    found = deepbench.layers("backward_filter", "float16")
    assert len(found) == 94 and [layer.index for layer in found] == list(range(94))
    first = found[0].convolution
    assert (first.channels, first.outputs, first.spatial, first.window) == (1, 32, (161, 700), (5, 20))
    assert first.result == (79, 341)  # the next layer's input
    assert found[4].convolution.spatial == first.result
    with pytest.raises(UsageError, match="1080Ti, P100, T4, V100"):
        deepbench.times("K80")


@pytest.mark.parametrize(
    ("batch", "devices", "options"),
    [
        (0, [{1: 1.0}], {}),
        (8, [], {}),
        (9, [{9: 1.0}], {"multiple": 2}),
        (8, [{8: 1.0}], {"multiple": 0}),
        (8, [{8: -1.0}], {}),
        (8, [{8: float("inf")}], {}),
        (8, [{-8: 1.0}], {}),
    ],
)
def test_bad_input_is_a_usage_error(batch, devices, options):
    with pytest.raises(UsageError):
        best_batch_size(batch, devices, **options)


def test_no_split():
    with pytest.raises(NoSplitError, match="add up"):
        best_batch_size(7, [{2: 1.0}, {4: 1.0}])
    with pytest.raises(NoSplitError):
        best_batch_size(7, [{}])


def test_public_name():
    assert jcuts.best_batch_size is best_batch_size
