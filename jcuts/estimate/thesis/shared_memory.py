"""Static shared-memory bank-conflict count (COEF_bc), from a kernel's access pattern before any code exists.

A warp's 32 lanes access 32 banks of 4 bytes.  A bank delivers one word per cycle to every lane that asks for it (lanes
that ask for the same word are served together); different words of one bank take one cycle each.  64-bit loads
are served in two half-warp phases, 128-bit loads in four quarter-warp phases.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.params import FORMATS, Operation, Tiles
from jcuts.estimate.thesis.tables import input_extent, n_load

WARP = 32
_LETTER = {letter: i for i, letter in enumerate("NCHW")}
_ORDER = np.array([[_LETTER[letter] for letter in order] for order in FORMATS])


def bank_conflicts(
    addresses: Any, width: int = 4, *, banks: int = 32, bank_bytes: int = 4, merged: bool = False
) -> np.ndarray:
    """Cycles that one warp-wide load takes, over the cycles that it takes without conflicts.

    Args:
        addresses: byte addresses of the lanes, shape (..., 32); all lanes may ask for the same one.
        width: bytes per lane: up to 4, 8 or 16.
        merged: count cycles (not a ratio) as if the phases of wide loads could overlap: a floor for the true bound.
    Returns: shape (...,): COEF_bc of each row, at least 1.
    Raises: ModelError for another width, a lane count that is not 32, or addresses not aligned to the width.
    Source: thesis 3.2.2, "Shared memory latency"; NVIDIA profiler's counting.
    """
    lanes = np.asarray(addresses, dtype=np.int64)
    if width not in (1, 2, 4, 8, 16) or lanes.shape[-1:] != (WARP,):
        raise ModelError(f"a warp has {WARP} lanes of 1 to 16 bytes, not {lanes.shape[-1:]} of {width}", width=width)
    if np.any(lanes % width):
        raise ModelError(f"addresses are not aligned to {width} bytes", width=width)
    words_per_lane = max(1, width // bank_bytes)
    words = lanes[..., None] // bank_bytes + np.arange(words_per_lane)
    phases = 1 if merged else words_per_lane
    words = words.reshape(*lanes.shape[:-1], phases, -1)
    cycles = _busiest_bank(words, banks)
    return cycles[..., 0] if merged else cycles.sum(axis=-1) / phases


def _busiest_bank(words: np.ndarray, banks: int) -> np.ndarray:
    """Most distinct words that fall on one bank, along the last axis."""
    # sorted by bank, then by word: equal words become neighbours, and a bank's words a run
    key = np.sort((words % banks << 40) | words, axis=-1)
    distinct = np.ones(key.shape, dtype=np.int64)
    distinct[..., 1:] = key[..., 1:] != key[..., :-1]
    bank = key >> 40
    first = np.ones(key.shape, dtype=bool)
    first[..., 1:] = bank[..., 1:] != bank[..., :-1]
    count = np.cumsum(distinct, axis=-1)
    before = np.maximum.accumulate(np.where(first, count - 1, 0), axis=-1)
    return (count - before).max(axis=-1)


def lane_coordinates(op: Operation, tiles: Tiles) -> tuple[np.ndarray, ...]:
    """Which thread tile (n, k, h, w) each lane of a block's first warp computes; arrays of shape (candidates, 32).

    Threads are numbered along W first, then H, K, N.  Lanes beyond the block repeat its last thread.
    """
    counts = [np.atleast_1d(b // t) for b, t in zip(tiles.block, tiles.thread, strict=True)]
    size = max(count.size for count in counts)
    n, k, h, w = (np.broadcast_to(count, size)[:, None] for count in counts)
    lane = np.minimum(np.arange(WARP)[None, :], n * k * h * w - 1)
    return lane // (w * h * k), lane // (w * h) % k, lane // w % h, lane % w


def load_patterns(op: Operation, tiles: Tiles) -> list[tuple[np.ndarray, Any]]:
    """Shared-memory loads of a warp: element offsets per lane, and how often a thread has a load of this pattern.

    Input tiles lie in shared memory in the order FORMAT_shared; a filter tile uses the same order with its output
    channels in the place of N.  Other loads of the same operand are shifted by a constant, which changes no conflict.
    """
    lane_n, lane_k, lane_h, lane_w = lane_coordinates(op, tiles)
    n, k, h, w = (np.atleast_1d(t)[:, None] for t in tiles.thread)
    nb, kb, hb, wb = (np.atleast_1d(b)[:, None] for b in tiles.block)
    channels = np.atleast_1d(tiles.c_input)[:, None] if op.is_complex else kb
    rows, columns = input_extent(hb, op.f_h, op.p_h, op.s_h), input_extent(wb, op.f_w, op.p_w, op.s_w)
    channel = np.zeros_like(lane_n) if op.is_complex else lane_k * k
    here = (lane_n * n, channel, lane_h * h * op.s_h, lane_w * w * op.s_w)
    inputs = _offset(tiles, here, (nb, channels, rows, columns))
    total = n_load(op, *tiles.thread)
    if not op.is_complex:
        return [(inputs, total)]
    zero = np.zeros_like(lane_k)
    f_h, f_w = np.full_like(kb, op.f_h), np.full_like(kb, op.f_w)
    weights = _offset(tiles, (lane_k * k, zero, zero, zero), (kb, channels, f_h, f_w))
    of_weights = tiles.k_thread * op.c * op.f_h * op.f_w
    return [(inputs, total - of_weights), (weights, of_weights)]


def _offset(tiles: Tiles, where: tuple[np.ndarray, ...], sizes: tuple[np.ndarray, ...]) -> np.ndarray:
    """Element offset of NCHW coordinates in a tile of NCHW ``sizes`` stored in the candidates' order."""
    count = max(len(tiles), where[0].shape[0])
    order = _ORDER[np.broadcast_to(np.atleast_1d(tiles.format_shared), count)]
    rows = np.arange(count)
    size = np.stack([np.broadcast_to(s, (count, 1))[:, 0] for s in sizes], axis=1)
    strides = np.ones((count, 4), dtype=np.int64)
    running = np.ones(count, dtype=np.int64)
    for place in (3, 2, 1, 0):
        strides[rows, order[:, place]] = running
        running = running * size[rows, order[:, place]]
    offset = np.zeros((count, WARP), dtype=np.int64)
    for dimension in range(4):
        offset += strides[:, dimension, None] * where[dimension]
    return offset


def coef_bc(op: Operation, tiles: Tiles, *, merged: bool = False) -> np.ndarray:
    """COEF_bc of every candidate: conflicts of its loads, weighted by how often each kind of load occurs.

    Returns: shape (candidates,), at least 1; with ``merged`` cycles per load (see ``bank_conflicts``).
    Source: thesis 3.2.2, "Shared memory latency".
    """
    patterns = load_patterns(op, tiles)
    count = patterns[0][0].shape[0]
    vector = np.broadcast_to(np.atleast_1d(tiles.vector), count)
    total = np.zeros(count)
    weight = np.zeros(count)
    for offsets, often in patterns:
        cost = np.ones(count)
        for lanes in np.unique(vector):
            chosen = vector == lanes
            width = min(16, int(lanes) * op.element_bytes)
            # a wide load starts at a multiple of its own width
            address = offsets[chosen] * op.element_bytes // width * width
            cost[chosen] = bank_conflicts(address, width, merged=merged)
        often = np.broadcast_to(np.atleast_1d(often), count)
        total += often * cost
        weight += often
    return total / weight
