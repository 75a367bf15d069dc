"""Matches convolutions to the implicit-GEMM kernel with halo reuse: activation pixels stay in shared memory for all
filter taps.

The A operand of such a GEMM is an array of *pixels*, ``channels`` contiguous elements each:

    left[m, (tap, channel)] = array[pixel(m) + offset(tap), begin + channel],   zero where guards fail

Neighbouring outputs read one run of pixels (the halo), most of which several taps need.  A block copies the run once
per `LINE` bytes of channels (`NARROW` where a pixel has no more), whereas the plain implicit GEMM copies a tile per
tap.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import ROWS, B, GemmOperand, K, S, _number, gemm_operands, k_extent, prologue

LINE = 128
"""Bytes of a pixel's channels that are kept at once."""
NARROW = 64
"""The same of pixels that have no more channels, of 16-bit floats."""
MOST_TAPS = 32
"""A lane knows in one word which of them lie inside the image."""
LEAST_TAPS = 2
STEP = 32
"""Bytes of k per instruction."""


@dataclass(frozen=True)
class ConvWindow:
    """How an implicit GEMM reads its A operand: pixels, filter taps, channels.

    Attributes:
        side: the left operand. channels: elements of a pixel that are read. pixels: of the whole array. rows: outputs.
        stride, begin: elements of a pixel, and those before the first that is read.
        pixel: the pixel of an output's tap with offset 0, by m.
        taps: how many; offset of tap t, in pixels from the first one: ``t // across * down + t % across * aside``.
        first: the least offset from `pixel`. narrow: whether lines are `NARROW`.
    """

    side: GemmOperand
    channels: int
    pixels: int
    rows: int
    pixel: Index
    taps: int
    across: int
    down: int
    aside: int
    first: int
    stride: int
    begin: int
    narrow: bool

    @property
    def bytes(self) -> int:
        """Bytes of a pixel's line in shared memory."""
        return NARROW if self.narrow else LINE

    @property
    def channels_per_tile(self) -> int:
        """Channels of one channel chunk."""
        return self.bytes // self.side.item

    @property
    def channel_tiles(self) -> int:
        """Number of channel chunks."""
        return -(-self.channels // self.channels_per_tile)

    @property
    def k_tiles(self) -> int:
        """Number of k-tiles: one tap and one channel chunk each."""
        return self.channel_tiles * self.taps

    @property
    def whole(self) -> int:
        """k-steps (instructions) of a full channel chunk."""
        return self.bytes // STEP

    @property
    def short(self) -> int:
        """k-steps of the last channel chunk for 16-bit floats; float32 multiplies the whole chunk."""
        left = (self.channels - (self.channel_tiles - 1) * self.channels_per_tile) * self.side.item
        return -(-left // STEP) if self.side.item == 2 else self.whole

    @property
    def tap_span(self) -> int:
        """Pixels from the first tap to the last, plus one."""
        return 1 + (self.taps - 1) // self.across * self.down + (self.across - 1) * self.aside

    def halo_rows(self, size: int) -> int:
        """Upper bound on the pixels that a tile of ``size`` neighbouring outputs reads."""
        return _max_row_distance(self.pixel, self.rows, size) + self.tap_span


def match_conv_window(program: Program) -> ConvWindow | None:
    """Matches the A operand of a GEMM to an array of pixels read by a filter; None where it is not one."""
    ranges = program.phases[0].ranges()
    left, right = gemm_operands(program)
    shape = next(b.shape for b in program.inputs if b.name == left.buffer)
    if {B, S} & set(ranges) or prologue(program) is not None or len(shape) < 2 or not left.along_terms:
        return None
    stride, terms = shape[-1], k_extent(program)
    # Channels that are part of a pixel's end each run of neighbouring terms.
    channels = stride if left.run % stride == 0 or left.run == terms else left.run
    taps = terms // channels
    if terms % channels or not LEAST_TAPS <= taps <= MOST_TAPS or left.width * left.item != 16:
        return None
    place = left.outer_offset
    begin = place.const % stride
    if begin + channels > stride or any(coef % stride for _, coef in place.terms):
        return None
    found = [_number(left.k_offset, {K: tap * channels}) for tap in range(taps)]
    if any(f % stride for f in found) or left.step != 1:
        return None
    offsets = [f // stride for f in found]
    grid = _grid([o - offsets[0] for o in offsets])
    if grid is None:
        return None
    pixel = Index(place.const // stride, tuple((atom, coef // stride) for atom, coef in place.terms))
    pixels, rows = int(np.prod(shape[:-1])), ranges[ROWS]
    if _max_row_distance(pixel, rows, 2) < 0:
        return None
    narrow = left.item == 2 and channels * left.item <= NARROW and not right.along_terms
    return ConvWindow(left, channels, pixels, rows, pixel, taps, *grid, offsets[0], stride, begin, narrow)


def linearize_k(side: GemmOperand, terms: int) -> GemmOperand:
    """The B operand with its address rewritten as a multiple of k, if it is one."""
    places = _number(side.k_offset, {K: np.arange(terms)})  # type: ignore[dict-item]
    if not np.array_equal(np.broadcast_to(places, (terms,)), np.arange(terms) * side.step):
        return side
    return replace(side, index=side.outer_offset + Index.axis(K) * side.step, run=terms)


def gather_per_copy(program: Program, left: GemmOperand, right: GemmOperand) -> bool:
    """Whether each copy of the A operand can compute its own address from k.

    16-bit floats, and float32 where the right operand is rounded, so that neither goes through registers; nothing is
    computed on the way.
    """
    whole = all(side.width * side.item == LINE // 8 for side in (left, right))
    copied = left.item == 2 or (right.along_terms and program.buffer(right.buffer).tf32)
    if not copied or not left.along_terms or not whole or prologue(program) is not None:
        return False
    terms = k_extent(program)
    return linearize_k(right, terms).run == terms


def weights_need_no_transform(program: Program) -> bool:
    """Whether the B operand of a convolution can be read by ``wgmma`` as it lies in memory."""
    left, right = gemm_operands(program)
    if right.width * right.item != 16 or (
        left.item == 4 and not (right.along_terms and program.buffer(right.buffer).tf32)
    ):
        return False
    found = match_conv_window(program)
    return found is not None and linearize_k(right, found.taps * found.channels).run == found.taps * found.channels


def _grid(offsets: list[int]) -> tuple[int, int, int] | None:
    """(across, down, aside) strides of tap offsets that grow, the first of which is 0."""
    if any(b <= a for a, b in itertools.pairwise(offsets)):
        return None
    aside = offsets[1]
    for across in range(len(offsets), 0, -1):
        if len(offsets) % across:
            continue
        down = offsets[across] if across < len(offsets) else 0
        if all(o == t // across * down + t % across * aside for t, o in enumerate(offsets)):
            return across, down, aside
    return None


@functools.lru_cache(256)
def _max_row_distance(pixel: Index, rows: int, size: int) -> int:
    """Most pixels between two outputs of a tile; negative where later outputs read earlier pixels."""
    places = np.broadcast_to(_number(pixel, {ROWS: np.arange(rows)}), (rows,))  # type: ignore[dict-item]
    if rows > 1 and (np.diff(places) < 0).any():
        return -1
    first = np.arange(0, rows, size)
    return int((places[np.minimum(first + size, rows) - 1] - places[first]).max())
