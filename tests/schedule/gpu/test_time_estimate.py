"""The partition search's time estimate on a GPU: counted by hand, by compute unit and level of memory, and monotone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.arch.load import list_gpus
from jcuts.schedule.gpu.launch_stats import memory_rates
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.schedule.gpu.time_estimate import seconds, traffic_seconds
from tests import programs

H200 = GpuMachine.named("H200")
LAUNCH_S = memory_rates(H200).launch_seconds
ARCH = H200.arch


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(("rows", "bandwidth"), [(256, ARCH.bw_l2), (65536, ARCH.bw_global)])
def test_maps_take_their_traffic_at_the_bandwidth_of_its_level(rows, bandwidth):
    program = programs.trace(lambda x: jnp.maximum(x, 0), zeros(rows, 1024)).program()
    moved = 2 * 4 * rows * 1024
    assert seconds(program, H200) == pytest.approx(LAUNCH_S + moved / bandwidth)
    assert traffic_seconds(moved, H200) == seconds(program, H200)


@pytest.mark.parametrize(
    ("dtype", "precision", "unit"),
    [
        (jnp.float32, None, "tf32_mma"),
        (jnp.float32, lax.Precision.HIGHEST, "ffma"),
        (jnp.bfloat16, None, "bf16_mma"),
        (jnp.float16, None, "fp16_mma"),
    ],
)
def test_products_take_their_operations_at_the_peak_of_their_unit(dtype, precision, unit):
    n = 4096
    x = zeros(n, n, dtype=dtype)
    program = programs.trace(lambda x, y: jnp.matmul(x, y, precision=precision), x, x).program()
    assert seconds(program, H200) == pytest.approx(LAUNCH_S + 2 * n**3 / ARCH.peak(unit), rel=0.01)


def test_gpus_without_matrix_units_for_them_multiply_in_threads():
    x = zeros(2048, 2048)
    program = programs.trace(jnp.matmul, x, x).program()
    old = GpuMachine.named("V100")
    assert seconds(program, old) == pytest.approx(LAUNCH_S + 2 * 2048**3 / old.arch.peak("ffma"), rel=0.01)


@pytest.mark.parametrize("name", list_gpus())
def test_estimates_grow_with_shapes_and_operations(name):
    machine = GpuMachine.named(name)

    def time(fn, *arguments):
        return seconds(programs.trace(fn, *arguments).program(), machine)

    sizes = [time(lambda x, y: jnp.tanh(x @ y) + 1, zeros(n, n), zeros(n, n)) for n in (64, 256, 1024, 4096)]
    assert sizes == sorted(sizes) and sizes[0] > LAUNCH_S and sizes[-1] > sizes[0]
    x = zeros(4096, 4096)
    chain = [time(fn, x) for fn in (lambda x: x + 1, lambda x: jnp.tanh(x + 1), lambda x: jnp.tanh(jnp.exp(x + 1)))]
    assert chain == sorted(chain)
    fused, apart = time(lambda x: jnp.tanh(x + 1).sum(1), x), time(lambda x: x + 1, x) + time(lambda x: x.sum(1), x)
    assert fused < apart  # a pass over memory less
