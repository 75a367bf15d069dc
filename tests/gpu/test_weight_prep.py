"""Many weights turned and rounded by one kernel, and by XLA, bit by bit (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.lower.weight_transpose import MOST, transpose_program
from jcuts.pipeline import weight_prep
from jcuts.rewrite.tf32_weights import round_tf32
from jcuts.trace import jaxapi
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests.codegen.cuda.elementwise.test_horizontal import calls

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [3, MOST // 2])
def test_a_kernel_makes_what_xla_makes(count):
    rng = np.random.default_rng(count)
    sizes = [(int(rng.integers(1, 400)), int(rng.integers(1, 300))) for _ in range(count)]
    operands = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in sizes]
    operands[0] = operands[0].at[0, :1].set(jnp.inf)
    kernel = kernel_for(transpose_program([(s, s[::-1]) for s in sizes]))

    @jax.jit
    def of_xla(*xs):
        return [lax.reduce_precision(x.T, 8, 10) for x in xs]

    for got, want, w in zip(
        jax.jit(lambda *xs: call_kernel(kernel, *xs))(*operands), of_xla(*operands), operands, strict=True
    ):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got, round_tf32(np.ascontiguousarray(np.asarray(w).T)))


def test_a_kernel_makes_all_vectors():
    for call, operands in calls([96, 1000, 33, 256, 7] * 5):
        kernel = kernel_for(weight_prep._program(call))
        (inside,) = (body for _, _, body in jaxapi.inner_jaxprs(call))
        wanted = jax.jit(lambda *xs, inside=inside: jaxapi.eval_closed(inside, *xs))(*operands)
        results = jax.jit(lambda *xs, kernel=kernel: call_kernel(kernel, *xs))(*operands)
        for got, want in zip(results, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
