"""Precision of a step's product once it runs for all steps (``precision=HIGHEST`` of ``dot_general``).

XLA multiplies a single float32 row by a matrix, and a column by a row, without tensor cores.  All steps' rows together
it would multiply in TF32, less precisely than the loop that they come from, so such a product asks for HIGHEST.
"""

from __future__ import annotations

import math
from typing import Any

import jax


def terms_of(dot: Any) -> int:
    """Terms of each sum of a product."""
    (left, _), _ = dot.params["dimension_numbers"]
    return math.prod(dot.invars[0].aval.shape[d] for d in left)


def rows_of(dot: Any, operand: int) -> int:
    """Rows (or columns) of a product that come from one of its operands, batch dimensions included."""
    return dot.invars[operand].aval.size // max(1, terms_of(dot))


def precision_over_steps(dot: Any) -> Any:
    """The precision that a step's product needs outside of its loop."""
    is_vector = min(rows_of(dot, 0), rows_of(dot, 1), terms_of(dot)) == 1
    is_float32 = all(operand.aval.dtype == "float32" for operand in dot.invars)
    if not is_vector or dot.params["precision"] is not None or not is_float32:
        return dot.params["precision"]
    return jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST
