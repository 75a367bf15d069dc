"""Products by fused multiply-adds, where more than TF32 is asked for: layouts, sizes, exits, against float64."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.codegen.cuda import compile as compiler
from jcuts.lower.patterns.gemm import as_gemm, k_tiles_per_split
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.gemm.problem import MmaTile
from jcuts.schedule.gpu.kernel_time import unit_of
from tests import programs
from tests.codegen.cuda.gemm.test_mma import LAYOUTS, SM80, SM90, TILINGS, compare, compiled, normal
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine

MACHINE = gpu_candidates.GpuMachine(132)
LIMIT = 3e-6
"""Of an error over the root mean square: TF32 would be 100 times as far off."""


def program_of(fn, *arguments):
    with jax.default_matmul_precision("highest"):
        return programs.trace(fn, *arguments)


def run(fn, arguments, tiling, target=SM90):
    traced = program_of(fn, *arguments)
    made = as_gemm(traced.program(), exact=True)
    assert made is not None
    program = replace(tiling, fma=1).of(made)
    kernel = compiler.compile_program(program, target)
    return ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, traced.operands())


def wide(x):
    return x.astype(np.float64)


@compiled
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("size", [(64, 64, 64), (37, 45, 53), (33, 101, 18), (130, 24, 70)])
def test_sizes_that_divide_nothing(size, tiling):
    m, k, n = size
    if k_tiles_per_split(k, tiling.terms, tiling.split * tiling.cluster)[1] != tiling.split * tiling.cluster:
        tiling = replace(tiling, split=1, cluster=1)
    x, w, b = normal(m, k), normal(k, n), normal(n)
    wanted = np.maximum(wide(x) @ wide(w) + b, 0)
    compare(run(lambda x, w, b: jax.nn.relu(x @ w + b), (x, w, b), tiling), [wanted], LIMIT)


@compiled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(48, 40, 32), (50, 98, 38)])
@pytest.mark.parametrize("target", [SM80, SM90], ids=str)
def test_layouts(layout, size, target):
    fn, left, right = LAYOUTS[layout]
    m, k, n = size
    x, w = left(normal(m, k)), right(normal(k, n))
    for tiling in (MmaTile(32, 32, 32, (2, 1, 2), 3, 1), MmaTile(64, 32, 64, (2, 2, 1), 2, 1, 1)):
        compare(run(fn, (x, w), tiling, target), [left(wide(x)) @ right(wide(w))], LIMIT)


@compiled
def test_batches_and_convolutions():
    q, k = normal(2, 18, 3, 16), normal(2, 29, 3, 16)
    scores = np.einsum("bqhd,bkhd->bhqk", wide(q), wide(k)) * 0.25
    compare(run(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25, (q, k), TILINGS[0]), [scores], LIMIT)
    x, w = normal(2, 9, 8, 32), normal(3, 3, 32, 24)
    with jax.enable_x64(True):
        wanted = np.asarray(conv(jnp.asarray(wide(x)), jnp.asarray(wide(w))))
    compare(run(conv, (x, w), MmaTile(32, 32, 16, (2, 2, 1), 3, 1)), [wanted], LIMIT)


@compiled
@pytest.mark.parametrize("stages", [2, 3, 6])
def test_what_is_added_may_be_asked_for_early(stages):
    x, w, r = normal(50, 72), normal(72, 40), normal(50, 40)
    tiling = MmaTile(32, 32, 16, (1, 1, 2), stages, 1, early=1)
    compare(run(lambda x, w, r: x @ w + r, (x, w, r), tiling), [wide(x) @ wide(w) + r], LIMIT)


@compiled
@pytest.mark.parametrize("warps", [(2, 2, 1), (1, 2, 1), (2, 1, 1)])
def test_large_tiles(warps):
    x, w = normal(200, 90), normal(90, 136)
    along, across, _ = warps
    tiling = MmaTile(64 * along, 64 * across, 16, warps, 4, 1)
    compare(run(lambda x, w: x @ w, (x, w), tiling), [wide(x) @ wide(w)], LIMIT)


@compiled
@pytest.mark.parametrize("size", [(1024, 512, 256), (4096, 4096, 4096), (384, 768, 3072), (64, 1024, 1000)], ids=str)
@pytest.mark.parametrize("target", [SM80, SM90], ids=str)
def test_candidates_assemble_without_local_memory(size, target):
    m, k, n = size
    x, w = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    machine = replace(MACHINE, capability=target.capability)
    program = program_of(lambda x, w: jax.nn.relu(x @ w), x, w).program()
    found = gpu_candidates.candidates(program, machine, 8)
    assert found and all(dict(p.params)["fma"] for p, _ in found)
    for candidate, _ in found:
        compiler.compile_program(candidate, target)


def test_its_unit_is_not_the_matrix_unit():
    x, w = np.zeros((512, 256), np.float32), np.zeros((256, 128), np.float32)
    (candidate, _), *_ = gpu_candidates.candidates(program_of(lambda x, w: x @ w, x, w).program(), MACHINE, 1)
    assert unit_of(candidate) == "ffma"


@pytest.mark.parametrize("precision, fma", [("highest", True), ("high", True), (None, False)])
def test_who_is_multiplied_so(precision, fma):
    x, w = np.zeros((512, 256), np.float32), np.zeros((256, 128), np.float32)
    program = programs.trace(lambda x, w: lax.dot(x, w, precision=precision), x, w).program()
    found = gpu_candidates.candidates(program, replace(MACHINE, capability=(9, 0)), 8)
    assert found and all(("fma" in dict(p.params)) == fma for p, _ in found)
