"""Tilings of a ``wgmma`` GEMM as arrays: prices, shared memory and registers are those of single tiles, bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.schedule.gpu.gemm import wgmma
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTiles
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs

MACHINE = GpuMachine(132)


def _problem(case: str) -> WgmmaProblem:
    """A product by its operands' kind and extents; ``weights``: pre-rounded ones, ``residual``: with an addition."""
    kind, m, k, n = case.split("-")[0], *(int(x) for x in case.split("-")[1:])
    dtype = jnp.bfloat16 if kind == "bf16" else np.float32
    x, w = np.zeros((m, k), dtype), np.zeros((n, k) if kind in ("weights", "residual") else (k, n), dtype)
    if kind == "conv":
        x, w = np.zeros((8, m, m, k), np.float32), np.zeros((3, 3, k, n), np.float32)
        found = programs.trace(_conv, x, w).product()
    elif kind == "residual":
        found = programs.trace(lambda x, w, y: x @ w.T + y, x, w, np.zeros((m, n), np.float32)).product()
    else:
        found = programs.trace((lambda x, w: x @ w.T) if kind == "weights" else (lambda x, w: x @ w), x, w).product()
    return WgmmaProblem(found, MACHINE)


def _conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


CASES = (
    "f32-4096-1000-520",
    "f32-50176-64-256",
    "bf16-4096-4096-4096",
    "bf16-784-512-128",
    "weights-1536-4096-2816",
    "weights-384-768-768",
    "weights-12544-1024-256",
    "residual-100352-256-64",
    "conv-56-64-64",
)


@pytest.mark.parametrize("case", CASES)
def test_batch_prices_are_those_of_single_tiles(case):
    counter = _problem(case)
    if counter.few:
        counter = counter.small_grid
    tiles = wgmma.tilings(counter)
    assert len(tiles) > 4
    cycles, shared, registers = counter.cycles(tiles), counter.shared(tiles), counter.registers(tiles)
    for place, tile in enumerate(tiles):
        assert counter.cycles(tile) == cycles[place]
        assert counter.shared(tile) == shared[place] and counter.registers(tile) == registers[place]


@pytest.mark.parametrize("case", CASES)
def test_what_fits_is_what_fits_alone(case):
    counter = _problem(case)
    rows = list(wgmma._tiles(counter))
    flags = {"rounded": counter.through, "steps": 1, "early": int(counter.short), "push": int(counter.rounded)}
    every = WgmmaTiles.of_rows(rows, **flags)
    fits = counter.fits(every)
    assert fits.tolist() == [bool(counter.fits(tile)) for tile in every]
    kept = every.take(fits)
    assert list(kept) == [tile for tile, fit in zip(every, fits, strict=True) if fit]


def test_no_tiles_of_a_product_that_is_too_small():
    assert len(wgmma.tilings(_problem("f32-64-64-64"))) == 0
