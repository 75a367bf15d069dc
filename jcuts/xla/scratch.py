"""Scratch memory of custom calls as an extra unused result, so that XLA's buffer assignment plans it."""

from __future__ import annotations

import jax
import numpy as np

FEW = 16


def least_bytes(needed: int, results: int) -> int:
    """Bytes of a call's scratch result: what the kernel needs, and a minimum where the call has several results.

    XLA makes a call whose results are a loop's next carry, in order, the root of the loop's body, and then takes the
    root's operands for the next carry (``WhileUtil::GetInvariantGTEsForWhileBody``; jax 0.10 and 0.11): a carry that
    is the operand of its own number counts as never changed, and the loop does not end.  With a result that is no
    carry the root stays a tuple.

    >>> least_bytes(0, 1), least_bytes(0, 2), least_bytes(640, 2)
    (0, 16, 640)
    """
    return needed or (FEW if results > 1 else 0)


def result_of(size: int) -> list[jax.ShapeDtypeStruct]:
    """Type of the extra result of ``size`` bytes; none for zero bytes."""
    return [jax.ShapeDtypeStruct((size,), np.dtype(np.uint8))] if size else []
