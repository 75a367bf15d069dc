"""Tables 3.5, 3.6 and 3.7 of the thesis: work, shared-memory loads and global transactions of an output tile.

Every function takes an ``Operation`` and the extents of an output tile (numbers or arrays) and returns a count of the
same shape.  ``formula="printed"`` reproduces the print; ``"corrected"`` differs in the input extent only:

    printed    floor((X + F - 2 P) / S) + 1        (an output-size formula with the signs of F and P swapped)
    corrected  (X - 1) S + F                       (the input rows that X output rows read)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.params import Operation, check_formula


def input_extent(extent: Any, filter_: int, padding: int, stride: int, formula: str = "corrected") -> Any:
    """Input rows (or columns) for ``extent`` output rows; at least one.

    Source: thesis 3.2.2, Tables 3.6 and 3.7; corrected as the module says.
    """
    check_formula(formula)
    if formula == "printed":
        return np.maximum((extent + filter_ - 2 * padding) // stride + 1, 1)
    return (extent - 1) * stride + filter_


def comp(op: Operation, n: Any, k: Any, h: Any, w: Any, *, c: Any = None) -> Any:
    """COMP: floating-point operations of an output tile (COMP_block, or COMP_thread with the thread's extents).

    Args: c: channels of the reduction that the tile covers; all of them by default (C, C_block).
    Source: thesis Table 3.5.
    """
    channels = op.c if c is None else c
    tile = n * k * h * w
    if op.kind == "convolution":
        return 2 * tile * channels * op.f_h * op.f_w
    if op.kind == "matmul":
        return 2 * n * channels * k
    if op.kind == "batch_norm":
        return 3 * tile
    if op.kind == "winograd":
        return 2.25 * tile
    if op.kind == "pooling":
        return tile * op.f_h * op.f_w
    return tile


def n_load(op: Operation, n: Any, k: Any, h: Any, w: Any, *, c: Any = None, formula: str = "corrected") -> Any:
    """N_load: elements that one thread loads from shared memory for its output tile.

    Source: thesis Table 3.6.
    """
    channels = op.c if c is None else c
    tile = n * k * h * w
    if op.kind == "convolution":
        rows = input_extent(h, op.f_h, op.p_h, op.s_h, formula)
        columns = input_extent(w, op.f_w, op.p_w, op.s_w, formula)
        return n * channels * rows * columns + k * channels * op.f_w * op.f_h
    check_formula(formula)
    if op.kind == "matmul":
        return n * channels + channels * k
    if op.kind == "batch_norm":
        return tile + 3 * k
    if op.kind == "pooling":
        return tile * op.f_w * op.f_h
    return 2 * tile if op.kind == "binary" else tile


def num_trans(
    op: Operation, n: Any, k: Any, h: Any, w: Any, *, trans: int, c: Any = None, formula: str = "corrected"
) -> Any:
    """NUM_trans: global-memory transactions that load the input of an output tile.

    Args: trans: TRANS_global, elements of one transaction.
    Raises: ModelError if ``trans`` is not positive.
    Source: thesis Table 3.7.
    """
    if trans < 1:
        raise ModelError(f"TRANS_global = {trans} must be at least 1", trans=trans)
    check_formula(formula)
    channels = op.c if c is None else c
    if op.kind == "matmul":
        return n * ceil_div(channels, trans) + channels * ceil_div(k, trans)
    if op.kind in ("convolution", "pooling"):
        rows = input_extent(h, op.f_h, op.p_h, op.s_h, formula)
        columns = input_extent(w, op.f_w, op.p_w, op.s_w, formula)
        if op.kind == "pooling":
            return n * k * rows * ceil_div(columns, trans)
        return n * channels * rows * ceil_div(columns, trans) + ceil_div(k * channels * op.f_w * op.f_h, trans)
    rows = n * k * h * ceil_div(w, trans)
    if op.kind == "batch_norm":
        return rows + 3 * ceil_div(k, trans)
    return 2 * rows if op.kind == "binary" else rows


def ceil_div(a: Any, b: Any) -> Any:
    """The least integer not below a / b, for numbers and arrays."""
    return -(-a // b)
