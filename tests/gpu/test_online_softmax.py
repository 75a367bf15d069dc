"""Online softmax of long rows on a GPU: every schedule against float64, and a function (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.base import knobs
from jcuts.schedule.gpu.families import FAMILIES
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests import programs
from tests.codegen.cuda.reduction.test_online_softmax import (
    FUNCTIONS,
    arguments_of,
    in_float64,
    ordered,
    rows_of,
    special_rows,
)

pytestmark = pytest.mark.gpu
SHAPES = [(300, 32000), (100, 50257), (7, 131072), (1025, 4098)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_schedule(shape, name):
    arguments = arguments_of(name, rows_of(shape))
    traced = programs.trace(FUNCTIONS[name], *arguments)
    wanted = ordered(traced, in_float64(FUNCTIONS[name], arguments))
    found = list(FAMILIES["online_softmax"].schedules(traced.program(), xla_devices.machine()))
    assert found
    for program, _ in found:
        kernel = kernel_for(program)
        got, again = (jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands()) for _ in range(2))
        for one, other, want in zip(got, again, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
            assert np.abs(np.asarray(one, np.float64) - want).max() <= 2e-6 * np.abs(want).max(), program.params


@pytest.mark.parametrize("name", ["softmax", "log softmax", "logsumexp"])
def test_infinities_and_nan_are_those_of_xla(name):
    traced = programs.trace(FUNCTIONS[name], special_rows(32001))
    want = np.asarray(jax.jit(FUNCTIONS[name])(*traced.arguments))
    for program, _ in FAMILIES["online_softmax"].schedules(traced.program(), xla_devices.machine()):
        kernel = kernel_for(program)
        (got,) = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands())
        np.testing.assert_allclose(np.asarray(got), want, rtol=5e-6)


def test_a_cross_entropy_and_its_gradient(tmp_path):
    """Whatever kernels the tuner takes, results are those of ``jax.jit``."""

    def loss(logits, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    fn = jax.value_and_grad(loss)
    logits = jnp.asarray(rows_of((1024, 32000)))
    labels = jnp.arange(1024, dtype=jnp.int32) * 31 % 32000
    with knobs.scope(cache_dir=tmp_path, max_candidates=8):
        value, gradient = jcuts.optimize(fn, mode="fusion")(logits, labels)
    wanted, other = jax.jit(fn)(logits, labels)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, other, atol=1e-9, rtol=1e-4)
