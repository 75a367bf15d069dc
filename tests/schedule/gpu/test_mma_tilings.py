"""Every tiling of a GEMM that the enumeration proposes is one that the ``mma`` kernel takes."""

from __future__ import annotations

import numpy as np
import pytest

from jcuts.codegen.cuda.gemm.mma_mainloop import product_shape
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu.gemm.mma import _tilings
from jcuts.schedule.gpu.gemm.problem import GemmProblem
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs

MACHINE = GpuMachine(132)


@pytest.mark.parametrize(("m", "k", "n"), [(33, 200, 48), (16, 1000, 40), (64, 512, 136)])
def test_every_tiling_is_consistent(m, k, n):
    args = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    program = as_gemm(programs.trace(lambda a, b: a @ b, *args).program())
    assert program is not None
    found = list(_tilings(program, GemmProblem(program, MACHINE)))
    assert {t.cluster > 1 for t in found} == {t.warps[2] > 1 for t in found} == {True, False}
    for tiling in found:
        shape = product_shape(tiling.of(program))  # it rejects what does not fit together
        assert (shape.cluster, shape.threads) == (tiling.cluster, tiling.threads)
        assert shape.share * shape.left.terms * (tiling.cluster - 1) < k  # no block without a k
