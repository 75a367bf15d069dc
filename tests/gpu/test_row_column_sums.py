"""Row reductions with column sums on a GPU: every candidate against float64, and a gradient (run with ``-m gpu``)."""

from __future__ import annotations

import jax
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
from tests.codegen.cuda.reduction.test_row_column_sums import (
    FUNCTIONS,
    arguments_of,
    in_float64,
    ordered,
    program_of,
)

pytestmark = pytest.mark.gpu
MOST = 12
"""Candidates that are tried."""
SHAPES = [(5000, 768), (1023, 100), (2049, 1000), (777, 4096), (3, 2048)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_candidate(shape, name):
    fn, arguments = FUNCTIONS[name], arguments_of(shape)
    traced = programs.trace(fn, *arguments)
    wanted = ordered(traced, in_float64(fn, arguments))
    found = gpu_candidates.candidates(program_of(fn, arguments), xla_devices.machine(), MOST)
    made = 0
    for program, _ in found:
        try:
            kernel = kernel_for(program)
        except CompileRejected:  # spills
            continue
        made += 1
        got, again = (jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands()) for _ in range(2))
        for one, other, want in zip(got, again, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
            assert np.abs(np.asarray(one, np.float64) - want).max() <= 5e-6 * np.abs(want).max(), program.params
    assert 2 * made >= len(found) > 0


def test_the_gradient_of_a_norm_stores_no_summand(tmp_path):
    fn, arguments = FUNCTIONS["layer norm"], arguments_of((16384, 768))
    with knobs.scope(cache_dir=tmp_path, max_candidates=4):
        run = jcuts.optimize(fn, mode="fusion")
        got = run(*arguments)
        report = run.explain(*arguments)
    for one, want in zip(got, in_float64(fn, arguments), strict=True):
        assert np.abs(np.asarray(one, np.float64) - want).max() <= 1e-5 * np.abs(want).max()
    assert any(s.chosen.startswith("row_column_sums") for s in report.subsets), [s.chosen for s in report.subsets]
