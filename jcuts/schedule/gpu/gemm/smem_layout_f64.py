"""Shared-memory layout of a float64 GEMM operand (`codegen.cuda.gemm.mma_f64`): pitches without bank conflicts."""

from __future__ import annotations

from jcuts.lower.patterns.gemm import GemmOperand

ITEM = 8
"""Bytes of a number."""
TERMS = 8
"""Numbers along K of a k-step."""
LINE = ITEM * TERMS
"""Bytes of a line of a step's terms: two lines fill the banks of shared memory."""
LEAST = 512
"""Totals of a warp: of fewer, ptxas has made wrong code (`codegen.cuda.gemm.mma_f64`)."""
APART = 16
"""Bytes by which lines of rows are apart, beyond a multiple of `LINE`."""


def pitch_of(length: int) -> int:
    """Bytes from one line of rows to the next."""
    return ITEM * length + (APART - ITEM * length) % LINE


def k_step_bytes(size: int) -> int:
    """Bytes of a step's terms of so many rows; the next step's begin in the other half of the banks."""
    return size * LINE + LINE * (1 - size % 2)


def bytes_of(side: GemmOperand, size: int, terms: int) -> int:
    """Of a tile of so many rows (or columns) and terms."""
    return terms // TERMS * k_step_bytes(size) if side.along_terms else terms * pitch_of(size)
