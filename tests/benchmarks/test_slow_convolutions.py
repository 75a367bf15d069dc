"""Cases of `benchmarks/known_issues/slow_convolutions.py`: shapes, gradients and errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.known_issues import slow_convolutions

RESULTS = {
    "transposed": (128, 128, 64),
    "transposed_3d": (32, 32, 32, 64),
    "grouped": (1024, 512),
    "dilated_depthwise": (1024, 256),
    "large_filter": (14, 14, 768),
    "depthwise": (124, 124, 256),
}


@pytest.mark.parametrize("case", slow_convolutions.CASES)
def test_cases_are_the_layers_that_they_say(case: str) -> None:
    layer, shape, filters = slow_convolutions.CASES[case](True)
    large = slow_convolutions.CASES[case](False)[1]
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, filters)]
    out = jax.eval_shape(layer, *types)
    assert out.shape == (shape[0], *RESULTS[case])
    assert np.prod(large) >= np.prod(shape)
    gradients = slow_convolutions.functions(layer)["gradients"]
    assert [g.shape for g in jax.eval_shape(gradients, *types, out)] == [shape, filters]


def test_gradients_depend_on_every_result() -> None:
    layer = slow_convolutions.transposed(1, 2)
    rng = np.random.default_rng(3)
    x, w, target = (rng.standard_normal(s) for s in ((2, 3, 2), (4, 2, 5), (2, 6, 5)))
    gradients = slow_convolutions.functions(layer)["gradients"](x, w, target)
    step = 1e-3
    for number, argument in enumerate((x, w)):
        moved = argument.copy()
        moved[(0, 1, 1)] += step

        def loss(value: np.ndarray, number: int = number) -> float:
            return float(jnp.sum((layer(*((value, w) if number == 0 else (x, value))) - target) ** 2))

        np.testing.assert_allclose(
            (loss(moved) - loss(argument)) / step, gradients[number][0, 1, 1], rtol=2e-2, atol=0.05
        )


def test_error_is_the_largest_of_all_results() -> None:
    exact = np.array([3.0, 4.0])
    assert slow_convolutions.error((exact, exact * 1.5), (exact, exact)) == pytest.approx(0.5)
