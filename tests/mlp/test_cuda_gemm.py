"""CUDA kernels in numba's simulator; transactions and bank conflicts by hand counts and the course report's numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mlp import cuda_gemm
from benchmarks.mlp.warp_accesses import counts, passes, segments

COLUMNS = 784


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        ([0] * 32, 1),
        (list(range(0, 256, 8)), 8),
        (list(range(8, 264, 8)), 9),
        (list(range(0, 32 * 32, 32)), 32),
        ([28], 2),
    ],
)
def test_segments(addresses: list[int], found: int) -> None:
    assert segments(addresses) == found


@pytest.mark.parametrize(
    ("addresses", "width", "found"),
    [
        ([0] * 32, 8, 1),
        (list(range(0, 256, 8)), 8, 1),
        (list(range(0, 256, 8)), 4, 2),
        (list(range(0, 32 * 256, 256)), 8, 32),
        (list(range(0, 32 * 264, 264)), 8, 1),
    ],
)
def test_passes(addresses: list[int], width: int, found: int) -> None:
    assert passes(addresses, bank_bytes=width) == found


@pytest.mark.parametrize("block", cuda_gemm.BLOCKS)
def test_transactions_equal_the_block_size_before_coalescing(block: int) -> None:
    """Report, 4.4: "global load/store L2 transactions per memory access is always equal to the chosen block size"."""
    assert counts(block, False, 0, COLUMNS)["global load"] == block


def test_the_reports_counts_at_block_size_16() -> None:
    """Report, 4.4: 16 -> 8 transactions; then `BLOCK_SIZE` passes per access, with padding 2."""
    before, coalesced, padded = (counts(16, *flags, COLUMNS) for flags in ((False, 0), (True, 0), (True, 1)))
    assert (before["global load"], coalesced["global load"], padded["global load"]) == (16, 8, 8)
    assert (before["shared store"], coalesced["shared store"], padded["shared store"]) == (2, 16, 2)
    assert (coalesced["shared load of B"], padded["shared load of B"]) == (16, 1)


def test_wide_banks_have_no_conflicts_at_block_size_32() -> None:
    """Report, footnotes 4 and 5."""
    assert counts(32, True, 0, COLUMNS, 8)["shared store"] == 32
    assert counts(32, True, 1, COLUMNS, 8)["shared store"] == 1


def test_kernels_in_the_simulator(tmp_path: Path) -> None:
    command = [sys.executable, cuda_gemm.__file__, "--dry", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"})
    found = json.loads((tmp_path / "cuda_gemm.json").read_text())
    assert found["device"] == "simulator"
    for rows in found["tests"].values():
        assert len(rows) == 6
        assert all(row["difference"] <= 1e-15 for row in rows.values())


def test_counts_need_no_gpu(tmp_path: Path) -> None:
    cuda_gemm.main(["--counts", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "cuda_counts.json").read_text())["counts"]
    assert len(rows) == 2 * 4 * 4
