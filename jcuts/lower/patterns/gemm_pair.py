"""Two GEMMs of which the second reads what the first makes: the record that fused kernels of both share.

    wide = epilogue1(x[row, :] @ expand)       rows of x, columns of the hidden dimension
    out  = epilogue2(wide[row, :] @ project)   back-to-back GEMM (`lower.patterns.b2b_gemm`)

Inverted residuals (`lower.patterns.inverted_residual`) have a depthwise convolution between both, and the first may be
missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, B, GemmOperand, K, as_gemm, gemm_operands, prologue

TYPES = ("float32", "bfloat16")
"""Operand types of both GEMMs."""
PREDICATE = "bool"


@dataclass(frozen=True, eq=False)
class GemmPair:
    """Two GEMMs of one program, a phase each, over the axes of `lower.patterns.gemm`.

    ``expand`` is None where there is no GEMM before what lies between.
    """

    program: Program
    expand: Program | None
    project: Program

    @cached_property
    def weights(self) -> tuple[GemmOperand | None, GemmOperand]:
        """B operands of the GEMMs."""
        return None if self.expand is None else gemm_operands(self.expand)[1], gemm_operands(self.project)[1]

    @cached_property
    def in_channels(self) -> int:
        """K of the expand GEMM; 0 where there is none."""
        return 0 if self.expand is None else self.expand.phases[0].ranges()[K]

    @cached_property
    def expanded_channels(self) -> int:
        """The hidden dimension: columns of the first GEMM, K of the second."""
        return self.project.phases[0].ranges()[K]

    @cached_property
    def out_channels(self) -> int:
        """Columns of the project GEMM."""
        return self.project.phases[0].ranges()[COLUMNS]

    @cached_property
    def dtype(self) -> str:
        """Operand type of all sums: float32 (rounded to TF32 for the GEMMs) or bfloat16."""
        return gemm_operands(self.project)[0].dtype

    @cached_property
    def item(self) -> int:
        """Bytes of an element of that type."""
        return ITEM_SIZE[self.dtype]


def gemm_of_phase(program: Program, phase: Phase) -> Program | None:
    """A phase as a GEMM, where its A operand is dense and k is contiguous in its B operand."""
    made = as_gemm(replace(program, phases=(phase,), params=(), template="contraction"))
    if made is None or prologue(made) is not None or B in made.phases[0].ranges():
        return None
    (left, right), extents = gemm_operands(made), made.phases[0].ranges()
    dense = left.index == Index.axis(ROWS) * extents[K] + Index.axis(K) and not left.guards and left.dtype in TYPES
    return made if dense and right.run == extents[K] else None


def is_dense(address: Index, columns: int) -> bool:
    """Whether a GEMM's results are stored row by row."""
    return address == Index.axis(ROWS) * columns + Index.axis(COLUMNS)


def reads_vectors_along(phase: Phase, axis: str, types: tuple[str, ...] = TYPES) -> bool:
    """Whether an exit graph reads vectors along one axis only. Args: types: that its values may have."""
    for node in phase.exit.nodes:
        if node.op in ("index", "guard") or node.guards or node.dtype not in types:
            return False
        if node.op == "load" and (node.index is None or node.index.values() or not node.index.axes() <= {axis}):
            return False
    return True
