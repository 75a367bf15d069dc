"""Skinny GEMM and multi-row GEMV on a GPU: every schedule against float64, twice, with equal bits (``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.schedule.gpu.families import FAMILIES
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests.codegen.cuda.skinny_gemm.test_skinny_gemm import (
    CASES,
    SM80,
    SM90,
    expected,
    k_major,
    keys,
    layer,
    problem_of,
    queries,
    row_major,
)
from tests.gpu.test_products import LIMIT

pytestmark = pytest.mark.gpu


def checked(programs, fn, traced, arguments, exact=False):
    """Runs schedules twice, against float64. Args: exact: of operands as they are, not rounded to TF32."""
    if exact:
        with jax.enable_x64(True):
            want = np.asarray(fn(*(jnp.asarray(np.asarray(a, np.float64)) for a in arguments)))
    else:
        want = expected(fn, arguments, SM90 if xla_devices.machine().capability >= (9, 0) else SM80)
    scale = np.sqrt(np.mean(want**2)) + np.abs(want)
    limit = float(jnp.finfo(arguments[0].dtype).eps) + LIMIT * arguments[0].shape[-1] ** 0.5
    for program in programs:
        kernel = kernel_for(program)
        run = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))
        (got,), (again,) = run(*traced.operands()), run(*traced.operands())
        np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
        error = np.abs(np.asarray(got, np.float64).reshape(want.shape) - want) / scale
        assert error.max() < limit, program.params


def every_schedule(family, fn, shape, dtype):
    traced, arguments = layer(fn, *shape, dtype)
    found = [p for p, _ in FAMILIES[family].schedules(traced.program(), xla_devices.machine())]
    assert found
    checked(found, fn, traced, arguments, exact=family == "gemv")


@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_ptx_machine(name):
    fn, *shape, dtype, schedule = CASES[name]
    if schedule.cluster > 1 and xla_devices.machine().capability < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    traced, arguments = layer(fn, *shape, dtype)
    checked([schedule.apply(*problem_of(traced))], fn, traced, arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fn", [row_major, k_major])
@pytest.mark.parametrize("shape", [(2, 2048, 1000), (8, 1284, 332), (16, 4096, 64), (5, 128, 5000), (13, 9998, 778)])
def test_every_schedule(fn, shape, dtype):
    every_schedule("skinny_gemm", fn, shape, dtype)


@pytest.mark.parametrize("fn", [row_major, k_major])
@pytest.mark.parametrize("shape", [(3, 999, 77), (9, 4097, 33)])
def test_odd_sizes(fn, shape):
    every_schedule("skinny_gemm", fn, shape, "float32")


@pytest.mark.parametrize("fn", [queries, keys])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batches(fn, dtype):
    every_schedule("skinny_gemm", fn, (4, 512, 328), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fn", [row_major, k_major])
@pytest.mark.parametrize("shape", [(2, 2048, 1000), (3, 1284, 332), (4, 4096, 64)])
def test_rows_of_a_gemv(fn, shape, dtype):
    every_schedule("gemv", fn, shape, dtype)
