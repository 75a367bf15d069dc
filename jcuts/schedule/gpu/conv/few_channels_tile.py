"""Thread-block tile of the few-channel convolution (implicit GEMM, ``mma.sync``): its shared-memory layout.

A fragments are gathered from the patch (the input pixels of a tile, with their halo), without im2col.

A block computes ``rows x pixels`` outputs of ``columns`` filters.  The patch that their windows cover is as it lies in
memory, line by line; a line begins up to three elements early, so that copies of 16 bytes are aligned.  Filters lie
behind it, one line of columns per k.

With an odd number of 16-bit elements, every second line begins in the middle of a word.  The same holds in shared
memory, where the pitch is odd, too: a tile whose first line begins in the middle lies one element further on, and words
stay words.

The k are numbered in fours.  A lane of a warp holds k ``lane % 4`` of two fours and pixel ``lane / 4`` of its fragment:
a four is a *pattern* (where its elements lie, seen from the first one), for which a lane has one address, and a
constant.  Fragments take neighbouring pixels, or every second one, whichever has fewer bank conflicts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.few_channel_conv import FewChannelConv, Place, conv_geometry
from jcuts.schedule.gpu.machine import WARP

BANKS = 32
FOUR = 4
"""k that a quarter of a warp's lanes hold."""
WORD = 4
"""Bytes of a bank's word."""
ACCESS = 16
"""Bytes of the widest copy."""
DEPTH = 32
"""Bytes along K of an instruction, of one pixel."""
LINES = DEPTH // WORD
"""Lines of filters of an instruction."""
TILE = 16
"""Pixels of an instruction, and columns whose results a lane stores in one access."""
SHIFT = 8
"""Words by which lines of filters are shifted against each other: k of a four lie in different banks."""


