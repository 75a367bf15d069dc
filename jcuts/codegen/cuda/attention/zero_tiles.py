"""Whether tiles of attention whose weights are all 0 may be left out: what is multiplied by 0 is finite.

0 times a finite number is 0, and adds nothing.  A warp that finds weights of 0 alone (masked keys) therefore looks at
what they would be multiplied with (``ldmatrix``, and integer maxima of the words), which takes a small part of the
products' time, and branches with all its lanes (``vote.sync.all``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L

HIGH_HALF = 0x7FFF0000
"""Magnitude of a 16-bit number in the upper half of a word, of bfloat16 as a float32."""
MAGNITUDE = 0x7FFFFFFF
"""Of a float32."""
SMALL = (127 + 45) << 23
"""2^45 as a float32: sums of 128 products of smaller numbers are below 2^97, and adding one to any finite float32 does
not overflow."""
INFINITE_HALF = 0x7C000000
"""Infinity of float16 in the upper half of a word: no sum of products of smaller numbers overflows a float32."""


def are_bounded(builder: GpuBuilder, kind: str, words: Iterable[L.Value]) -> L.Value:
    """Whether all numbers of a lane's fragments are bounded: neither they nor their products are NaN or infinite.

    Args: kind: operand type of the ``mma`` instruction. words: of 32 bits.
    """
    largest: L.Value = L.I32(0)
    for word in words:
        for number in _magnitudes(builder, kind, word):
            larger = builder.icmp_unsigned(">", number, largest)
            largest = builder.select(larger, number, largest)
    return builder.icmp_unsigned("<", largest, L.I32(INFINITE_HALF if kind == "f16" else SMALL))


def _magnitudes(builder: GpuBuilder, kind: str, word: L.Value) -> list[L.Value]:
    if kind == "tf32":
        return [builder.and_(word, L.I32(MAGNITUDE))]
    high, low = word, builder.shl(word, L.I32(16))
    return [builder.and_(half, L.I32(HIGH_HALF)) for half in (high, low)]


def are_zero(builder: GpuBuilder, values: Iterable[L.Value]) -> L.Value:
    """Whether all float32 values of a lane are +0 or -0."""
    every: L.Value = L.I32(0)
    for value in values:
        every = builder.or_(every, builder.bitcast(value, L.I32))
    return builder.icmp_signed("==", builder.and_(every, L.I32(MAGNITUDE)), L.I32(0))


def both(builder: GpuBuilder, first: L.Value, second: Callable[[], L.Value]) -> L.Value:
    """Whether two predicates hold, of which the second is evaluated where the first does (both of the whole warp)."""
    (holds,) = unless(builder, builder.not_(first), [L.I1(0)], lambda: [second()])
    return holds


def unless(
    builder: GpuBuilder, holds: L.Value, values: list[L.Value], make: Callable[[], list[L.Value]]
) -> list[L.Value]:
    """Values that ``make`` gives, or the present ones where a predicate holds (of a whole warp: a uniform branch)."""
    before = builder.block
    work, after = builder.append_basic_block("work"), builder.append_basic_block("work.done")
    builder.cbranch(holds, after, work)
    builder.position_at_end(work)
    made = make()
    end = builder.block
    builder.branch(after)
    builder.position_at_end(after)
    found = []
    for old, new in zip(values, made, strict=True):
        value = builder.phi(old.type)
        value.add_incoming(old, before)
        value.add_incoming(new, end)
        found.append(value)
    return found
