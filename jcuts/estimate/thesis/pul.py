"""PUL, the thesis' ranking score of a kernel, and ``bound``, a true roofline bound.

A product of bounds is not itself a bound: a memory-bound kernel on half of the multiprocessors may still saturate DRAM.
So there are two numbers: ``pul`` ranks, ``bound`` is guaranteed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jcuts.arch.gpu import GpuArch
from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.limits import coef_r, lanes_per_tile
from jcuts.estimate.thesis.params import Operation, Tiles
from jcuts.estimate.thesis.ratios import gm_ratio, sm_ratio, thread_blocks, wb_ratio
from jcuts.estimate.thesis.shared_memory import coef_bc
from jcuts.estimate.thesis.tables import ceil_div, comp, n_load


@dataclass(frozen=True)
class Estimate:
    """Scores of candidates, arrays of shape (candidates,), each in [0, 1].

    Attributes:
        gm, sm, wb, r: the four factors; bc: COEF_bc (at least 1).
        pul: their product, gm * sm * wb * r.
    """

    gm: np.ndarray
    sm: np.ndarray
    wb: np.ndarray
    r: np.ndarray
    bc: np.ndarray
    pul: np.ndarray


def estimate(op: Operation, tiles: Tiles, arch: GpuArch, *, unit: str = "ffma", formula: str = "corrected") -> Estimate:
    """PUL of every candidate: expected best performance over the peak of the unit.

        PUL = GMRatio * SMRatio * WBRatio * COEF_r

    Args: unit: the compute unit; a tensor core's tile belongs to a warp, whose loads are swizzled (COEF_bc = 1).
    Source: thesis 3.2.3.
    """
    count = max(len(tiles), 1)
    bc = np.ones(count) if lanes_per_tile(unit) > 1 else coef_bc(op, tiles)
    blocks = thread_blocks(op, tiles, formula=formula)
    gm = np.broadcast_to(gm_ratio(op, tiles, arch, unit=unit, formula=formula), count)
    sm = np.broadcast_to(sm_ratio(op, tiles, arch, coef_bc=bc, formula=formula), count)
    wb = np.broadcast_to(wb_ratio(blocks, arch.num_sm, formula=formula), count)
    r = coef_r(op, tiles, arch, unit=unit, formula=formula)
    return Estimate(gm, sm, wb, r, bc, gm * sm * wb * r)


def bound(
    op: Operation,
    tiles: Tiles,
    arch: GpuArch,
    *,
    unit: str = "ffma",
    executed_flop: float | None = None,
    resident_bytes: float = 0.0,
    cluster: int = 1,
) -> dict[str, np.ndarray]:
    """Upper bound on the fraction of the unit's peak that a candidate can reach: no kernel of these parameters is
    faster.

        bound = COEF_r * min(GM_dram, GM_L2, SM issue, SM balance)

    * GM_dram: compulsory traffic (every used input once, every output once) at DRAM bandwidth;
    * GM_L2: every block column loads its inputs anew, at L2 bandwidth (halos left out: a floor of the traffic);
    * issue: a multiprocessor issues FMAs and shared-memory loads together, and its banks deliver 128 bytes per cycle;
      latency counts as hidden by other resident warps;
    * balance: the busiest multiprocessor has ceil(N_full / N_SM) of the blocks that no edge cuts off; where the
      tiles divide the output this is WBRatio.

    Args:
        executed_flop: FLOP that the algorithm really executes (Winograd, FFT); Table 3.5's count by default.
        resident_bytes: bytes that an earlier kernel may have left in the L2 cache.
        cluster: blocks that share one load (multicast).
    Returns: arrays ``dram``, ``l2``, ``issue``, ``balance``, ``bound``, each in [0, 1].
    Raises: ModelError if a count is not positive.
    """
    if cluster < 1 or resident_bytes < 0 or (executed_flop is not None and executed_flop <= 0):
        raise ModelError(
            f"cluster={cluster}, resident_bytes={resident_bytes}, executed_flop={executed_flop}: must be positive",
            cluster=cluster,
        )
    count = max(len(tiles), 1)
    flop = float(comp(op, op.n, op.k, op.h, op.w)) if executed_flop is None else executed_flop
    seconds = flop / arch.peak(unit)
    compulsory = (op.used_input() + op.weights() + op.outputs()) * op.element_bytes
    dram_seconds = max(0.0, compulsory - min(resident_bytes, arch.l2_bytes)) / arch.bw_global
    l2_seconds = _l2_bytes(op, tiles, cluster) / arch.bw_l2
    parts: dict[str, Any] = {
        "dram": min(1.0, seconds / dram_seconds) if dram_seconds > 0 else 1.0,
        "l2": np.minimum(1.0, seconds / l2_seconds),
        "issue": _issue(op, tiles, arch, unit),
        "balance": _balance(op, tiles, arch),
    }
    found = {name: np.broadcast_to(np.asarray(value, dtype=np.float64), count) for name, value in parts.items()}
    found["bound"] = coef_r(op, tiles, arch, unit=unit) * np.minimum.reduce(list(found.values()))
    return found


def _l2_bytes(op: Operation, tiles: Tiles, cluster: int) -> Any:
    """Bytes that all blocks load and store together, at least."""
    columns_k = ceil_div(op.k, tiles.k_block) if op.is_complex else 1
    inputs = op.used_input() * columns_k
    others = ceil_div(op.n, tiles.n_block) * ceil_div(op.h, tiles.h_block) * ceil_div(op.w, tiles.w_block)
    weights = op.weights() * others
    return ((inputs + weights) / cluster + op.outputs()) * op.element_bytes


def _balance(op: Operation, tiles: Tiles, arch: GpuArch) -> Any:
    """Share of all multiprocessors that can be busy: edge blocks may be almost empty, so only full ones count."""
    total: Any = 1.0
    full: Any = 1.0
    for size, block in zip((op.n, op.k, op.h, op.w), tiles.block, strict=True):
        total = total * (size / np.asarray(block))
        full = full * (size // np.asarray(block))
    waves = np.maximum(np.ceil(full * tiles.split_k / arch.num_sm), 1e-300)
    by_waves = np.where(full > 0, total * tiles.split_k / (arch.num_sm * waves), 1.0)
    return np.minimum(1.0, np.minimum(by_waves, thread_blocks(op, tiles) / arch.num_sm))


def _issue(op: Operation, tiles: Tiles, arch: GpuArch, unit: str) -> Any:
    """Fraction of the unit's peak that instruction issue and shared-memory banks allow one multiprocessor."""
    work = comp(op, *tiles.thread)
    loads = n_load(op, *tiles.thread)
    lanes = lanes_per_tile(unit)
    # cycles per warp and thread tile; for a matrix unit per warp tile
    if lanes > 1:
        compute = work / arch.flop_per_clock_sm[unit]
        delivered = loads * op.element_bytes / arch.shared_bytes_per_clock
        return compute / np.maximum(compute, delivered)
    compute = work * arch.warp_size / arch.flop_per_clock_sm[unit]
    instructions = loads / np.asarray(tiles.vector)
    issued = (work / 2 + instructions) / arch.issue_per_clock
    delivered = instructions * coef_bc(op, tiles, merged=True)
    return compute / np.maximum(np.maximum(compute, issued), delivered)
