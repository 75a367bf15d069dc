"""Inverted residual blocks on a GPU: every candidate, against float64 with rounded operands (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.region import gpu
from jcuts.xla import gpus
from jcuts.xla.call import call_kernel
from jcuts.xla.kernels import kernel_for
from tests.codegen.test_block import BLOCKS, OTHER_WAY, Layers, program_of, traced_number, wanted

pytestmark = pytest.mark.gpu
LARGE = {
    "56": Layers((2, 56, 56, 24), (3, 3), 144, 24, residual=True),
    "28 to 14": Layers((3, 28, 28, 32), (3, 3), 192, 64, (2, 2)),
    "14": Layers((4, 14, 14, 96), (3, 3), 576, 96, residual=True),
    "7": Layers((5, 7, 7, 160), (3, 3), 960, 320),
    "first": Layers((2, 112, 112, 32), (3, 3), 32, 16, alone=True),
}


@pytest.fixture(autouse=True, scope="module")
def usable():
    why = gpus.unusable()
    if why:
        pytest.skip(why)


@pytest.mark.parametrize("name", [*BLOCKS, *LARGE])
def test_every_candidate(name):
    layers = {**BLOCKS, **LARGE}[name]
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    want = wanted(layers, arguments, even=gpus.this().capability >= (9, 0))
    found = gpu.candidates(program, gpus.machine(), 8)
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
        assert np.median(error) < 1e-5 and error.max() < OTHER_WAY, (candidate.params, np.median(error), error.max())
    assert 2 * made >= len(found)
