"""Products of 16-bit types in few blocks: clusters that store into each other's memory, all tiles under way at once."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import contraction
from jcuts.schedule.gpu.candidates import GpuMachine
from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from tests import programs
from tests.codegen.cuda.gemm.test_wgmma import SM90, compiled, normal
from tests.gpu.test_products import behind_a_norm as norm_before
from tests.ptx import machine as ptx_machine

MACHINE = GpuMachine(132, capability=(9, 0))
TILINGS = [
    WgmmaTile(64, 32, 64, (1, 1), 4, cluster=8, push=1, early=1),  # a stage for every tile of terms
    WgmmaTile(64, 64, 64, (1, 1), 4, cluster=4, push=1, early=1),
    WgmmaTile(64, 96, 64, (1, 1), 3, cluster=5, push=1),  # the last blocks have fewer terms
    WgmmaTile(64, 32, 64, (1, 1), 8, early=1),
    WgmmaTile(128, 64, 128, (2, 1), 3, cluster=2, push=1, early=1),
]
OFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def layer(x, w, s, b, r):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu((y.astype(jnp.float32) * s + b).astype(x.dtype) + r)


def arguments(rows, terms, columns, dtype):
    shapes = ((1, rows, 1, terms), (1, 1, terms, columns), (columns,), (columns,), (1, rows, 1, columns))
    found = [normal(*s, seed=k) for k, s in enumerate(shapes)]
    found[1] /= np.sqrt(np.float32(terms))
    return [a.astype(dtype) if a.ndim == 4 else a for a in found]


def built(traced):
    program = traced.build()
    assert isinstance(program, Program)
    return program


def check(program, found, operands):
    x, w, s, b, r = (np.asarray(a, np.float64) for a in found)
    scaled = (x[0, :, 0] @ w[0, 0]) * s
    want = np.maximum(scaled + b + r[0, :, 0], 0)
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    (got,) = ptx_machine.run_kernel(ptx, kernel, operands)
    error = np.abs(got.astype(np.float64)[0, :, 0] - want)
    off = OFF[found[0].dtype.name]
    assert (error <= off * (np.abs(want) + np.abs(scaled + b) + np.abs(scaled)) + 1e-6).all()  # each is rounded


@compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("size", [(49, 960, 64), (70, 936, 104)])
def test_few_rows(size, tiling, dtype):
    found = arguments(*size, jnp.dtype(dtype))
    traced = programs.trace(layer, *found)
    made = as_gemm(built(traced))
    assert made is not None
    check(tiling.of(made), found, traced.operands())


@compiled
@pytest.mark.parametrize("size", [(49, 2048, 512), (196, 1024, 256), (784, 128, 512)])
def test_both_families_compete_for_few_rows(size):
    """As networks have them at batch 1; the ranking keeps schedules of both."""
    found = arguments(*size, jnp.bfloat16)
    traced = programs.trace(layer, *found)
    ranked = [p for p, _ in gpu_candidates.candidates(built(traced), MACHINE, 12)]
    groups = [p for p in ranked if "groups" in dict(p.params)]
    tilings = {str({**dict(p.params), "paired": 0}) for p in groups}  # the best one with and without exchanged results
    assert len(tilings) == gemm_wgmma.SMALL_GRID_CANDIDATES and len(ranked) - len(groups) >= 3
    made = 0
    for program in groups:
        try:
            compiler.compile_program(program, SM90)
        except CompileRejected:
            continue
        made += 1
    assert made == len(groups)
    check(groups[0], found, traced.operands())


def test_nothing_new_for_float32_and_older_units():
    for dtype, capability in ((jnp.float32, (9, 0)), (jnp.bfloat16, (8, 0))):
        traced = programs.trace(layer, *arguments(196, 1024, 256, dtype))
        found = gpu_candidates.candidates(built(traced), GpuMachine(132, capability=capability), 12)
        assert found and not any("groups" in dict(p.params) for p, _ in found)


PIECED = [
    WgmmaTile(64, 64, 64, (1, 1), 4),
    WgmmaTile(128, 40, 64, (2, 1), 5, early=1),
    WgmmaTile(64, 32, 64, (1, 1), 4, cluster=3, push=1, early=1),
    WgmmaTile(64, 64, 128, (1, 1), 3),
    WgmmaTile(64, 64, 64, (1, 1), 5, cluster=3),
    WgmmaTile(128, 48, 64, (2, 1), 4, paired=1),
]


@compiled
@pytest.mark.parametrize("tiling", PIECED, ids=str)
@pytest.mark.parametrize(
    "channels, taps, strides, padding",
    [
        (48, (3, 3), 1, "SAME"),
        (40, (1, 7), 1, "SAME"),
        (96, (3, 3), 2, "VALID"),
        (160, (3, 1), 1, "SAME"),
    ],
)
def test_tiles_whose_terms_lie_in_several_taps(channels, taps, strides, padding, tiling):
    """Channels that 64 does not divide, part of pixels that hold NaN besides."""
    half = jnp.dtype("bfloat16")
    x, w = (normal(*s, seed=k).astype(half) for k, s in enumerate(((2, 9, 8, channels + 16), (*taps, channels, 72))))
    x[..., :8], x[..., 8 + channels :] = np.nan, np.nan

    def fn(x, w):
        x = lax.slice_in_dim(x, 8, 8 + channels, axis=3)
        names = ("NHWC", "HWIO", "NHWC")
        return jax.nn.relu(lax.conv_general_dilated(x, w, (strides,) * 2, padding, dimension_numbers=names))

    program = tiling.of(programs.trace(fn, x, w).product())
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    with jax.enable_x64(True):
        want = np.asarray(fn(*(jnp.asarray(a.astype(np.float64)) for a in (x, w))))
    (got,) = ptx_machine.run_kernel(ptx, kernel, [x, w])
    assert np.abs(got.astype(np.float64) - want).max() <= OFF["bfloat16"] * np.abs(want).max()


@compiled
@pytest.mark.parametrize(
    "batch, size, channels, features, taps",
    [
        (1, 35, 48, 64, 5),
        (1, 35, 96, 96, 3),
        (64, 35, 288, 384, 3),
    ],
)
def test_channels_that_64_does_not_divide_have_schedules_of_warp_groups(batch, size, channels, features, taps):
    half = jnp.bfloat16

    def fn(x, w):
        names = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names)

    shapes = (batch, size, size, channels), (taps, taps, channels, features)
    traced = programs.trace(fn, *(jax.ShapeDtypeStruct(s, half) for s in shapes))
    ranked = [dict(p.params) for p, _ in gpu_candidates.candidates(built(traced), MACHINE, 12)]
    assert any("groups" in found and "pixels" not in found for found in ranked)


@compiled
@pytest.mark.parametrize("size", [(70, 192, 104), (130, 128, 48), (64, 136, 100)])
@pytest.mark.parametrize(
    "tiling", [WgmmaTile(64, 96, 64, (1, 1), 3, paired=1), WgmmaTile(128, 64, 64, (2, 1), 3, paired=1)], ids=str
)
def test_lanes_exchange_results(size, tiling):
    """What is added is read as widely as results are stored."""
    found = arguments(*size, jnp.bfloat16)
    traced = programs.trace(layer, *found)
    program = tiling.of(as_gemm(built(traced)))
    check(program, found, traced.operands())
    ptx = compiler.ptx_of(program, SM90)
    assert "shfl.sync.bfly" in ptx and "st.global.v2.b32" in ptx and "st.global.b32" not in ptx


@compiled
def test_lanes_of_blocks_that_meet_exchange_nothing():
    found = arguments(49, 960, 64, jnp.bfloat16)
    made = as_gemm(built(programs.trace(layer, *found)))
    odd, meeting = WgmmaTile(64, 40, 64, (1, 1), 4), WgmmaTile(64, 64, 64, (1, 1), 4, cluster=4)
    for tiling in (replace(odd, paired=1), replace(meeting, paired=1)):
        with pytest.raises(CompileRejected):
            compiler.compile_program(tiling.of(made), SM90)


BEHIND = [
    WgmmaTile(64, 32, 64, (1, 1), 4, cluster=8, rounded=1, push=1, early=1),
    WgmmaTile(64, 64, 64, (1, 1), 4, cluster=5, rounded=1, push=1, early=1),  # the last blocks have fewer terms
    WgmmaTile(64, 32, 128, (1, 1), 3, cluster=3, rounded=1, push=1, early=1),
    WgmmaTile(64, 32, 64, (1, 1), 8, rounded=1, early=1, paired=1),
    WgmmaTile(64, 32, 64, (1, 1), 8, cluster=2, rounded=1, push=1, early=1),  # a stage for every tile of terms
]


def behind_a_norm(x, w, s, b):
    """The last channels of the operand are somebody else's."""
    return norm_before(lax.slice_in_dim(x, 0, w.shape[0], axis=1), w, s, b)


