"""Chooses operands to prefetch into the L2 cache: the weights of a product of few rows, keys and values of few queries.

An operand qualifies by its size: it takes more bytes than all that the kernel reads and writes besides.  So it is not
what the kernel in front has just made, as activations are, which would be read from memory for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from jcuts.base import knobs
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.schedule import fit
from jcuts.schedule.gpu.families import family_of

MEBIBYTE = 1 << 20
DENSE = 2
"""An operand of which a kernel reads less than one element in so many is not prefetched."""


@dataclass(frozen=True)
class PrefetchLimits:
    """Which operands are prefetched: bytes of one kernel at most, of all its operands together at most, of an operand
    at least; and bytes of these operands over those of all others and of results, at least.
    """

    most_bytes: float
    largest_bytes: float
    least_bytes: float
    dominance: float


_FITTED = fit.record("gpu/weight_prefetch", "operands", PrefetchLimits)


class PrefetchedRange(NamedTuple):
    """A contiguous part of an operand: its buffer's name, first byte and bytes, of which `wanted` are prefetched."""

    buffer: str
    first: int
    bytes: int
    wanted: int


def prefetched_ranges(program: Program, whole: Program) -> list[PrefetchedRange]:
    """What a kernel prefetches; nothing where no operand dominates, or with ``JCUTS_L2_PREFETCH_MB=0``.

    Args:
        program: of one kernel; whole: the scheduled program that it is a part of.
    """
    allowed = limits()
    count = family_of(whole).statistics.prefetched_operands
    if not count or not allowed.most_bytes:
        return []
    found = sorted(_ranges_read(program, {b.name for b in whole.inputs}), key=lambda one: -one.bytes)
    taken = [one for one in found[:count] if one.bytes >= allowed.least_bytes]
    total = sum(one.bytes for one in taken)
    written = {store.buffer for phase in program.phases for store in phase.stores}
    rest = sum(one.bytes for one in found) - total
    rest += sum(b.bytes for b in program.buffers if b.name in written and b.role != "local")
    if not taken or total > allowed.largest_bytes or total < allowed.dominance * rest:
        return []
    share = min(1.0, allowed.most_bytes / total)
    return [one._replace(wanted=int(share * one.bytes)) for one in taken]


def limits() -> PrefetchLimits:
    """The limits of this moment: ``JCUTS_L2_PREFETCH_MB`` in place of the fitted ``most_bytes``, where it is set."""
    chosen = knobs.current().l2_prefetch_mb
    return _FITTED if chosen is None else replace(_FITTED, most_bytes=chosen * MEBIBYTE)


def _ranges_read(program: Program, operands: set[str]) -> list[PrefetchedRange]:
    """The range of every operand that a kernel loads by affine addresses, and most of which it reads."""
    found: dict[str, PrefetchedRange] = {}
    for phase in program.phases:
        for node in (*phase.body.nodes, *phase.exit.nodes):
            if node.op != "load" or node.index is None or node.buffer not in operands:
                continue
            size, item = program.buffer(node.buffer).size, ITEM_SIZE[program.buffer(node.buffer).dtype]
            low, high = _span(program, phase, node.index, size)
            one = PrefetchedRange(node.buffer, low * item, (high - low) * item, 0)
            if node.buffer in found:
                before = found[node.buffer]
                first = min(before.first, one.first)
                end = max(before.first + before.bytes, one.first + one.bytes)
                one = PrefetchedRange(node.buffer, first, end - first, 0)
            found[node.buffer] = one
    return list(found.values())


def _span(program: Program, phase: Phase, index: Index, size: int) -> tuple[int, int]:
    """Elements from the first to behind the last that an address reaches; (0, 0) where it reads few of them."""
    ranges = {**{g.axis: g.extent for g in program.grid}, **phase.ranges()}
    low, high = index.bounds(ranges)
    points = math.prod(ranges.get(axis, 1) for axis in index.axes())
    if index.values() or low is None or high is None:
        return 0, 0
    low, high = max(0, low), min(size, high + 1)
    return (low, high) if high - low <= DENSE * points else (0, 0)
