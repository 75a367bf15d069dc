"""Loop tiling of rows: how many rows a chunk has, and which ones every turn of a loop takes.

Rows are dimensions (batch, length) that different values merge in different ways ([batch, length, vocabulary] and
[tokens, vocabulary]); a chunk is a range of rows in row-major order that is a box in all of them.  What chunks do not
divide is a second, shorter loop over the remainder, so nothing is padded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Factors = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Turns of one loop, each over ``size`` rows.

    Attributes:
        per: turns between two starts that are ``block`` rows apart.
        offset: first row of the first turn.
    """

    size: int
    turns: int
    per: int
    block: int
    offset: int = 0

    def start(self, turn: Any) -> Any:
        """First row of a turn."""
        return turn // self.per * self.block + turn % self.per * self.size + self.offset


def finest(factors: Iterable[Factors]) -> Factors | None:
    """The row dimensions of which all others are merged; None where two of them are no refinement of each other."""
    products = sorted({math.prod(one[d:]) for one in factors for d in range(len(one))} | {1})
    if any(large % small for small, large in itertools.pairwise(products)):
        return None
    return tuple(large // small for small, large in itertools.pairwise(products))[::-1]


def parts(dims: Factors, wanted: int) -> tuple[Part, ...]:
    """Loops over chunks of about ``wanted`` rows, at most.

    Args: dims: `finest`.
    """
    inner, place = 1, len(dims) - 1
    while place > 0 and dims[place] * inner <= wanted:
        inner *= dims[place]
        place -= 1
    extent, outer = dims[place], math.prod(dims[:place])
    size = _divisor(extent, max(1, wanted // inner))
    turns, rest = divmod(extent, size)
    found = [Part(size * inner, outer * turns, turns, extent * inner)]
    if rest:
        found.append(Part(rest * inner, outer, 1, extent * inner, turns * size * inner))
    return tuple(found)


def _divisor(extent: int, most: int) -> int:
    """The largest divisor up to ``most`` if it is at least half of that, else equal sizes but for the last."""
    if most >= extent:
        return extent
    best = max(n for n in range(1, most + 1) if extent % n == 0)
    return best if 2 * best >= most else -(-extent // -(-extent // most))


def local_shape(shape: Sequence[int], rows: Sequence[int], size: int) -> tuple[int, ...]:
    """A value's shape at ``size`` rows."""
    found = list(shape)
    for d in reversed(rows):
        whole = shape[d]
        found[d] = min(whole, size)
        size = size // whole if size > whole else 1
    return tuple(found)


def positions(shape: Sequence[int], rows: Sequence[int], start: Any) -> list[Any]:
    """Start of a chunk along every dimension of a value."""
    found: list[Any] = [0] * len(shape)
    for d in reversed(rows):
        found[d] = start % shape[d]
        start = start // shape[d]
    return found
