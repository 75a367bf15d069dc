"""Arrays are judged slab by slab: the verdict must be that of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from jcuts.base.errors import AccuracyRejected
from jcuts.tune.problem import Output
from jcuts.tune.verify import blocked_numpy, reference
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.expected import OutputReference


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 27, 28, 29, 1000])
def test_every_element_is_seen_once(monkeypatch, count):
    monkeypatch.setattr(blocked_numpy, "SLAB", 7)
    seen = np.zeros(count, int)

    def mark(slab):
        seen[slab] += 1
        return slab.start

    starts = blocked_numpy.parallel_blocks(count, mark)
    assert (seen == 1).all() and starts == list(range(0, count, 7))
    assert blocked_numpy.parallel_max(count, lambda s: float(s.stop)) == count


def sets(rng, shape):
    made = []
    for kind in ("normal", "special", "huge"):
        r = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)
        if kind == "special":
            r.reshape(-1)[::17], r.reshape(-1)[5::29], r.reshape(-1)[3::31] = np.nan, np.inf, -np.inf
        x = (r * (1 + 1e-7 * rng.standard_normal(shape))).astype(np.float32)
        c = (r * (1 + 1e-7 * rng.standard_normal(shape))).astype(np.float32)
        made.append((OutputReference(kind, x, r), c))
    return [e for e, _ in made], [c for _, c in made]


def verdict(expected, got):
    fresh = [OutputReference(e.kind, e.xla, e.reference) for e in expected]  # what was found out before is not used
    try:
        return check_output(0, Output(got[0].shape, "float32", 9), fresh, got, 2.0)
    except AccuracyRejected as error:
        return error.values["rule"], error.values.get("seed")


@pytest.mark.parametrize("damage", ["none", "normal", "small", "class", "special", "huge"])
def test_the_verdict_does_not_depend_on_slabs(monkeypatch, damage):
    expected, got = sets(np.random.default_rng(3), (41, 53))
    flat = [c.reshape(-1) for c in got]
    if damage == "normal":
        flat[0][np.argmax(np.abs(flat[0]))] *= 1.001
    elif damage == "small":
        flat[0][np.argmin(np.abs(flat[0]))] *= 2
    elif damage == "class":
        flat[1][17] = 0.0
    elif damage in ("special", "huge"):
        number = 1 if damage == "special" else 2
        flat[number][np.argmax(np.where(np.isfinite(flat[number]), np.abs(flat[number]), 0))] *= 1.01
    whole = verdict(expected, got)
    monkeypatch.setattr(blocked_numpy, "SLAB", 64)
    assert verdict(expected, got) == whole
    if damage != "none":
        assert whole[0] == {"normal": "output", "small": "magnitude"}.get(damage, damage)


@pytest.mark.parametrize("classes", ["alike", "one differs"])
def test_errors_of_xla_count_beyond_the_smallest_normal_number(classes):
    """XLA is off by half of it, which is no error: nor is it where another set is judged element by element."""
    r = np.full(64, 2.0**-12)
    tiny = 2.0**-14
    x = (r + tiny / 2).astype(np.float16)
    second = x.copy()
    second[0] = np.inf  # on the way to a finite result: candidates are free there
    expected = [OutputReference("normal", x, r), OutputReference("normal", second, r)]
    got = [r.astype(np.float16), second.copy()]
    if classes == "one differs":
        got[1][0] = 0.0
    accuracy = check_output(0, Output((64,), "float16", 2), expected, got, 2.0)
    assert accuracy.xla == 0


def test_complex_bounds_keep_their_parts_apart():
    """A part whose class varies between runs has bounds of -inf and inf; the other part keeps its own."""
    runs = [np.array([1.0 + 2.0j]), np.array([1.5 + 0.0j])]
    runs[1].imag = np.inf
    low, high = reference.value_range(runs)
    assert (low.real, high.real) == (1.0, 1.5) and (low.imag, high.imag) == (-np.inf, np.inf)


def test_ranges_of_large_arrays_are_those_of_small_ones():
    """Most slabs are finite; where a class varies, by NaN, sign of infinity or finiteness, nothing is bounded."""
    rng = np.random.default_rng(0)
    runs = [rng.standard_normal((5 * blocked_numpy.SLAB // 4 * 4 + 3,)) for _ in range(3)]
    for run in runs:
        run[7], run[8], run[-1] = np.nan, np.inf, -np.inf
    runs[1][[100, 200]] = np.nan, np.inf
    runs[0][300], runs[1][300], runs[2][300] = np.inf, -np.inf, np.inf
    low, high = reference.value_range(runs)
    stacked = np.stack(runs)
    with np.errstate(invalid="ignore"):
        least, most = stacked.min(axis=0), stacked.max(axis=0)
    least[[100, 200, 300]], most[[100, 200, 300]] = -np.inf, np.inf
    np.testing.assert_array_equal(low, least)
    np.testing.assert_array_equal(high, most)
    flags = [np.array([True, False, False]), np.array([True, True, False])]
    assert [x.tolist() for x in reference.value_range(flags)] == [[True, False, False], [True, True, False]]
