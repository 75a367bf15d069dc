"""Interpolates XLA's time between problems that differ in one dimension, such as the layers of a growing dense block.

XLA times dozens of its own kernels for every new matmul, which takes seconds; the time of the best one grows smoothly
with the size.  Of such a family XLA's time is measured at sizes a factor apart and interpolated linearly in between.
That suffices where a kernel is clearly faster or slower than the line; elsewhere XLA's time is measured after all
(`tune.parent.measure_order`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LEAST = 4
"""Members of a family."""
STEP = 1.6
"""Most that the sizes of neighbours that are measured differ by, as a factor, where there are any in between."""
CLEAR = 1.25
"""A kernel is clearly faster or slower than the line by that factor."""
STEEP = 2.0
"""Neighbours whose times differ by more than that are none: XLA has changed its mind in between."""
BACK = 1.1
"""... nor those of which the larger takes less time by more than that."""

Range = tuple[float, float]

# A slice's time does not depend on where it begins; digits of names and types are no sizes.
_PLACES = re.compile(r"(start|limit)_indices=\([^)]*\)")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


@dataclass(frozen=True)
class InterpolationPair:
    """A problem between two measured ones, with its interpolation weight.

    Attributes: low, high: their keys; share: of the way from the one to the other, in [0, 1].
    """

    low: str
    high: str
    share: float

    def seconds(self, low: Range, high: Range) -> Range | None:
        """XLA's time on the line between theirs, least and most [s]; None where they do not tell."""
        if not all(a / BACK <= b <= STEEP * a for a, b in zip(low, high, strict=True)):
            return None
        return (low[0] + self.share * (high[0] - low[0]), low[1] + self.share * (high[1] - low[1]))


def interpolation_neighbours(texts: Mapping[str, str]) -> dict[str, InterpolationPair]:
    """The problems whose XLA side need not be measured at first.

    Args: texts: key of each -> its program as text (`trace.canonical`), '' for one that has no family.
    """
    found: dict[str, InterpolationPair] = {}
    for family in _families(texts):
        sizes = sorted({size for size, _ in family})
        kept = _kept(sizes)
        first = dict(sorted(family, reverse=True))  # the least key of each size
        for size, key in family:
            if size in kept and first[size] == key:
                continue
            low = max(s for s in kept if s <= size)
            high = min(s for s in kept if s >= size)
            share = (size - low) / (high - low) if high > low else 0.0
            found[key] = InterpolationPair(first[low], first[high], share)
    return found


def decide_from_bounds(
    kernel: float | None, least: float, most: float, faster: float, slower: float = 1.0
) -> float | None:
    """XLA's time [s] where that is enough to choose by; None where it must be measured.

    Args: kernel: the fastest one's time [s], None where all were left behind; least, most: what XLA's side takes [s];
        faster, slower: factors by which a kernel must be faster than the one, or slower than the other; infinite where
            XLA's own program is wanted if it wins.
    """
    if kernel is None:
        return most if slower < math.inf else None
    if kernel >= slower * most:
        return most
    return least if faster * kernel <= least else None


def _families(texts: Mapping[str, str]) -> Iterator[list[tuple[int, str]]]:
    """Disjoint families, the largest first, as sizes with keys."""
    alike: dict[tuple[str, tuple[int, ...]], list[tuple[int, str]]] = {}
    for key, text in sorted(texts.items()):
        bare = _PLACES.sub("", text)
        numbers = [int(n) for n in _NUMBER.findall(bare)]
        shape = _NUMBER.sub("#", bare)
        for size in sorted(set(numbers)) if text else ():
            rest = tuple(-1 if n == size else n for n in numbers)
            alike.setdefault((shape, rest), []).append((size, key))
    taken: set[str] = set()
    for family in sorted(alike.values(), key=len, reverse=True):
        left = [(size, key) for size, key in family if key not in taken]
        if len(left) >= LEAST:
            taken |= {key for _, key in left}
            yield left


def _kept(sizes: Sequence[int]) -> set[int]:
    """The sizes at which XLA's side is measured: both ends, and steps of a factor in between."""
    kept = [sizes[0]]
    while kept[-1] != sizes[-1]:
        near = [s for s in sizes if kept[-1] < s <= STEP * kept[-1]]
        kept.append(near[-1] if near else next(s for s in sizes if s > kept[-1]))
    return set(kept)
