"""Batched weight transpose: one program that rounds many weight matrices to TF32 and stores each K-major.

    result[n, k] = tf32(operand[k, n])                          one phase per operand; all sizes differ

Its kernel replaces one launch per layer of a network (`rewrite.tf32_weight_args`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Axis, Buffer, Phase, Program, Store

TEMPLATE = "weights"
FORM = "weights"
SIDE = 64
"""Rows and columns of a block's tile."""
THREADS = 256
"""Of a block."""
MOST = 240
"""Operands and results that a kernel's parameters (4 KiB) have room for, with some to spare."""
ROUND = "tf32"
TYPE = "float32"


@dataclass(frozen=True)
class WeightTranspose:
    """One matrix of a batched weight transpose: its buffers, and its size as a matrix of ``terms`` rows."""

    operand: str
    result: str
    terms: int
    columns: int

    @property
    def across(self) -> int:
        """Tiles along the columns."""
        return -(-self.columns // SIDE)

    @property
    def tiles(self) -> int:
        """Tiles of the whole matrix."""
        return -(-self.terms // SIDE) * self.across


def transpose_program(shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Program | None:
    """The program of operands and results of these shapes; None where one is empty, or they exceed a kernel's
    parameters.

    Args: shapes: of each operand, whose columns lie side by side, and of its result, whose first dimension they are.
    Raises: ValueError: a result of another size.
    """
    if not shapes or 2 * len(shapes) > MOST or any(0 in made for _, made in shapes):
        return None
    buffers: list[Buffer] = [Buffer(f"w{k}", TYPE, shape, "in") for k, (shape, _) in enumerate(shapes)]
    buffers += [Buffer(f"v{k}", TYPE, shape, "out") for k, (_, shape) in enumerate(shapes)]
    phases = []
    for k, (_, made) in enumerate(shapes):
        columns = made[0]
        terms = buffers[k].size // columns
        graph = Graph()
        value = graph.load(f"w{k}", Index.axis("t") * columns + Index.axis("n"), TYPE)
        store = Store(f"v{k}", Index.axis("n") * terms + Index.axis("t"), graph.apply(ROUND, TYPE, value))
        phases.append(Phase(f"turn{k}", (Axis("n", columns), Axis("t", terms)), (), (), Graph(), graph, (store,)))
        if buffers[len(shapes) + k].size != buffers[k].size:
            raise ValueError(f"weights {shapes[k][0]} do not become {made}")
    params = (("cuda", FORM), ("threads", THREADS))
    return Program("weights", tuple(buffers), (), (), tuple(phases), 1, TEMPLATE, params)


def transposes_of(program: Program) -> list[WeightTranspose] | None:
    """The matrices that a batched weight-transpose program transposes; None for any other program."""
    names = [(b.name, c.name) for b, c in zip(program.inputs, program.outputs, strict=False)]
    if len(names) != len(program.phases) or len(program.outputs) != len(names):
        return None
    shapes = [(b.shape, c.shape) for b, c in zip(program.inputs, program.outputs, strict=True)]
    made = transpose_program(shapes)
    if made is None or made.phases != program.phases:
        return None
    return [
        WeightTranspose(f"w{k}", f"v{k}", phase.axes[1].extent, phase.axes[0].extent)
        for k, phase in enumerate(program.phases)
    ]
