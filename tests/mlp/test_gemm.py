"""GEMM with alpha and beta in float64: loops and jcuts' schedules against extended precision, uneven edges included."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jcuts
from benchmarks.mlp import gemm, gemm_loops
from benchmarks.mlp.network import difference

UNEVEN = (13, 10, 19)
MOST = 1e-15
"""Relative difference in the infinity norm, as the report's."""


@pytest.mark.parametrize("operands", gemm.OPERANDS)
@pytest.mark.parametrize("shape", [UNEVEN, (1, 1, 1), (32, 32, 32)])
def test_loops(shape: tuple[int, int, int], operands: str) -> None:
    given = gemm.problem(shape, operands)
    exact = given.exact()
    assert gemm.infinity_difference(given.reference, exact) < MOST
    loops = [gemm_loops.naive(False), *(gemm_loops.in_tiles(f, b, False) for f in gemm_loops.TILED for b in (4, 8))]
    for loop in loops:
        assert gemm.infinity_difference(gemm.loop_call(loop, given)(), exact) < MOST


def test_block_sizes_must_fit_registers() -> None:
    with pytest.raises(ValueError, match="6 is no multiple of 4"):
        gemm_loops.in_tiles("tiled", 6)


def test_operands_of_the_course_program() -> None:
    given = gemm.problem((4, 5, 3))
    assert (given.a[2, 1], given.b[2, 3], given.c[3, 4]) == (2 * 1 / 4, (2 * 3 + 1) / 5, (3 * 4 + 2) / 5)
    assert np.allclose(given.reference, 2 * given.a @ given.b + 5 * given.c, rtol=1e-14)


@pytest.mark.parametrize("shape", gemm.SHAPES.values())
def test_jcuts_kernel_at_the_reports_shapes(shape: tuple[int, int, int]) -> None:
    with jax.enable_x64(True):
        given = gemm.problem(shape)
        ranked = gemm.schedules(given)
        alone = np.asarray(gemm.kernel_call(ranked[0], given)())
        ours = jcuts.optimize(gemm.in_parts, mode="fusion", tune="off")
        found = np.asarray(ours(given.a, given.b, given.c))
    assert found.dtype == np.float64
    assert difference(found, given.reference)["max"] <= MOST
    # One sum of K terms in order rounds more: K terms of one sign err by sqrt(K) half units in the last place, about.
    assert difference(alone, given.reference)["max"] <= np.sqrt(shape[2]) * 2**-53
    for block in gemm.BLOCKS:
        assert all(max(gemm.register_tile(p)) <= block for p in gemm.of_block(ranked, block))
    assert any(gemm.of_block(ranked, block) for block in gemm.BLOCKS)  # which, vectors and columns decide


def test_the_command(tmp_path: Path) -> None:
    gemm.main(["--dry", "--out", str(tmp_path)])
    tests = json.loads((tmp_path / "gemm.json").read_text())["tests"]
    assert set(tests) == set(gemm.SHAPES)
    for test in tests.values():
        names = set(test["rows"])
        assert names >= {"OpenBLAS dgemm", "jcuts.optimize", "naive", gemm.OURS, "tiled 8", "register_blocked 4"}
        assert any(name.startswith("jcuts kernel") for name in names)
        assert all(row["difference"] <= MOST and row["seconds"][0] > 0 for row in test["rows"].values())
