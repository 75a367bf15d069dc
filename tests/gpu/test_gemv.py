"""Split-K GEMV on a GPU: every schedule of the family against float64, twice, with equal bits (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.schedule.gpu.families import FAMILIES
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests.codegen.cuda.gemv.test_gemv import k_major, layer, row_major

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fn", [row_major, k_major])
@pytest.mark.parametrize(("terms", "columns"), [(2048, 1000), (1284, 332), (4096, 64), (16, 5000), (9999, 777)])
def test_every_schedule(fn, terms, columns, dtype):
    traced, arguments = layer(fn, terms, columns, dtype)
    found = list(FAMILIES["gemv"].schedules(traced.program(), xla_devices.machine()))
    if dtype != "float32" and terms % 2:
        assert not found  # no copy of four bytes
        return
    assert found
    with jax.enable_x64(True):
        want = np.asarray(fn(*(jnp.asarray(np.asarray(a, np.float64)) for a in arguments)))
    scale = np.sqrt(np.mean(want**2)) + np.abs(want)
    for program, _ in found:
        kernel = kernel_for(program)
        run = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))
        (got,), (again,) = run(*traced.operands()), run(*traced.operands())
        np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
        error = np.abs(np.asarray(got, np.float64) - want) / scale
        limit = float(jnp.finfo(jnp.dtype(dtype)).eps) + 4e-7 * terms**0.5
        assert error.max() < limit, program.params
