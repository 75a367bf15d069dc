"""Kernels that write into a larger array: they run on the PTX machine, and everything else stays as it was."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import IRError
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.split_kernels import with_starts
from jcuts.kernel_ir.printer import program_text
from jcuts.kernel_ir.program import Offset, Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.lower.sliced_output import ALIGNMENT, ONTO, write_into_slice
from jcuts.pipeline import inplace_update
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.gemm.epilogue_smem import LOADED, SENT, STORED
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from tests import programs
from tests.codegen.cuda.gemm.test_mma import SM90, TILINGS, compare, compiled, normal, tf32
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import round_tf32

NHWC = ("NHWC", "HWIO", "NHWC")


def dense(x, w, b):
    return jax.nn.relu(x @ w + b)


def layer(x, w, b):
    return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC) + b)


def run(program, operands, whole, starts):
    """The kernel's result in a larger array of random numbers, and those numbers."""
    found = write_into_slice(program, whole, starts)
    assert found is not None
    verify(found.program)
    assert found.program.inputs[-1].name == ONTO and found.program.outputs[0].shape == tuple(whole)
    kernel = compiler.compile_program(found.program, SM90)
    array = normal(*whole, seed=9)
    (result,) = ptx_machine.run_kernel(
        compiler.ptx_of(found.program, SM90), kernel, [*operands, array], start=found.start
    )
    return result, array


def check(result, array, starts, want):
    here = tuple(slice(s, s + n) for s, n in zip(starts, want.shape, strict=True))
    compare([np.ascontiguousarray(result[here])], [want])
    result, array = result.copy(), array.copy()
    result[here] = array[here] = 0
    np.testing.assert_array_equal(result, array)


@compiled
@pytest.mark.parametrize("tiling", TILINGS[:6], ids=str)
@pytest.mark.parametrize(("whole", "starts"), [((33, 60), (0, 4)), ((33, 36), (0, 0)), ((50, 24), (8, 0))])
def test_products_write_their_part_alone(tiling, whole, starts):
    x, w, b = normal(33, 101), normal(101, 24), normal(24)
    traced = programs.trace(dense, x, w, b)
    product = as_gemm(traced.program())
    assert product is not None
    result, array = run(tiling.of(product), traced.operands(), whole, starts)
    check(result, array, starts, np.maximum(tf32(x) @ tf32(w) + b, 0))


@compiled
@pytest.mark.parametrize("how", [LOADED, STORED, SENT])
@pytest.mark.parametrize(("whole", "starts"), [((70, 100), (0, 4)), ((70, 102), (0, 4)), ((80, 72), (8, 0))])
def test_bulk_copies_of_results_where_rows_are_aligned(whole, starts, how):
    """Rows of 102 floats begin anywhere: lanes store them."""
    x, w, r = normal(70, 68), round_tf32(normal(72, 68, seed=1)), normal(70, 72, seed=2)
    traced = programs.trace(lambda x, w, r: x @ w.T + r, x, w, r)
    program = WgmmaTile(64, 64, 32, (1, 1), 3, rounded=1, held=how).of(traced.product())
    found = write_into_slice(program, whole, starts)
    assert found is not None
    ptx = compiler.ptx_of(found.program, SM90)
    assert ("cp.async.bulk.global" in ptx) == (how != LOADED and whole[1] % 4 == 0)
    result, array = run(program, traced.operands(), whole, starts)
    check(result, array, starts, tf32(x) @ w.T.astype(np.float64) + r)


@compiled
@pytest.mark.parametrize("tiling", [TILINGS[0], TILINGS[4], WgmmaTile(64, 64, 32, (1, 1), 3, rounded=1)], ids=str)
def test_a_kernel_that_begins_an_array_writes_its_part_alone(tiling):
    x, w, b = normal(33, 96), round_tf32(normal(24, 96)), normal(24)
    traced = programs.trace(lambda x, w, b: jax.nn.relu(x @ w.T + b), x, w, b)
    product = traced.product() if isinstance(tiling, WgmmaTile) else as_gemm(traced.program())
    found = write_into_slice(tiling.of(product), (33, 60), (0, 4), None)
    assert found is not None and found.operand is None and len(found.program.inputs) == 3
    verify(found.program)
    kernel, ptx = compiler.compile_program(found.program, SM90), compiler.ptx_of(found.program, SM90)
    poison = np.full((33, 60), np.nan, np.float32)
    (result,) = ptx_machine.run_kernel(ptx, kernel, traced.operands(), start=found.start, array=poison)
    compare([np.ascontiguousarray(result[:, 4:28])], [np.maximum(tf32(x) @ tf32(w).T + b, 0)])
    assert np.isnan(result[:, :4]).all() and np.isnan(result[:, 28:]).all()


