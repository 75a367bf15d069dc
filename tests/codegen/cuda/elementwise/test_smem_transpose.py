"""Transposes through shared memory: every schedule that is proposed is built, and computes the transpose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.elementwise.smem_transpose import bank_conflict_padding
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.elementwise.schedules import smem_staged_loads
from tests import programs
from tests.ptx import machine as ptx_machine

MACHINE, SM90 = gpu_candidates.GpuMachine(132), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
RNG = np.random.default_rng(8)


def numbers(shape, dtype):
    return RNG.integers(0, 2 if dtype == "bool" else 100, shape).astype(jnp.dtype(dtype))


def transposes(fn, *arguments):
    """The program, and its schedules by way of shared memory."""
    traced = programs.trace(fn, *arguments)
    program = traced.program()
    found = [
        p for p, _ in gpu_candidates.candidates(program, MACHINE, 1 << 30) if dict(p.params)["cuda"] == "transposed"
    ]
    return traced, program, found


def sums(*values):
    return (sum(v.T for v in values) > 7).astype(jnp.int8)


CASES = {
    "bytes": (lambda x: x.T, "int8", (33, 104), 1),
    "halves": (lambda x: x.T, "bfloat16", (40, 64), 1),
    "short lines": (lambda x: x.T, "float32", (16, 24), 1),
    "doubles": (lambda x: x.T, "float64", (13, 8), 1),
    "bytes of doubles": (lambda x: x.T.astype(jnp.int8), "float64", (64, 64), 1),
    "doubles of bytes": (lambda x: x.T.astype(jnp.float64), "int8", (33, 100), 1),
    "five operands": (sums, "int8", (48, 200), 5),
    "two wide ones": (lambda x, y: x.T * y.T, "float64", (48, 40), 2),
}


@compiled
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_built_and_right(name):
    fn, dtype, shape, count = CASES[name]
    with jax.enable_x64(True):
        operands = [numbers(shape, dtype) for _ in range(count)]
        traced, _, found = transposes(fn, *operands)
        want = np.asarray(fn(*operands))
        assert found
        for number, candidate in enumerate(found):
            text = compiler.ptx_of(candidate, SM90)
            if number % 4 == 0:
                kernel = compiler.compile_program(candidate, SM90)
                (got,) = ptx_machine.run_kernel(text, kernel, traced.operands())
                np.testing.assert_array_equal(got, want, err_msg=str(candidate.params))


def test_selected_operands_of_two_widths():
    """Threads are more than the columns of a tile would give wide accesses of bools."""
    a, b, c = numbers((13, 8), "float32"), numbers((13, 8), "float32"), numbers((13, 8), "bool")
    _, program, found = transposes(lambda a, b, c: -jnp.where(c, a, b).T, a, b, c)
    assert len(smem_staged_loads(program.phases[0], program.phases[0].axes[0].name)) == 3
    assert {dict(p.params)["threads"] for p in found} == {256, 512}


def test_nothing_is_proposed_that_no_memory_holds():
    many = [numbers((64, 64), "float32") for _ in range(11)]
    _, program, found = transposes(lambda *xs: sum(x.T for x in xs), *many)
    assert smem_staged_loads(program.phases[0], program.phases[0].axes[0].name) and not found


def test_padding_keeps_within_what_is_left():
    free = bank_conflict_padding(64, 32, 4, 4, 4, 1 << 20)
    assert free > 0
    assert (
        bank_conflict_padding(64, 32, 4, 4, 4, free) == free and bank_conflict_padding(64, 32, 4, 4, 4, free - 1) < free
    )
    assert bank_conflict_padding(64, 32, 4, 4, 4, 0) == 0
