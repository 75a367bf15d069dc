"""Products as transformers have them: tiles of widths between powers of two, and the GELU that follows."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy import special

from jcuts.schedule.gpu.gemm import wave_tiles
from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs
from tests.codegen.cuda.gemm.test_mma import compare, compiled, normal, tf32
from tests.codegen.cuda.gemm.test_wgmma import marked, run_rounded
from tests.ptx.tensor_core import round_tf32

FITTED = [
    WgmmaTile(192, 144, 32, (3, 1), 5, rounded=1),
    WgmmaTile(128, 160, 32, (2, 1), 6, rounded=1, steps=0),
    WgmmaTile(128, 224, 32, (2, 1), 5, rounded=1, spread=1, steps=2),
    WgmmaTile(64, 112, 32, (1, 1), 3, cluster=3, rounded=1, push=1, early=1, steps=0),
    WgmmaTile(64, 208, 32, (1, 1), 3, rounded=1),
]
SIZES = [(200, 288, 300), (70, 300, 116)]


def gelu(x):
    return x / 2 * special.erfc(-x * np.sqrt(0.5))


@compiled
@pytest.mark.parametrize("tiling", FITTED, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_tiles_of_any_even_width(size, tiling):
    m, k, n = size
    x, w, b, r = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(n), normal(m, n, seed=2)
    found = run_rounded(lambda x, w, b, r: x @ w.T + b + r, (x, w, b, r), tiling)
    compare(found, [tf32(x) @ w.T.astype(np.float64) + b + r], 3e-6)


@compiled
@pytest.mark.parametrize("scale", [1e-6, 0.3, 2.0])
def test_gelu_behind_a_product(scale):
    """The complement of the error function keeps its relative error in the tail; see `special._coarse_erfc`."""
    x, w = normal(64, 64) * np.float32(scale / 8), round_tf32(normal(48, 64, seed=1))
    y = tf32(x) @ w.T.astype(np.float64)
    (found,) = run_rounded(
        lambda x, w: jax.nn.gelu(x @ w.T, approximate=False), (x, w), WgmmaTile(64, 64, 32, (1, 1), 3, rounded=1)
    )
    wanted = gelu(y)
    error = 1e-6 * np.abs(y).max()  # of sums; it moves small results in the tail by |y| times as much
    tail = np.abs(wanted) * (2e-5 + 2 * np.abs(y) * error)
    allowed = np.where(y < -1, tail, tail + 1.2 * error)
    assert (np.abs(found - wanted) <= allowed).all()
    assert np.abs(y).max() > 2.5 * scale


@compiled
def test_error_functions_of_infinities_and_of_what_overflows():
    x = np.zeros((64, 32), np.float32)
    x[:6, 0] = (np.inf, -np.inf, np.nan, 3e38, -3e38, 12.0)
    w = np.zeros((24, 32), np.float32)
    w[:, 0] = 1
    (found,) = run_rounded(lambda x, w: jax.lax.erfc(x @ w.T), (x, w), WgmmaTile(64, 32, 32, (1, 1), 1, rounded=1))
    np.testing.assert_array_equal(found[:6, 0], np.array([0, 2, np.nan, 0, 2, 0], np.float32))
    np.testing.assert_allclose(found[6:], 1.0, rtol=4e-6)


@pytest.mark.parametrize("terms, columns", [(768, 2304), (3072, 768), (100, 1000)])
def test_fitted_tiles_waste_less(terms, columns):
    """Columns that are left over are fewer than a step per tile; candidates have such tiles where they count less."""
    for wide in wave_tiles.even_widths(columns):
        count = -(-columns // wide)
        assert wide % wave_tiles.STEP == 0 and count * wide - columns < count * wave_tiles.STEP
    x, w = np.zeros((3072, terms), np.float32), np.zeros((columns, terms), np.float32)
    made = marked(programs.trace(lambda x, w: x @ w.T, x, w).product())
    counter = WgmmaProblem(made, GpuMachine(132))
    found = list(gemm_wgmma.tilings(counter))
    best = min(found, key=counter.cycles)
    assert counter.cycles(best) <= min(counter.cycles(t) for t in found if t.columns in (64, 96, 128, 192, 256))
    tiles = [dict(p.params)["tile"] for p, _ in gemm_wgmma.wgmma_schedules(counter)]
    assert (best.rows, best.columns, best.terms) in tiles


def counter_of(m, k, n):
    x, w = np.zeros((m, k), np.float32), np.zeros((n, k), np.float32)
    made = marked(programs.trace(lambda x, w: x @ w.T, x, w).product())
    return WgmmaProblem(made, GpuMachine(132))


def test_tiles_of_known_sizes_are_tried_beside_others():
    known = frozenset(gemm_wgmma.SHAPES)
    for m, k, n in ((3072, 768, 2304), (3072, 768, 768), (3072, 3072, 768)):
        counter = counter_of(m, k, n)
        found = sorted(gemm_wgmma.wgmma_schedules(counter), key=lambda pair: -pair[1])[:4]
        sizes = [(*dict(p.params)["tile"][:2], dict(p.params)["groups"][0]) for p, _ in found]  # type: ignore[index]
        usual = [t for t in gemm_wgmma.tilings(counter) if (t.rows, t.columns, t.groups[0]) in known]
        best = min(usual, key=counter.cycles)
        assert (best.rows, best.columns, best.groups[0]) in sizes
        assert any(size not in known for size in sizes)
