"""Blocked GEMM on a CPU in the thesis' model: register tiles, panels and packing, ranked by PUL."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jcuts.arch.cpu import CpuArch
from jcuts.base.errors import ModelError
from jcuts.estimate.cpu import CpuWork, pul

_KINDS = {2: "bfloat16", 4: "float32", 8: "float64"}
_MAX_ROWS = 16
_MAX_VECTORS = 6
_ROW_STRIPS = (1, 2, 4, 8, 16, 32)
_COLUMN_STRIPS = (1, 2, 4, 8)
_UNPACKED = 0.9
"""Score of reading B where it lies: its rows are far apart, so every step opens new pages and lines."""


@dataclass(frozen=True)
class GemmTile:
    """One tiling of a GEMM (M, K) x (K, N) on a CPU.

    Attributes:
        rows, vectors: register tile: ``rows`` x ``vectors`` vector registers of C.
        block_rows, block_columns: extents of C that one task computes: multiples of the register tile.
        pack_b: whether B is copied into strips of ``vectors`` registers' width first.
        pul: ranking score in [0, 1].
    """

    rows: int
    vectors: int
    block_rows: int
    block_columns: int
    pack_b: bool
    pul: float


def gemm_work(
    m: int,
    n: int,
    k: int,
    arch: CpuArch,
    *,
    rows: int,
    vectors: int,
    block_rows: int,
    block_columns: int,
    dtype_bytes: int = 4,
) -> CpuWork:
    """Work and traffic of a GEMM with given tiles.

    A strip of B (K x vectors registers) stays in a core's L1 while all row strips of a task pass by it:

        L2 bytes = A read once per column strip + B read once per row block

    Raises: ModelError if an extent is not positive, or for an element size without a GEMM.
    """
    if min(m, n, k, rows, vectors, block_rows, block_columns) < 1 or dtype_bytes not in _KINDS:
        raise ModelError(f"a GEMM of M={m}, N={n}, K={k} with {dtype_bytes}-byte elements is impossible", m=m, n=n, k=k)
    width = vectors * arch.lanes(dtype_bytes)
    full = (m // block_rows) * (n // block_columns)
    covered = full * block_rows * block_columns / (m * n)
    row_blocks, column_strips = math.ceil(m / block_rows), math.ceil(n / width)
    return CpuWork(
        flop={_KINDS[dtype_bytes]: 2.0 * m * n * k},
        input_bytes=float(m * k + k * n) * dtype_bytes,
        output_bytes=float(m * n) * dtype_bytes,
        l2_bytes=float(m * k * column_strips + k * n * row_blocks) * dtype_bytes,
        panel_bytes=float(k * width * dtype_bytes),
        tiles=full if full else math.ceil(m / block_rows) * math.ceil(n / block_columns),
        edge_share=max(0.0, 1.0 - covered) if full else 0.0,
        rows=rows,
        vectors=vectors,
        vector_extent=n,
        dtype_bytes=dtype_bytes,
    )


def gemm_tiles(
    m: int,
    n: int,
    k: int,
    arch: CpuArch,
    dtype_bytes: int = 4,
    *,
    percent: float = 1.0,
    least: int = 8,
    constant_b: bool = True,
) -> list[GemmTile]:
    """Candidates for (M, K) x (K, N), best first: the top ``percent`` by PUL, at least ``least`` of them (or all).

    Register tiles whose accumulators do not fit the register file are left out (rows * vectors + vectors + 1).

    Args: constant_b: B is a weight that is packed once and for all; otherwise packing costs its traffic.
    Returns: never empty.
    Raises: ModelError if an extent is not positive.
    """
    if min(m, n, k) < 1:
        raise ModelError(f"a GEMM of M={m}, N={n}, K={k} is impossible", m=m, n=n, k=k)
    if not 0 < percent <= 100 or least < 1:
        raise ModelError(f"percent={percent} must be in (0, 100] and least={least} at least 1", percent=percent)
    found = [
        tile
        for rows in range(1, min(m, _MAX_ROWS) + 1)
        for vectors in range(1, min(math.ceil(n / arch.lanes(dtype_bytes)), _MAX_VECTORS) + 1)
        if rows * vectors + vectors + 1 <= arch.vector_registers
        for tile in _with_register_tile(m, n, k, arch, dtype_bytes, rows, vectors, constant_b)
    ]
    # equal scores: larger register tiles and larger tasks first, packed before unpacked
    found.sort(key=lambda t: (-t.pul, -t.rows * t.vectors, -t.block_rows * t.block_columns, not t.pack_b, -t.rows))
    return found[: min(len(found), max(least, math.ceil(len(found) * percent / 100)))]


def _with_register_tile(
    m: int, n: int, k: int, arch: CpuArch, dtype_bytes: int, rows: int, vectors: int, constant_b: bool
) -> list[GemmTile]:
    width = vectors * arch.lanes(dtype_bytes)
    block_rows = sorted({min(rows * strips, math.ceil(m / rows) * rows) for strips in _ROW_STRIPS})
    block_columns = sorted({min(width * strips, math.ceil(n / width) * width) for strips in _COLUMN_STRIPS})
    found: list[GemmTile] = []
    for high in block_rows:
        for wide in block_columns:
            work = gemm_work(
                m, n, k, arch, rows=rows, vectors=vectors, block_rows=high, block_columns=wide, dtype_bytes=dtype_bytes
            )
            # a last strip of rows computes lines that nobody asked for
            score = pul(work, arch) * m / (math.ceil(m / rows) * rows)
            seconds = 2.0 * m * n * k / arch.peak(_KINDS[dtype_bytes])
            copied = 0.0 if constant_b else 2.0 * k * n * dtype_bytes / arch.measured("l3")
            found.append(GemmTile(rows, vectors, high, wide, True, score * seconds / (seconds + copied)))
            strided = k * n * dtype_bytes > arch.l1d and n > width
            found.append(GemmTile(rows, vectors, high, wide, False, score * (_UNPACKED if strided else 1.0)))
    return found
