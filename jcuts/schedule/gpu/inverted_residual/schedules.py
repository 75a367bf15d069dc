"""Schedules of fused inverted residuals (`lower.patterns.inverted_residual`), ranked by the cycle model of `cost`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.inverted_residual import InvertedResidual, Place, match_inverted_residual
from jcuts.schedule import fit
from jcuts.schedule.gpu.b2b_gemm.pair_tile import COLUMN_TILE, ROW_TILE, WORD
from jcuts.schedule.gpu.gemm.mma import AGAIN, BLOCKS, REGISTERS
from jcuts.schedule.gpu.inverted_residual.cost import covered_pixels, cycles, least
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile
from jcuts.schedule.gpu.machine import WARP, Candidate, GpuMachine, scheduled

LISTED = 80
"""Schedules that are ranked: by default a tenth of them is measured."""
EDGES = (4, 7, 8, 14, 16, 28)
"""Outputs along an edge of a tile."""
IMAGES = (1, 2, 4)
CHUNKS = {4: (16, 32, 48, 64), 2: (16, 32, 48, 64, 96, 128)}
"""Channels of a piece, by bytes of an operand."""
WARPS = (4, 6, 7, 8, 12, 14, 16)
ACROSS = (1, 2, 3, 4)
STRIPS = (
    (4, 4),
    (7, 2),
    (2, 7),
    (4, 2),
    (2, 4),
    (7, 1),
    (1, 7),
    (8, 1),
    (1, 8),
    (2, 2),
    (4, 1),
    (1, 4),
    (8, 2),
    (2, 1),
)
MOST_STRIP = 64
"""Pixels that a strip's windows may cover."""
MOST_PIXELS = 480
"""Input pixels of a tile."""
MOST_OUTPUTS = 256
"""Outputs of a tile."""
MOST_SUMS = 96
"""Registers of a thread for accumulators of the results."""
MOST_WIDE = 64
"""Registers of a thread for accumulators of a channel chunk."""
CROWDED = 2
"""Best schedules that are also tried with one more block beside the others."""
_CANDIDATES = fit.coefficients("gpu/inverted_residual", "candidates")
NEXT = _CANDIDATES.bfloat16_alike_score_factor
"""What every further schedule of bfloat16 counts: estimates are off by more than they differ (16 % over 17 schedules),
so that more are tried."""
ALIKE = _CANDIDATES.bfloat16_alike_cycles_factor
"""What a schedule of bfloat16 counts more for every better one of its tile, or of its pieces and threads."""
LARGE = 256
"""Threads from which on a schedule of bfloat16 is of another kind: what float32 holds or not. It takes less room."""
SPARED = _CANDIDATES.register_excess_factor
"""What the assembler may have to do without, as a factor of the registers that there are."""
MOST_UNROLLED = 400
"""Most ``mma`` instructions in one thread's code per channel chunk."""
LEFT = 1 << 10
"""Bytes of shared memory that a block does not ask for."""


def products(program: Program, machine: GpuMachine, most: int = LISTED) -> Iterator[Candidate]:
    """Schedules of a fused inverted residual, at most so many; none for other programs."""
    found = match_inverted_residual(program)
    if isinstance(found, Refusal):
        return
    best: dict[tuple[int, ...], tuple[float, InvertedResidualTile]] = {}
    for shape in shapes(found, machine):
        count = cycles(shape, machine)
        kind = shape.held if found.item == WORD else shape.threads >= LARGE
        key = (shape.images, shape.rows, shape.columns, shape.chunk, kind)
        if key not in best or count < best[key][0]:
            best[key] = (count, shape)
    floor = least(found, machine)
    ranked = sorted(best.values(), key=lambda item: item[0])[:most]
    if found.item < WORD:
        ranked = _diverse(ranked)
    for place, (count, shape) in enumerate(ranked[:CROWDED]):
        others = [*_one_more_block(shape, machine)]
        if found.item < WORD and place == 0:
            others += [
                one
                for made in _toggle_input_registers(shape, machine)
                for one in (made, *_one_more_block(made, machine))
            ]
        more = [(max(count, cycles(other, machine)), other) for other in others]
        ranked[2 * place + 1 : 2 * place + 1] = more or [(math.inf, shape)]
    ranked = [found for found in ranked if found[0] < math.inf][:most]
    for place, (count, shape) in enumerate(ranked):
        yield of(program, shape), min(1.0, floor / count) * (AGAIN if found.item == WORD else NEXT) ** place


