"""Splits a program into several launches: split-K GEMM, column sums of a GEMM, reductions and scans split over the
grid, then a combining kernel.

How a family's programs are split is said by its entry of `families.FAMILIES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jcuts.codegen.cuda.families import kernel_family_of
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.column_sums import SUMS

SCRATCH_ALIGN = 256


@dataclass(frozen=True)
class KernelPart:
    """One kernel of a program.

    Attributes:
        program: what it computes.
        arguments: for each of its buffers the operand or result number and 0, or (-1, scratch offset).
    """

    program: Program
    arguments: tuple[tuple[int, int], ...]


def with_starts(part: Program, program: Program) -> Program:
    """A part of a program with the operands at which its results start at run time (`kernel_ir.program.Offset`)."""
    starts = dict.fromkeys(b.offset.start for b in part.buffers if b.offset is not None)
    names = [b.name for b in part.buffers]
    missing = tuple(program.buffer(name) for name in starts if name not in names)
    return replace(part, buffers=(*missing, *part.buffers)) if missing else part


def split_into_kernels(program: Program) -> tuple[list[KernelPart], int]:
    """The kernels of a scheduled program in launch order, and the bytes of scratch memory that they share."""
    family = kernel_family_of(program)
    order = {b.name: n for n, b in enumerate((*program.inputs, *program.outputs))}
    params = dict(program.params)
    if params.get("split", 1) == 1 and SUMS not in params:
        names = [b.name for b in program.buffers if b.role != "local"]
        return [KernelPart(family.whole(program), tuple((order[n], 0) for n in names))], 0
    kernels, partials = family.split(program)
    places, total = {}, 0
    for buffer in partials:
        places[buffer.name] = (-1, total)
        total += -(-buffer.bytes // SCRATCH_ALIGN) * SCRATCH_ALIGN
    found = []
    for kernel in kernels:
        part = with_starts(kernel, program)
        arguments = [places.get(b.name) or (order[b.name], 0) for b in part.buffers if b.role != "local"]
        found.append(KernelPart(part, tuple(arguments)))
    return found, total
