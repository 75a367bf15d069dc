"""Bulk prefetch of operands into the L2 cache: ``cp.async.bulk.prefetch.L2``, by one thread of every warp.

The instructions stand before a kernel's ``griddepcontrol.wait``: they change no value, and the L2 cache is where all
multiprocessors' writes meet, so that what is prefetched is never old.  The warps of all blocks have a piece each of the
operand.  Which operands: `jcuts.schedule.gpu.weight_prefetch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jcuts.arch.sm_limits import SM_90

BULK = "cp.async.bulk.prefetch.L2.global"
UNIT = 16
"""Addresses and sizes of bulk copies are multiples of so many bytes."""


class OperandPrefetch(NamedTuple):
    """A range of an operand: number of the kernel's parameter, first byte, bytes, and how many of these to prefetch."""

    parameter: int
    first: int
    bytes: int
    wanted: int


def prefetch_instructions(
    parameters: Sequence[str], operands: Sequence[OperandPrefetch], blocks: int, threads: int
) -> list[str]:
    """Lines of PTX.  Where an operand is not prefetched as a whole, every warp takes the beginning of its piece.

    Args: parameters: names of the kernel's parameters; blocks, threads: of the launch, along x.
    """
    if not operands:
        return []
    warps = -(-threads // SM_90.warp_threads)
    lines = [
        ".reg .b64 %bulk_d<3>;",
        ".reg .b32 %bulk_r<5>;",
        ".reg .pred %bulk_p<3>;",
        "mov.u32 \t%bulk_r1, %tid.x;",
        f"and.b32 \t%bulk_r2, %bulk_r1, {SM_90.warp_threads - 1};",
        "setp.eq.u32 \t%bulk_p1, %bulk_r2, 0;",
        f"shr.u32 \t%bulk_r1, %bulk_r1, {SM_90.warp_threads.bit_length() - 1};",
        "mov.u32 \t%bulk_r3, %ctaid.x;",
        f"mad.lo.u32 \t%bulk_r3, %bulk_r3, {warps}, %bulk_r1;",
    ]
    for operand in operands:
        lines += _of_operand(parameters[operand.parameter], operand, blocks * warps)
    return [f"\t{line}" for line in lines]


def _of_operand(parameter: str, operand: OperandPrefetch, warps: int) -> list[str]:
    """Piece number ``%bulk_r3`` of an operand, on the threads of ``%bulk_p1``."""
    first = operand.first // UNIT * UNIT
    total = (operand.first + operand.bytes - first) // UNIT * UNIT
    stride = -(-total // warps // SM_90.cache_line_bytes) * SM_90.cache_line_bytes
    if not stride:
        return []
    pieces, last = divmod(total, stride)
    size = stride if operand.wanted >= operand.bytes else min(stride, -(-operand.wanted // warps // UNIT) * UNIT)
    lines = [
        f"mul.wide.u32 \t%bulk_d2, %bulk_r3, {stride};",
        f"ld.param.u64 \t%bulk_d1, [{parameter}];",
        "add.s64 \t%bulk_d1, %bulk_d1, %bulk_d2;",
    ]
    if first:
        lines.append(f"add.s64 \t%bulk_d1, %bulk_d1, {first};")
    lines.append(f"mov.u32 \t%bulk_r4, {size};")
    if last:
        lines.append(f"setp.eq.u32 \t%bulk_p2, %bulk_r3, {pieces};")
        lines.append(f"selp.b32 \t%bulk_r4, {min(size, last)}, %bulk_r4, %bulk_p2;")
    lines.append(f"setp.lt.u32 \t%bulk_p2, %bulk_r3, {pieces + bool(last)};")
    return [*lines, "and.pred \t%bulk_p2, %bulk_p2, %bulk_p1;", f"@%bulk_p2 {BULK} \t[%bulk_d1], %bulk_r4;"]