@dataclass(frozen=True)
class FewChannelTile:
    """Block tile of the few-channel convolution.

    Attributes:
        patches: the convolution's geometry.
        rows, pixels, columns: outputs of a tile.
        warps: warps along each of these.
        stages: patches in shared memory.
        share: tiles that a block computes one after the other.
    """

    patches: FewChannelConv
    rows: int
    pixels: int
    columns: int
    warps: tuple[int, int, int]
    stages: int
    share: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * math.prod(self.warps)

    @property
    def warp(self) -> tuple[int, int, int]:
        """Outputs of a warp's tile."""
        high, wide, across = self.warps
        return self.rows // high, self.pixels // wide, self.columns // across

    @property
    def fits(self) -> bool:
        """Whether warps divide the tile into whole fragments."""
        whole = all(t % w == 0 for t, w in zip((self.rows, self.pixels, self.columns), self.warps, strict=True))
        whole = whole and self.width > 0 and self.warp[1] % TILE == 0 and self.warp[2] % TILE == 0
        return whole and self.stages in (1, 2) and (self.rows == 1 or self.patches.vertical is not None)

    # -- tiles --------------------------------------------------------------------------------------------------
    @property
    def counts(self) -> tuple[int, int]:
        """Output tiles of an image: down and across."""
        return -(-self.patches.rows // self.rows), -(-self.patches.outputs // self.pixels)

    @property
    def tiles(self) -> int:
        """Output tiles of all images."""
        return self.patches.images * math.prod(self.counts)

    @property
    def blocks(self) -> tuple[int, int]:
        """Grid: blocks along the filters, and blocks along the output tiles."""
        return -(-self.patches.columns // self.columns), -(-self.tiles // self.share)

    # -- the patch ----------------------------------------------------------------------------------------------
    @property
    def half_word_lines(self) -> bool:
        """Whether every second line begins in the middle of a word (only without padding to the left of an image)."""
        return self.patches.item < WORD and self.patches.length % 2 == 1 and self.patches.start[1] >= 0

    @property
    def early(self) -> int:
        """Elements that a line of the patch begins early, for alignment."""
        return self.patches.start[1] % self.width

    @cached_property
    def width(self) -> int:
        """Elements of one copy; 0 where lines are not even word-aligned."""
        found = self.patches
        if self.half_word_lines:
            return WORD // found.item
        image = found.lines * found.length
        steps = (found.length, found.step[1] * self.pixels, image)
        widths = (size // found.item for size in (ACCESS, 8, WORD))
        return next((w for w in widths if all(step % w == 0 for step in steps)), 0)

    @property
    def lines(self) -> int:
        """Lines of a patch."""
        return (self.rows - 1) * self.patches.step[0] + self.patches.reach[0]

    @property
    def length(self) -> int:
        """Elements of a line that are copied."""
        found = self.half_word_lines + self.early + (self.pixels - 1) * self.patches.step[1] + self.patches.reach[1]
        return -(-found // self.width) * self.width

    @cached_property
    def threads_per_line(self) -> int:
        """Threads that copy a line together."""
        pieces = self.length // self.width
        return min((2**k for k in range(2, 6)), key=lambda count: (self.copies(count), abs(count - pieces)))

    def copies(self, beside: int) -> int:
        """Copies per thread."""
        return -(-self.lines // (self.threads // beside)) * -(-self.length // self.width // beside)

    @property
    def pitch(self) -> int:
        """Elements from one line to the next: the shortest length with fewest bank conflicts."""
        return self._layout[0]

    @cached_property
    def _layout(self) -> tuple[int, int]:
        return _best_pitch(
            self.patches.terms,
            self.patches.step[1] * self.fragment_row_stride,
            self.length + self.half_word_lines,
            self.width,
            self.patches.item,
        )

    @property
    def patch(self) -> int:
        """Bytes of a patch, a multiple of 16."""
        return -(-(self.lines * self.pitch + self.half_word_lines) * self.patches.item // ACCESS) * ACCESS

    # -- terms --------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """k-steps (instructions along K)."""
        return -(-len(self.patches.terms) * self.patches.item // DEPTH)

    @cached_property
    def k_offsets(self) -> list[list[int]]:
        """Offsets in the patch from a pixel's first element to its k, in fours; the last one stands for those beyond K.

        For 16-bit floats a four of even k comes before that of the neighbouring odd ones.
        """
        return _fours(self.patches.terms, self.pitch, self.patches.item)

    def real(self, four: int) -> int:
        """How many k of a four exist (the rest is padding)."""
        many = WORD // self.patches.item
        first = four // many * many * FOUR + four % many
        return max(0, min(FOUR, -((first - len(self.patches.terms)) // many)))

    @property
    def bank_conflict_cycles(self) -> int:
        """Cycles of all reads of a fragment's fours; one each without bank conflicts."""
        return self._layout[1]

    @cached_property
    def fragment_row_stride(self) -> int:
        """Pixel stride within a fragment's upper half: 1, or 2 with the lower half interleaved."""

        def cost(apart: int) -> int:
            many = WORD // self.patches.item
            terms = range(0, FOUR * many, many)
            places = [k * apart * self.patches.step[1] + t for k in range(WARP // FOUR) for t in terms]
            return _conflicts([place // many for place in places])

        return min((1, 2), key=cost)

    # -- shared memory --------------------------------------------------------------------------------------------
    @property
    def filters_pitch(self) -> int:
        """Words from one line of filters to the next."""
        return self.columns + (SHIFT - self.columns) % BANKS

    @property
    def filters(self) -> int:
        """Bytes of the filters, zero padding of k included."""
        return self.steps * LINES * self.filters_pitch * WORD

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: patches, filters."""
        return self.stages * self.patch + self.filters


@functools.lru_cache(256)
def _best_pitch(terms: tuple[Place, ...], apart: int, length: int, width: int, item: int) -> tuple[int, int]:
    """(pitch, cycles of the reads) with pixels that are so many elements apart."""

    def waits(pitch: int) -> int:
        pixels = range(0, WARP // FOUR * apart, apart)
        fours = _fours(terms, pitch, item)
        return sum(_conflicts([(pixel + term) * item // WORD for pixel in pixels for term in four]) for four in fours)

    pitches = range(length, length + BANKS * WORD // item, width)
    return min(((pitch, waits(pitch)) for pitch in pitches), key=lambda found: found[::-1])


def _fours(terms: tuple[Place, ...], pitch: int, item: int) -> list[list[int]]:
    found = [line * pitch + element for line, element in terms]
    found += [found[-1]] * (-len(found) % (DEPTH // item))
    many = WORD // item
    return [found[k + n : k + many * FOUR : many] for k in range(0, len(found), many * FOUR) for n in range(many)]


def _conflicts(words: list[int]) -> int:
    """Cycles of a read: how many different words the busiest bank has."""
    banks: dict[int, set[int]] = {}
    for word in words:
        banks.setdefault(word % BANKS, set()).add(word)
    return max(len(found) for found in banks.values())


def shape_of(program: Program) -> FewChannelTile:
    """The block tile of a schedule of `conv.few_channels`."""
    params: Any = dict(program.params)
    rows, pixels, columns = params["tile"]
    high, wide, across = params["warps"]
    return FewChannelTile(
        conv_geometry(program), rows, pixels, columns, (high, wide, across), int(params["stages"]), int(params["share"])
    )
