"""Block tile of the fused inverted residual: output tile, input halo, channel chunks, shared-memory layout.

Of every tile of outputs of one image (or of a few whole ones) the pixels that its windows cover *inside* the image are
expanded: ``span`` of them, which begin where the windows do, or at the image's first pixel, or so that they end with
its last.  They lie in shared memory as a ``patch`` of all pixels that windows cover; those outside the image stay zero.
Channels between the GEMMs come in chunks of ``chunk``:

    expand a chunk -> patch | barrier | depthwise -> deep | barrier | project: accumulators += deep @ weights

Where there is nothing to expand, a chunk of the operand's channels is copied, and of several chunks there are two
patches.

Shared memory: two chunks (or the only one) of both GEMMs' weights, input pixels, patches, the depthwise results.  Input
pixels may be staged in registers (parameter ``held``), each lane its part, read once: then the patches reuse their
shared memory.

Patch and depthwise results have the type of the GEMMs' operands (`Block.dtype`); a thread sums the windows of one
channel of float32, of two neighbours of bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.inverted_residual import InvertedResidual, Place, match_inverted_residual
from jcuts.schedule.gpu.b2b_gemm.pair_tile import BANKS, COLUMN_TILE, HELD, ROW_TILE, WORD, GemmPairTile, aligned
from jcuts.schedule.gpu.machine import WARP

MOST_DEALT = 16
"""Groups of threads whose strips have an order of their own: one constant of 64 bits."""

_PLACED = ("patch", "span", "starts", "shifts", "pixels")
"""What depends on a tile's images, rows and columns alone."""


