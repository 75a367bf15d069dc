"""Problem record of GEMMs with few rows, as the split-K GEMV and the skinny GEMM (``mma.sync``) see them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, K, gemm_operands

CLUSTERS = (9, 0)
"""The least compute capability with thread-block clusters."""
CLUSTER_SIZES = (1, 2, 4, 8)
"""Blocks of a cluster; 8 is the most that every GPU of capability 9.0 allows."""


@dataclass(frozen=True)
class FewRowGemm:
    """A product of few rows, as the schedules see it.

    Attributes:
        rows, columns, terms: extents of m, n and k. batch: products that are computed side by side.
        item: bytes of an element of W.
        is_k_major: neighbouring k of W are neighbours in memory, else neighbouring n.
        moved: bytes of all operands and results.
    """

    rows: int
    columns: int
    terms: int
    batch: int
    item: int
    is_k_major: bool
    moved: int

    @classmethod
    def of(cls, program: Program) -> Self:
        """Of a GEMM with few rows (`lower.patterns.gemm.as_gemm`)."""
        ranges, right = program.phases[0].ranges(), gemm_operands(program)[1]
        batch = math.prod(a.extent for a in program.phases[0].axes if a.name not in (ROWS, COLUMNS))
        moved = sum(b.bytes for b in (*program.inputs, *program.outputs))
        return cls(ranges[ROWS], ranges[COLUMNS], ranges[K], batch, right.item, right.along_terms, moved)
