"""Depthwise stage of the fused inverted residual: direct convolution of the expanded tile in shared memory.

It is register-tiled; its epilogue writes the projection GEMM's A operand to shared memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

from jcuts.codegen.cuda.b2b_gemm.mid_epilogue import MidEpilogue
from jcuts.codegen.cuda.graph.node_emitter import from_word
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.kernel_ir.program import Buffer
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile


class DepthwiseConv:
    """Depthwise stage: a thread has one word of channels (one of float32, two of bfloat16) and some strips of outputs.

    Neighbouring outputs share the pixels they read.
    """

    def __init__(
        self,
        frame: M.Frame,
        shape: InvertedResidualTile,
        thread: L.Value,
        patch: L.Value,
        deep: L.Value,
        buffers: Mapping[str, Buffer],
    ) -> None:
        self.frame, self.shape, self.builder = frame, shape, frame.builder
        builder, window, chunk = self.builder, shape.block.window, shape.chunk
        self.channel = builder.mul(builder.urem(thread, L.I32(shape.words)), L.I32(shape.lanes))
        group = builder.udiv(thread, L.I32(shape.words))
        self.chain = MidEpilogue(frame, window.phase, window.channel, shape.block.expanded_channels, chunk, buffers)
        self.places: list[tuple[L.Value, L.Value, L.Value | None]] = []
        (high, wide), step = shape.strip, window.step
        down, across = shape.rows // high, shape.columns // wide
        for first in range(0, shape.strips, shape.groups):
            strip, inside, order = group, None, shape.strips_per_pass(first)
            if order != sorted(order):
                table = L.I64(sum(number << 4 * place for place, number in enumerate(order)))
                moved = builder.zext(builder.shl(group, L.I32(2)), L.I64)
                strip = builder.and_(builder.trunc(builder.lshr(table, moved), L.I32), L.I32(15))
            strip = builder.add(strip, L.I32(first)) if first else strip
            if len(order) < shape.groups:
                inside = builder.icmp_unsigned("<", group, L.I32(len(order)))
            rest, column = builder.udiv(strip, L.I32(across)), builder.urem(strip, L.I32(across))
            image, row = L.I32(0), rest
            if shape.images > 1:
                image, row = builder.udiv(rest, L.I32(down)), builder.urem(rest, L.I32(down))
            line = builder.add(builder.mul(image, L.I32(shape.patch[0])), builder.mul(row, L.I32(high * step[0])))
            pixel = builder.add(builder.mul(line, L.I32(shape.patch[1])), builder.mul(column, L.I32(wide * step[1])))
            source = builder.add(builder.mul(pixel, L.I32(shape.patch_pitch)), self.channel)
            line = builder.add(builder.mul(image, L.I32(shape.rows)), builder.mul(row, L.I32(high)))
            pixel = builder.add(builder.mul(line, L.I32(shape.columns)), builder.mul(column, L.I32(wide)))
            target = builder.add(builder.mul(pixel, L.I32(shape.projected_pitch)), self.channel)
            self.places.append(
                (
                    builder.add(patch, builder.mul(source, L.I32(shape.item))),
                    builder.add(deep, builder.mul(target, L.I32(shape.item))),
                    inside,
                )
            )

    def filters(self, first: L.Value) -> list[list[L.Value]]:
        """This thread's filters of the channel chunk that begins at ``first``: by tap, then by channel."""
        builder, window, shape = self.builder, self.shape.block.window, self.shape
        frame = replace(
            self.frame,
            variables={window.channel: builder.add(first, self.channel)},
            cache={},
            values={},
            ranges={window.channel: shape.channel_chunks * shape.chunk},
            multiples={window.channel: shape.lanes},
        )
        guards = (Guard(Index.axis(window.channel), None, shape.block.expanded_channels - 1),)
        found = []
        for address in window.weights:
            if (
                M.max_vector_width(frame, shape.item, address, shape.lanes) < shape.lanes
                or address.stride(window.channel) != 1
            ):
                places = [
                    address.substitute({window.channel: Index.axis(window.channel) + k}, frame.ranges)
                    for k in range(shape.lanes)
                ]
                words = [M.load(frame, window.filters, shape.item, place, 1, guards, 0)[0] for place in places]
            else:
                words = M.load(frame, window.filters, shape.item, address, shape.lanes, guards, 0)
            found.append([from_word(builder, word, shape.block.dtype).value for word in words])
        return found

    def compute(self, first: L.Value, filters: list[list[L.Value]], skipped: L.Value) -> None:
        """All strips of the channel chunk that begins at ``first``. Args: skipped: byte offset of its patch."""
        builder, channels = self.builder, self.shape.block.expanded_channels
        channel = builder.add(first, self.channel)
        real = None
        if channels % self.shape.chunk:
            real = builder.icmp_signed("<", channel, L.I32(channels))
        for source, target, inside in self.places:
            with builder.if_then(inside) if inside is not None else nullcontext():
                self._strip(channel, builder.add(source, skipped), target, filters, real)

    def _strip(
        self, channel: L.Value, source: L.Value, target: L.Value, filters: list[list[L.Value]], real: L.Value | None
    ) -> None:
        builder, shape, window = self.builder, self.shape, self.shape.block.window
        (high, wide), (down, across) = shape.strip, window.step
        outputs = list(itertools.product(range(high), range(wide)))
        lanes, item = range(shape.lanes), shape.item
        sums: dict[tuple[int, int], list[L.Value]] = {place: [L.F32(0.0)] * shape.lanes for place in outputs}
        pixels: dict[tuple[int, int], list[L.Value]] = {}
        uses = sorted(
            ((i * down + row, j * across + column), number, (i, j))
            for i, j in outputs
            for number, (row, column) in enumerate(window.taps)
        )
        for pixel, number, output in uses:
            if pixel not in pixels:
                offset = item * (pixel[0] * shape.patch[1] + pixel[1]) * shape.patch_pitch
                pixels[pixel] = self._floats(ptx_mma.ld_shared_b32(builder, source, offset))
            terms = zip(pixels[pixel], filters[number], sums[output], strict=True)
            sums[output] = [L.fma(builder, *three) for three in terms]
        runs = [[(k, [sums[place][k] for place in outputs]) for k in lanes]]
        (values,) = self.chain.apply(channel, shape.lanes, runs)
        for (i, j), found in zip(outputs, zip(*values, strict=True), strict=True):
            (word,) = self.chain.words(found)
            if shape.lanes == 1:
                word = ptx_mma.to_tf32(builder, word)
            if real is not None:
                word = builder.select(real, word, L.I32(0))
            ptx_mma.write_words(builder, target, item * (i * shape.columns + j) * shape.projected_pitch, [word])

    def _floats(self, word: L.Value) -> list[L.Value]:
        """Unpacks the channels of a word to float32."""
        builder = self.builder
        if self.shape.lanes == 1:
            return [builder.bitcast(word, L.F32)]
        low, high = builder.shl(word, L.I32(16)), builder.and_(word, L.I32(0xFFFF0000))
        return [builder.bitcast(half, L.F32) for half in (low, high)]
