"""Back-to-back GEMMs on a GPU: the candidates, and the best by ``wgmma``, against float64 with rounded operands.

Run with ``-m gpu``.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.b2b_gemm import wgmma_schedules
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests.codegen.cuda.b2b_gemm.test_kernel import (
    CASES,
    HALF,
    HALVES,
    LIMITS,
    Mlp,
    gelu,
    operands_of,
    program_of,
    residual,
    wanted,
)

pytestmark = pytest.mark.gpu
LARGE = {
    "96 wide": Mlp((2, 56, 56), 96, 384, 96, gelu, tail=residual),
    "192 wide": Mlp((3, 28, 28), 192, 768, 192, gelu, tail=residual, along=True),
    "128 wide": Mlp((5000,), 128, 512, 128, gelu, tail=residual),
    "64 wide": Mlp((10001,), 64, 64, 64),
}
LAYERS = {
    **CASES,
    **LARGE,
    **{f"bf16 {name}": layers for name, layers in HALVES.items()},
    **{f"bf16 {name}": replace(layers, dtype=HALF, stored=HALF) for name, layers in LARGE.items()},
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_candidate(name):
    """Twice, with equal bits."""
    layers = LAYERS[name]
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    want = wanted(layers, arguments, even=xla_devices.this().capability >= (9, 0))
    _, most = LIMITS[np.dtype(layers.dtype).itemsize]
    median = most if layers.stored == HALF else 1e-5 if layers.dtype == np.float32 else 5e-4
    machine = xla_devices.machine()
    first = [p for p, _ in gpu_candidates.candidates(program, machine, 8)]
    grouped = [p for p, _ in wgmma_schedules.b2b_wgmma_schedules(program, machine, 8)]
    found = [*first, *(p for p in grouped if p not in first)]
    made = 0
    for candidate in found:
        try:
            kernel = kernel_for(candidate)
        except CompileRejected:  # an assembler may spill where another does not: tuning leaves such schedules out
            continue
        made += 1
        operands = operands_of(traced)
        got, again = (jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*operands)[0] for _ in range(2))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
        error = np.abs(np.asarray(got, np.float64) - want) / np.sqrt(np.mean(np.square(want)))
        assert np.median(error) < median and error.max() < most, (candidate.params, np.median(error), error.max())
    assert 2 * made >= len(found)
