"""Inverted residual blocks in one kernel, against float64, through the PTX machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.fusion import greedy
from jcuts.fusion.match_inverted_residual import inverted_residual_groups
from jcuts.lower.patterns.inverted_residual import match_inverted_residual
from jcuts.schedule.gpu.candidates import GpuMachine
from jcuts.schedule.gpu.inverted_residual import schedules as inverted_residual_schedules
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile
from tests import programs
from tests.codegen.cuda.assembling import assert_most_assemble
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import TensorFault, round_tf32

MACHINE = GpuMachine(132)
SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
LIMIT, OTHER_WAY = 2e-6, 2e-3
"""Allowed errors over the root mean square: of most results (sums of float32), and of those for which a value between
the products, less exact here than in float64, rounds the other way."""


@dataclass(frozen=True)
class Layers:
    """A block: image, filter of the window, expanded channels, features; filters of products as (O, H, W, I)?

    ``alone``: without a product before the window.
    """

    image: tuple[int, int, int, int]
    window: tuple[int, int]
    wide: int
    features: int
    strides: tuple[int, int] = (1, 1)
    padding: Any = "SAME"
    dilation: tuple[int, int] = (1, 1)
    along: bool = True
    residual: bool = False
    alone: bool = False

    def arguments(self) -> list[np.ndarray]:
        """Random operands."""
        channels, (high, wide) = self.image[3], self.window
        first, last = ((self.wide, 1, 1, channels), (self.features, 1, 1, self.wide))
        if not self.along:
            first, last = ((1, 1, channels, self.wide), (1, 1, self.wide, self.features))
        shapes = (self.image, first, (self.wide,), (high, wide, 1, self.wide), (self.wide,), last, (self.features,))
        found = [normal(*s, seed=k) for k, s in enumerate(shapes)]
        found[1] /= np.sqrt(np.float32(channels))
        found[5] /= np.sqrt(np.float32(self.wide))
        return found

    def __call__(self, x, w, b, f, c, v, d, between=lambda y: y):
        numbers = ("NHWC", "OHWI" if self.along else "HWIO", "NHWC")
        wide = x if self.alone else product(x, w, numbers) + b
        wide = wide if self.alone else jax.nn.relu6(wide)
        deep = lax.conv_general_dilated(
            wide,
            f,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            feature_group_count=self.wide,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        deep = between(jax.nn.relu6(deep + c))
        found = product(deep, v, numbers) + d
        return found + x if self.residual else found


def product(x, w, numbers):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def program_of(layers, arguments, rounded=False):
    """The block of a function, with its products' weights known to be rounded or not."""
    traced = programs.trace(layers, *arguments)
    (found,) = inverted_residual_groups(traced.graph, greedy.group(traced.graph).subsets, lambda program: True)
    assert found.members == traced.everything
    shapes = {arguments[1].shape, arguments[5].shape}
    buffers = tuple(replace(b, tf32=rounded and b.shape in shapes) for b in found.program.buffers)
    return replace(found.program, buffers=buffers), traced


def shape_of(program, images, rows, columns, chunk, expand, project, strip, held=False):
    found = match_inverted_residual(program)
    assert not isinstance(found, Refusal), found
    return InvertedResidualTile(found, images, rows, columns, chunk, expand, project, strip, held)


def results(program, traced, target=SM90):
    operands = [traced.arguments[traced_number(traced, k)] for k in traced.graph.subset_inputs(traced.everything)]
    kernel = compiler.compile_program(program, target)
    (found,) = ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, operands)
    return found


def traced_number(traced, tensor):
    return [traced.graph.of_var[v] for v in traced.closed.jaxpr.invars].index(tensor)


def wanted(layers, arguments, even=True):
    """The block in float64 of operands that are rounded where the kernel rounds them."""

    def rounded(x):
        return jnp.asarray(round_tf32(np.asarray(x, np.float32), even=even).astype(np.float64))

    with jax.enable_x64(True):
        wide = [jnp.asarray(a.astype(np.float64)) for a in arguments]
        x = wide[0]
        for place in (1, 5) if layers.alone else (0, 1, 5):
            wide[place] = rounded(arguments[place])
        found = replace(layers, residual=False)(*wide, between=rounded)
        return np.asarray(found + x if layers.residual else found)


def compare(got, want):
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want) / np.sqrt(np.mean(np.square(want)))
    assert np.quantile(error, 0.9) < LIMIT and error.max() < OTHER_WAY, (np.quantile(error, 0.9), error.max())


BLOCKS = {
    "odd": Layers((3, 15, 13, 20), (3, 3), 20, 25, along=False),
    "odd along terms": Layers((2, 15, 13, 12), (3, 3), 36, 20),
    "stride 2": Layers((2, 14, 18, 24), (3, 3), 40, 24, (2, 2)),
    "stride 2 odd": Layers((1, 15, 13, 9), (3, 3), 20, 24, (2, 2), along=False),
    "residual": Layers((2, 11, 9, 24), (3, 3), 48, 24, residual=True),
    "5x5": Layers((1, 10, 12, 16), (5, 5), 32, 33, along=False),
    "without padding": Layers((2, 10, 12, 16), (3, 3), 32, 24, padding="VALID"),
    "uneven padding": Layers((1, 10, 12, 16), (3, 2), 32, 24, (1, 2), padding=((2, 0), (1, 3))),
    "dilation": Layers((1, 12, 12, 16), (3, 3), 32, 24, dilation=(2, 1), along=False),
    "nothing to expand": Layers((2, 11, 9, 20), (3, 3), 20, 24, alone=True),
    "nothing to expand, stride 2": Layers((1, 14, 13, 48), (3, 3), 48, 33, (2, 2), along=False, alone=True),
    "many channels": Layers((2, 7, 7, 88), (3, 3), 64, 72),
}
TILES = [
    (1, 8, 4, 16, (2, 1), (1, 2), (4, 2)),
    (1, 4, 8, 32, (2, 2), (4, 1), (2, 2)),
    (1, 7, 14, 16, (4, 1), (2, 2), (7, 1)),
    (1, 4, 4, 32, (2, 1), (2, 1), (4, 4), True),
]


