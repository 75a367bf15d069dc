"""Many weights turned and rounded by one kernel, through the interpreter and the PTX machine, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.layout.weight_transpose import turn_shape
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.lower.weight_transpose import MOST, transpose_program, transposes_of
from jcuts.rewrite.tf32_weights import round_tf32
from tests.ptx import machine as ptx_machine

SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
RNG = np.random.default_rng(3)

SHAPES = [
    ((3, 3, 5, 17), (17, 3, 3, 5)),
    ((64, 64), (64, 64)),
    ((1, 1, 130, 24), (24, 130)),
    ((4, 1), (1, 4)),
    ((2, 3, 65), (65, 2, 3)),
]


def weights(shape):
    found = RNG.standard_normal(shape).astype(np.float32)
    odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 3.4028235e38]
    places = RNG.choice(found.size, min(len(odd), found.size), replace=False)
    found.reshape(-1)[places] = odd[: len(places)]
    return found


def check(results, operands):
    for got, (w, (_, made)) in zip(results, zip(operands, SHAPES, strict=True), strict=True):
        want = round_tf32(np.ascontiguousarray(w.reshape(-1, made[0]).T)).reshape(made)
        np.testing.assert_array_equal(got, want)
        assert np.array_equal(np.signbit(got), np.signbit(want))


def test_the_program():
    program = transpose_program(SHAPES)
    assert Program.from_json(program.to_json()) == program
    assert [p.tiles for p in transposes_of(program)] == [1, 1, 3, 1, 2]
    operands = [weights(shape) for shape, _ in SHAPES]
    with np.errstate(over="ignore"):
        check(interpret(program, operands), operands)


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=str)
def test_the_kernel(target):
    program = transpose_program(SHAPES)
    kernel = compiler.compile_program(program, target)
    (launch,) = Image.unpack(kernel.object_code).launches
    assert launch.grid[0] == sum(p.tiles for p in transposes_of(program)) == 8
    operands = [weights(shape) for shape, _ in SHAPES]
    check(ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, operands), operands)


@compiled
def test_as_many_as_there_are_parameters_for():
    count = MOST // 2
    program = transpose_program([((1, 1, 64, 32 + k), (32 + k, 1, 1, 64)) for k in range(count)])
    (launch,) = Image.unpack(compiler.compile_program(program, SM90).object_code).launches
    assert launch.resources.registers <= 64 and not launch.resources.spills
    assert len(launch.arguments) == MOST and transpose_program([((4, 4), (4, 4))] * (count + 1)) is None


def test_other_programs_are_refused():
    program = transpose_program(SHAPES)
    other = replace(program, phases=program.phases[:-1])
    assert transposes_of(other) is None
    for bad in (other, replace(program, params=(("cuda", "weights"), ("threads", 128)))):
        with pytest.raises(CompileRejected, match="turns weights"):
            turn_shape(bad)


@pytest.mark.parametrize("shape, made", [((32, 0), (0, 32)), ((0, 32), (32, 0))])
def test_weights_without_elements_are_not_turned(shape, made):
    assert transpose_program([((2, 3), (3, 2)), (shape, made)]) is None
