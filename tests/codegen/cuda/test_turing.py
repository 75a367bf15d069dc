"""Code for compute capability 7.5, where maximum with NaN, rounding to bfloat16 and asynchronous copies are missing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.schedule.gpu import candidates as gpu_candidates
from tests import programs
from tests.gpu import cases
from tests.ptx import machine as ptx_machine

compiled = pytest.mark.cuda_compilers
SM75 = CudaTarget((7, 5))
RTX_2080 = gpu_candidates.GpuMachine(46, 1024, (7, 5))
SPECIAL = np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 88.0, -104.5, 1e-3, 3e38, 7.0, -1.0], np.float32)


def candidates(fn, *arguments, machine=RTX_2080, limit=2):
    return [p for p, _ in gpu_candidates.candidates(programs.trace(fn, *arguments).program(), machine, limit)]


def results(program, operands):
    kernel = compiler.compile_program(program, SM75)
    assert Image.unpack(kernel.object_code).arch == "sm_75"
    return ptx_machine.run_kernel(compiler.ptx_of(program, SM75), kernel, operands)


@compiled
@pytest.mark.parametrize("op", [lax.max, lax.min])
def test_extremes_keep_nan_and_the_sign_of_zero(op):
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(SPECIAL, SPECIAL))
    (got,) = results(candidates(op, x, y)[0], [x, y])
    want = np.asarray(jax.jit(op)(x, y))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


@compiled
def test_exp_keeps_nan_and_overflow():
    (got,) = results(candidates(lambda v: jnp.exp(v), SPECIAL)[0], [SPECIAL])
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(got, np.exp(SPECIAL.astype(np.float64)).astype(np.float32), rtol=1e-6)


@compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_rounded_to_even(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(400).astype(np.float32) * np.exp2(rng.integers(-8, 8, 400)).astype(np.float32)
    ties = (rng.integers(0, 1 << 7, 112) + 0.5) * 2.0**-7 + 1
    x = np.concatenate([x, ties.astype(np.float32), SPECIAL])
    (got,) = results(candidates(lambda v: v.astype(dtype), x)[0], [x])
    with np.errstate(over="ignore"):
        want = x.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@compiled
@pytest.mark.parametrize("name", ["chain", "transpose", "depthwise", "softmax", "moments", "column sum", "argmax"])
def test_families_compute_what_xla_does(name):
    fn, arguments = cases.CASES[name]
    with jax.enable_x64(True):
        traced = programs.trace(fn, *arguments)
        want = [np.asarray(v) for v in jax.tree.leaves(jax.jit(fn)(*arguments))]
    (program, *_) = [p for p, _ in gpu_candidates.candidates(traced.program(), RTX_2080, 1)]
    for got, wanted in zip(results(program, traced.operands()), want, strict=True):
        scale = max(1.0, float(np.abs(wanted.astype(np.float64)).max()))
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=3e-5, atol=1e-5 * scale)


def test_products_are_refused_with_a_reason():
    x, w = np.zeros((3136, 144), np.float32), np.zeros((144, 24), np.float32)
    assert candidates(lambda x, w: x @ w, x, w) == []
    program = candidates(lambda x, w: x @ w, x, w, machine=gpu_candidates.GpuMachine(108, capability=(8, 0)))[0]
    with pytest.raises(CompileRejected, match="needs asynchronous copies and TF32") as caught:
        compiler.check_tensor_core_support(program, SM75)
    assert caught.value.values["arch"] == "sm_75"
    compiler.check_tensor_core_support(program, CudaTarget((8, 0)))


def test_a_matrix_times_a_vector_is_a_sum_of_rows():
    x, w = np.zeros((1, 777), np.float32), np.zeros((777, 1000), np.float32)
    found = candidates(lambda x, w: x @ w, x, w)
    assert found and all(dict(p.params)["cuda"] not in ("product", "patch") for p in found)