@compiled
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name, tile):
    layers = BLOCKS[name]
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    shape = shape_of(program, *tile)
    if shape.held and not shape.fits:  # nothing to hold, or too much
        shape = replace(shape, held=False)
    assert shape.fits
    compare(results(inverted_residual_schedules.of(program, shape), traced), wanted(layers, arguments))


@compiled
def test_pixels_that_are_not_finite_stay_in_their_windows():
    """Neither zeros around the image, nor those beyond the last channel or pixel, meet them."""
    layers = BLOCKS["odd"]
    arguments = layers.arguments()
    arguments[0][0, 3, 5, 1], arguments[0][1, 0, 0, 2], arguments[0][2, 14, 12, 19] = np.nan, np.inf, -np.inf
    program, traced = program_of(layers, arguments)
    with np.errstate(invalid="ignore"):
        want = np.asarray(layers(*arguments))
        for tile in TILES[:2]:
            got = results(inverted_residual_schedules.of(program, shape_of(program, *tile)), traced)
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
            np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05)
    assert 0 < (~np.isfinite(want)).sum() < want.size / 4


@compiled
@pytest.mark.parametrize("images", [2, 4])
def test_several_images_of_a_block(images):
    layers = Layers((5, 7, 7, 16), (3, 3), 48, 24)
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    for chunk, expand, strip in ((16, (4, 1), (7, 1)), (48, (1, 3), (1, 7))):
        shape = shape_of(program, images, 7, 7, chunk, expand, expand, strip)
        assert shape.fits
        compare(results(inverted_residual_schedules.of(program, shape), traced), wanted(layers, arguments))


@compiled
def test_rounded_weights_and_older_units():
    layers = BLOCKS["stride 2"]
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    program = inverted_residual_schedules.of(program, shape_of(program, *TILES[1]))
    compare(results(program, traced, SM80), wanted(layers, arguments, even=False))
    for place in (1, 5):
        arguments[place] = round_tf32(arguments[place])
    program, traced = program_of(layers, arguments, rounded=True)
    program = inverted_residual_schedules.of(program, shape_of(program, *TILES[1]))
    compare(results(program, traced), wanted(layers, arguments))
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    operands = [traced.arguments[traced_number(traced, k)] for k in traced.graph.subset_inputs(traced.everything)]
    for change, fault, what in (
        (("cp.async.wait_group 0;", "cp.async.wait_group 1;"), TensorFault, "under way"),
        (("cvt.rn.tf32.f32", "mov.b32"), TensorFault, "not rounded"),
        (("bar.sync 0;", ""), ptx_machine.Fault, "race"),
    ):
        with pytest.raises(fault, match=what):
            ptx_machine.run_kernel(ptx.replace(*change), kernel, operands)


@compiled
@pytest.mark.parametrize("name", ["odd", "residual", "stride 2"])
def test_what_the_ranking_proposes_is_right(name):
    layers = BLOCKS[name]
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    found = [p for p, _ in inverted_residual_schedules.products(program, MACHINE)]
    assert len(found) > 2
    for candidate in found[::3]:
        compare(results(candidate, traced), wanted(layers, arguments))


def assemble_some(program, target):
    """Most of the first schedules of a block assemble, and take no local memory."""
    found = [p for p, _ in inverted_residual_schedules.products(program, GpuMachine(132, capability=target.capability))]
    assert len(found) > 3
    assert_most_assemble(found[:4], target)


NETWORK = {
    "56": Layers((64, 56, 56, 24), (3, 3), 144, 24, residual=True),
    "56 to 28": Layers((64, 56, 56, 24), (3, 3), 144, 32, (2, 2)),
    "14": Layers((64, 14, 14, 96), (3, 3), 576, 96, residual=True),
    "7 alone": Layers((1, 7, 7, 160), (3, 3), 960, 160),
}


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=lambda t: t.arch)
@pytest.mark.parametrize("name", NETWORK)
def test_candidates_assemble_without_local_memory(name, target):
    layers = NETWORK[name]
    program, _ = program_of(layers, [np.zeros(a.shape, np.float32) for a in layers.arguments()], rounded=True)
    assemble_some(program, target)


def test_refusals():
    layers = BLOCKS["residual"]
    program, _ = program_of(layers, layers.arguments())
    for tile in (
        (1, 8, 4, 24, (2, 1), (2, 1), (4, 2)),
        (1, 8, 4, 16, (2, 1), (1, 1), (4, 2)),
        (2, 4, 4, 16, (2, 1), (2, 1), (4, 4)),
    ):
        with pytest.raises(CompileRejected, match="no block"):
            emit_source(inverted_residual_schedules.of(program, shape_of(program, *tile)))
