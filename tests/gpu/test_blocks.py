"""Inverted residual blocks on a GPU: every candidate, against float64 with rounded operands (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests.codegen.cuda.inverted_residual import test_bfloat16 as halves
from tests.codegen.cuda.inverted_residual.test_kernel import (
    BLOCKS,
    OTHER_WAY,
    Layers,
    program_of,
    traced_number,
    wanted,
)

pytestmark = pytest.mark.gpu
LARGE = {
    "56": Layers((2, 56, 56, 24), (3, 3), 144, 24, residual=True),
    "28 to 14": Layers((3, 28, 28, 32), (3, 3), 192, 64, (2, 2)),
    "14": Layers((4, 14, 14, 96), (3, 3), 576, 96, residual=True),
    "7": Layers((5, 7, 7, 160), (3, 3), 960, 320),
    "first": Layers((2, 112, 112, 32), (3, 3), 32, 16, alone=True),
}


HALVES = {
    "56": halves.Halves((2, 56, 56, 24), (3, 3), 144, 24, residual=True, along=False),
    "28 to 14": halves.Halves((3, 28, 28, 32), (3, 3), 192, 64, (2, 2), along=False, stored=True),
    "14": halves.Halves((4, 14, 14, 96), (3, 3), 576, 96, along=False),
    "7": halves.Halves((5, 7, 7, 160), (3, 3), 960, 320, stored=True),
    "first": halves.Halves((2, 112, 112, 32), (3, 3), 32, 16, along=False, alone=True, stored=True),
}


@pytest.mark.parametrize("name", [*BLOCKS, *LARGE])
def test_every_candidate(name):
    layers = {**BLOCKS, **LARGE}[name]
    check(layers, wanted(layers, layers.arguments(), even=xla_devices.this().capability >= (9, 0)), 1e-5, OTHER_WAY)


@pytest.mark.parametrize("name", [*halves.BLOCKS, *HALVES])
def test_every_candidate_of_bfloat16(name):
    layers = {**halves.BLOCKS, **HALVES}[name]
    check(layers, halves.wanted(layers, layers.arguments()), 5e-4, halves.OTHER_WAY)


def check(layers, want, median, most):
    """Every candidate, twice. Args: median, most: allowed errors over the root mean square."""
    program, traced = program_of(layers, layers.arguments())
    found = gpu_candidates.candidates(program, xla_devices.machine(), 8)
    operands = [traced.arguments[traced_number(traced, t)] for t in traced.graph.subset_inputs(traced.everything)]
    made = 0
    for candidate, _ in found:
        try:
            kernel = kernel_for(candidate)
        except CompileRejected:  # an assembler may spill where another does not: tuning leaves such schedules out
            continue
        made += 1
        got, again = (jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*operands)[0] for _ in range(2))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
        error = np.abs(np.asarray(got, np.float64) - want) / np.sqrt(np.mean(np.square(want)))
        assert np.median(error) < median and error.max() < most, (candidate.params, np.median(error), error.max())
    assert 2 * made >= len(found)
