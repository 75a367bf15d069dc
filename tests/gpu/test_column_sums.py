"""Column sums in the epilogue on a GPU: every candidate against float64, and a training step (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.base import knobs
from jcuts.base.errors import CompileRejected
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests import programs
from tests.codegen.cuda.gemm.test_column_sums import exact_gradients, exact_statistics, masked, statistics
from tests.ops.cases import conv

pytestmark = pytest.mark.gpu
MOST = 12
"""Candidates that are tried."""
ROUNDING = 2.0**-10
"""Allowed error over the largest value: operands are rounded to TF32."""


LAYERS = {
    "3x3": ((8, 27, 29, 64), (3, 3, 64, 72), 3.0),
    "1x1": ((16, 28, 28, 96), (1, 1, 96, 200), 0.0),
    "1x1 of few columns": ((5, 33, 31, 48), (1, 1, 48, 24), 100.0),
    "deep": ((3, 7, 7, 512), (1, 1, 512, 136), 100.0),
}
"""Image, filters, mean of the results."""


@pytest.mark.parametrize("kind", ["statistics", "gradients"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_candidate(name, kind):
    image, filters, mean = LAYERS[name]
    rng = np.random.default_rng(len(name))
    x, w = (rng.standard_normal(s).astype(np.float32) for s in (image, filters))
    with jax.enable_x64(True):
        z = np.asarray(conv(*(jnp.asarray(np.asarray(a, np.float64)) for a in (x, w))))
    if kind == "statistics":
        arguments = [x, w, np.full(filters[-1], mean, np.float32)]
        fn = lambda x, w, b: statistics(conv(x, w) + b)  # noqa: E731
    else:
        mask, y = (rng.standard_normal(z.shape).astype(np.float32) for _ in range(2))
        arguments, fn = [x, w, mask, y + np.float32(mean)], lambda x, w, mask, y: masked(conv(x, w), mask, y)
    wanted = exact_statistics(z + mean) if kind == "statistics" else exact_gradients(z, *arguments[2:])
    found = gpu_candidates.candidates(programs.trace_sums(fn, *arguments), xla_devices.machine(), MOST)
    made = 0
    for program, _ in found:
        try:
            kernel = kernel_for(program)
        except CompileRejected:  # spills
            continue
        made += 1
        got, again = (jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*arguments) for _ in range(2))
        own = np.asarray(got[0], np.float64)
        exact = exact_statistics(own) if kind == "statistics" else exact_gradients(own, *arguments[2:])
        for place, (one, other, want, mine) in enumerate(zip(got, again, wanted, exact, strict=True)):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
            error, size = np.abs(np.asarray(one, np.float64) - want).max(), np.abs(want).max()
            assert error <= ROUNDING * size, (program.params, place, error / size)
            if place:  # sums of what was stored lose nothing
                assert np.abs(np.asarray(one, np.float64) - mine).max() <= 2e-6 * np.abs(mine).max(), program.params
    assert 2 * made >= len(found) > 0


def step(weights, x, target):
    """Loss of two convolutions with batch norms."""
    (w, g, b), (v, h, c) = weights

    def normed(y, gain, shift):
        mean = jnp.mean(y, (0, 1, 2), keepdims=True)
        return (y - mean) * jax.lax.rsqrt(jnp.var(y, (0, 1, 2), keepdims=True) + 1e-3) * gain + shift

    y = jax.nn.relu(normed(conv(x, w), g, b))
    y = jax.nn.relu(normed(conv(y, v), h, c))
    return jnp.mean(jnp.square(y - target))


def test_a_training_step_takes_its_sums_from_the_convolutions(tmp_path):
    rng = np.random.default_rng(0)
    normal = lambda *s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    ones, zeros = np.ones(128, np.float32), np.zeros(128, np.float32)
    weights = [(normal(3, 3, 64, 128) / 24, ones, zeros), (normal(1, 1, 128, 128) / 11, ones, zeros)]
    arguments = weights, normal(32, 28, 28, 64), normal(32, 28, 28, 128)
    with knobs.scope(cache_dir=tmp_path, max_candidates=4):
        run = jcuts.optimize(jax.value_and_grad(step), mode="fusion")
        got = run(*arguments)
        report = run.explain(*arguments)
    wanted = jax.jit(jax.value_and_grad(step))(*arguments)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        size = float(jnp.abs(other).max())
        assert float(jnp.abs(one - other).max()) <= 1e-2 * size
    taken = [s for s in report.subsets if s.chosen.startswith("column_sums")]
    assert len(taken) >= 2, [s.chosen for s in report.subsets]