@compiled
@pytest.mark.parametrize("window", [None, "SAME", "VALID"])
@pytest.mark.parametrize(
    "tiling",
    [
        *TILINGS[:4],
        WgmmaTile(64, 64, 32, (1, 1), 3, 1),
        WgmmaTile(64, 64, 32, (1, 1), 3, rounded=1),
    ],
    ids=str,
)
def test_nothing_of_an_array_is_read_but_the_slice(tiling, window):
    """What was not written yet is NaN."""
    x, b = np.full((2, 6, 7, 52), np.nan, np.float32), normal(20)
    x[..., 8:40] = normal(2, 6, 7, 32)
    w = round_tf32(normal(20, 32) if window is None else normal(20, 3, 3, 32))

    def layer(x, w, b):
        if window is None:
            return jax.nn.relu(x[..., 8:40] @ w.T + b)
        y = lax.conv_general_dilated(x[..., 8:40], w, (1, 1), window, dimension_numbers=("NHWC", "OHWI", "NHWC"))
        return jax.nn.relu(y + b)

    with jax.enable_x64(True):
        exact = np.asarray(layer(*(jax.numpy.asarray(tf32(a), "float64") for a in (x, w)), b))
    traced = programs.trace(layer, x, w, b)
    rounded = isinstance(tiling, WgmmaTile) and tiling.rounded
    program = tiling.of(traced.product() if rounded else as_gemm(traced.program()))
    kernel = compiler.compile_program(program, SM90)
    compare(ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, [x, w, b]), [exact], 3e-6)


@compiled
@pytest.mark.parametrize("features", [8, 12, 32])
def test_every_form_of_a_convolution_writes_its_part_alone(features):
    x, w, b = normal(2, 5, 7, 16), normal(3, 3, 16, features), normal(features)
    traced = programs.trace(layer, x, w, b)
    pixels, weights = (jax.numpy.asarray(tf32(array)) for array in (x, w))
    exact = lax.conv_general_dilated(pixels, weights, (1, 1), "SAME", dimension_numbers=NHWC, precision="highest")
    want = np.asarray(exact, np.float64)
    ran = set()
    for program, _ in gpu_candidates.candidates(
        traced.program(), gpu_candidates.GpuMachine(132, capability=(9, 0)), 1 << 10
    )[::7]:
        form = dict(program.params)["cuda"]
        if write_into_slice(program, (2, 5, 7, 64), (0, 0, 0, 20)) is None or sum(f == form for f, _ in ran) > 2:
            continue
        result, array = run(program, traced.operands(), (2, 5, 7, 64), (0, 0, 0, 20))
        check(result, array, (0, 0, 0, 20), np.maximum(want + b, 0))
        ran.add((form, program.digest))
    assert ran


@compiled
@pytest.mark.parametrize(
    ("shape", "whole", "starts"),
    [
        ((3, 5, 24), (3, 5, 60), (0, 0, 8)),
        ((7, 4, 8), (7, 12, 8), (0, 4, 0)),
        ((33, 10), (33, 50), (0, 20)),
        ((2, 6), (9, 6), (2, 0)),
    ],
)
def test_parts_that_are_copied(shape, whole, starts):
    program = inplace_update._copying(shape, whole, "float32", gpu_candidates.GpuMachine(132, capability=(9, 0)))
    assert program is not None
    x = normal(*shape)
    result, array = run(program, [x], whole, starts)
    check(result, array, starts, x)


def test_what_cannot_be_placed():
    traced = programs.trace(dense, normal(33, 101), normal(101, 24), normal(24))
    product = as_gemm(traced.program())
    assert product is not None
    program = TILINGS[0].of(product)
    assert write_into_slice(program, (33, 24), (0, 0)) is None  # the whole array
    assert write_into_slice(program, (40, 30), (0, 0)) is None  # a part of two dimensions
    assert write_into_slice(program, (33, 60), (0, 37)) is None  # beyond the end
    assert write_into_slice(program, (33, 60), (0, 3)) is None  # not aligned
    found = write_into_slice(program, (33, 60), (0, 8))
    assert found is not None and found.start == 32 and found.start % ALIGNMENT == 0
    assert write_into_slice(found.program, (33, 120), (0, 0)) is None  # placed already


def test_flat_loops_over_a_result_stay_as_they_are():
    """Their points know neither row nor column."""
    traced = programs.trace(lambda x: x * 2 + 1, normal(64, 32))
    flat = [
        p
        for p, _ in gpu_candidates.candidates(traced.program(), gpu_candidates.GpuMachine(132), 1 << 10)
        if len(p.phases[0].axes) == 1
    ]
    assert flat and all(write_into_slice(p, (64, 96), (0, 32)) is None for p in flat)


