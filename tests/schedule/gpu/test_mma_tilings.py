"""Tilings of a GEMM: consistent with the ``mma`` kernel, and vectorised as an enumeration tile by tile would be."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.codegen.cuda.gemm.mma_mainloop import product_shape
from jcuts.estimate import time_model
from jcuts.lower.patterns.gemm import as_gemm, k_tiles_per_split
from jcuts.schedule.gpu.gemm import cost_mma, mma, smem_layout_f64
from jcuts.schedule.gpu.gemm.problem import GemmProblem, MmaTile, MmaTiles
from jcuts.schedule.gpu.machine import WARP, GpuMachine
from tests import programs

MACHINE = GpuMachine(132)
exact_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@pytest.mark.parametrize(("m", "k", "n"), [(33, 200, 48), (16, 1000, 40), (64, 512, 136)])
def test_every_tiling_is_consistent(m, k, n):
    args = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    program = as_gemm(programs.trace(lambda a, b: a @ b, *args).program())
    assert program is not None
    tiles = mma.tilings(GemmProblem(program, MACHINE))
    found = [tiles.tile(n) for n in range(len(tiles))]
    assert {t.cluster > 1 for t in found} == {t.warps[2] > 1 for t in found} == {True, False}
    for tiling in found:
        shape = product_shape(tiling.of(program))  # it rejects what does not fit together
        assert (shape.cluster, shape.threads) == (tiling.cluster, tiling.threads)
        assert shape.share * shape.left.terms * (tiling.cluster - 1) < k  # no block without a k


def _conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _problem(case: str) -> GemmProblem:
    """A product of odd extents, of each arithmetic and layout."""
    kind, m, k, n = case.split("-")[0], *(int(x) for x in case.split("-")[1:])
    dtype = {"bf16": jnp.bfloat16, "f64": np.float64}.get(kind, np.float32)
    left, right = np.zeros((m, k), dtype), np.zeros((k, n), dtype)
    if kind == "conv":
        left, right = np.zeros((2, 9, m, k), np.float32), np.zeros((3, 3, k, n), np.float32)
    if kind == "transposed":
        left, right = left.T.copy(), right.T.copy()
    function = {
        "conv": _conv,
        "transposed": lambda a, b: a.T @ b.T,
        "fma": exact_product,
        "bias": lambda a, b: a @ b + a[:, :n],
    }.get(kind, jnp.matmul)
    with jax.enable_x64(kind == "f64"):
        program = as_gemm(programs.trace(function, left, right).program(), exact=kind in ("fma", "f64"))
    assert program is not None
    return GemmProblem(program, MACHINE, fma=int(kind == "fma"))


CASES = (
    "f32-33-200-48",
    "f32-1000-72-1000",
    "f32-50176-96-24",
    "transposed-100-60-36",
    "bf16-520-1032-264",
    "bf16-17-4096-40",
    "fma-100-333-52",
    "fma-640-64-200",
    "f64-96-130-72",
    "conv-7-16-20",
    "bias-130-144-68",
)


@pytest.mark.parametrize("case", CASES)
def test_batch_prices_are_those_of_single_tiles(case):
    counter = _problem(case)
    tiles = mma.tilings(counter)
    assert len(tiles) > 20
    prices = cost_mma.warp_times(counter, tiles)
    values: Any = prices.value
    for place in {*range(0, len(tiles), 1 + len(tiles) // 400), len(tiles) - 1}:
        plain = cost_mma.warp_time(counter, tiles.tile(place))
        assert plain.value == values[place]
        picked = time_model.of_schedule(prices, place)
        assert time_model.text(picked) == time_model.text(plain)
        assert time_model.amounts(picked) == time_model.amounts(plain)


@pytest.mark.parametrize("case", CASES)
def test_enumeration_is_that_of_nested_loops(case):
    counter = _problem(case)
    tiles = mma.tilings(counter)
    assert [tiles.tile(n) for n in range(len(tiles))] == list(_nested_loops(counter))


@pytest.mark.parametrize("case", CASES)
def test_the_fastest_of_every_kind_of_tile(case):
    counter = _problem(case)
    tiles = mma.tilings(counter)
    cycles = np.round(cost_mma.warp_times(counter, tiles).value, -3)  # many are equal
    best: dict[tuple[int, ...], tuple[float, int]] = {}
    for place, spent in enumerate(cycles.tolist()):
        tile = tiles.tile(place)
        kind = (tile.rows, tile.columns, tile.warps[2], tile.split, tile.cluster)
        if kind not in best or spent < best[kind][0]:
            best[kind] = spent, place
    assert mma._best_of_kinds(tiles, cycles) == sorted(best.values(), key=lambda found: found[0])


def test_no_tiling():
    nothing = np.zeros(0, np.int64)
    tiles = MmaTiles(nothing, nothing, nothing, (nothing, nothing, nothing), nothing, nothing, nothing)
    assert mma._best_of_kinds(tiles, np.zeros(0)) == []
    prices: Any = cost_mma.warp_times(_problem(CASES[0]), tiles).value
    assert prices.shape == (0,)


def _nested_loops(counter: GemmProblem):
    """The enumeration, a tile at a time."""
    left, right = counter.sides
    kinds = mma.FMA_TILES if counter.fma else mma.TILES
    most = WARP * (mma.FMA_TOTALS if counter.fma else mma.TOTALS)
    space = (kinds, kinds, mma.WARP_TILES, mma.WARP_TILES, mma.DEEP, mma.TERMS)
    ways = [*((s, 1) for s in mma.SPLITS if s == 1 or not counter.double), *((1, c) for c in mma.CLUSTERS)]
    for rows, columns, high, wide, deep, size in itertools.product(*space):
        terms = size // left.item
        sizes = ((rows, counter.rows), (columns, counter.columns))
        if any(tile != kinds[0] and tile >= 2 * extent for tile, extent in sizes):
            continue
        if rows % high or columns % wide or size % (counter.step * deep) or high * wide > most:
            continue
        if counter.double and high * wide < smem_layout_f64.LEAST:
            continue
        warps = (rows // high, columns // wide, deep)
        if not 2 <= math.prod(warps) <= (16 if deep > 1 else 8) or (terms > counter.terms and size > mma.TERMS[0]):
            continue
        if any(side.run % terms and side.run != counter.terms for side in counter.sides):
            continue
        if any((terms if s.along_terms else across) % s.width for s, across in ((left, rows), (right, columns))):
            continue
        few = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns) < 2 * MACHINE.sms
        for stages, (split, cluster) in itertools.product(mma.STAGES, ways):
            share, groups = k_tiles_per_split(counter.terms, terms, split * cluster)
            if split * cluster > 1 and (not few or share < 2):
                continue
            if groups != split * cluster or stages > share + 1 or (stages == 2 and share > 1):
                continue
            tile = MmaTile(rows, columns, terms, warps, stages, split, cluster, fma=counter.fma)
            if cost_mma.block_smem(counter, tile) > mma.MOST_SHARED or not _fits_registers(counter, tile):
                continue
            yield tile


def _fits_registers(counter: GemmProblem, tile: MmaTile) -> bool:
    if not (counter.fma or counter.double):
        return True
    places = 0.0
    for side, size, extent in zip(
        counter.sides, (tile.rows, tile.columns), (counter.rows, counter.columns), strict=True
    ):
        apart = bool(side.guards) or side.index.stride(side.outer) is None or extent % size > 0
        places += size * tile.terms / side.width / tile.threads if apart and side.along_terms else 0.0
    if counter.double and tile.threads > mma.MOST_THREADS:
        return False
    most = mma.FMA_MOST if counter.fma else mma.DOUBLE_MOST
    return cost_mma.registers_of(counter, tile) + mma.PLACE * places <= most
