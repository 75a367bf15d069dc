"""C = alpha A B + beta C in float64 as numba.cuda kernels: `naive`, `tiled` (shared memory), `register_blocked`.

    python benchmarks/mlp/cuda_gemm.py --out DIR           # on a GPU: both shapes, block sizes 4 to 32, the ablation
    NUMBA_ENABLE_CUDASIM=1 python benchmarks/mlp/cuda_gemm.py --out DIR --dry     # numba's simulator, tiny matrices

The course report's kernels (2.1, 4.4).  Tiles lie transposed in shared memory, as its column-major matrices make them;
``coalesced`` lets neighbouring threads read neighbouring elements, ``padding`` adds a column to each tile.  Beside the
times stand the transactions and bank conflicts that `warp_accesses.py` counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numba  # noqa: E402
import numba.cuda  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.mlp.machine import described, written  # noqa: E402
from benchmarks.mlp.report_tables import ALPHA, BETA, BLOCKS, SHAPES  # noqa: E402
from benchmarks.mlp.warp_accesses import BANK_BYTES, counts  # noqa: E402

ROWS = 4
"""Rows of C per thread in `register_blocked`."""
REPEATS = 20
cuda: Any = numba.cuda  # of this module: numba's simulator puts itself in the place of a global
float64: Any = numba.float64
Launch = Callable[[Any, Any, Any, Any], None]
"""(a, b, c, out): row-major arrays on the device."""


def _grid(shape: Sequence[int], rows: int, columns: int) -> tuple[int, int]:
    return -(-shape[1] // columns), -(-shape[0] // rows)


@cache
def naive(block: int) -> Launch:
    """A thread per element of C, everything from global memory."""

    @cuda.jit
    def kernel(alpha: Any, a: Any, b: Any, beta: Any, c: Any, out: Any) -> None:
        j, i = cuda.grid(2)
        if i < out.shape[0] and j < out.shape[1]:
            total = 0.0
            for k in range(a.shape[1]):
                total += a[i, k] * b[k, j]
            out[i, j] = alpha * total + beta * c[i, j]

    return _launch(kernel, block, block)


@cache
def tiled(block: int, coalesced: bool = True, padding: int = 1) -> Launch:
    """A thread per element of C; tiles of A and B in shared memory, transposed."""
    size: int = block
    pitch = block + padding

    @cuda.jit
    def kernel(alpha: Any, a: Any, b: Any, beta: Any, c: Any, out: Any) -> None:
        x = cuda.shared.array((size, pitch), float64)
        y = cuda.shared.array((size, pitch), float64)
        row = cuda.threadIdx.y if coalesced else cuda.threadIdx.x
        column = cuda.threadIdx.x if coalesced else cuda.threadIdx.y
        i = cuda.blockIdx.y * size + row
        j = cuda.blockIdx.x * size + column
        terms = a.shape[1]
        total = 0.0
        for start in range(0, terms, size):
            x[column, row] = a[i, start + column] if i < out.shape[0] and start + column < terms else 0.0
            y[column, row] = b[start + row, j] if j < out.shape[1] and start + row < terms else 0.0
            cuda.syncthreads()
            for k in range(size):
                total += x[k, row] * y[column, k]
            cuda.syncthreads()
        if i < out.shape[0] and j < out.shape[1]:
            out[i, j] = alpha * total + beta * c[i, j]

    return _launch(kernel, block, block)


@cache
def register_blocked(block: int) -> Launch:
    """`ROWS` elements of C per thread in registers: each element of B's tile is read once for all of them."""
    size: int = block
    tall = ROWS * block
    pitch = block + 1

    @cuda.jit
    def kernel(alpha: Any, a: Any, b: Any, beta: Any, c: Any, out: Any) -> None:
        x = cuda.shared.array((tall, pitch), float64)
        y = cuda.shared.array((size, pitch), float64)
        row, column = cuda.threadIdx.y, cuda.threadIdx.x
        top, j = cuda.blockIdx.y * tall + row, cuda.blockIdx.x * size + column
        terms = a.shape[1]
        s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
        for start in range(0, terms, size):
            for part in range(ROWS):
                i = top + part * size
                inside = i < out.shape[0] and start + column < terms
                x[row + part * size, column] = a[i, start + column] if inside else 0.0
            y[row, column] = b[start + row, j] if j < out.shape[1] and start + row < terms else 0.0
            cuda.syncthreads()
            for k in range(size):
                v = y[k, column]
                s0 += x[row, k] * v
                s1 += x[row + size, k] * v
                s2 += x[row + 2 * size, k] * v
                s3 += x[row + 3 * size, k] * v
            cuda.syncthreads()
        for part in range(ROWS):
            i = top + part * size
            total = s0 if part == 0 else s1 if part == 1 else s2 if part == 2 else s3
            if i < out.shape[0] and j < out.shape[1]:
                out[i, j] = alpha * total + beta * c[i, j]

    return _launch(kernel, block, tall)


