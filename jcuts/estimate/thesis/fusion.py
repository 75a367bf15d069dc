"""Fusion of two consecutive operations in the thesis' model (3.2.4): which kinds of fusion apply, and their PUL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jcuts.arch.gpu import GpuArch
from jcuts.base.errors import Refusal
from jcuts.estimate.thesis.limits import coef_r
from jcuts.estimate.thesis.params import Operation, Tiles
from jcuts.estimate.thesis.pul import estimate
from jcuts.estimate.thesis.ratios import sm_ratio, thread_blocks, wb_ratio
from jcuts.estimate.thesis.shared_memory import coef_bc
from jcuts.estimate.thesis.tables import ceil_div, comp, input_extent, n_load, num_trans


def fusion_level(first_complex: bool, second_complex: bool, *, one_to_one: bool = True) -> str:
    """Where the intermediate result of two consecutive operations stays: ``"register"`` or ``"shared"``.

    Simple with simple and simple with complex fuse in registers; complex with complex only through shared memory, and
    so does any pair in which several threads of the successor use one thread's result (``one_to_one=False``).
    Source: thesis 3.2.4.
    """
    return "shared" if (first_complex and second_complex) or not one_to_one else "register"


def fused_is_complex(first_complex: bool, second_complex: bool) -> bool:
    """Whether the fused operation counts as complex: as soon as one part is.  Source: thesis 3.2.4."""
    return first_complex or second_complex


def register_pul(
    chain: Sequence[Operation], tiles: Tiles, arch: GpuArch, *, unit: str = "ffma", formula: str = "corrected"
) -> np.ndarray:
    """PUL of operations fused in registers, one after the other.

        NUM_trans, N_load = those of the predecessor;   COMP_block, COMP_thread = the sums

    Returns: shape (candidates,), in [0, 1].
    Source: thesis 3.2.4, rules of register-level fusion.
    """
    head = chain[0]
    work = sum(comp(op, *tiles.thread) for op in chain)
    block = sum(comp(op, *tiles.block, c=ceil_div(op.c, tiles.split_k)) for op in chain)
    trans = arch.trans_global(head.element_bytes)
    moved = num_trans(head, *tiles.block, trans=trans, c=ceil_div(head.c, tiles.split_k), formula=formula)
    loads: Any = n_load(head, *tiles.thread, formula=formula)
    if formula == "corrected":
        loads = ceil_div(loads, tiles.vector)
    peak = arch.perf_peak if formula == "printed" else arch.peak(unit)
    gm = np.minimum(1.0, block / (head.element_bytes * trans * moved) / (peak / arch.bw_global))
    sm = np.minimum(1.0, work / loads / (arch.lat_shared * coef_bc(head, tiles)))
    wb = wb_ratio(thread_blocks(head, tiles, formula=formula), arch.num_sm, formula=formula)
    return np.atleast_1d(gm * sm * wb) * coef_r(head, tiles, arch, unit=unit, formula=formula)


def check_shared(first: Operation, first_tiles: Tiles, second: Operation, second_tiles: Tiles) -> Refusal | None:
    """None if two candidates (single ones) can be fused through shared memory, else the reason.

    The predecessor's output tile must be the successor's input tile, and a complex successor needs all its channels at
    once (C_input = C).
    Source: thesis 3.2.4, rules of shared-memory-level fusion.
    """
    name = f"{first.kind}+{second.kind}"
    if second.is_complex and second_tiles.c_input != second.c:
        return Refusal(name, f"C_input = {second_tiles.c_input} of the successor is not C = {second.c}")
    channels = second.c if second.is_complex else second_tiles.k_block
    wanted = (
        second_tiles.n_block,
        channels,
        int(input_extent(second_tiles.h_block, second.f_h, second.p_h, second.s_h)),
        int(input_extent(second_tiles.w_block, second.f_w, second.p_w, second.s_w)),
    )
    if first_tiles.block != wanted:
        return Refusal(name, f"the predecessor's tile {first_tiles.block} (N, K, H, W) is not the input tile {wanted}")
    return None


def shared_pul(
    first: Operation,
    first_tiles: Tiles,
    second: Operation,
    second_tiles: Tiles,
    arch: GpuArch,
    *,
    unit: str = "ffma",
    formula: str = "corrected",
) -> tuple[float, float] | Refusal:
    """PUL of both operations of a pair that is fused through shared memory (single candidates).

    The successor's NUM_trans is 0, so its GMRatio is 1; everything else is as usual.
    Returns: the two values in [0, 1], or the reason why the tiles do not match.
    Source: thesis 3.2.4, rules of shared-memory-level fusion.
    """
    refusal = check_shared(first, first_tiles, second, second_tiles)
    if refusal is not None:
        return refusal
    before = float(estimate(first, first_tiles, arch, unit=unit, formula=formula).pul[0])
    sm = sm_ratio(second, second_tiles, arch, coef_bc=coef_bc(second, second_tiles), formula=formula)
    wb = wb_ratio(thread_blocks(second, second_tiles, formula=formula), arch.num_sm, formula=formula)
    after = np.atleast_1d(sm * wb) * coef_r(second, second_tiles, arch, unit=unit, formula=formula)
    return before, float(after[0])


def combined_pul(works: Sequence[float], puls: Sequence[float]) -> float:
    """One score for a pair: total work over total time, each part running at its own PUL (an extension).

    PUL = sum(work_i) / sum(work_i / PUL_i),   0 if any part cannot run
    """
    if any(value <= 0 for value in puls):
        return 0.0
    return sum(works) / sum(work / value for work, value in zip(works, puls, strict=True))
