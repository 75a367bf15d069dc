"""Matches back-to-back GEMMs (B2B GEMM, fused MLP) in chains of two layers (`lower.layer_fusion`).

    hidden = f1(x[m, :] @ w1 + b1)          phase 1, into a local buffer
    out    = f2(hidden[m, :] @ w2 + b2)     phase 2

f1 is any element-wise exit graph whose operands are vectors along the hidden dimension; f2 any exit graph (residual,
layer scale).  The kernel (`codegen.cuda.b2b_gemm.kernel`) never holds the hidden matrix as a whole: it goes through its
columns in chunks.  Source: CUTLASS, example 13 (two-tensor-op fusion).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Phase, Program
from jcuts.lower.layer_fusion import Members, lower_layers
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, K, gemm_operands
from jcuts.lower.patterns.gemm_pair import (
    PREDICATE,
    TYPES,
    GemmPair,
    gemm_of_phase,
    is_dense,
    reads_vectors_along,
)
from jcuts.lower.region import MAX_RECOMPUTED_OPS
from jcuts.lower.tensor_graph import TensorGraph


@dataclass(frozen=True, eq=False)
class B2bGemm(GemmPair):
    """A matched back-to-back GEMM."""

    @cached_property
    def rows(self) -> int:
        """Rows of both GEMMs."""
        return self.project.phases[0].ranges()[ROWS]

    @property
    def multiply_adds(self) -> float:
        """Multiply-adds of both GEMMs."""
        return float(self.rows) * self.expanded_channels * (self.in_channels + self.out_channels)


def match_b2b_gemm(program: Program) -> B2bGemm | Refusal:
    """Matches a chain of two layers to a back-to-back GEMM, or refuses it with the reason why it is none."""
    if len(program.phases) != 2:
        return Refusal("b2b_gemm", f"{len(program.phases)} phases, a back-to-back GEMM has 2")
    if dict(program.params).get("precision"):
        return Refusal("b2b_gemm", "its products ask for more than the default precision")
    first, second = program.phases
    expand, project = gemm_of_phase(program, first), gemm_of_phase(program, second)
    if expand is None:
        return Refusal("b2b_gemm", "the first layer is no GEMM of rows as they lie in memory (windows, a prologue)")
    if project is None:
        return Refusal("b2b_gemm", "the second layer is no GEMM of rows as they lie in memory (windows, a prologue)")
    if why := _unlinked(program, expand, project) or _unfused(program, expand.phases[0], second):
        return Refusal("b2b_gemm", why)
    return B2bGemm(program, expand, project)


def _unlinked(program: Program, expand: Program, project: Program) -> str:
    """Why the second GEMM is not one of the rows that the first makes; '' where it is."""
    made, read = expand.phases[0].ranges(), project.phases[0].ranges()
    (left, right), (hidden, back) = gemm_operands(expand), gemm_operands(project)
    stores = expand.phases[0].stores
    if (made[ROWS], made[COLUMNS]) != (read[ROWS], read[K]):
        return "the second GEMM does not go along the first one's rows and columns"
    if len(stores) != 1 or stores[0].buffer != hidden.buffer or program.buffer(hidden.buffer).role != "local":
        return "the second GEMM does not read what the first makes, or others do"
    if not is_dense(stores[0].address, made[COLUMNS]):
        return "the hidden matrix is not stored as it lies in memory"
    if len({left.dtype, right.dtype, hidden.dtype, back.dtype}) > 1:
        return "operands of several types"
    return ""


def _unfused(program: Program, first: Phase, second: Phase) -> str:
    """Why the epilogues cannot be those of a fused kernel; '' where they can."""
    local = {b.name for b in program.buffers if b.role == "local"}
    if any(node.op == "load" and node.buffer in local for node in second.exit.nodes):
        return "the hidden matrix is needed behind the second GEMM"
    if not reads_vectors_along(first, COLUMNS, (*TYPES, PREDICATE)):
        return "an operand between the GEMMs is no vector along the hidden dimension"
    return ""


def lower_b2b_gemm(graph: TensorGraph, subset: Members, cheap: float = MAX_RECOMPUTED_OPS) -> Program | Refusal:
    """The program of a back-to-back GEMM, or a refusal with the reason why equations are none.

    Args: cheap: of `lower.region.lower_region`.
    """
    program = lower_layers(graph, subset, cheap=cheap)
    if isinstance(program, Refusal):
        return program
    found = match_b2b_gemm(program)
    return found if isinstance(found, Refusal) else program