@dataclass(frozen=True)
class InvertedResidualTile(GemmPairTile):
    """Block tile of the fused inverted residual.

    Attributes:
        block: the operation.
        images, rows, columns: outputs of a tile.
        chunk: channels per chunk.
        expand: warps along pixels and along channels of the expand GEMM.
        project: the same of the project GEMM.
        strip: outputs (rows, columns) of one channel that a thread computes.
        held: whether a warp keeps its input pixels in registers.
        beside: resident blocks per multiprocessor that registers must allow.
    """

    block: InvertedResidual
    images: int
    rows: int
    columns: int
    chunk: int
    expand: Place
    project: Place
    strip: Place
    held: bool = False
    beside: int = 1

    def divided(self, **changes: Any) -> InvertedResidualTile:
        """The same tile of outputs with other work per warp or chunk: where it lies in the image is known."""
        made = replace(self, **changes)
        vars(made).update((name, vars(self)[name]) for name in _PLACED if name in vars(self))
        return made

    @property
    def fits(self) -> bool:
        """Whether the parameters are consistent."""
        whole = self.rows >= self.block.window.outputs[0] and self.columns >= self.block.window.outputs[1]
        found = math.prod(self.expand) == math.prod(self.project) and self.threads <= 1024
        found = found and self.chunk % (COLUMN_TILE * self.expand[1]) == 0 and self.threads % self.words == 0
        found = found and self.rows % self.strip[0] == self.columns % self.strip[1] == 0
        return found and (self.images == 1 or whole) and (not self.held or 0 < self.input_registers <= HELD)

    # -- tiles --------------------------------------------------------------------------------------------------
    @property
    def counts(self) -> tuple[int, int, int]:
        """Groups of images, tiles down and across."""
        (images, *_), outputs = self.block.window.image, self.block.window.outputs
        return -(-images // self.images), -(-outputs[0] // self.rows), -(-outputs[1] // self.columns)

    @property
    def tiles(self) -> int:
        """Thread blocks of the grid."""
        return math.prod(self.counts)

    @cached_property
    def patch(self) -> Place:
        """Rows and columns of the patch (output tile plus halo)."""
        step, reach = self.block.window.step, self.block.window.receptive_field
        return (self.rows - 1) * step[0] + reach[0], (self.columns - 1) * step[1] + reach[1]

    @cached_property
    def span(self) -> Place:
        """Rows and columns of the image that are expanded for a tile (maximum over tiles)."""
        down, across = (
            max(max(1, min(extent, begin + reach) - max(0, begin)) for begin in starts)
            for starts, reach, extent in zip(self.starts, self.patch, self.block.window.image[1:3], strict=True)
        )
        return down, across

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First row and column of every tile's windows."""
        window = self.block.window
        down, across = (
            tuple(number * size * step + start for number in range(count))
            for count, size, step, start in zip(
                self.counts[1:], (self.rows, self.columns), window.step, window.start, strict=True
            )
        )
        return down, across

    @cached_property
    def shifts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset of the expanded rows and columns in the patch, for all tiles."""
        down, across = (
            tuple(max(0, min(begin, extent - span)) - begin for begin in starts)
            for starts, span, extent in zip(self.starts, self.span, self.block.window.image[1:3], strict=True)
        )
        return down, across

    @property
    def has_outside_pixels(self) -> tuple[bool, bool]:
        """Whether expanded rows and columns may lie outside the patch."""
        down, across = (
            min(shifts) < 0 or max(shifts) + span > size
            for shifts, span, size in zip(self.shifts, self.span, self.patch, strict=True)
        )
        return down, across

    @property
    def is_linear(self) -> bool:
        """Whether neighbouring expanded pixels are neighbours in the patch, across ends of rows too."""
        return self.span[1] == self.patch[1] and (self.images == 1 or self.span[0] == self.patch[0])

    @cached_property
    def pixels(self) -> int:
        """Input pixels of a tile."""
        return self.images * math.prod(self.span)

    @property
    def outputs(self) -> int:
        """Output pixels of a tile."""
        return self.images * self.rows * self.columns

    @property
    def strips(self) -> int:
        """Strips of outputs per tile and channel."""
        return self.outputs // math.prod(self.strip)

    @property
    def groups(self) -> int:
        """Groups of threads that cover all words of a chunk; each does a strip at a time."""
        return self.threads // self.words

    def strips_per_pass(self, first: int) -> list[int]:
        """Strips that the groups compute at once, from number ``first`` on.

        Threads of a warp that belong to several groups are to meet few banks twice: each group takes the strip that
        costs least beside those before it.
        """
        count = min(self.groups, self.strips - first)
        found = list(range(count))
        if count > MOST_DEALT or self.words % WARP == 0:
            return found
        starts = self._starts(first + np.arange(count))
        for place in range(1, count):
            costs = [self._passes(starts, [*found[:place], strip]) for strip in found[place:]]
            found.insert(place, found.pop(place + costs.index(min(costs))))
        return found if self._passes(starts, found) < self._passes(starts, list(range(count))) else list(range(count))

    def _starts(self, strips: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Of reads and of stores of windows: how many there are per strip, the first word of each strip."""
        rest, column = np.divmod(strips, self.columns // self.strip[1])
        image, row = np.divmod(rest, self.rows // self.strip[0])
        (high, wide), (down, across), reach = self.strip, self.block.window.step, self.block.window.receptive_field
        read = (image * self.patch[0] + row * high * down) * self.patch[1] + column * wide * across
        written = (image * self.rows + row * high) * self.columns + column * wide
        covered = ((high - 1) * down + reach[0]) * ((wide - 1) * across + reach[1])
        words = self.item / WORD
        return [
            (covered, (read * self.patch_pitch * words).astype(int)),
            (high * wide, (written * self.projected_pitch * words).astype(int)),
        ]

    def _passes(self, starts: list[tuple[int, np.ndarray]], order: list[int]) -> int:
        """Passes through shared memory of groups that do strips in this order."""
        total = 0
        for count, words in starts:
            banks = (words[order][:, None] + np.arange(self.words)).ravel() % BANKS
            total += count * sum(int(np.bincount(banks[k : k + WARP]).max()) for k in range(0, banks.size, WARP))
        return total

    # -- shared memory --------------------------------------------------------------------------------------------
    @property
    def patch_pitch(self) -> int:
        """Elements from one patch pixel to the next: fragment stores have no bank conflicts."""
        if self.item < WORD:
            return self.projected_pitch
        first = self.block.weights[0]
        apart = 8 if first is None or first.along_terms else 16
        return self.chunk + (apart - self.chunk) % (2 * apart)

    @property
    def projected_pitch(self) -> int:
        """Elements from one pixel of depthwise results to the next: 16 bytes of padding."""
        return self.chunk + 16 // self.item

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Bytes of input, a chunk of either GEMM's weights, patch, depthwise results."""
        elements = (
            self.images * math.prod(self.patch) * self.patch_pitch,
            self.m_fragments_out * self.project[0] * ROW_TILE * self.projected_pitch,
        )
        patch, deep = (aligned(self.item * count) for count in elements)
        return *self.operand_bytes, patch, deep

    @property
    def patches(self) -> int:
        """Number of patches: two where the next one is copied meanwhile."""
        return self.weight_stages if self.block.expand is None else 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a thread block."""
        first, _, _, patch, deep = self.sizes
        later = self.patches * patch + deep
        return self.weights + (max(first, later) if self.held else first + later)


def shape_of(program: Program) -> InvertedResidualTile | None:
    """The block tile of a schedule of `inverted_residual.schedules`; None for other programs."""
    params: Any = dict(program.params)
    found = match_inverted_residual(program)
    if isinstance(found, Refusal):
        return None
    images, rows, columns = params["tile"]
    expand, project, strip = (tuple(params[name]) for name in ("expand", "project", "strip"))
    more = bool(params.get("held", False)), int(params.get("beside", 1))
    return InvertedResidualTile(found, images, rows, columns, int(params["chunk"]), expand, project, strip, *more)
