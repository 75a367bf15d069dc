"""Workload classification for the GPU scheduler (`GpuProblem`): cached pattern matches that kernel families ask.

An unscheduled program on one GPU: is it a GEMM, attention, a row or column reduction, a window, ...?

Patterns are matched once per program, however many families ask.
"""

from __future__ import annotations

import math
from functools import cached_property

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.program import Program
from jcuts.lower.attention.backward import TEMPLATE as ATTENTION_BACKWARD
from jcuts.lower.attention.forward import TEMPLATE as ATTENTION
from jcuts.lower.layer_fusion import TEMPLATE as LAYER_FUSION
from jcuts.lower.patterns.column_sums import TEMPLATE as COLUMN_SUMS
from jcuts.lower.patterns.column_sums import as_gemm_with_column_sums
from jcuts.lower.patterns.gemm import ROWS, as_gemm, gemm_operands, prologue
from jcuts.lower.patterns.inverted_residual import TEMPLATE as INVERTED_RESIDUAL
from jcuts.lower.patterns.row_column_sums import TEMPLATE as ROW_COLUMN_SUMS
from jcuts.lower.recurrence.program import TEMPLATE as RECURRENCE
from jcuts.lower.reduction import online_softmax, welford
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.machine import TAPS, GpuMachine, loads_of
from jcuts.schedule.gpu.reduction.row import reduces_rows

CONTRACTIONS = ("contraction", "convolution")
"""Templates of programs that `lower.patterns.gemm.as_gemm` may take."""
GEMM_TEMPLATES = (*CONTRACTIONS, COLUMN_SUMS)
"""Those of the families whose epilogue reduces columns, too."""
FUSED = (
    "scan",
    RECURRENCE,
    ATTENTION,
    ATTENTION_BACKWARD,
    INVERTED_RESIDUAL,
    LAYER_FUSION,
    COLUMN_SUMS,
    ROW_COLUMN_SUMS,
)
"""Templates of several phases that families of their own compute."""


class GpuProblem:
    """An unscheduled program and the GPU that it is scheduled for."""

    def __init__(self, program: Program, machine: GpuMachine) -> None:
        self.program, self.machine = program, machine
        self.phase = program.phases[0]

    @property
    def is_scan(self) -> bool:
        """Whether it is a cumulative operation."""
        return self.program.template == "scan"

    @property
    def is_recurrence(self) -> bool:
        """Whether it is a loop of steps."""
        return self.program.template == RECURRENCE

    @property
    def is_attention(self) -> bool:
        """Whether it is scaled dot-product attention."""
        return self.program.template == ATTENTION

    @property
    def is_attention_backward(self) -> bool:
        """Whether it is a part of the backward pass of attention."""
        return self.program.template == ATTENTION_BACKWARD

    @property
    def is_inverted_residual(self) -> bool:
        """Whether it is a fused inverted residual."""
        return self.program.template == INVERTED_RESIDUAL

    @property
    def is_layer_fusion(self) -> bool:
        """Whether it is a chain of layers."""
        return self.program.template == LAYER_FUSION

    @property
    def has_column_sums(self) -> bool:
        """Whether it is a product or convolution with column reductions of its result."""
        return self.program.template == COLUMN_SUMS

    @property
    def is_row_column_sums(self) -> bool:
        """Whether it is row reductions with column reductions of values at their points."""
        return self.program.template == ROW_COLUMN_SUMS

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution."""
        return self.program.template == "convolution"

    @property
    def is_row_norm(self) -> bool:
        """Whether several phases read each row: softmax, norms along the contiguous dimension."""
        if self.program.template in FUSED or len(self.program.phases) == 1:
            return False
        return {g.axis for g in self.program.grid} == set(self.program.serial)

    @property
    def is_online_softmax(self) -> bool:
        """Whether a maximum and a sum of exponentials of rows follow each other, which one pass gives."""
        return self.is_row_norm and online_softmax.match_online_softmax(self.program) is not None

    @property
    def is_column_norm(self) -> bool:
        """Whether several phases read each column."""
        return self.program.template not in FUSED and len(self.program.phases) > 1 and not self.is_row_norm

    @property
    def is_welford(self) -> bool:
        """Whether they are the mean and the variance of columns, which one pass gives."""
        return self.is_column_norm and welford.match_welford(self.collapsed) is not None

    @property
    def is_single_phase(self) -> bool:
        """Whether it is one loop nest, a map or a reduction."""
        return self.program.template not in FUSED and len(self.program.phases) == 1

    @property
    def is_map(self) -> bool:
        """Whether it is one loop nest that reduces nothing."""
        return self.is_single_phase and not self.phase.reds

    @property
    def is_reduction(self) -> bool:
        """Whether it is one loop nest that reduces."""
        return self.is_single_phase and bool(self.phase.reds)

    @property
    def is_row_reduction(self) -> bool:
        """Whether it is a plain reduction along the dimension that is contiguous in memory."""
        return self.is_reduction and self.program.template == "reduction" and reduces_rows(self.phase)

    @property
    def is_column_reduction(self) -> bool:
        """Whether neighbouring outputs lie next to each other: plain reductions, and gradients of depthwise filters."""
        if not self.is_reduction:
            return False
        if self.program.template == "reduction":
            return not reduces_rows(self.phase)
        return self._is_k_major

    @property
    def _is_k_major(self) -> bool:
        """Whether it is a long reduction whose operands all lie along the last output axis."""
        if not self.phase.axes or self.length <= TAPS:
            return False
        lane = self.phase.axes[-1].name
        return all(n.index is not None and n.index.stride(lane) == 1 for n in loads_of(self.phase))

    @property
    def is_window(self) -> bool:
        """Whether a thread may take all values of an output: pooling, depthwise convolution, short contractions."""
        return self.is_reduction and self.program.template != "reduction" and self.length <= TAPS

    @cached_property
    def length(self) -> int:
        """Reduced values of an output."""
        return math.prod(r.extent for r in self.phase.reds)

    @cached_property
    def collapsed(self) -> Program:
        """The program with neighbouring axes joined where all addresses allow for it."""
        return collapse_program(self.program)

    @cached_property
    def gemm(self) -> Program | None:
        """The program as a GEMM of the default precision (TF32, or 16-bit operands)."""
        if self.has_column_sums:
            return as_gemm_with_column_sums(self.program)
        return as_gemm(self.program) if self.program.template in CONTRACTIONS else None

    @cached_property
    def exact_gemm(self) -> Program | None:
        """The program as a GEMM that asks for more than TF32."""
        return as_gemm(self.program, exact=True) if self.program.template in CONTRACTIONS else None

    @cached_property
    def wgmma(self) -> WgmmaProblem | None:
        """The GEMM as its warpgroup schedules see it."""
        return None if self.gemm is None else WgmmaProblem(self.gemm, self.machine)

    @property
    def is_matvec(self) -> bool:
        """Whether it is a GEMM with one row: a matrix times a vector."""
        return self.gemm is not None and self.gemm.phases[0].ranges()[ROWS] == 1

    def has_few_rows(self, most: int) -> bool:
        """Whether it is a GEMM of 2 to so many rows, whose left operand is an array as it lies in memory."""
        if self.gemm is None or not 1 < self.gemm.phases[0].ranges()[ROWS] <= most:
            return False
        return prologue(self.gemm) is None and not gemm_operands(self.gemm)[0].guards
