"""Attention on a GPU: every candidate, against float64 with operands rounded to TF32 (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests import programs
from tests.gpu.cases import attention
from tests.ptx.tensor_core import round_tf32

pytestmark = pytest.mark.gpu
LIMIT = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 6e-3}
"""Allowed error over the root mean square, where XLA's own is not larger: weights are rounded to 11 or 8 bits, 16-bit
scores and results as well."""
SHAPES = {
    "bert": ((2, 384, 12, 64), (2, 384, 12, 64)),
    "odd": ((3, 37, 5, 40), (3, 53, 5, 40)),
    "cross": ((1, 130, 4, 128), (1, 1000, 4, 128)),
    "long": ((1, 1024, 2, 32), (1, 1024, 2, 32)),
}


@pytest.fixture(autouse=True, scope="module")
def usable():
    why = xla_devices.unusable()
    if why:
        pytest.skip(why)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_candidate(name, dtype):
    rng = np.random.default_rng(len(name))
    query, key = SHAPES[name]
    arrays = [rng.standard_normal(s, dtype=np.float32).astype(jnp.dtype(dtype)) for s in (query, key, key)]
    exact = [round_tf32(a) if dtype == "float32" else a for a in arrays]
    with jax.enable_x64(True):
        want = np.asarray(attention()(*[jnp.asarray(np.asarray(a, np.float64)) for a in exact]))
    limit = max(LIMIT[dtype], _error(np.asarray(jax.jit(attention())(*arrays)), want))
    traced = programs.trace(attention(), *arrays)
    members, program = traced.attention()
    found, made = gpu_candidates.candidates(program, xla_devices.machine(), 12), 0
    for candidate, _ in found:
        try:
            kernel = kernel_for(candidate)
        except CompileRejected:  # an assembler may spill where another does not
            continue
        made += 1
        run = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))
        got, again = (np.asarray(run(*traced.operands(members))[0]) for _ in range(2))
        np.testing.assert_array_equal(got, again)  # no matter in which order blocks ran
        error = _error(got, want)
        assert error <= limit, (candidate.params, error)
    assert made and 2 * made >= len(found)


def test_rows_without_a_key_are_as_those_of_xla():
    def fn(q, k, v, m):
        scores = jnp.where(m[:, None, None, :], jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)

    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 70, 2, 16), dtype=np.float32) for _ in range(3))
    m = rng.random((2, 70)) < 0.5
    m[1], m[0, :40] = False, False
    want = np.asarray(jax.jit(fn)(q, k, v, m))
    assert np.isnan(want[1]).all() and np.isfinite(want[0]).all()
    traced = programs.trace(fn, q, k, v, m)
    members, program = traced.attention()
    for candidate, _ in gpu_candidates.candidates(program, xla_devices.machine(), 4):
        kernel = kernel_for(candidate)
        (got,) = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands(members))
        np.testing.assert_allclose(np.asarray(got), want, rtol=0.02, atol=5e-3)


def _error(got, want):
    return np.abs(got.astype(np.float64) - want).max() / np.sqrt(np.mean(np.square(want)))
