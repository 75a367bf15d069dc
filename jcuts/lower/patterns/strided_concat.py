"""Eliminates concatenations of equal strided slices of one tensor: the result is an index expression on the source.

Where slice n starts at an affine function of n (as in shifted channel groups), every point of the result is one point
of the source:

    concatenate(slice_0(x), ..., slice_n(x))[i]  =  x[start + large (number // minor) + small (number % minor) + rest]
    with  number, rest  =  divmod(i, extent of a slice)    along the dimension of the concatenation

Convolutions have addresses of the same kind (quotients of k, affine within a run of k), so a shift before a 1x1
convolution, padded or not, becomes part of its loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.kernel_ir.index import Index

LEAST = 3
"""Pieces from which on they are looked at together."""


@dataclass(frozen=True)
class StridedConcat:
    """A concatenation as an index expression on its source.

    Attributes:
        source: the tensor. slices: equations that cut the pieces. dim, extent: the dimension along which they are
            joined, and what one has of it. starts: of piece 0. minor: the second digit's base. steps: per dimension,
            how far a piece is from the one before it, and how far one that is ``minor`` pieces on.
    """

    source: int
    slices: frozenset[int]
    dim: int
    extent: int
    starts: tuple[int, ...]
    minor: int
    steps: tuple[tuple[int, int], ...]

    def place(self, index: Sequence[Index], ranges: Mapping[str, int]) -> tuple[Index, ...]:
        """Index in the source of the result's point at ``index``."""
        number = index[self.dim].floordiv(self.extent, ranges)
        within = [*index[: self.dim], index[self.dim].mod(self.extent, ranges), *index[self.dim + 1 :]]
        found = []
        for part, start, (small, large) in zip(within, self.starts, self.steps, strict=True):
            if large == small * self.minor:
                found.append(part + number * small + start)
            else:
                high, low = number.floordiv(self.minor, ranges), number.mod(self.minor, ranges)
                found.append(part + high * large + low * small + start)
        return tuple(found)


def match_strided_concat(
    cuts: Sequence[tuple[int, int, Any]], shapes: Sequence[tuple[int, ...]], dim: int
) -> StridedConcat | None:
    """Matches a concatenation of equal strided slices; None where sizes differ or the starts are not affine.

    Args: cuts: (number, source, parameters) of the slices; shapes: of their results.
    """
    sources = {source for _, source, _ in cuts}
    strided = any(s != 1 for _, _, params in cuts for s in params["strides"] or ())
    if len(cuts) < LEAST or len(sources) != 1 or len(set(shapes)) != 1 or strided:
        return None
    starts = [tuple(map(int, params["start_indices"])) for _, _, params in cuts]
    count = len(starts)
    for minor in range(count, 1, -1):
        if count % minor:
            continue
        small = tuple(b - a for a, b in zip(starts[0], starts[1], strict=True))
        large = tuple(b - a for a, b in zip(starts[0], starts[minor % count], strict=True))
        if minor == count:
            large = tuple(s * minor for s in small)
        expected = [
            tuple(a + k // minor * m + k % minor * s for a, m, s in zip(starts[0], large, small, strict=True))
            for k in range(count)
        ]
        if expected == starts:
            slices = frozenset(number for number, _, _ in cuts)
            steps = tuple(zip(small, large, strict=True))
            return StridedConcat(sources.pop(), slices, dim, shapes[0][dim], starts[0], minor, steps)
    return None
