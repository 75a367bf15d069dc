"""Kernels on a GPU against float64, every candidate of every family (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from jcuts.base.errors import CompileRejected
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.xla import cuda_launcher
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests import programs
from tests.gpu import cases
from tests.gpu.objects import is_called

pytestmark = pytest.mark.gpu
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, -1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e10, -1e10, 88.0])


def wide(x):
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def reference(fn, arguments):
    with jax.enable_x64(True):
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*(wide(a) for a in arguments)))]


def check(fn, arguments, limit=6):
    """Runs every candidate on poisoned memory and compares with float64, XLA's own error in view."""
    with jax.enable_x64(True):
        traced = programs.trace(fn, *arguments)
        program = traced.program()
        operands = traced.operands()
        expected = reference(fn, arguments)
        plain = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*arguments))]
        found = gpu_candidates.candidates(program, xla_devices.machine(), limit)
        assert found
        ran = 0
        for candidate, _ in found:
            try:
                kernel = kernel_for(candidate)
            except CompileRejected:
                continue
            got = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*operands)
            for a, x, r in zip(got, plain, expected, strict=True):
                compare(np.asarray(a), x, r, f"{candidate.params} {[ax.unroll for ax in candidate.phases[0].axes]}")
            ran += 1
        assert ran


def compare(got, xla, want, what):
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, xla, err_msg=what)
        return
    a, x, r = (np.asarray(v, np.float64) for v in (got, xla, want))
    np.testing.assert_array_equal(np.isnan(a), np.isnan(x), err_msg=what)
    live = np.isfinite(r) & np.isfinite(x)
    scale = np.maximum(np.abs(r[live]), np.sqrt(np.mean(r[live] ** 2)) if live.any() else 1.0)
    eps = float(jnp.finfo(got.dtype).eps)
    error, theirs = np.abs(a[live] - r[live]) / scale, np.abs(x[live] - r[live]) / scale
    assert error.max(initial=0) <= 4 * theirs.max(initial=0) + 40 * eps, f"{what}: {error.max()} against {theirs.max()}"


@pytest.mark.parametrize("name", cases.CASES)
def test_family(name):
    check(*cases.CASES[name])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_storage_type(dtype):
    with jax.enable_x64(True):
        for fn, arguments in cases.typed(dtype).values():
            check(fn, arguments, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", cases.ELEMENTARY)
def test_function(name, dtype):
    with np.errstate(over="ignore"):
        values = np.concatenate([cases.normal(500) * 3, SPECIAL, np.linspace(-1, 1, 101)]).astype(jnp.dtype(dtype))
    op = getattr(lax, name)
    check(lambda x: op(x), (values,), 1)


def test_replays_with_allocations_between_give_equal_bits():
    fn = lambda x: jax.nn.softmax(x) + x.sum(0)  # noqa: E731
    x = jax.device_put(cases.normal(2000, 512))
    run = jcuts.optimize(fn, mode="fusion", tune="off")
    first = np.asarray(run(x))
    rng = np.random.default_rng(0)
    for _ in range(300):
        junk = jnp.full((int(rng.integers(1, 200_000)),), np.nan)
        again = run(x)
        del junk
    np.testing.assert_array_equal(np.asarray(again), first)


def test_a_function_runs_on_kernels():
    def fn(x, w, g):
        y = jax.nn.relu6(
            lax.conv_general_dilated(
                x, w, (1, 1), "SAME", feature_group_count=16, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
        return jax.nn.softmax(y.mean((1, 2)) * g)

    arguments = (cases.normal(4, 20, 20, 16), cases.normal(3, 3, 1, 16), cases.normal(16))
    run = jcuts.optimize(fn, mode="fusion", tune="off")
    got = run(*arguments)
    report = run.explain(*arguments)
    assert report.subsets and all(s.chosen != "xla" for s in report.subsets), report
    assert is_called(run.lower(*arguments).compile())
    np.testing.assert_allclose(got, reference(fn, arguments)[0], rtol=1e-4)


def test_calls_are_inside_the_command_buffer():
    """A replayed graph does not come back to the launcher."""
    x = jax.device_put(cases.normal(512, 512))
    run = jcuts.optimize(lambda a: jax.nn.softmax(jax.nn.softmax(a).T), mode="fusion", tune="off")
    options = {"xla_gpu_graph_min_graph_size": 1}
    compiled = jax.jit(lambda a: run(a) + 1).lower(x).compile(compiler_options=options)
    assert is_called(compiled)
    for _ in range(5):
        out = jax.block_until_ready(compiled(x))
    before = cuda_launcher.executions()
    for _ in range(50):
        out = jax.block_until_ready(compiled(x))
    assert before > 0
    assert cuda_launcher.executions() - before < 25
    np.testing.assert_allclose(out, jax.nn.softmax(jax.nn.softmax(x).T) + 1, rtol=1e-5)
