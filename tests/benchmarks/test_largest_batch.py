"""The search of the largest batch that fits: linear proposals, programs that XLA refuses."""

from collections.abc import Callable

import pytest

from benchmarks.networks.largest_batch import TOO_MUCH, largest


@pytest.mark.parametrize(
    ("peak", "limit", "expected"),
    [
        (lambda b: 10 + 3 * b, 1000, 330),
        (lambda b: 10 + 3 * b, 20, 3),
        (lambda b: 1000 + 3 * b, 20, 0),
        (lambda b: 10 + 3 * b if b < 300 else 10 + 4 * b, 2000, 497),
    ],
)
def test_linear(peak: Callable[[int], int], limit: float, expected: int) -> None:
    """Peaks that grow linearly, with another slope from some batch on."""
    assert largest(peak, 8, limit)["largest"] == expected


def test_refused() -> None:
    """Batches that XLA refuses are bisected; what is given was compiled."""
    found = largest(lambda b: 10 + 3 * b if b < 300 else TOO_MUCH, 8, 1000)
    assert 280 <= found["largest"] < 300
    assert found["peaks"][str(found["largest"])] <= 1000


def test_a_peak_that_falls() -> None:
    """Kernels end where arrays pass 2^31 elements; a larger batch may need less then."""
    found = largest(lambda b: 25 * b if b <= 32 else 20 * b, 16, 850)
    assert found["largest"] == 42