def _diverse(ranked: list[tuple[float, InvertedResidualTile]]) -> list[tuple[float, InvertedResidualTile]]:
    """The same, reordered so that neighbours of equal cycles differ in tiles, channel chunks and threads."""
    left, found, seen = list(ranked), [], Counter[tuple[str, int, int]]()

    def kinds(shape: InvertedResidualTile) -> tuple[tuple[str, int, int], ...]:
        return ("tile", shape.rows, shape.columns), ("work", shape.chunk, shape.threads)

    while left:
        found.append(min(left, key=lambda item: item[0] * ALIKE ** sum(seen[kind] for kind in kinds(item[1]))))
        left.remove(found[-1])
        seen.update(kinds(found[-1][1]))
    return found


def of(program: Program, shape: InvertedResidualTile) -> Program:
    """The scheduled program."""
    params = (
        ("tile", (shape.images, shape.rows, shape.columns)),
        ("chunk", shape.chunk),
        ("expand", shape.expand),
        ("project", shape.project),
        ("strip", shape.strip),
        *((("held", True),) if shape.held else ()),
        *((("beside", shape.beside),) if shape.beside > 1 else ()),
    )
    return scheduled(program, "block", shape.threads, *params)


def shapes(found: InvertedResidual, machine: GpuMachine) -> Iterator[InvertedResidualTile]:
    """All schedules that fit; of the ways to divide work among warps, the one with least padding."""
    room = machine.limits.smem_per_block_bytes - LEFT
    outputs, (count, *_) = found.window.outputs, found.window.image
    rows, columns = ([e for e in EDGES if e == EDGES[0] or e < 2 * extent] for extent in outputs)
    for high, wide in itertools.product(rows, columns):
        whole = high >= outputs[0] and wide >= outputs[1]
        if high > wide and wide < outputs[1]:  # lines of memory are longer the other way
            continue
        for images in IMAGES if whole else IMAGES[:1]:
            if images > count or images * high * wide > MOST_OUTPUTS:
                continue
            plain = InvertedResidualTile(found, images, high, wide, COLUMN_TILE, (1, 1), (1, 1), (1, 1))
            if plain.pixels > MOST_PIXELS:
                continue
            strips = [s for s in STRIPS if high % s[0] == wide % s[1] == 0 and covered_pixels(found, s) <= MOST_STRIP]
            for chunk in CHUNKS[found.item]:
                if chunk >= found.expanded_channels + COLUMN_TILE:
                    continue
                for warps in WARPS:
                    split = _split_over_warps(plain, chunk, warps, strips)
                    for shape in () if split is None else (split, split.divided(held=True)):
                        if shape.fits and shape.shared <= room and _small(shape):
                            most = min(_blocks_per_sm_by_registers(shape), _blocks_per_sm_limit(shape, machine))
                            yield shape.divided(beside=max(1, most))


def _one_more_block(shape: InvertedResidualTile, machine: GpuMachine) -> Iterator[InvertedResidualTile]:
    """The same with one more resident block per multiprocessor, where registers allow."""
    more = _blocks_per_sm_by_registers(shape) + 1
    if more <= _blocks_per_sm_limit(shape, machine) and more * shape.threads * _registers(shape) <= SPARED * REGISTERS:
        yield replace(shape, beside=more)


