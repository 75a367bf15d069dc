"""Search space of Table 3.3 with two-stage pruning: hard limits first, then the model's top T percent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np

from jcuts.arch.gpu import GpuArch
from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.limits import lanes_per_tile, violations
from jcuts.estimate.thesis.params import FORMATS, Operation, Tiles
from jcuts.estimate.thesis.pul import estimate

MAX_THREAD_TILE = 256
"""Outputs of one thread beyond which the accumulators alone leave the register file."""

_MAX_SHAPES = 20_000

_BLOCK_MULTIPLES = (1, 2, 3, 4, 6, 7, 8, 14, 16, 28, 32, 64, 128)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to the first one that is not below ``limit``: a tile may overhang its edge once."""
    found = [1]
    while found[-1] < limit:
        found.append(found[-1] * 2)
    return found


def distinct_formats(op: Operation) -> list[int]:
    """Indices into ``FORMATS`` without orders that differ only in dimensions of extent one.

    Of equal orders one is taken whose fastest dimension is longer than one: vector loads run along it.
    """
    sizes = {"N": op.n, "C": op.c if op.is_complex else op.k, "H": op.h + op.f_h - 1, "W": op.w + op.f_w - 1}
    seen: dict[str, int] = {}
    for index, order in enumerate(FORMATS):
        reduced = "".join(letter for letter in order if sizes[letter] > 1)
        if not reduced or order[-1] == reduced[-1]:
            seen.setdefault(reduced, index)
    return sorted(seen.values())


def enumerate_tiles(
    op: Operation,
    arch: GpuArch,
    *,
    unit: str = "ffma",
    max_candidates: int = 200_000,
    vectors: Iterable[int] = (1, 2, 4),
) -> Tiles:
    """Candidates for one operation that pass every hard limit.

    Thread tiles are powers of two, block tiles multiples of them; C_input powers of two (or all of C); every distinct
    FORMAT_shared; both looping variants where there is a loop; vector widths.  A space larger than ``max_candidates``
    is thinned by a draw that is the same every time.  The smallest tile, one output per thread, is always a candidate.

    Raises: ModelError if not even that fits the device (attributes ``limits``).
    Source: thesis 3.2.1.
    """
    if max_candidates < 1:
        raise ModelError(f"max_candidates={max_candidates} must be at least 1", max_candidates=max_candidates)
    shapes = _tile_shapes(op, arch, unit)
    loops = _loops(op)
    formats = distinct_formats(op)
    widths = sorted(set(vectors))
    choices = [len(shapes), len(loops), len(formats), len(widths)]
    total = math.prod(choices)
    # hard limits thin the list further on, so twice as many are drawn
    index = _draw(total, 2 * max_candidates)
    shape, loop, layout, width = np.unravel_index(index, choices)
    last = np.stack([np.asarray(formats)[layout], np.asarray(widths)[width]], axis=1)
    columns = np.concatenate([shapes[shape], loops[loop], last], axis=1)
    fits = np.ones(len(index), dtype=bool)
    for broken in violations(op, _tiles(columns), arch, unit=unit).values():
        fits &= ~broken
    columns = columns[fits]
    room = max_candidates - 1
    if len(columns) > room:
        columns = columns[_draw(len(columns), room)]
    smallest = _smallest(op, arch, unit)
    if not (columns == smallest).all(axis=1).any():
        columns = np.concatenate([columns, smallest])
    return _tiles(columns)


def prune(
    op: Operation,
    tiles: Tiles,
    arch: GpuArch,
    *,
    percent: float = 1.0,
    least: int = 8,
    unit: str = "ffma",
    formula: str = "corrected",
) -> np.ndarray:
    """Indices of the candidates that survive both prunings, best first.

    Hard limits (COEF_r = 0) first; of the rest the top ``percent`` by PUL, but no fewer than ``least`` where there are
    as many.  Ties keep the order of enumeration, so the result is the same on every machine.

    Returns: never empty.
    Raises: ModelError if the list is empty, or nothing in it fits the device (``limits``: how many broke what).
    Source: thesis 3.1 (T = 1) and 3.2.3.
    """
    if not 0 < percent <= 100 or least < 1:
        raise ModelError(f"percent={percent} must be in (0, 100] and least={least} at least 1", percent=percent)
    if len(tiles) == 0:
        raise ModelError("there are no candidates to prune", candidates=0)
    found = estimate(op, tiles, arch, unit=unit, formula=formula)
    alive = np.flatnonzero(found.r > 0)
    if alive.size == 0:
        broken = violations(op, tiles, arch, unit=unit, formula=formula)
        counts = {name: int(mask.sum()) for name, mask in broken.items()}
        raise ModelError(f"none of {len(tiles)} candidates fits {arch.name}: limits broken: {counts}", limits=counts)
    return top_percent(found.pul, alive, percent, least)


