"""Blocked summation of long sums: every schedule is as exact as a sum in blocks, whatever the blocks divide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from jcuts.codegen.cpu import accumulators
from jcuts.codegen.cpu.compile import compile_program, llvm_of
from jcuts.tune.measure.cpu_launch import Launcher, Schedule
from tests import programs
from tests.ops.cases import conv

RNG = np.random.default_rng(17)


def values(*shape):
    return RNG.random(shape).astype(np.float32) + 0.5


def depthwise_filter_gradient(x, d):
    return jax.vjp(lambda w: conv(x, w, groups=x.shape[-1]), jnp.zeros((3, 3, 1, x.shape[-1]), x.dtype))[1](d)[0]


LONG_SUMS = {
    "columns": (lambda x: jnp.sum(x, 0), (values(20011, 21),)),
    "columns of two dimensions": (lambda x: jnp.sum(jnp.square(x), (0, 1)), (values(7, 3001, 20),)),
    "many short rows": (lambda x: jnp.sum(x, (0, 2)), (values(9001, 5, 3),)),
    "rows": (lambda x: jnp.sum(x, 1), (values(3, 200003),)),
    "product": (lambda a, b: a @ b, (values(13, 9013), values(9013, 35))),
    "convolution": (conv, (values(1, 6, 6, 600), values(3, 3, 600, 17))),
    "depthwise filter gradient": (depthwise_filter_gradient, (values(9, 21, 23, 19), values(9, 21, 23, 19))),
}


@pytest.mark.parametrize("name", LONG_SUMS)
def test_long_sums_are_exact_to_a_few_ulp(name):
    fn, arguments = LONG_SUMS[name]
    traced = programs.trace(fn, *arguments)
    with jax.enable_x64(True):
        wanted = np.asarray(fn(*(jnp.asarray(a, jnp.float64) for a in arguments)))
    schedules = programs.schedules(traced.program(), 4)
    assert schedules
    for program in schedules:
        (got,) = Launcher(compile_program(program)).run([np.asarray(o) for o in traced.operands()], Schedule())
        # Terms of one sign: without blocks the error is that of 2,000 to 20,000 roundings of the whole sum.
        error = np.abs(got.astype(np.float64) - wanted) / wanted
        assert error.max() < 8e-7 and np.sqrt(np.mean(error**2)) < 4e-7, program.params


@pytest.mark.parametrize("name", ["columns", "rows", "product"])
def test_long_sums_of_float64_are_exact_to_a_few_ulp(name):
    fn, arguments = LONG_SUMS[name]
    arguments = [a.astype(np.float64) for a in arguments]
    with jax.enable_x64(True):
        traced = programs.trace(fn, *arguments)
        schedules = programs.schedules(traced.program(), 4)
    wide = [a.astype(np.longdouble) for a in arguments]
    wanted = wide[0] @ wide[1] if name == "product" else wide[0].sum(int(name == "rows"))
    for program in schedules:
        (got,) = Launcher(compile_program(program)).run([np.asarray(o) for o in traced.operands()], Schedule())
        error = np.abs(got.reshape(wanted.shape) - wanted) / wanted
        assert error.max() < 2e-15 and np.sqrt(np.mean(error**2)) < 8e-16, (error.max(), program.params)


def test_infinities_and_zeros_of_long_sums():
    x = np.zeros((5000, 4), np.float32)
    x[:, 0], x[3000, 1], x[100, 2], x[200, 2] = -0.0, np.inf, np.inf, -np.inf
    traced = programs.trace(lambda x: jnp.sum(x, 0), x)
    for program in programs.schedules(traced.program(), 2):
        (got,) = Launcher(compile_program(program)).run([x], Schedule())
        np.testing.assert_array_equal(got, [0.0, np.inf, np.nan, 0.0])
        assert not np.signbit(got[0])


@pytest.mark.parametrize("rows", [1, 3, 64, accumulators.LONG - 1])
def test_short_sums_have_no_blocks(rows):
    for shape, axis in (((rows, 64), 0), ((64, rows), 1)):
        traced = programs.trace(lambda x, axis=axis: jnp.sum(x, axis), values(*shape))
        for program in programs.schedules(traced.program(), 4):
            assert "block" not in llvm_of(program)


def test_sums_of_fewer_terms_than_lanes():
    (program,) = programs.schedules(programs.trace(lambda x: jnp.sum(x, 0), values(3, 64)).program(), 1)
    made = accumulators.Accumulators(ir.IRBuilder(), program.phases[0], 64, reduced=True)
    assert made.terms < 0.5 and made.per_block(0) == 0


def test_maxima_have_no_blocks():
    traced = programs.trace(lambda x: jnp.max(x, 0), values(30000, 64))
    (program,) = programs.schedules(traced.program(), 1)
    assert "block" not in llvm_of(program)
