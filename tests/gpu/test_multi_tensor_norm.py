"""Partial sums of many arrays as one kernel, and a training step with clipping by the global norm (``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests.codegen.cuda.reduction import test_multi_tensor_sums as sums
from tests.rewrite import test_multi_tensor_update as updates

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_kernel_sums_squares(dtype):
    xs = sums.arrays((*sums.SIZES, 3_000_001), dtype)
    _, program = sums.made(sums.square_sums, xs)
    kernel = kernel_for(program)
    run = jax.jit(lambda *xs: call_kernel(kernel, *xs)[0])
    got = run(*xs)
    np.testing.assert_allclose(got, np.concatenate([sums.squares_of(x) for x in xs]), rtol=5e-7)
    np.testing.assert_array_equal(got, run(*xs))


def test_a_step_with_clipping():
    args = updates.arguments(updates.adamw)
    wanted = jax.jit(updates.adamw)(*args)
    got = jcuts.optimize(updates.adamw)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
