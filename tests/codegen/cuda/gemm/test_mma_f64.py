"""Products of float64 on matrix units: layouts, sizes, exits, against longer numbers, through the PTX machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.gemm.mma_f64 import double_shape
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.lower.patterns.gemm import as_gemm, k_tiles_per_split
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.gemm import cost_mma
from jcuts.schedule.gpu.gemm.problem import GemmProblem, MmaTile
from jcuts.schedule.gpu.kernel_time import unit_of
from tests import programs
from tests.codegen.cuda.gemm.test_mma import LAYOUTS, SM80, SM90, compiled
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine

MACHINE = gpu_candidates.GpuMachine(132)
LIMIT = 1e-14
"""Of an error over the root mean square."""
TILINGS = [
    MmaTile(32, 64, 16, (1, 2, 1), 3, 1),
    MmaTile(64, 32, 32, (2, 1, 2), 2, 1),
    MmaTile(16, 64, 32, (1, 2, 4), 4, 1),
    MmaTile(32, 64, 8, (1, 2, 1), 3, 1),
    MmaTile(32, 16, 16, (1, 1, 2), 6, 1),
    MmaTile(64, 32, 16, (2, 1, 1), 3, 1, 2),
    MmaTile(16, 64, 16, (1, 2, 2), 2, 1, 4),
    MmaTile(64, 32, 16, (1, 2, 1), 3, 1, 3),
    MmaTile(48, 96, 32, (3, 2, 1), 3, 1),
]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def product_of(fn, *arguments):
    traced = programs.trace(fn, *arguments)
    made = as_gemm(traced.program(), exact=True)
    assert made is not None
    return traced, made


def run(fn, arguments, tiling, target=SM90):
    traced, made = product_of(fn, *arguments)
    program = tiling.of(made)
    kernel = compiler.compile_program(program, target)
    return ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, traced.operands())


def compare(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape and got.dtype == np.float64
        assert float(np.abs(got - want).max() / np.sqrt(np.mean(np.square(want)))) < LIMIT


def longer(x):
    return x.astype(np.longdouble)


@compiled
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("size", [(64, 64, 64), (37, 45, 53), (33, 101, 18), (130, 24, 70)])
def test_sizes_that_divide_nothing(size, tiling):
    m, k, n = size
    if k_tiles_per_split(k, tiling.terms, tiling.cluster)[1] != tiling.cluster:
        tiling = replace(tiling, cluster=1)
    x, w, b = normal(m, k), normal(k, n), normal(n)
    wanted = np.maximum(longer(x) @ longer(w) + b, 0)
    compare(run(lambda x, w, b: jax.nn.relu(x @ w + b), (x, w, b), tiling), [wanted])


@compiled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(48, 40, 32), (50, 99, 38)])
@pytest.mark.parametrize("target", [SM80, SM90], ids=str)
def test_layouts(layout, size, target):
    fn, left, right = LAYOUTS[layout]
    m, k, n = size
    x, w = left(normal(m, k)), right(normal(k, n))
    for tiling in (MmaTile(32, 32, 32, (2, 1, 2), 3, 1), MmaTile(64, 32, 16, (2, 1, 1), 2, 1, 1)):
        compare(run(fn, (x, w), tiling, target), [left(longer(x)) @ right(longer(w))])


@compiled
def test_batches_and_convolutions():
    q, k = normal(2, 18, 3, 16), normal(2, 29, 3, 16)
    scores = np.einsum("bqhd,bkhd->bhqk", longer(q), longer(k)) * 0.25
    compare(run(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25, (q, k), TILINGS[0]), [scores])
    x, w = normal(2, 9, 8, 32), normal(3, 3, 32, 24)
    padded = np.pad(longer(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
    wanted = sum(padded[:, i : i + 9, j : j + 8] @ longer(w[i, j]) for i in range(3) for j in range(3))
    compare(run(conv, (x, w), MmaTile(32, 32, 16, (1, 2, 1), 3, 1)), [wanted])


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=str)
def test_what_is_added_may_be_asked_for_early(target):
    x, w, r = normal(50, 64), normal(64, 40), normal(50, 40).astype(np.float32)
    wanted = longer(x) @ longer(w) + r
    tiling = MmaTile(32, 32, 32, (2, 1, 1), 3, 1, early=1)
    compare(run(lambda x, w, r: x @ w + r.astype(x.dtype), (x, w, r), tiling, target), [wanted])


@compiled
@pytest.mark.parametrize("size", [(1024, 512, 256), (4096, 4096, 4096), (384, 768, 3072), (64, 1024, 1000)], ids=str)
@pytest.mark.parametrize("target", [SM80, SM90], ids=str)
def test_candidates_assemble_without_local_memory(size, target):
    m, k, n = size
    x, w = np.zeros((m, k)), np.zeros((k, n))
    machine = replace(MACHINE, capability=target.capability)
    found = gpu_candidates.candidates(programs.trace(lambda x, w: jax.nn.relu(x @ w), x, w).program(), machine, 8)
    assert found and {unit_of(p) for p, _ in found} == {"fp64"}
    for candidate, _ in found:
        compiler.compile_program(candidate, target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_what_the_counter_says(layout):
    fn, left, right = LAYOUTS[layout]
    _, made = product_of(fn, left(normal(96, 64)), right(normal(64, 96)))
    for tiling in TILINGS[:-2]:
        shape = double_shape(tiling.of(made))
        assert shape.shared == cost_mma.block_smem(GemmProblem(made, MACHINE), tiling)
        assert {p % 128 for p in (shape.left.pitch, shape.right.pitch)} <= {16, 64, 80}


def test_what_does_not_fit():
    _, made = product_of(lambda x, w: x @ w, normal(96, 64), normal(64, 96))
    wrong = (32, 32, 8, (1, 1, 2)), (32, 32, 48, (1, 1, 2)), (32, 32, 16, (2, 2, 1))
    for tiling in (MmaTile(*sizes, 3, 1) for sizes in wrong):
        with pytest.raises(CompileRejected):
            emit_source(tiling.of(made))


@pytest.mark.parametrize(
    "how, product",
    [
        ({}, True),
        ({"strides": (2, 2)}, True),
        ({"dilation": (2, 2)}, True),
        ({"lhs": (2, 2), "padding": ((1, 1), (1, 1))}, False),
        ({"lhs": (2, 1), "padding": ((1, 2), (0, 0))}, False),
    ],
    ids=str,
)
def test_which_zeros_are_factors(how, product):
    traced = programs.trace(lambda x, w: conv(x, w, **how), normal(2, 9, 8, 32), normal(3, 3, 32, 24))
    assert (as_gemm(traced.program(), exact=True) is not None) == product


@pytest.mark.parametrize("precision", ["highest", None])
def test_float64_is_never_rounded(precision):
    x, w = normal(512, 256), normal(256, 128)
    program = programs.trace(lambda x, w: lax.dot(x, w, precision=precision), x, w).program()
    assert as_gemm(program) is None
    found = gpu_candidates.candidates(program, replace(MACHINE, capability=(9, 0)), 8)
    assert found and {unit_of(p) for p, _ in found} == {"fp64"}
    mixed = programs.trace(lambda x, w: (x @ w).astype(jnp.float64), x.astype(np.float32), w.astype(np.float32))
    assert as_gemm(mixed.program(), exact=True) is None
