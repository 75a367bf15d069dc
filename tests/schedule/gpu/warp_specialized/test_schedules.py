"""Schedules of products whose operands are brought by warps of their own."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.codegen.cuda.warp_specialized.tile import fed_shape
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.candidates import GpuMachine
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.warp_specialized import schedules as warp_specialized_schedules
from tests import programs
from tests.gpu.test_products import MOST, ROUNDED, STAGED

MACHINE = GpuMachine(132)
LIMIT = 227 << 10
"""Bytes of shared memory of a block."""


def convolution(strides):
    """A convolution with bias and ReLU."""

    def fn(x, w, b):
        numbers = ("NHWC", "OHWI", "NHWC")
        return jax.nn.relu(lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers) + b)

    return fn


def added(x, w, b, r):
    """A product with bias, a matrix that is added, and ReLU."""
    return jax.nn.relu(lax.dot_general(x, w, (((1,), (1,)), ((), ()))) + b + r)


def product_of(fn, *shapes):
    """The program of a product with rounded weights; only shapes matter."""
    return programs.trace(fn, *(np.zeros(shape, np.float32) for shape in shapes)).product()


def found(program, most=8):
    """Its schedules, with what a block does."""
    counter = WgmmaProblem(program, MACHINE)
    return [
        (made, fed_shape(made), score) for made, score in warp_specialized_schedules.candidates(counter, program, most)
    ]


@pytest.mark.parametrize(
    "image, filters, strides",
    [
        ((64, 7, 7, 512), (512, 3, 3, 512), (1, 1)),
        ((64, 17, 17, 192), (192, 1, 7, 192), (1, 1)),
        ((16, 35, 35, 48), (64, 5, 5, 48), (1, 1)),
        ((64, 28, 28, 512), (1024, 1, 1, 512), (2, 2)),
    ],
    ids=str,
)
def test_schedules_of_convolutions_fit(image, filters, strides):
    made = found(product_of(convolution(strides), image, filters, filters[:1]))
    assert made and [score for *_, score in made] == sorted((score for *_, score in made), reverse=True)
    for program, shape, score in made:
        assert 0 < score <= 1 and shape.shared <= LIMIT, program.params
        assert shape.blocks <= MACHINE.sms and shape.blocks * shape.rounds >= shape.tiles, program.params
        assert (shape.window is not None) == ("pixels" in dict(program.params))
    assert any(shape.window is not None for _, shape, _ in made) == (filters[1:3] != (1, 1))


def test_registers_are_shared_out_in_full():
    made = found(product_of(convolution((1, 1)), (64, 14, 14, 1024), (256, 1, 1, 1024), (256,)))
    shared = [shape for _, shape, _ in made if shape.registers is not None]
    assert shared
    for shape in shared:
        more, fewer = shape.registers
        taken = more * shape.consumer_threads + fewer * (shape.threads - shape.consumer_threads)
        assert taken <= shape.entry_registers * shape.threads <= 65536


def test_registers_that_cannot_be_shared_out():
    program = product_of(added, (12544, 256), (1024, 256), (1024,), (12544, 1024))
    with pytest.raises(CompileRejected, match="no product of tiles"):
        fed_shape(warp_specialized_schedules.WarpSpecializedTile(256, 136, 4, 3, 2).of(program))


def test_what_is_added_is_asked_for_early():
    made = found(product_of(added, (12544, 256), (1024, 256), (1024,), (12544, 1024)))
    assert made and all(shape.early for _, shape, _ in made)


@pytest.mark.parametrize(
    "rows, terms, columns",
    [
        (200704, 64, 256),
        (50176, 128, 512),
        (12544, 256, 1024),
        (3136, 512, 2048),
    ],
)
def test_what_is_added_comes_by_the_stages(rows, terms, columns):
    """One stage for each group's rows, of the size that a tile of terms has; as many stages as there is room for."""
    program = product_of(added, (rows, terms), (columns, terms), (columns,), (rows, columns))
    made, shape, _ = found(program, 1)[0]
    params = dict(made.params)
    assert params["tile"] == (128, 128, 32) and params["beside"] == 1 and shape.stages == 7
    assert shape.residual_stages == 2 and shape.beside.buffer == program.inputs[3].name and shape.beside.pitch == 512
    assert 64 * 512 == shape.stage == 2 * 128 * 128 and shape.shared == 7 * shape.stage + 3 * 7 * 8 <= LIMIT
    assert shape.rounds == -(-(-(-rows // 128) * (columns // 128)) // 132)


@pytest.mark.parametrize("name", STAGED)
def test_gpu_tests_run_such_kernels(name):
    fn, shapes = ROUNDED[name]
    program = programs.trace(fn, *(np.zeros(shape, np.float32) for shape in shapes)).rounded()
    made = gpu_candidates.candidates(program, GpuMachine(132, capability=(9, 0)), MOST)
    assert any("beside" in dict(candidate.params) for candidate, _ in made)


def test_what_does_not_come_by_the_stages():
    """Tiles whose rows are no whole lines, too large for a stage, or copied by too few; other types; columns apart."""
    program = product_of(added, (12544, 256), (1024, 256), (1024,), (12544, 1024))
    fits = [(128, 128, 2, 4), (256, 64, 2, 4), (64, 64, 1, 2), (192, 32, 3, 4)]
    assert all(warp_specialized_schedules.staged_residual(program, *tile) is not None for tile in fits)
    others = [(128, 96, 2, 4), (128, 128, 1, 4), (128, 256, 2, 4), (128, 128, 2, 2), (128, 72, 2, 4)]
    assert all(warp_specialized_schedules.staged_residual(program, *tile) is None for tile in others)
    turned = product_of(lambda x, w, r: x @ w.T + r.T, (12544, 256), (1024, 256), (1024, 12544))
    assert warp_specialized_schedules.staged_residual(turned, *fits[0]) is None
    tiling = warp_specialized_schedules.WarpSpecializedTile(128, 128, 2, 7, 4, rounds=6, beside=1)
    fed_shape(tiling.of(program))
    for wrong in (replace(tiling, columns=96), replace(tiling, carriers=2)):
        with pytest.raises(CompileRejected, match="no product of tiles"):
            fed_shape(wrong.of(program))
    with pytest.raises(CompileRejected, match="no product of tiles"):
        fed_shape(tiling.of(turned))


@pytest.mark.more_with_cuda_compilers
@pytest.mark.parametrize("size", [(8192, 544, 512), (12544, 256, 1024), (3136, 512, 2048)])
def test_several_matrices_get_smaller_tiles(size):
    """The assembler has no registers for two of them beside 64 totals of a thread."""
    rows, terms, columns = size
    shapes = ((rows, terms), (columns, terms), (columns,), (rows, columns), (rows, columns))
    program, shape, _ = found(product_of(lambda x, w, b, r, q: (x @ w.T + b + r) * q, *shapes), 1)[0]
    assert shape.left.size * shape.right.size <= 32 * shape.consumer_threads and shape.beside is not None
    if not compiler.available():
        compiler.compile_program(program, CudaTarget((9, 0)))


def test_no_schedules():
    program = product_of(added, (12544, 256), (1024, 256), (1024,), (12544, 1024))
    assert not found(replace(program, buffers=tuple(replace(b, tf32=False) for b in program.buffers)))
    assert not found(product_of(added, (784, 256), (256, 256), (256,), (784, 256)))
    assert not found(product_of(added, (65536, 32), (256, 32), (256,), (65536, 256)))  # one tile of terms
