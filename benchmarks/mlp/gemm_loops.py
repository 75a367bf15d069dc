"""C = alpha A B + beta C as numba loops on a CPU: `naive`, `tiled` (copied tiles) and `register_blocked`.

The CPU's counterparts of the course report's kernels (2.1): a tile of A and one of B are copied into small arrays, as a
thread block copies them to shared memory; in `register_blocked` 4 x 4 sums stay in registers while the tiles are
read.  A thread has a strip of ``block`` rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

Gemm = Callable[[float, np.ndarray, np.ndarray, float, np.ndarray, np.ndarray], None]
"""(alpha, a, b, beta, c, result), all row-major float64."""
MICRO = 4
"""Rows and columns of sums in registers."""
prange: Any = numba.prange


def _naive(alpha: float, a: Any, b: Any, beta: float, c: Any, out: Any) -> None:
    rows, terms = a.shape
    for i in prange(rows):
        for j in range(b.shape[1]):
            total = 0.0
            for k in range(terms):
                total += a[i, k] * b[k, j]
            out[i, j] = alpha * total + beta * c[i, j]


def _copied(source: Any, row: int, column: int, tile: Any) -> None:
    """A tile of a matrix; zeros beyond its edges."""
    rows, columns = min(tile.shape[0], source.shape[0] - row), min(tile.shape[1], source.shape[1] - column)
    tile[:] = 0.0
    for i in range(rows):
        for j in range(columns):
            tile[i, j] = source[row + i, column + j]


def _product(x: Any, y: Any, sums: Any) -> None:
    """Adds x y to sums, in memory."""
    size = x.shape[0]
    for i in range(size):
        for k in range(size):
            for j in range(size):
                sums[i, j] += x[i, k] * y[k, j]


def _product_in_registers(x: Any, y: Any, sums: Any) -> None:
    """Adds x y to sums, 4 x 4 sums at a time in scalars."""
    size = x.shape[0]
    for i in range(0, size, 4):
        for j in range(0, size, 4):
            s00, s01, s02, s03 = sums[i, j], sums[i, j + 1], sums[i, j + 2], sums[i, j + 3]
            s10, s11, s12, s13 = sums[i + 1, j], sums[i + 1, j + 1], sums[i + 1, j + 2], sums[i + 1, j + 3]
            s20, s21, s22, s23 = sums[i + 2, j], sums[i + 2, j + 1], sums[i + 2, j + 2], sums[i + 2, j + 3]
            s30, s31, s32, s33 = sums[i + 3, j], sums[i + 3, j + 1], sums[i + 3, j + 2], sums[i + 3, j + 3]
            for k in range(size):
                y0, y1, y2, y3 = y[k, j], y[k, j + 1], y[k, j + 2], y[k, j + 3]
                v = x[i, k]
                s00, s01, s02, s03 = s00 + v * y0, s01 + v * y1, s02 + v * y2, s03 + v * y3
                v = x[i + 1, k]
                s10, s11, s12, s13 = s10 + v * y0, s11 + v * y1, s12 + v * y2, s13 + v * y3
                v = x[i + 2, k]
                s20, s21, s22, s23 = s20 + v * y0, s21 + v * y1, s22 + v * y2, s23 + v * y3
                v = x[i + 3, k]
                s30, s31, s32, s33 = s30 + v * y0, s31 + v * y1, s32 + v * y2, s33 + v * y3
            sums[i, j], sums[i, j + 1], sums[i, j + 2], sums[i, j + 3] = s00, s01, s02, s03
            sums[i + 1, j], sums[i + 1, j + 1], sums[i + 1, j + 2], sums[i + 1, j + 3] = s10, s11, s12, s13
            sums[i + 2, j], sums[i + 2, j + 1], sums[i + 2, j + 2], sums[i + 2, j + 3] = s20, s21, s22, s23
            sums[i + 3, j], sums[i + 3, j + 1], sums[i + 3, j + 2], sums[i + 3, j + 3] = s30, s31, s32, s33


_copy = numba.njit(_copied)
_PRODUCTS = {"tiled": numba.njit(_product), "register_blocked": numba.njit(_product_in_registers)}
TILED = tuple(_PRODUCTS)


@cache
def naive(parallel: bool = True) -> Gemm:
    """Every element's sum on its own. Args: parallel: rows are divided among threads."""
    return numba.njit(parallel=parallel)(_naive)


@cache
def in_tiles(form: str, block: int, parallel: bool = True) -> Gemm:
    """``tiled`` or ``register_blocked`` with tiles of block x block elements.

    Raises: ValueError if ``block`` is no multiple of `MICRO`.
    """
    if block % MICRO:
        raise ValueError(f"block size {block} is no multiple of {MICRO}")
    product = _PRODUCTS[form]

    def gemm(alpha: float, a: Any, b: Any, beta: float, c: Any, out: Any) -> None:
        rows, terms = a.shape
        columns = b.shape[1]
        for strip in prange((rows + block - 1) // block):
            x, y, sums = np.empty((block, block)), np.empty((block, block)), np.empty((block, block))
            top = strip * block
            for left in range(0, columns, block):
                sums[:] = 0.0
                for k in range(0, terms, block):
                    _copy(a, top, k, x)
                    _copy(b, k, left, y)
                    product(x, y, sums)
                for i in range(min(block, rows - top)):
                    for j in range(min(block, columns - left)):
                        out[top + i, left + j] = alpha * sums[i, j] + beta * c[top + i, left + j]

    return numba.njit(parallel=parallel)(gemm)
