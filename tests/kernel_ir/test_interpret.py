"""The reference semantics: schedules do not change what a program computes, and broken programs are noticed."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.numpy_semantics import convert
from jcuts.kernel_ir.program import Axis, Buffer, Grid, Phase, Program, Store
from tests import programs
from tests.ops.cases import conv


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def layer_norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * g + b


def batch_statistics(x):
    return x.mean((0, 1)), (x * x).mean((0, 1))


FUNCTIONS = {
    "map": (lambda x, b: jnp.tanh(x) * b + x, (random(5, 21), random(21))),
    "map of two results": (lambda x: (x * 2, jnp.maximum(x, 0)), (random(7, 9),)),
    "gemm": (lambda a, b, c: jax.nn.relu(a @ b + c), (random(9, 11), random(11, 23), random(23))),
    "matrix times vector": (lambda a, b: a @ b, (random(33, 50), random(50))),
    "convolution": (lambda x, w: jax.nn.relu6(conv(x, w, strides=(2, 2))), (random(1, 9, 9, 3), random(3, 3, 3, 18))),
    "depthwise": (lambda x, w: conv(x, w, groups=17), (random(1, 6, 7, 17), random(3, 3, 1, 17))),
    "row sums": (lambda x: x.sum(1), (random(6, 50),)),
    "column sums": (lambda x: x.sum(0), (random(50, 19),)),
    "argmax": (lambda x: jnp.argmax(x, 1), (random(6, 50),)),
    "softmax": (lambda x: jax.nn.softmax(x), (random(4, 37),)),
    "softmax of columns": (lambda x: jax.nn.softmax(x, axis=0), (random(12, 37),)),
    "layer norm": (layer_norm, (random(5, 40), random(40), random(40, seed=1))),
    "pooling": (
        lambda x: -jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (random(2, 8, 6, 5),),
    ),
    "statistics of columns": (batch_statistics, (random(3, 8, 20),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unscheduled_scheduled_and_compiled_agree(name):
    fn, arguments = FUNCTIONS[name]
    trace = programs.trace(fn, *arguments)
    operands = trace.operands()
    plain = trace.program()
    expected = interpret(plain, operands)
    wanted = dict(zip(trace.closed.jaxpr.outvars, jax.tree.leaves(jax.jit(fn)(*arguments)), strict=True))
    names = {number: var for var, number in trace.graph.of_var.items()}
    for tensor, got in zip(trace.graph.subset_outputs(trace.everything), expected, strict=True):
        np.testing.assert_allclose(got, wanted[names[tensor]], rtol=2e-5, atol=2e-5)
    candidates = programs.schedules(plain)
    assert candidates
    for number, program in enumerate(candidates):
        for got, want in zip(interpret(program, operands), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=str(program.params))
        if number < 2:
            for got, want in zip(programs.run_compiled(program, operands), expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=str(program.params))


@pytest.mark.parametrize("name", ["gemm", "argmax", "softmax of columns", "statistics of columns"])
def test_reduction_points_are_combined_in_order_however_many_are_evaluated_at_once(name, monkeypatch):
    fn, arguments = FUNCTIONS[name]
    trace = programs.trace(fn, *arguments)
    expected = interpret(trace.program(), trace.operands())
    for elements in (1, 500):
        monkeypatch.setattr("jcuts.kernel_ir.interpret._AT_ONCE", elements)
        for got, want in zip(interpret(trace.program(), trace.operands()), expected, strict=True):
            np.testing.assert_array_equal(got, want)


def copy_program(extent=8, size=8, address=None, grid=()):
    graph = Graph()
    index = Index.axis("i") if address is None else address
    value = graph.load("x", index, "float32")
    phase = Phase("map", (Axis("i", extent),), (), (), Graph(), graph, (Store("out", Index.axis("i"), value),))
    buffers = (Buffer("x", "float32", (size,), "in"), Buffer("out", "float32", (8,), "out"))
    return Program("copy", buffers, grid, (), (phase,), 1)


def test_tasks_split_the_grid():
    x = random(8)
    for block in (1, 3, 8):
        (got,) = interpret(copy_program(grid=(Grid("i", 8, block),)), [x])
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (copy_program(size=7), "loads 0..7 of 7"),
        (copy_program(address=Index.axis("i") - 1), "loads -1..6"),
        (copy_program(extent=7), "written 0 to 1 times"),
        (copy_program(extent=9, size=9), "stores 0..8 of 8"),
        (copy_program(address=Index.axis("z")), "axis 'z' is used outside its loop"),
    ],
)
def test_broken_programs_are_noticed(program, message):
    with pytest.raises(IRError, match=message):
        interpret(program, [random(program.buffers[0].size)])


def test_two_tasks_that_write_one_element_are_noticed():
    program = copy_program()
    phase = program.phases[0]
    program = replace(program, phases=(phase, phase))
    with pytest.raises(IRError, match="written 2 to 2 times"):
        interpret(program, [random(8)])


def test_scratch_memory_is_read_after_it_is_written():
    program = copy_program()
    program = replace(program, buffers=(replace(program.buffers[0], role="local"), program.buffers[1]))
    with pytest.raises(IRError, match="not written"):
        interpret(program, [])


@pytest.mark.parametrize("operands", [[], [random(7)], [random(8).astype(np.float64)], [random(8), random(8)]])
def test_operands_that_do_not_fit(operands):
    with pytest.raises(IRError):
        interpret(copy_program(), operands)


def test_conversions_saturate():
    values = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 2.7, -2.7], np.float32)
    assert convert(values, "float32", "int32").tolist() == [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 2, -2]
    assert convert(values, "float32", "uint8").tolist() == [0, 255, 0, 255, 0, 2, 0]