@compiled
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("position", "clamped"), [(0, 0), (4, 4), (17, 17), (-3, 0), (40, 17)])
def test_a_part_that_begins_where_an_argument_says(position, clamped, dtype):
    """A key-value cache: the kernel adds the position to its addresses, clamped as XLA clamps it."""
    x, w, b = normal(33, 101), normal(101, 24), normal(24)
    traced = programs.trace(dense, x, w, b)
    product = as_gemm(traced.program())
    assert product is not None
    found = write_into_slice(TILINGS[0].of(product), (50, 24), (np.dtype(dtype).name, 0))
    assert found is not None and (found.operand, found.position, found.start) == (3, 4, 0)
    verify(found.program, all_addresses=True)
    assert Program.from_json(found.program.to_text()) == found.program
    kernel, ptx = compiler.compile_program(found.program, SM90), compiler.ptx_of(found.program, SM90)
    array = normal(50, 24, seed=9)
    operands = [*traced.operands(), array, np.asarray(position, dtype)]
    (result,) = ptx_machine.run_kernel(ptx, kernel, operands, start=0, array=array)
    check(result, array, (clamped, 0), np.maximum(tf32(x) @ tf32(w) + b, 0))


@compiled
@pytest.mark.parametrize("batch", [1, 3])
def test_every_form_of_a_product_of_few_rows_appends(batch):
    """Split over blocks, clusters and launches: a cache (batch, 9, 64) gains a line at an argument's position."""
    x, w = round_tf32(normal(batch, 1, 96)), round_tf32(normal(96, 64))
    traced = programs.trace(lambda x, w: x @ w, x, w)
    ran = set()
    for program, _ in gpu_candidates.candidates(
        traced.program(), gpu_candidates.GpuMachine(132, capability=(9, 0)), 1 << 10
    )[::3]:
        params = dict(program.params)
        form = params["cuda"], params.get("split", 1) > 1, params.get("cluster", 1) > 1
        found = write_into_slice(program, (batch, 9, 64), (0, "int32", 0))
        if found is None or form in ran:
            continue
        verify(found.program)
        kernel, ptx = compiler.compile_program(found.program, SM90), compiler.ptx_of(found.program, SM90)
        array = normal(batch, 9, 64, seed=9)
        operands = [*traced.operands(), array, np.asarray(7, np.int32)]
        (result,) = ptx_machine.run_kernel(ptx, kernel, operands, start=0, array=array)
        check(result, array, (0, 7, 0), x.astype(np.float64) @ w)
        ran.add(form)
    assert len(ran) >= 3, ran


def test_which_run_time_positions_have_a_kernel():
    traced = programs.trace(dense, normal(33, 101), normal(101, 24), normal(24))
    product = TILINGS[0].of(as_gemm(traced.program()))
    assert write_into_slice(product, (50, 24), ("int32", 0)) is not None
    assert write_into_slice(product, (50, 24), ("int32", "int32")) is not None  # the whole of a line begins at 0
    assert write_into_slice(product, (33, 60), (0, "int32")) is None  # elements of four bytes: not aligned
    assert write_into_slice(product, (50, 24), ("int32", 0), None) is None  # the rest would be undefined
    found = write_into_slice(product, (50, 24), ("int32", 0))
    assert found is not None and write_into_slice(found.program, (90, 24), (8, 0)) is None  # placed already
    assert "f32[50, 24] from clip(begins, 0, 17) * 24 on" in program_text(found.program).replace("float32", "f32")


@pytest.mark.parametrize(
    ("offset", "wrong"),
    [
        (Offset("begins", 408, 1), "is not of 16 bytes"),
        (Offset("onto", 17, 24), "starts at"),
        (Offset("begins", 99, 24), "starts at|leaves"),
        (Offset("nowhere", 17, 24), "no buffer"),
    ],
)
def test_offsets_that_reach_beyond_a_buffer_or_between_accesses_are_refused(offset, wrong):
    """Whoever wrote the row of a database."""
    traced = programs.trace(dense, normal(33, 101), normal(101, 24), normal(24))
    found = write_into_slice(TILINGS[0].of(as_gemm(traced.program())), (50, 24), ("int32", 0))
    assert found is not None
    buffers = [b if b.role != "out" else replace(b, offset=offset) for b in found.program.buffers]
    with pytest.raises(IRError, match=wrong):
        verify(replace(found.program, buffers=tuple(buffers)), all_addresses=True)


def test_results_that_begin_at_one_argument_share_it():
    traced = programs.trace(dense, normal(33, 101), normal(101, 24), normal(24))
    found = write_into_slice(TILINGS[0].of(as_gemm(traced.program())), (50, 24), ("int32", 0))
    assert found is not None
    (result,) = found.program.outputs
    part = replace(found.program, buffers=(result, replace(result, name="other")))
    assert [b.name for b in with_starts(part, found.program).buffers] == ["begins", result.name, "other"]
