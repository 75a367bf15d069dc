"""Packed operands: programs with a panel compute the same, and what a panel cannot hold is not packed."""

from __future__ import annotations

import numpy as np
import pytest
from jax import lax

from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.verify import verify
from jcuts.schedule.cpu import packing
from tests import programs

LANES, REGISTERS = 4, 16
RNG = np.random.default_rng(5)


def values(*shape):
    return RNG.standard_normal(shape, np.float32)


def convolution(layouts):
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layouts)


def traced(function, *args):
    return collapse_program(programs.trace(function, *args).program())


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a, b: a @ b, ((18, 7), (7, 10))),
        (lambda a, b: a @ b.T, ((18, 7), (10, 7))),
        (convolution(("NHWC", "HWIO", "NHWC")), ((1, 4, 5, 2), (3, 3, 2, 6))),
    ],
    ids=["gemm", "transposed", "weights of a convolution"],
)
def test_a_panel_changes_no_value(function, shapes):
    args = [values(*shape) for shape in shapes]
    by_shape = {a.shape: a for a in args}
    program = traced(function, *args)
    found = list(packing.packings(program, LANES, REGISTERS))
    assert found
    for one in {(p.load, p.lane, p.row): p for p in found}.values():
        packed = packing.apply(program, one, 1)
        verify(packed)
        (got,) = interpret(packed, [by_shape[b.shape] for b in packed.inputs])
        np.testing.assert_allclose(got, function(*args), rtol=1e-5, atol=1e-5)


def test_what_is_read_under_guards_is_not_packed():
    args = values(1, 2, 4, 8), values(20, 2, 3, 3)  # lanes along a padded row, which 20 output channels share
    assert not list(packing.packings(traced(convolution(("NCHW", "OIHW", "NCHW")), *args), LANES, REGISTERS))