@compiled
@pytest.mark.parametrize("tiling", BEHIND, ids=str)
@pytest.mark.parametrize("size", [(49, 960, 64), (70, 928, 136)])
def test_few_rows_behind_a_norm(size, tiling):
    """Norms of few rows whose channels no tile divides, with a shift that terms beyond the last must not add."""
    m, k, n = size
    kind = jnp.dtype("bfloat16")
    if tiling.paired and n % 16:
        pytest.skip("columns are exchanged in pairs of eight")
    x, w, s, b = normal(m, k + 32).astype(kind), normal(k, n, seed=1), normal(k), 1 + normal(k, seed=2)
    x[:, k:], w = np.nan, (w / np.sqrt(np.float32(k))).astype(kind)
    program = tiling.of(programs.trace(behind_a_norm, x, w, s, b).product())
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    (got,) = ptx_machine.run_kernel(ptx, kernel, programs.trace(behind_a_norm, x, w, s, b).operands())
    normed = np.maximum((x[:, :k].astype(np.float32) * s + b).astype(kind), 0).astype(np.float64)
    want = normed @ w.astype(np.float64)
    assert np.abs(got.astype(np.float64) - want).max() <= OFF["bfloat16"] * np.abs(want).max()


@compiled
@pytest.mark.parametrize("size", [(3136, 224, 128), (784, 480, 128), (196, 992, 128), (49, 896, 128)])
def test_norms_of_few_rows_have_candidates(size):
    """As DenseNet has them at batch 1."""
    m, k, n = size
    half = jnp.bfloat16
    x, w, s, b = np.zeros((m, k + 32), half), np.zeros((k, n), half), normal(k), normal(k)
    found = [
        p for p, _ in contraction.contraction_schedules(programs.trace(behind_a_norm, x, w, s, b).product(), MACHINE)
    ]
    assert found and all("groups" in dict(p.params) for p in found)
    for program in found:
        image = Image.unpack(compiler.compile_program(program, SM90).object_code)
        assert all(launch.resources.stack == 0 for launch in image.launches)
