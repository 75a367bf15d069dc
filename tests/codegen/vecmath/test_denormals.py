"""Functions of denormal numbers beside comparisons of them, on XLA's threads, which take them for zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts


@pytest.mark.parametrize("base", [-(2.0**-127), 2.0**-127, -(2.0**-149), -0.0, 0.0, 2.0**-126])
def test_the_gradient_of_a_power_is_nan_where_xlas_is(base):
    """It divides by the base, and asks with ``==`` whether that is zero: both have to say the same."""

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.power(x, x / 3.0)))(x)

    x = jnp.full((67,), base, jnp.float32)
    got = np.asarray(jcuts.optimize(gradient, mode="fusion", tune="off")(x))
    np.testing.assert_allclose(got, np.asarray(jax.jit(gradient)(x)), rtol=1e-5)
