"""Static memory planning: offsets in one arena for temporaries with known lifetimes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

ALIGNMENT = 256  # bytes: what XLA gives its own buffers on a GPU


def assign_offsets(spans: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets such that values with overlapping lifetimes do not overlap (greedy by size: largest first, lowest
    offset).

    Args: spans: (first step, last step, bytes) per value; both steps belong to its life.
    Returns: an offset [B] per value, aligned; the size [B] of it all.

    >>> packed([(0, 1, 256), (1, 2, 256), (2, 3, 256)])
    ([0, 256, 0], 512)
    """
    offsets = [0] * len(spans)
    placed: list[int] = []  # by offset
    size = 0
    for k in sorted(range(len(spans)), key=lambda k: (-spans[k][2], spans[k][0], k)):
        begin, end, length = spans[k]
        offset = 0
        for other in placed:
            first, last, taken = spans[other]
            if first > end or last < begin:
                continue
            if offset + length <= offsets[other]:
                break
            offset = max(offset, -(-(offsets[other] + taken) // ALIGNMENT) * ALIGNMENT)
        offsets[k] = offset
        bisect.insort(placed, k, key=offsets.__getitem__)
        size = max(size, offset + length)
    return offsets, size