def top_percent(scores: np.ndarray, alive: np.ndarray, percent: float, least: int) -> np.ndarray:
    """The best ``percent`` of the ``alive`` indices by score, at least ``least`` of them (or all), best first."""
    keep = min(alive.size, max(least, math.ceil(alive.size * percent / 100)))
    return alive[np.argsort(-scores[alive], kind="stable")[:keep]]


def _draw(total: int, wanted: int) -> np.ndarray:
    """Sorted indices below ``total``: all of them, or ``wanted`` drawn with a fixed seed.

    Equal steps would not do: they lock onto the strides of the enumeration and miss whole values of a parameter.
    """
    if total <= wanted:
        return np.arange(total)
    if wanted <= 0:
        return np.zeros(0, dtype=np.int64)
    return np.sort(np.random.default_rng(20210611).choice(total, size=wanted, replace=False, shuffle=False))


def _tile_shapes(op: Operation, arch: GpuArch, unit: str) -> np.ndarray:
    """Rows of (block N, K, H, W, thread N, K, H, W) whose thread count and thread tile are possible."""
    lanes = lanes_per_tile(unit)
    per_axis: list[list[tuple[int, int]]] = []
    for size in (op.n, op.k, op.h, op.w):
        pairs = []
        for thread in powers_of_two(min(size, MAX_THREAD_TILE * lanes)):
            for multiple in _BLOCK_MULTIPLES:
                # no block reaches further than one thread tile beyond the edge
                if thread * (multiple - 1) < size:
                    pairs.append((thread * multiple, thread))
        per_axis.append(pairs)
    rows = np.zeros((1, 0), dtype=np.int64)
    for axis, pairs in enumerate(per_axis):
        table = np.asarray(pairs, dtype=np.int64)
        left, right = np.divmod(np.arange(len(rows) * len(table)), len(table))
        rows = np.concatenate([rows[left], table[right]], axis=1)
        blocks, threads = rows[:, 0::2], rows[:, 1::2]
        tile, count = threads.prod(axis=1), (blocks // threads).prod(axis=1)
        rows = rows[(tile <= MAX_THREAD_TILE * lanes) & (count * lanes <= arch.max_thread)]
        if axis < 3 and len(rows) > _MAX_SHAPES:
            rows = rows[_draw(len(rows), _MAX_SHAPES)]
    if lanes == 1:
        # a block of less than a warp wastes lanes; keep it only where the output has no more
        threads = (rows[:, 0::2] // rows[:, 1::2]).prod(axis=1)
        full = threads >= min(arch.warp_size, op.outputs())
        rows = rows[full] if full.any() else rows
    else:
        # the smallest matrix instruction computes 16 x 8 outputs: N, H, W rows by K columns
        rows = rows[(rows[:, [1, 5, 7]].prod(axis=1) >= 16) & (rows[:, 3] >= 8)]
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)


def _loops(op: Operation) -> np.ndarray:
    """Rows of (C_input, prefetch): a loop over channels only where there is a reduction."""
    if not op.is_complex:
        return np.array([[1, 0]])
    sizes = sorted({min(size, op.c) for size in powers_of_two(min(op.c, 256))} | ({op.c} if op.c <= 512 else set()))
    return np.array([(c, p) for c, p in itertools.product(sizes, (0, 1)) if p == 0 or c < op.c])


_COLUMNS = (
    "n_block",
    "k_block",
    "h_block",
    "w_block",
    "n_thread",
    "k_thread",
    "h_thread",
    "w_thread",
    "c_input",
    "prefetch",
    "format_shared",
    "vector",
)


def _tiles(columns: np.ndarray) -> Tiles:
    return Tiles(**{name: columns[:, i] for i, name in enumerate(_COLUMNS)})


def _smallest(op: Operation, arch: GpuArch, unit: str) -> np.ndarray:
    """One row: a block of one warp along the output's last long axis, one output (or matrix instruction) per tile."""
    if lanes_per_tile(unit) > 1:
        thread, block = [16, 8, 1, 1], [16, 8, 1, 1]
    else:
        axis = max((3, 1, 2, 0), key=lambda i: (min((op.n, op.k, op.h, op.w)[i], arch.warp_size), i == 3))
        thread, block = [1, 1, 1, 1], [1, 1, 1, 1]
        block[axis] = min((op.n, op.k, op.h, op.w)[axis], arch.warp_size)
    row = np.array([[*block, *thread, 1, 0, 0, 1]])
    broken = [name for name, mask in violations(op, _tiles(row), arch, unit=unit).items() if mask.any()]
    if broken:
        raise ModelError(f"not even the smallest tile of {op.kind} fits {arch.name}: {broken}", limits=broken)
    return row
