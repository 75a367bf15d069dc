"""The four factors of PUL: global memory, shared memory, workload balance, resources (thesis 3.2.2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jcuts.arch.gpu import GpuArch
from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.params import Operation, Tiles, check_formula
from jcuts.estimate.thesis.tables import ceil_div, comp, n_load, num_trans


def oi_tb(op: Operation, tiles: Tiles, arch: GpuArch, *, formula: str = "corrected") -> Any:
    """Operational intensity of a thread block, FLOP per byte of global traffic.

        OI_TB = COMP_block / (SIZE_element * TRANS_global * NUM_trans)

    Source: thesis 3.2.2, "Global memory bandwidth".
    """
    channels = ceil_div(op.c, tiles.split_k)
    trans = arch.trans_global(op.element_bytes)
    moved = op.element_bytes * trans * num_trans(op, *tiles.block, trans=trans, c=channels, formula=formula)
    return comp(op, *tiles.block, c=channels) / moved


def gm_ratio(op: Operation, tiles: Tiles, arch: GpuArch, *, unit: str = "ffma", formula: str = "corrected") -> Any:
    """Fraction of peak that global-memory traffic allows (GMRatio), in (0, 1]; 1 means it is not the limit.

        GMRatio = min(1, OI_TB / (R_peak / BW_global))

    R_peak is the vendor's single-precision figure (printed), or the ceiling of the compute unit (corrected).
    Source: thesis 3.2.2, "Global memory bandwidth".
    """
    peak = arch.perf_peak if formula == "printed" else arch.peak(unit)
    return np.minimum(1.0, oi_tb(op, tiles, arch, formula=formula) / (peak / arch.bw_global))


def sm_ratio(op: Operation, tiles: Tiles, arch: GpuArch, *, coef_bc: Any = 1.0, formula: str = "corrected") -> Any:
    """Fraction of the shared-memory latency that compute operations of the same thread hide (SMRatio), in (0, 1].

        SMRatio = min(1, (COMP_thread / N_load) / (LAT_shared * COEF_bc))

    The corrected form counts load instructions: one 64- or 128-bit load brings ``vector`` elements.
    Source: thesis 3.2.2, "Shared memory latency", and 3.4.2 for vector loads.
    """
    check_formula(formula)
    loads = n_load(op, *tiles.thread, formula=formula)
    if formula == "corrected":
        loads = ceil_div(loads, tiles.vector)
    return np.minimum(1.0, comp(op, *tiles.thread) / loads / (arch.lat_shared * coef_bc))


def thread_blocks(op: Operation, tiles: Tiles, *, formula: str = "corrected") -> Any:
    """N_TB: thread blocks of the kernel.  The print divides exactly; a tile at the edge is a block as well."""
    check_formula(formula)
    sizes = zip((op.n, op.k, op.h, op.w), tiles.block, strict=True)
    blocks: Any = 1
    for size, block in sizes:
        blocks = blocks * (size / block if formula == "printed" else ceil_div(size, block))
    return blocks if formula == "printed" else blocks * tiles.split_k


def wb_ratio(blocks: Any, num_sm: int, *, formula: str = "corrected") -> Any:
    """Balance of the thread blocks over the multiprocessors (WBRatio), in (0, 1].

        corrected  (N_TB / N_SM) / ceil(N_TB / N_SM)                       (wave efficiency)
        printed    1 - ((N_TB mod N_SM) / N_SM) / ceil(N_TB / N_SM)

    The print has lost an operator between N_TB and N_SM; the remainder is the only reading that stays in [0, 1].
    Raises: ModelError if there is no block or no multiprocessor.
    Source: thesis 3.2.2, "Workload imbalance across SMs".
    """
    check_formula(formula)
    if num_sm < 1 or np.any(np.asarray(blocks) <= 0):
        raise ModelError(f"{np.min(blocks)} thread blocks on {num_sm} multiprocessors", num_sm=num_sm)
    waves = np.ceil(np.asarray(blocks) / num_sm)
    if formula == "printed":
        return 1.0 - (np.asarray(blocks) % num_sm) / num_sm / waves
    return (np.asarray(blocks) / num_sm) / waves