def _launch(kernel: Any, block: int, rows: int) -> Launch:
    def launch(a: Any, b: Any, c: Any, out: Any) -> None:
        kernel[_grid(out.shape, rows, block), (block, block)](ALPHA, a, b, BETA, c, out)

    return launch


def kernels(blocks: Sequence[int]) -> dict[str, Launch]:
    """All kernels by name, the ablation of coalescing and padding included."""
    found: dict[str, Launch] = {}
    for block in blocks:
        found[f"naive {block}"] = naive(block)
        for coalesced in (False, True):
            for padding in (0, 1):
                name = f"tiled {block}{'' if coalesced else ', not coalesced'}{', padded' if padding else ''}"
                found[name] = tiled(block, coalesced, padding)
        found[f"register_blocked {block}"] = register_blocked(block)
    return found


def study(shape: tuple[int, int, int], blocks: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """By kernel, the shortest seconds of a launch and the relative difference from NumPy in the infinity norm."""
    rows, columns, terms = shape
    i, j, k = np.arange(rows), np.arange(columns), np.arange(terms)
    a, b = np.outer(i, k) / rows, (np.outer(k, j) + 1) / columns
    c = (np.outer(i, j) + 2) / columns
    reference = ALPHA * (a @ b) + BETA * c
    x, y, z = cuda.to_device(a), cuda.to_device(b), cuda.to_device(c)
    found = {}
    for name, launch in kernels(blocks).items():
        out = cuda.to_device(np.full(c.shape, np.nan))
        launch(x, y, z, out)
        cuda.synchronize()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            launch(x, y, z, out)
            cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        off = np.abs(out.copy_to_host() - reference).sum(1).max() / np.abs(reference).sum(1).max()
        found[name] = {"seconds": min(seconds), "difference": float(off)}
        print(f"{name:36s} {1e3 * min(seconds):9.3f} ms  {off:.2e}", flush=True)
    return found


def counted(columns: int) -> list[dict[str, Any]]:
    """The ablation as counts: a row per block size, coalescing, padding and width of banks."""
    return [
        {"block": block, "coalesced": coalesced, "padding": padding, "bank_bytes": width}
        | {"counts": counts(block, coalesced, padding, columns, width)}
        for width in BANK_BYTES
        for block in BLOCKS
        for coalesced in (False, True)
        for padding in (0, 1)
    ]


def main(given: Sequence[str] | None = None) -> None:
    """Runs all kernels and writes ``cuda_gemm.json``; ``--counts`` needs neither GPU nor simulator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="tiny matrices, one block size")
    parser.add_argument("--counts", action="store_true", help="count accesses, launch nothing")
    args = parser.parse_args(given)
    result: dict[str, Any] = described() | {"counts": counted(SHAPES["test 1"][2])}
    if args.counts:
        written(args.out / "cuda_counts.json", result)
        return
    shapes = {"test 1": (9, 10, 7), "test 2": (9, 3, 10)} if args.dry else SHAPES
    blocks, repeats = (BLOCKS[:1], 1) if args.dry else (BLOCKS, REPEATS)
    device = "simulator" if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" else _device()
    tests = {name: study(shape, blocks, repeats) for name, shape in shapes.items()}
    written(args.out / "cuda_gemm.json", result | {"device": device, "tests": tests})


def _device() -> str:
    name = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else name


if __name__ == "__main__":
    main()
