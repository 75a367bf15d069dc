"""Schedule parameters of persistent recurrences, by their names in a program's ``params``."""

from __future__ import annotations

from jcuts.kernel_ir.program import Program

HELD = "held"
"""Operands that do not change stay in registers (1)."""
MMA = "mma"
"""The type of the operands of ``mma`` that a stage's products are made by."""
EXCHANGE = "exchange"
"""How carried values pass from block to block: absent, behind a grid barrier."""
FLAGS = "flags"
"""With flags, in place of a grid barrier."""
REPLICAS = "replicas"
"""How often blocks write what they exchange with flags."""


def is_flagged(program: Program) -> bool:
    """Whether a schedule exchanges carried values with flags."""
    return dict(program.params).get(EXCHANGE) == FLAGS
