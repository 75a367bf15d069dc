"""Inverted residual blocks of bfloat16, norms in float32, in one kernel, against float64, through the PTX machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.kernel_ir.interpret import interpret
from jcuts.lower.excess_precision import drop_bf16_round_trips
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import kernel_time
from jcuts.schedule.gpu.inverted_residual import schedules as inverted_residual_schedules
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile, shape_of
from tests.codegen.cuda.inverted_residual import test_kernel
from tests.codegen.cuda.inverted_residual.test_kernel import (
    MACHINE,
    SM80,
    SM90,
    TILES,
    Layers,
    compiled,
    product,
    program_of,
    results,
)

LIMIT, OTHER_WAY = 4e-6, 3e-2
"""Allowed errors over the root mean square: of most results, of those for which a value is rounded the other way."""
HALF = jnp.bfloat16


@dataclass(frozen=True)
class Halves(Layers):
    """A block of bfloat16: what follows a sum is computed in float32 and rounded, then cut off.

    ``stored``: the results are rounded, too.
    """

    stored: bool = False

    def arguments(self) -> list[np.ndarray]:
        """Random operands."""
        return [a.astype(HALF) if a.ndim == 4 else a for a in super().arguments()]

    def __call__(self, x, w, b, f, c, v, d, between=lambda y: y.astype(HALF)):
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        numbers = ("NHWC", "OHWI" if self.along else "HWIO", "NHWC")
        if not self.alone:
            first = jax.nn.relu6(between(product(x, w, numbers).astype(wide) * (1 + b * b) + b))
        deep = lax.conv_general_dilated(
            x if self.alone else first,
            f,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            feature_group_count=self.wide,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        deep = jax.nn.relu6(between(deep.astype(wide) + c))
        found = product(deep, v, numbers).astype(wide) + d
        if wide == jnp.float32 and (self.residual or self.stored):
            found = between(found)
        return found + x if self.residual else found  # in bfloat16: kernels round the sum alone


def half(x: Any) -> Any:
    return jnp.asarray(np.asarray(x).astype(HALF).astype(np.float64))


def wanted(layers, arguments):
    """The block in float64, rounded where the program says so, but for sums."""
    with jax.enable_x64(True):
        found = layers(*(jnp.asarray(a.astype(np.float64)) for a in arguments), between=half)
        return np.asarray(half(found) if layers.residual or layers.stored else found)


def compare(got, want):
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want) / np.sqrt(np.mean(np.square(want)))
    assert np.quantile(error, 0.9) < LIMIT and error.max() < OTHER_WAY, (np.quantile(error, 0.9), error.max())


def scheduled(program, shape):
    return inverted_residual_schedules.of(drop_bf16_round_trips(program), shape)


def tile_of(program, tile):
    shape = test_kernel.shape_of(program, *tile)
    if shape.held and not shape.fits:
        shape = InvertedResidualTile(shape.block, *tile[:7])
    assert shape.fits and shape.item == 2
    return shape


BLOCKS = {
    "odd": Halves((3, 15, 13, 20), (3, 3), 20, 26, along=False),
    "odd features": Halves((2, 9, 13, 20), (3, 3), 20, 25, stored=True),
    "odd along terms": Halves((2, 15, 13, 12), (3, 3), 36, 20, stored=True),
    "stride 2": Halves((2, 14, 18, 24), (3, 3), 40, 24, (2, 2)),
    "stride 2 odd": Halves((1, 15, 13, 10), (3, 3), 20, 24, (2, 2), along=False, stored=True),
    "residual": Halves((2, 11, 9, 24), (3, 3), 48, 24, residual=True),
    "residual across": Halves((2, 11, 9, 24), (3, 3), 48, 24, residual=True, along=False),
    "5x5": Halves((1, 10, 12, 16), (5, 5), 32, 34, along=False),
    "without padding": Halves((2, 10, 12, 16), (3, 3), 32, 24, padding="VALID"),
    "uneven padding": Halves((1, 10, 12, 16), (3, 2), 32, 24, (1, 2), padding=((2, 0), (1, 3))),
    "dilation": Halves((1, 12, 12, 16), (3, 3), 32, 24, dilation=(2, 1), along=False),
    "nothing to expand": Halves((2, 11, 9, 20), (3, 3), 20, 24, alone=True),
    "nothing to expand, stride 2": Halves((1, 14, 13, 48), (3, 3), 48, 34, (2, 2), along=False, alone=True),
    "many channels": Halves((2, 7, 7, 88), (3, 3), 64, 72),
}


@compiled
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name, tile):
    layers = BLOCKS[name]
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    got = results(scheduled(program, tile_of(program, tile)), traced)
    assert got.dtype == (HALF if layers.stored or layers.residual else np.float32)
    compare(got, wanted(layers, arguments))


@pytest.mark.parametrize("name", ["stride 2 odd", "uneven padding"])
def test_blocks_keep_their_meaning(name):
    layers = BLOCKS[name]
    program, traced = program_of(layers, layers.arguments())
    operands = [
        traced.arguments[test_kernel.traced_number(traced, t)] for t in traced.graph.subset_inputs(traced.everything)
    ]
    for found in (program, drop_bf16_round_trips(program)):
        (got,) = interpret(found, operands)
        want = wanted(layers, layers.arguments())
        error = np.abs(got.astype(np.float64) - want) / np.sqrt(np.mean(np.square(want)))
        assert error.max() < OTHER_WAY and np.median(error) < OTHER_WAY / 4
    assert drop_bf16_round_trips(program) is not program and drop_bf16_round_trips(
        drop_bf16_round_trips(program)
    ) == drop_bf16_round_trips(program)


@compiled
def test_pixels_that_are_not_finite_stay_in_their_windows():
    """Neither zeros around the image, nor those beyond the last channel or pixel, meet them."""
    layers = BLOCKS["odd"]
    arguments = layers.arguments()
    arguments[0][0, 3, 5, 1], arguments[0][1, 0, 0, 2], arguments[0][2, 14, 12, 19] = np.nan, np.inf, -np.inf
    program, traced = program_of(layers, arguments)
    with np.errstate(invalid="ignore"):
        want = np.asarray(layers(*arguments), np.float32)
        for tile in TILES[:2]:
            got = results(scheduled(program, tile_of(program, tile)), traced)
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    assert 0 < (~np.isfinite(want)).sum() < want.size / 4


@compiled
@pytest.mark.parametrize("images", [2, 4])
def test_several_images_of_a_block(images):
    layers = Halves((5, 7, 7, 16), (3, 3), 48, 24, stored=True)
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    for chunk, expand, strip in ((16, (4, 1), (7, 1)), (48, (1, 3), (1, 7))):
        shape = test_kernel.shape_of(program, images, 7, 7, chunk, expand, expand, strip)
        assert shape.fits
        compare(results(scheduled(program, shape), traced, SM80), wanted(layers, arguments))


@compiled
@pytest.mark.parametrize("name", ["odd", "residual", "stride 2"])
def test_what_the_ranking_proposes_is_right(name):
    layers = BLOCKS[name]
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    found = gpu_candidates.candidates(program, MACHINE, 12)
    assert len(found) > 2
    for candidate, _ in found[::3]:
        compare(results(candidate, traced), wanted(layers, arguments))
        shape = shape_of(candidate)
        assert shape is not None and kernel_time.unit_of(candidate) == "bf16_mma"
        assert inverted_residual_schedules.cycles(shape, MACHINE) >= inverted_residual_schedules.least(
            shape.block, MACHINE
        )


NETWORK = {
    "56": Halves((64, 56, 56, 24), (3, 3), 144, 24, residual=True, along=False),
    "56 to 28": Halves((64, 56, 56, 24), (3, 3), 144, 32, (2, 2), along=False, stored=True),
    "14": Halves((64, 14, 14, 96), (3, 3), 576, 96, residual=True, along=False),
    "first": Halves((64, 112, 112, 32), (3, 3), 32, 16, along=False, alone=True, stored=True),
}


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=lambda t: t.arch)
@pytest.mark.parametrize("name", NETWORK)
def test_candidates_assemble_without_local_memory(name, target):
    layers = NETWORK[name]
    program, _ = program_of(layers, [np.zeros(a.shape, a.dtype) for a in layers.arguments()])
    test_kernel.assemble_some(drop_bf16_round_trips(program), target)


def test_banks_of_what_warps_store_and_read():
    """Stores of fragments and reads of matrices meet every bank once."""
    for along in (True, False):
        layers = Halves((2, 11, 9, 24), (3, 3), 48, 24, along=along)
        program, _ = program_of(layers, layers.arguments())
        for chunk in (16, 32, 48, 64, 96, 128):
            shape = InvertedResidualTile(
                test_kernel.shape_of(program, *TILES[0]).block, 1, 8, 8, chunk, (2, 1), (2, 1), (1, 1)
            )
            for pitch in (shape.patch_pitch, shape.projected_pitch, shape.input_pitch):
                words = [row * pitch // 2 + k for row in range(8) for k in range(4)]
                assert pitch % 8 == 0 and len({word % 32 for word in words}) == 32


def test_strips_of_a_warp_meet_few_banks_twice():
    """Every strip is somebody's, also in the last turn; two strips beside each other would share banks."""
    layers = Halves((1, 28, 28, 16), (3, 3), 192, 16, along=False)
    program, _ = program_of(layers, layers.arguments())
    tiles = (7, 28, (7, 2), 4), (14, 14, (7, 1), 3), (4, 28, (2, 7), 4), (8, 16, (4, 4), 2)
    for rows, columns, strip, warps in tiles:
        shape = test_kernel.shape_of(program, 1, rows, columns, 32, (warps, 1), (warps, 1), strip)
        turns = range(0, shape.strips, shape.groups)
        assert shape.fits and sorted(f + n for f in turns for n in shape.strips_per_pass(f)) == list(
            range(shape.strips)
        )
        starts, count = shape._starts(np.arange(len(shape.strips_per_pass(0)))), len(shape.strips_per_pass(0))
        before, after = (shape._passes(starts, order) for order in (list(range(count)), shape.strips_per_pass(0)))
        least = sum(n for n, _ in starts) * count * shape.words // 32
        assert least <= after <= before and after < 1.8 * least
    shape = test_kernel.shape_of(program, 1, 7, 28, 32, (4, 1), (4, 1), (7, 2))
    assert shape.strips_per_pass(0) == [0, 2, 1, 3, 4, 6, 5, 7]
