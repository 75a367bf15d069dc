"""Schedules of products whose operands are brought by warps of their own."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.fed_shape import fed_shape
from jcuts.region import gpu_fed, gpu_groups
from jcuts.region.gpu import GpuMachine
from tests import programs

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
    counter = gpu_groups.GroupCounter(program, MACHINE)
    return [(made, fed_shape(made), score) for made, score in gpu_fed.candidates(counter, program, most)]


@pytest.mark.parametrize("image, filters, strides", [
    ((64, 7, 7, 512), (512, 3, 3, 512), (1, 1)), ((64, 17, 17, 192), (192, 1, 7, 192), (1, 1)),
    ((16, 35, 35, 48), (64, 5, 5, 48), (1, 1)), ((64, 28, 28, 512), (1024, 1, 1, 512), (2, 2)),
], ids=str)  # fmt: skip
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
        taken = more * shape.multipliers + fewer * (shape.threads - shape.multipliers)
        assert taken <= shape.entry * shape.threads <= 65536


def test_registers_that_cannot_be_shared_out():
    program = product_of(added, (12544, 256), (1024, 256), (1024,), (12544, 1024))
    with pytest.raises(CompileRejected, match="no product of tiles"):
        fed_shape(gpu_fed.FedTiling(256, 136, 4, 3, 2).of(program))


def test_what_is_added_is_asked_for_early():
    made = found(product_of(added, (12544, 256), (1024, 256), (1024,), (12544, 1024)))
    assert made and all(shape.early for _, shape, _ in made)


def test_no_schedules():
    program = product_of(added, (12544, 256), (1024, 256), (1024,), (12544, 1024))
    assert not found(replace(program, buffers=tuple(replace(b, tf32=False) for b in program.buffers)))
    assert not found(product_of(added, (784, 256), (256, 256), (256,), (784, 256)))
    assert not found(product_of(added, (65536, 32), (256, 32), (256,), (65536, 256)))  # one tile of terms