def _toggle_input_registers(shape: InvertedResidualTile, machine: GpuMachine) -> Iterator[InvertedResidualTile]:
    """The same with input pixels in registers instead of shared memory, or the reverse."""
    made = replace(shape, held=not shape.held, beside=1)
    if made.fits and made.shared <= machine.limits.smem_per_block_bytes - LEFT and _small(made):
        yield replace(made, beside=max(1, min(_blocks_per_sm_by_registers(made), _blocks_per_sm_limit(made, machine))))


def _blocks_per_sm_by_registers(shape: InvertedResidualTile) -> int:
    """Resident blocks per multiprocessor by registers."""
    return max(1, REGISTERS // (shape.threads * _registers(shape)))


def _blocks_per_sm_limit(shape: InvertedResidualTile, machine: GpuMachine) -> int:
    """Resident blocks per multiprocessor by threads and shared memory."""
    room = machine.limits.smem_per_block_bytes - LEFT
    return min(machine.threads_per_sm // shape.threads, BLOCKS, room // (shape.shared + 1024))


def _split_over_warps(
    plain: InvertedResidualTile, chunk: int, warps: int, strips: Sequence[Place]
) -> InvertedResidualTile | None:
    """The work divided among warps: fewest fragments of a warp, then fewest reads. Args: strips: those that may be."""
    found, words = plain.block, chunk * plain.item // WORD
    if warps * WARP % words or not strips:
        return None
    up = [
        (-(-plain.pixels // (ROW_TILE * (warps // a))) * (chunk // (8 * a)), a)
        for a in ACROSS
        if warps % a == 0 and chunk % (COLUMN_TILE * a) == 0
    ]
    if not up:
        return None
    down = [
        (-(-plain.outputs // (ROW_TILE * (warps // a))) * -(-found.out_channels // (COLUMN_TILE * a)), a)
        for a in (1, 2, 3, 4, 6, 7, 8)
        if warps % a == 0
    ]
    first, second = min(up)[1], min(down)[1]
    groups, outputs, taps = warps * WARP // words, plain.outputs, len(found.window.taps)

    def work(strip: Place) -> float:
        made = strip[0] * strip[1]
        turns = -(-(outputs // made) // groups)
        return turns * (covered_pixels(found, strip) + made * (2 + taps / 4) + 12)

    shares = {"expand": (warps // first, first), "project": (warps // second, second)}
    return plain.divided(chunk=chunk, strip=min(strips, key=work), **shares)


def _small(shape: InvertedResidualTile) -> bool:
    wide = shape.chunk // shape.expand[1] // 8
    unrolled = (
        shape.m_fragments_in * wide * shape.padded_in_channels
        + shape.m_fragments_out * shape.n_per_warp // 8 * shape.chunk
    ) // shape.step
    sums, piece = (
        shape.m_fragments_out * shape.n_per_warp // 2,
        shape.m_fragments_in * wide * 4 if shape.padded_in_channels else 0,
    )
    return sums <= MOST_SUMS and piece <= MOST_WIDE and unrolled <= MOST_UNROLLED and _registers(shape) <= 232


def _registers(shape: InvertedResidualTile) -> int:
    """Estimated registers of a thread."""
    wide = shape.chunk // shape.expand[1] // 8
    held = shape.input_registers if shape.held else 8
    alone = (
        shape.padded_in_channels <= shape.step and shape.item < WORD
    )  # one instruction per sum: one row after another
    sums = 2 * wide if alone else shape.m_fragments_in * wide
    expand = (sums + shape.m_fragments_in) * 4 - (12 if alone else 0)
    expand = expand if shape.padded_in_channels else shape.pixels * shape.words // shape.threads // 2
    windows = shape.lanes * math.prod(shape.strip) + covered_pixels(shape.block, shape.strip) // 2
    filters = shape.lanes * len(shape.block.window.taps)
    if (
        shape.channel_chunks == 1 and not shape.padded_in_channels
    ):  # windows are summed before the results are, and as their pixels come
        return 36 + max(3 * shape.m_fragments_out * shape.n_per_warp // 4 + held, windows + filters // 2)
    return 36 + shape.m_fragments_out * shape.n_per_warp // 2 + held + max(expand, windows) + filters
