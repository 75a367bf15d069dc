"""The MLP of the course report: gradients by differences, JAX against NumPy, norms, shards of uneven batches."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.mlp import jax_network, network
from benchmarks.mlp.digits import draw_digits
from benchmarks.mlp.network import GRADING, NAMES, Params, Training

SMALL = Training(0.01, 2, hidden=7, batch=32)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """90 digits: two full mini-batches and one of 26."""
    images, labels = draw_digits(90)
    return images.reshape(90, -1).astype(np.float64), np.eye(10)[labels], labels


def test_grading_modes_are_the_reports() -> None:
    assert {m: (t.learning_rate, t.epochs) for m, t in GRADING.items()} == {
        1: (0.001, 40),
        2: (0.01, 10),
        3: (0.025, 1),
    }
    assert {(t.hidden, t.batch, t.reg) for t in GRADING.values()} == {(100, 800, 1e-4)}


def test_gradients_are_those_of_the_loss() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.random((5, 6)), np.eye(10)[rng.integers(10, size=5)]
    params = Params(*(p + rng.normal(0, 0.3, p.shape) for p in network.initial(4, 6)))
    found = network.gradients(params, x, y, 0.1)
    for i, grad in enumerate(found):
        for place in np.ndindex(grad.shape):
            off = np.zeros(grad.shape)
            off[place] = 1e-5
            values = [
                network.loss(Params(*(p + s * off if j == i else p for j, p in enumerate(params))), x, y, 0.1)
                for s in (1, -1)
            ]
            assert grad[place] == pytest.approx((values[0] - values[1]) / 2e-5, abs=1e-8)


def test_norms() -> None:
    reference, found = np.array([[3.0, -4.0], [0.0, 1.0]]), np.array([[3.0, -4.0], [0.0, 1.5]])
    norms = network.difference(found, reference)
    # Rows of absolute values: 7 and 1; singular values: roots of 13 +- sqrt(160).
    assert norms == pytest.approx({"max": 0.5 / 7, "l2": 0.5 / np.sqrt(13 + np.sqrt(160))})
    assert network.difference(np.array([1.0, 3.0]), np.array([0.0, 4.0])) == pytest.approx(
        {"max": 0.25, "l2": 2**0.5 / 4}
    )


@pytest.mark.parametrize("mode", GRADING)
def test_jax_trains_what_numpy_trains(digits, mode: int) -> None:
    x, y, labels = digits
    how = replace(GRADING[mode], hidden=9, batch=32, epochs=3)
    with jax.enable_x64(True):
        found = jax_network.train(x, y, how)
    reference = network.train(x, y, how)
    differences = network.differences(found, reference)
    assert tuple(differences) == NAMES
    assert network.largest(differences) < 1e-12
    assert network.precision(found, x, labels) == network.precision(reference, x, labels)
    assert network.difference(found.w0, network.initial(9).w0)["l2"] > 1e-4


def test_training_learns(digits) -> None:
    x, y, labels = digits
    how = replace(SMALL, epochs=150, hidden=20)
    before, after = network.initial(how.hidden), network.train(x, y, how)
    assert network.precision(before, x, labels) < 0.3
    assert network.precision(after, x, labels) > 0.7
    assert network.loss(after, x, y, how.reg) < network.loss(before, x, y, how.reg)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_padded_rows_have_no_weight(digits, shards: int) -> None:
    x, y, _ = digits
    params = network.initial(SMALL.hidden)
    parts = jax_network.weighted_batches(x, y, SMALL.batch, shards)
    assert [len(p[0]) for p in parts] == [-(-n // shards) * shards for n in (32, 32, 26)]
    with jax.enable_x64(True):
        for (bx, by, weight), part in zip(parts, network.batches(90, SMALL.batch), strict=True):
            assert weight.sum() == pytest.approx(1)
            found = jax.grad(jax_network.data_loss)(Params(*map(jax.numpy.asarray, params)), bx, by, weight)
            reference = network.gradients(params, x[part], y[part], 0.0)
            assert network.largest(network.differences(Params(*map(np.asarray, found)), reference)) < 1e-12
