"""The acceptance rule: what must pass, what must not, with numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jcuts.base.errors import AccuracyRejected
from jcuts.tune.problem import Output
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.expected import OutputReference
from jcuts.tune.verify.inputs import HUGE, NORMAL, SPECIAL
from jcuts.tune.verify.magnitude_bands import ErrorBands

EPS = float(np.finfo(np.float32).eps)
RNG = np.random.default_rng(0)


def check(spec, expected, got, tolerance=2.0):
    return check_output(0, spec, expected, got, tolerance)


def sums(rng, rows=400, terms=500):
    """Sums with cancellation: reference, float32 sequential and float32 reversed."""
    x = rng.standard_normal((rows, terms)).astype(np.float32)
    one = np.add.accumulate(x, axis=1, dtype=np.float32)[:, -1]
    other = np.add.accumulate(x[:, ::-1], axis=1, dtype=np.float32)[:, -1]
    return x.astype(np.float64).sum(1), one, other


def test_another_order_of_summation_passes():
    for seed in range(20):
        parts = [sums(np.random.default_rng([seed, n])) for n in range(3)]
        expected = [OutputReference(NORMAL, x, r) for r, x, _ in parts]
        accuracy = check(Output((400,), "float32", reduction=500), expected, [c for _, _, c in parts])
        assert accuracy.candidate <= accuracy.limit


def test_half_precision_accumulation_is_rejected():
    r, x, _ = sums(RNG)
    c = r.astype(ml_dtypes.bfloat16).astype(np.float32)
    with pytest.raises(AccuracyRejected) as caught:
        check(Output((400,), "float32", reduction=500), [OutputReference(NORMAL, x, r)], [c])
    values = caught.value.values
    assert values["rule"] == "output"
    assert values["error_ulp"] > values["limit_ulp"] > values["xla_error_ulp"]


@pytest.mark.parametrize(("ulps", "passes"), [(4.0, True), (4.9, True), (7.0, False)])
def test_the_floor_is_four_ulp_above_twice_xla(ulps, passes):
    r = np.full(100, 1.0)
    x = (r * (1 + 0.5 * EPS)).astype(np.float32)  # rounds to 1: XLA's error is 0
    c = (r + ulps * EPS).astype(np.float32)
    expected = [OutputReference(NORMAL, x + np.float32(EPS), r)]  # XLA is off by one ulp: 2 * 1 + 4 are allowed
    if passes:
        check(Output((100,), "float32"), expected, [c])
    else:
        with pytest.raises(AccuracyRejected):
            check(Output((100,), "float32"), expected, [c])


def test_small_elements_may_not_hide_behind_large_ones():
    r = np.concatenate([RNG.uniform(0.5, 1, 500), RNG.uniform(0.5e-6, 1e-6, 500)])
    x = r.astype(np.float32)
    c = x.copy()
    c[500:] *= np.float32(1.05)  # 5% wrong, yet within an ulp of the largest
    with pytest.raises(AccuracyRejected) as caught:
        check(Output((1000,), "float32"), [OutputReference(NORMAL, x, r)], [c])
    assert caught.value.values["rule"] == "magnitude"


@pytest.mark.parametrize("kind", [NORMAL, SPECIAL, HUGE])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_classes_must_match(kind, value):
    r = RNG.standard_normal(50)
    x = r.astype(np.float32)
    normal = OutputReference(NORMAL, x, r)
    bad = x.copy()
    bad[7] = value
    with pytest.raises(AccuracyRejected) as caught:
        check(Output((50,), "float32"), [normal, OutputReference(kind, x, r)], [x, bad])
    assert caught.value.values["rule"] == "class"
    assert caught.value.values["position"] == [7]
    special = OutputReference(kind, bad, bad.astype(np.float64))
    check(Output((50,), "float32"), [normal, special], [x, bad])
    with pytest.raises(AccuracyRejected):
        check(Output((50,), "float32"), [normal, special], [x, x])


def clipped(rng, low, high):
    """Huge sums behind a clip: most elements at its ends, a few where terms cancelled."""
    r = np.clip(
        np.where(rng.random(2000) < 0.02, rng.uniform(0.5, 5.5, 2000), rng.choice([-1e12, 1e12], 2000)), low, high
    )
    between = np.flatnonzero((r > 0.5) & (r < 5.5))
    return OutputReference(HUGE, (r * (1 + 1e-6)).astype(np.float32).clip(low, high), r), between


def test_what_cancels_between_the_ends_of_a_clip_is_no_ones_fault():
    r, x, _ = sums(np.random.default_rng(3), rows=2000)
    normal, spec = OutputReference(NORMAL, x, r), Output((2000,), "float32", reduction=500)
    want, between = clipped(np.random.default_rng(4), 0.0, 6.0)
    got = want.xla.copy()
    got[between[0]] += 2e-3  # 4,000 ulp
    check(spec, [normal, want], [normal.xla, got])
    for place, value in ((between[0], -3.0), (np.flatnonzero(want.reference == 6.0)[0], 5.99), (0, np.nan)):
        bad = want.xla.copy()
        bad[place] = value
        with pytest.raises(AccuracyRejected):
            check(spec, [normal, want], [normal.xla, bad])


def test_a_rectifier_has_one_end():
    """What lies above it is huge by itself, and judged."""
    r, x, _ = sums(np.random.default_rng(3), rows=2000)
    normal, spec = OutputReference(NORMAL, x, r), Output((2000,), "float32", reduction=500)
    rng = np.random.default_rng(5)
    r = np.maximum(rng.standard_normal(2000) * 1e12, 0.0)
    want = OutputReference(HUGE, r.astype(np.float32), r)
    got = want.xla.copy()
    got[r.argmax()] *= np.float32(1.01)
    with pytest.raises(AccuracyRejected, match="huge"):
        check(spec, [normal, want], [normal.xla, got])


def test_overflow_of_xla_alone_binds_nobody():
    r = np.array([1.0, 2.0, 3e38])
    x = np.array([1.0, 2.0, np.inf], np.float32)
    spec = Output((3,), "float32", reduction=9)
    normal = OutputReference(NORMAL, r[:3].astype(np.float32), r)
    for last in (np.inf, np.nan, 3e38, 1e38):
        check(spec, [normal, OutputReference(HUGE, x, r)], [normal.xla, np.array([1, 2, last], np.float32)])
    # Where XLA stays finite, so does the candidate; where the true result overflows, both do.
    with pytest.raises(AccuracyRejected):
        check(spec, [normal, OutputReference(HUGE, normal.xla, r)], [normal.xla, x])
    beyond = np.array([1.0, 2.0, 1e39])
    with pytest.raises(AccuracyRejected):
        check(spec, [normal, OutputReference(HUGE, x, beyond)], [normal.xla, np.array([1, 2, 3e38], np.float32)])


def test_the_other_side_of_a_tie_passes_however_small_the_jump():
    """A jump of `reduce_precision` above what 121 terms are rounded by, below what bounds ranges (16 times that)."""
    r = np.linspace(0.5, 1.5, 847)
    low, high = r.copy(), r.copy()
    r[7] = low[7] = 1888 * 2.0**-15  # numbers of 11 bits
    high[7] = 1889 * 2.0**-15
    x = r.astype(np.float32)
    spec, expected = Output((847,), "float32", reduction=121), [OutputReference(NORMAL, x, r, low, high)]
    for value, passes in ((high[7], True), (high[7] + 2.0**-26, False), (low[7] - 2.0**-15, False)):
        c = x.copy()
        c[7] = value
        if passes:
            check(spec, expected, [c])
        else:
            with pytest.raises(AccuracyRejected):
                check(spec, expected, [c])


def test_sign_of_zero():
    r = np.array([0.0, -0.0, 1.0])
    x = r.astype(np.float32)
    check(Output((3,), "float32"), [OutputReference(NORMAL, x, r)], [x])
    with pytest.raises(AccuracyRejected) as caught:
        check(Output((3,), "float32"), [OutputReference(NORMAL, x, r)], [np.abs(x)])
    assert caught.value.values["rule"] == "zero"


def test_flushed_denormals_pass_both_ways():
    r = np.array([1e-40, -1e-41, 1.0])
    kept = r.astype(np.float32)
    flushed = np.array([0.0, -0.0, 1.0], np.float32)
    for x, c in ((kept, flushed), (flushed, kept)):
        check(Output((3,), "float32"), [OutputReference(NORMAL, x, r)], [c])


def test_poison_and_nan_everywhere_are_rejected():
    r = RNG.standard_normal(64)
    x = r.astype(np.float32)
    for byte in (0xAB, 0xFF):
        c = np.full(64, byte * 0x01010101, np.uint32).view(np.float32)
        with pytest.raises(AccuracyRejected):
            check(Output((64,), "float32"), [OutputReference(NORMAL, x, r)], [c])


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "int64"])
def test_discrete_outputs_are_bit_equal(dtype):
    x = (RNG.integers(0, 2, 40)).astype(dtype)
    check(Output((40,), dtype), [OutputReference(NORMAL, x, x)], [x.copy()])
    c = x.copy()
    c[3] = not c[3] if dtype == "bool" else c[3] + 1
    with pytest.raises(AccuracyRejected) as caught:
        check(Output((40,), dtype), [OutputReference(NORMAL, x, x)], [c])
    assert caught.value.values["rule"] == "exact" and caught.value.values["position"] == [3]


def test_discrete_outputs_within_rounding():
    x = np.array([3, 5, 9], np.int32)
    low, high = np.array([3, 4, 9], np.int32), np.array([3, 5, 9], np.int32)
    expected = [OutputReference(NORMAL, x, x, low, high)]
    check(Output((3,), "int32", exact=True), expected, [np.array([3, 4, 9], np.int32)])
    for bad in ([3, 3, 9], [4, 5, 9], [3, 6, 9]):
        with pytest.raises(AccuracyRejected):
            check(Output((3,), "int32", exact=True), expected, [np.array(bad, np.int32)])


def test_float_elements_that_rounding_flips():
    r = RNG.standard_normal(200)
    x = r.astype(np.float32)
    low, high = r.copy(), r.copy()
    high[5] = r[5] + 10.0  # a comparison went the other way in one run
    expected = [OutputReference(NORMAL, x, r, low, high)]
    flipped = x.copy()
    flipped[5] = high[5]
    check(Output((200,), "float32"), expected, [flipped])
    for position, value in ((5, high[5] + 1), (6, x[6] + 10)):
        bad = x.copy()
        bad[position] = value
        with pytest.raises(AccuracyRejected):
            check(Output((200,), "float32"), expected, [bad])


def test_a_range_ends_no_sharper_than_its_values_are_rounded():
    """Variance of equal numbers: nothing but rounding, and a candidate without any of it is exact."""
    r = np.full(20, 1.5e-23)
    low, high = r.copy(), np.full(20, 3e-6)
    expected = [OutputReference(NORMAL, np.full(20, 2e-6, np.float32), r, low, high)]
    check(Output((20,), "float32"), expected, [np.zeros(20, np.float32)])
    for wrong in (-1e-9, 1e-5, np.nan):
        with pytest.raises(AccuracyRejected) as caught:
            check(Output((20,), "float32"), expected, [np.full(20, wrong, np.float32)])
        assert caught.value.values["rule"] == "range"


def test_copies_of_one_number_tell_of_xlas_error_once():
    """3 ulp of cancelled terms, 30 times: XLA is exact by luck; with as many different numbers it would not be."""
    r = np.concatenate([np.linspace(1.0, 2.0, 40), np.full(30, 1e-4)])
    x = r.astype(np.float32)
    x[:40] += np.float32(EPS)
    c = x.copy()
    c[40:] += np.float32(0.5 * EPS)
    expected = [OutputReference(NORMAL, x, r)]
    check(Output((70,), "float32"), expected, [c])
    apart = r.copy()
    apart[40:] *= np.linspace(0.9, 1.0, 30)
    x[40:] = c[40:] = apart[40:]
    c[40:] += np.float32(0.5 * EPS)
    with pytest.raises(AccuracyRejected):
        check(Output((70,), "float32"), [OutputReference(NORMAL, x, apart)], [c])


def test_a_reference_no_wider_than_the_program_is_trusted_as_far_as_rounding_goes():
    """b + b tanh(b) for b = -8: XLA and the reference make the same rounding, 1e-16 of 8 in a result of 2e-6."""
    b = -np.linspace(7.0, 8.0, 64)
    r = b + b * np.tanh(b)
    c = b + b * (np.tanh(b) + 2.0**-53)
    with pytest.raises(AccuracyRejected):
        check(Output((64,), "float64"), [OutputReference(NORMAL, r, r)], [c])
    unsure = OutputReference(NORMAL, r, r, uncertainty=np.abs(b) * 2.0**-52)
    check(Output((64,), "float64"), [unsure], [c])
    with pytest.raises(AccuracyRejected):
        check(Output((64,), "float64"), [unsure], [r + np.abs(b) * 2.0**-45])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64"])
def test_other_float_types(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    r = RNG.standard_normal(100) + (1j * RNG.standard_normal(100) if dtype == "complex64" else 0)
    x = r.astype(kind)
    check(Output((100,), dtype), [OutputReference(NORMAL, x, r)], [x.copy()])
    bad = (r * 1.2).astype(kind)
    with pytest.raises(AccuracyRejected):
        check(Output((100,), dtype), [OutputReference(NORMAL, x, r)], [bad])


def test_shape_and_dtype_mismatch():
    x = np.zeros(3, np.float32)
    with pytest.raises(AccuracyRejected) as caught:
        check(Output((3,), "float32"), [OutputReference(NORMAL, x, x)], [np.zeros(4, np.float32)])
    assert caught.value.values["rule"] == "shape"


def test_empty_output():
    x = np.zeros((0, 3), np.float32)
    check(Output((0, 3), "float32"), [OutputReference(NORMAL, x, x.astype(np.float64))], [x])


MOST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("last", "passes"),
    [(np.inf, True), (MOST, True), (MOST * (1 - 2 * EPS), True), (-np.inf, False), (np.nan, False), (1e38, False)],
)
def test_at_the_end_of_the_range_infinity_and_the_largest_number_are_neighbours(last, passes):
    r = np.array([1.0, 2.0, MOST * (1 + EPS)])  # rounds to infinity
    x = np.array([1.0, 2.0, np.inf], np.float32)
    got = np.array([1.0, 2.0, last], np.float32)
    expected = [OutputReference(NORMAL, x[[0, 1, 1]], r[[0, 1, 1]]), OutputReference(HUGE, x, r)]
    if passes:
        check(Output((3,), "float32"), expected, [x[[0, 1, 1]], got])
    else:
        with pytest.raises(AccuracyRejected):
            check(Output((3,), "float32"), expected, [x[[0, 1, 1]], got])


def test_an_overflow_needs_a_reason():
    r = np.array([1.0, 2.0, 0.9 * MOST])
    x = r.astype(np.float32)
    c = np.array([1.0, 2.0, np.inf], np.float32)
    low = np.array([1.0, 2.0, -np.inf])
    normal = OutputReference(NORMAL, x[:3], r)
    with pytest.raises(AccuracyRejected):
        check(Output((3,), "float32", reduction=16), [normal, OutputReference(HUGE, x, r, r, r)], [x, c])
    varied = OutputReference(HUGE, x, r, low, np.array([1.0, 2.0, np.inf]))  # partial sums overflow in some order
    check(Output((3,), "float32", reduction=16), [normal, varied], [x, c])


def test_the_sign_of_a_zero_that_rounding_moves_is_free():
    r = np.array([-0.0, 1e8])
    x = r.astype(np.float32)
    c = np.array([0.0, 1e8], np.float32)
    spec = Output((2,), "float32")
    check(spec, [OutputReference(NORMAL, x, r, np.array([-1e-7, 1e8]), np.array([0.0, 1e8]))], [c])
    with pytest.raises(AccuracyRejected):
        check(spec, [OutputReference(NORMAL, x, r, r, r)], [c])


@pytest.mark.parametrize(("low", "high", "passes"), [(-(2**31), 0, True), (0, 2**31 - 1, True), (-100, 0, False)])
def test_a_range_of_integers_that_reaches_the_end_goes_on_at_the_other(low, high, passes):
    x, c = np.zeros(3, np.int32), np.array([0, 0, 7 if low else -7], np.int32)
    want = OutputReference(NORMAL, x, x, np.array([0, 0, low], np.int32), np.array([0, 0, high], np.int32))
    spec = Output((3,), "int32", exact=True)
    if passes:
        check(spec, [want], [c])
    else:
        with pytest.raises(AccuracyRejected):
            check(spec, [want], [c])


@pytest.mark.parametrize(("reach", "passes"), [(4e-6, True), (2e-7, False)])
def test_a_small_element_that_rounding_moves_may_be_off(reach, passes):
    """One of many small elements is small by cancellation, and XLA was lucky on it."""
    r = np.concatenate([RNG.uniform(0.5, 1, 100), RNG.uniform(1e-3, 2e-3, 100)])
    x = r.astype(np.float32)
    c = x.copy()
    c[150] += np.float32(2e-7)
    low, high = r * (1 - 4 * EPS), r * (1 + 4 * EPS)
    low[150], high[150] = r[150] - reach, r[150] + reach
    spec, want = Output((200,), "float32"), OutputReference(NORMAL, x, r, low, high)
    if passes:
        check(spec, [want], [c])
    else:
        with pytest.raises(AccuracyRejected) as caught:
            check(spec, [want], [c])
        assert caught.value.values["rule"] == "magnitude"


def test_bands_and_their_groups():
    rng = np.random.default_rng(3)
    size = [rng.uniform(1.0, 100.0, 40), rng.uniform(1e-6, 1.1e-6, 5), [0.0], [1e30, 2e30]]
    size = np.concatenate(size)
    error = rng.uniform(0.0, 1.0, size.size)
    pool = ErrorBands(size * rng.choice([-1.0, 1.0], size.size), 2 * error, 1e-38)
    groups = pool.by_magnitude(error)
    # The five small ones join the band above; the last ones have nobody to join; the zero has no magnitude.
    assert [top for top, _, _ in groups] == [size[:40].max(), size[46:].max()]
    assert groups[0][1:] == (error[:45].max(), 2 * error[:45].max())
    assert pool.relative(error) == pytest.approx((error / np.maximum(size, np.sqrt(np.mean(size**2)))).max())


def test_equal_numbers_do_not_fill_a_band():
    size = np.concatenate([np.full(1000, 1e-6), np.linspace(1.0, 1.5, 100)])
    assert [top for top, _, _ in ErrorBands(size, size, 1e-38).by_magnitude(size)] == [1.5]


def test_what_overflows_only_in_the_narrow_type_may_be_infinite():
    r = np.array([1.0, 2.0, 3.4028235677973366e38])  # rounds to infinity
    x = np.array([1, 2, 3.4028235e38], np.float32)
    with np.errstate(over="ignore"):
        check(Output((3,), "float32", reduction=4), [OutputReference(NORMAL, x, r)], [r.astype(np.float32)])


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("exact", "rounded", "got", "passes"),
    [
        (0.0, NAN, NAN, True),  # relu(-inf), of an infinity times a denormal number
        (INF, NAN, NAN, True),
        (NAN, INF, INF, True),  # a small sum changes its sign before an infinite scale
        (0.0, NAN, INF, False),
        (0.0, NAN, 0.5, False),
        (0.0, 0.0, NAN, False),
        (INF, INF, NAN, False),
        (NAN, 2.0, 2.0, True),
        (NAN, 2.0, 2.1, False),
        (NAN, INF, 2.0, False),
        (2.0, NAN, 2.1, False),
    ],
)
def test_where_rounded_operands_change_the_class_it_may_be_either(exact, rounded, got, passes):
    r, s = (np.array([*np.linspace(1.0, 2.0, 30), last, 1.0]) for last in (exact, rounded))
    x, c = r.astype(np.float32), r.astype(np.float32)
    c[30] = got
    spec, normal = Output((32,), "float32", 9), OutputReference(NORMAL, x[:1].repeat(32), r[:1].repeat(32))
    sets = [normal, OutputReference(SPECIAL, x, r, rounded=s)]
    if passes:
        check(spec, sets, [normal.xla, c])
    else:
        with pytest.raises(AccuracyRejected):
            check(spec, sets, [normal.xla, c])
    c[30], c[31] = x[30], got  # beside it nothing is free
    if got != 1.0:
        with pytest.raises(AccuracyRejected):
            check(spec, sets, [normal.xla, c])
    with pytest.raises(AccuracyRejected):
        c[31], c[30] = 1.0, got
        check(spec, [normal, OutputReference(SPECIAL, x, r)], [normal.xla, np.where(np.arange(32) == 30, c, x[0])])
