"""The MLP of the course report in NumPy float64: `train` by mini-batches, grading modes, norms, precision.

784 inputs, a sigmoid layer, softmax, cross-entropy, L2 regularisation; weights as (outputs, inputs), as the course
program stores them, so that norms are the same ones.  Source: J. P. Binagia, "CME 213 Final Report", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

INPUTS = 784
CLASSES = 10


class Params(NamedTuple):
    """Weights and biases, arrays of NumPy or JAX: W[0] (hidden, 784), b[0] (hidden,), W[1] (10, hidden), b[1] (10,)."""

    w0: Any
    b0: Any
    w1: Any
    b1: Any


NAMES = ("W[0]", "b[0]", "W[1]", "b[1]")


@dataclass(frozen=True)
class Training:
    """Hyper-parameters; defaults of the course program for grading: footnote 3 of the report."""

    learning_rate: float
    epochs: int
    hidden: int = 100
    batch: int = 800
    reg: float = 1e-4


GRADING = {1: Training(0.001, 40), 2: Training(0.01, 10), 3: Training(0.025, 1)}
"""Grading modes 1 to 3 (report, 3.2)."""


def initial(hidden: int, inputs: int = INPUTS, seed: int = 0) -> Params:
    """Weights of standard deviation 0.01, biases of zero."""
    rng = np.random.default_rng(seed)
    w0, w1 = 0.01 * rng.standard_normal((hidden, inputs)), 0.01 * rng.standard_normal((CLASSES, hidden))
    return Params(w0, np.zeros(hidden), w1, np.zeros(CLASSES))


def batches(samples: int, batch: int) -> Iterator[slice]:
    """Mini-batches in order; the last one has what is left.

    >>> [s.stop - s.start for s in batches(54000, 800)][-2:]
    [800, 400]
    """
    for start in range(0, samples, batch):
        yield slice(start, min(start + batch, samples))


def sigmoid(z: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-z)), without overflow."""
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1, e) / (1 + e)


def softmax(z: np.ndarray) -> np.ndarray:
    """Of rows."""
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def forward(params: Params, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden activations and probabilities of rows of ``x``."""
    hidden = sigmoid(x @ params.w0.T + params.b0)
    return hidden, softmax(hidden @ params.w1.T + params.b1)


def loss(params: Params, x: np.ndarray, y: np.ndarray, reg: float) -> float:
    """Mean cross-entropy plus reg / 2 times the squares of all weights."""
    _, p = forward(params, x)
    squares = (params.w0**2).sum() + (params.w1**2).sum()
    return float(-np.log((p * y).sum(1)).mean() + 0.5 * reg * squares)


def gradients(params: Params, x: np.ndarray, y: np.ndarray, reg: float) -> Params:
    """Gradients of `loss` by back-propagation."""
    hidden, p = forward(params, x)
    d1 = (p - y) / len(x)
    d0 = (d1 @ params.w1) * hidden * (1 - hidden)
    return Params(d0.T @ x + reg * params.w0, d0.sum(0), d1.T @ hidden + reg * params.w1, d1.sum(0))


def train(x: np.ndarray, y: np.ndarray, how: Training, params: Params | None = None) -> Params:
    """Trained weights: stochastic gradient descent over mini-batches in order, sequential."""
    params = params or initial(how.hidden, x.shape[1])
    for _ in range(how.epochs):
        for part in batches(len(x), how.batch):
            grads = gradients(params, x[part], y[part], how.reg)
            params = Params(*(p - how.learning_rate * g for p, g in zip(params, grads, strict=True)))
    return params


def precision(params: Params, x: np.ndarray, labels: np.ndarray) -> float:
    """Share of samples whose label has the largest probability."""
    return float((forward(params, x)[1].argmax(1) == labels).mean())


def difference(found: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Relative difference in the report's norms: ||found - reference|| / ||reference||.

    ``max``: infinity norm, of a matrix the largest sum of a row's absolute values; ``l2``: of a matrix the spectral
    norm.  These are Armadillo's ``norm(X, "inf")`` and ``norm(X, 2)``, by which the course program compares.
    """
    reference = np.asarray(reference)
    off = np.asarray(found) - reference
    norms = {"max": np.inf, "l2": 2}
    return {n: float(np.linalg.norm(off, k) / np.linalg.norm(reference, k)) for n, k in norms.items()}


def differences(found: Params, reference: Params) -> dict[str, dict[str, float]]:
    """`difference` of W[0], b[0], W[1] and b[1]."""
    return {n: difference(f, r) for n, f, r in zip(NAMES, found, reference, strict=True)}


def largest(found: dict[str, dict[str, float]]) -> float:
    """The largest of all differences."""
    return max(value for norms in found.values() for value in norms.values())
