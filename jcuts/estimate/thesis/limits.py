"""Hard resource limits of a candidate (COEF_r, thesis 3.2.2): registers, shared memory and threads of the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from jcuts.arch.gpu import GpuArch
from jcuts.estimate.thesis.params import FORMATS, Operation, Tiles, check_formula
from jcuts.estimate.thesis.tables import ceil_div, input_extent

MMA_LANES = 32
"""Threads that share one "thread" tile with tensor cores: the tile belongs to a warp."""

REGISTER_OVERHEAD = 10
"""Registers for addresses, indices and loop counters that no kernel goes without: a floor."""

_FASTEST = np.array(["NCHW".index(order[-1]) for order in FORMATS])


def lanes_per_tile(unit: str) -> int:
    """Threads per thread tile: 1, or a warp for tensor cores."""
    return MMA_LANES if unit.endswith("_mma") else 1


def num_thread(tiles: Tiles, *, unit: str = "ffma") -> Any:
    """NUM_thread: threads of a block, the product of block over thread extents."""
    threads: Any = lanes_per_tile(unit)
    for block, thread in zip(tiles.block, tiles.thread, strict=True):
        threads = threads * (block // thread)
    return threads


def size_shared(op: Operation, tiles: Tiles, *, formula: str = "corrected") -> Any:
    """SIZE_shared: bytes of shared memory of a block: the input tile and the filter tile of one iteration.

    A prefetching candidate holds two iterations (corrected); the thesis keeps the next one in registers (printed).
    """
    check_formula(formula)
    # no misprint to reproduce: the thesis gives no formula for this size
    rows = input_extent(tiles.h_block, op.f_h, op.p_h, op.s_h)
    columns = input_extent(tiles.w_block, op.f_w, op.p_w, op.s_w)
    if op.is_complex:
        elements = tiles.n_block * tiles.c_input * rows * columns
        elements = elements + tiles.k_block * tiles.c_input * op.f_h * op.f_w
    else:
        elements = tiles.n_block * tiles.k_block * rows * columns * (2 if op.kind == "binary" else 1)
        if op.kind == "batch_norm":
            elements = elements + 3 * tiles.k_block
    stages = 1 + tiles.prefetch if formula == "corrected" else 1
    return elements * stages * op.element_bytes


def registers(op: Operation, tiles: Tiles, *, unit: str = "ffma") -> Any:
    """Lower bound on a thread's registers: its accumulators, one operand row, and ``REGISTER_OVERHEAD``.

    Accumulators are single precision (double for 8-byte elements).  With tensor cores a warp shares them.
    """
    n, k, h, w = tiles.thread
    words = max(1, op.element_bytes // 4)
    lanes = lanes_per_tile(unit)
    accumulators = ceil_div(n * k * h * w * words, lanes)
    operands = ceil_div(np.minimum(k, n * h * w) * words, lanes) if op.is_complex else 1
    return accumulators + operands + REGISTER_OVERHEAD


def violations(
    op: Operation, tiles: Tiles, arch: GpuArch, *, unit: str = "ffma", formula: str = "corrected"
) -> dict[str, np.ndarray]:
    """For every hard limit a boolean array: which candidates break it.

    Keys: ``threads``, ``shared``; and in the corrected form ``registers_thread``, ``registers_sm``, ``vector`` (a
    thread's loads along the fastest dimension are no multiple of it), ``c_input`` (more than the reduction has).
    """
    check_formula(formula)
    threads = np.atleast_1d(num_thread(tiles, unit=unit))
    shared = np.atleast_1d(size_shared(op, tiles, formula=formula))
    if formula == "printed":
        # the print says "<": a block that exactly fills a limit is refused
        return {"threads": threads >= arch.max_thread, "shared": shared >= arch.max_shared}
    need = np.atleast_1d(registers(op, tiles, unit=unit))
    per_warp = ceil_div(need * arch.warp_size, 256) * 256
    warps = ceil_div(threads, arch.warp_size)
    channels = tiles.c_input if op.is_complex else tiles.k_thread
    columns = (np.atleast_1d(x) for x in (tiles.n_thread, channels, tiles.h_thread, tiles.w_thread))
    lengths = np.stack(np.broadcast_arrays(*columns, np.empty(len(tiles)))[:4]).astype(np.int64)
    fastest = np.broadcast_to(_FASTEST[np.atleast_1d(tiles.format_shared)], lengths.shape[1:])
    run = lengths[fastest, np.arange(lengths.shape[1])]
    vector = np.atleast_1d(tiles.vector)
    return {
        "threads": threads > arch.max_thread,
        "shared": shared > arch.max_shared,
        "registers_thread": need > arch.registers_per_thread,
        "registers_sm": warps * per_warp > arch.registers_per_sm,
        "vector": (run % vector != 0) | (vector * op.element_bytes > 16),
        "c_input": np.atleast_1d(tiles.c_input) > (op.c if op.is_complex else 1),
    }


def coef_r(op: Operation, tiles: Tiles, arch: GpuArch, *, unit: str = "ffma", formula: str = "corrected") -> np.ndarray:
    """COEF_r: 1.0 where a candidate fits the hardware, else 0.0; shape (candidates,).

        printed    NUM_thread < MAX_thread  and  SIZE_shared < MAX_shared
        corrected  <= in both, and registers per thread and per multiprocessor, and legal vector loads

    Source: thesis 3.2.2, "Limitation of hardware resources".
    """
    broken = violations(op, tiles, arch, unit=unit, formula=formula)
    count = max(len(tiles), 1)
    fits = np.ones(count, dtype=bool)
    for mask in broken.values():
        fits &= ~np.broadcast_to(mask, count)
    return fits.astype(np.float64)
