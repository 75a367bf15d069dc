"""Loaders of the few-channel convolution: image patches (``cp.async``), and filters rounded to TF32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, K
from jcuts.schedule.gpu.conv.few_channels_tile import FOUR, LINES, WORD, FewChannelTile

FLIGHT = 8
"""Pieces of filters that a thread loads before it stores the first."""


class ImageLoader:
    """Copies image patches into shared memory (``cp.async``): a few neighbouring threads per line."""

    def __init__(self, frame: M.Frame, shape: FewChannelTile, shared: L.Value) -> None:
        self.frame, self.shape, self.shared = frame, shape, shared

    def start(self, places: Mapping[str, L.Value], stage: L.Value, thread: L.Value) -> None:
        """Starts the copies of the patch of a tile whose first output is at ``places``, zeros outside the image.

        Args: stage: bytes to where its first line begins.
        """
        builder, shape, found = self.frame.builder, self.shape, self.shape.patches
        item = found.item
        at = replace(self.frame, variables=dict(places), cache={})
        first: L.Value = L.I32(found.start[0])
        if found.vertical is not None:
            first = builder.add(builder.mul(places[found.vertical.name], L.I32(found.step[0])), first)
        begin = builder.mul(places[ROWS], L.I32(found.step[1]))
        begin = builder.add(begin, L.I32(found.start[1] - shape.early))
        base = builder.mul(builder.sext(M.index(at, found.base), L.I64), L.I64(item))
        base = builder.add(self.frame.pointers[found.image], base)
        line, column = (
            builder.udiv(thread, L.I32(shape.threads_per_line)),
            builder.urem(thread, L.I32(shape.threads_per_line)),
        )
        place = builder.mul(column, L.I32(shape.width))
        down = builder.add(line, first)

        def addresses(lower: int, back: L.Value | None) -> tuple[L.Value, L.Value, L.Value]:
            """Of this thread's first copy: target, source, element of the line.

            Args: lower: lines below this thread's first one; back: elements before the first.
            """
            there, right = builder.add(line, L.I32(lower)) if lower else line, builder.add(begin, place)
            inner = builder.add(builder.mul(there, L.I32(shape.pitch)), place)
            if back is not None:
                inner, right = builder.sub(inner, back), builder.sub(right, back)
            target = builder.add(builder.add(self.shared, stage), builder.mul(inner, L.I32(item)))
            offset = builder.add(builder.mul(builder.add(there, first), L.I32(found.length)), right)
            return target, builder.add(base, builder.mul(builder.sext(offset, L.I64), L.I64(item))), right

        abreast, pieces = shape.threads // shape.threads_per_line, shape.length // shape.width
        if shape.half_word_lines:
            middle = builder.and_(builder.add(self.middle(places), line), L.I32(1))
            other = abreast % 2 and abreast < shape.lines
            turns = [addresses(0, middle), *([addresses(abreast, builder.sub(L.I32(1), middle))] if other else [])]
        else:
            turns = [addresses(0, None)]
        for above in range(0, shape.lines, abreast):
            turn = above % 2 if shape.half_word_lines else 0
            target, source, right = turns[turn]
            lines = above - turn * abreast
            there = None
            if above + abreast > shape.lines:
                there = builder.icmp_unsigned("<", line, L.I32(shape.lines - above))
            inside = builder.icmp_unsigned("<", builder.add(down, L.I32(above)), L.I32(found.lines))
            for left in range(0, pieces, shape.threads_per_line):
                where = there
                if left + shape.threads_per_line > pieces:
                    held = builder.icmp_unsigned("<", column, L.I32(pieces - left))
                    where = held if where is None else builder.and_(where, held)
                end = builder.add(right, L.I32(left * shape.width))
                moved = (lines * shape.pitch + left * shape.width, lines * found.length + left * shape.width)
                ends = (target, item * moved[0]), (source, item * moved[1])
                if not shape.half_word_lines:
                    live = builder.and_(inside, builder.icmp_unsigned("<", end, L.I32(found.length)))
                    ptx_mma.cp_async(builder, *ends, item * shape.width, live, where)
                    continue
                live = builder.and_(inside, builder.icmp_signed("<", end, L.I32(found.length)))
                last = builder.icmp_signed("==", end, L.I32(found.length - 1))
                size = builder.select(last, L.I32(item), L.I32(item * shape.width))
                ptx_mma.cp_async(builder, *ends, item * shape.width, live, where, read=size)

    def middle(self, places: Mapping[str, L.Value]) -> L.Value:
        """1 where the first line of a tile's patch begins in the middle of a 32-bit word, so that all lines are shifted
        by one element.
        """
        builder, found = self.frame.builder, self.shape.patches
        at = replace(self.frame, variables=dict(places), cache={})
        line: L.Value = L.I32(found.start[0])
        if found.vertical is not None:
            line = builder.add(builder.mul(places[found.vertical.name], L.I32(found.step[0])), line)
        return builder.and_(builder.add(M.index(at, found.base), line), L.I32(1))


class FilterLoader:
    """Copies a block's filters into shared memory, rounded to TF32; zeros for k and columns that do not exist.

    A line of columns per k, rounded to TF32, or per two k of 16 bits: a word holds both.
    """

    def __init__(self, frame: M.Frame, shape: FewChannelTile, thread: L.Value, into: L.Value) -> None:
        """Args: into: their address in shared memory."""
        self.shape, self.thread, self.into = shape, thread, into
        self.builder: GpuBuilder = frame.builder
        along = shape.columns // self.width
        self.pieces = shape.steps * LINES * along
        turns = -(-self.pieces // shape.threads)  # in the last one, some threads are beyond the last line
        lines = -(-turns * shape.threads // along)
        self.frame = replace(frame, ranges={K: lines * self.many, COLUMNS: shape.blocks[0] * shape.columns})

    @property
    def many(self) -> int:
        """k values of a line."""
        return WORD // self.shape.patches.item

    @property
    def width(self) -> int:
        """Columns per vector load."""
        index, columns = self.shape.patches.weights, self.shape.patches.columns
        if index.stride(COLUMNS) != 1:
            return 1
        steps = [index.const, columns, *(c for atom, c in index.terms if (atom.kind, atom.name) != ("axis", COLUMNS))]
        return next(w for w in (FOUR, 2, 1) if all(step % w == 0 for step in steps))

    def copy(self) -> None:
        """Loads, rounds and stores this thread's part."""
        builder, shape, width = self.builder, self.shape, self.width
        along = shape.columns // width
        pieces = self.pieces
        starts = list(range(0, pieces, shape.threads))
        for group in (starts[k : k + FLIGHT] for k in range(0, len(starts), FLIGHT)):
            held = []
            for start in group:
                piece = builder.add(self.thread, L.I32(start)) if start else self.thread
                inside = start + shape.threads <= pieces
                where = None if inside else builder.icmp_unsigned("<", piece, L.I32(pieces))
                line, column = builder.udiv(piece, L.I32(along)), builder.urem(piece, L.I32(along))
                column = builder.mul(column, L.I32(width))
                place = builder.add(builder.mul(line, L.I32(shape.filters_pitch)), column)
                target = builder.add(self.into, builder.mul(place, L.I32(WORD)))
                held.append((self._loads(line, column), target, where))
            for terms, target, where in held:
                ptx_mma.write_words(builder, target, 0, self._words(terms), where)

    def _loads(self, line: L.Value, column: L.Value) -> list[list[L.Value]]:
        """For every k of a line its neighbouring columns, as integers."""
        builder, found = self.builder, self.shape.patches
        column = builder.add(self.frame.variables[COLUMNS], column)
        guards = (
            Guard(Index.axis(K), None, len(found.terms) - 1),
            Guard(Index.axis(COLUMNS), None, found.columns - 1),
        )
        loads = []
        for number in range(self.many):
            term = builder.add(builder.mul(line, L.I32(self.many)), L.I32(number))
            at = replace(self.frame, variables={K: term, COLUMNS: column}, cache={})
            loads.append(M.load(at, found.filters, found.item, found.weights, self.width, guards, 0))
        return loads

    def _words(self, terms: list[list[L.Value]]) -> list[L.Value]:
        builder = self.builder
        if self.many == 1:
            return [ptx_mma.to_tf32(builder, word) for word in terms[0]]
        return [ptx_mma.pack_b16x2(builder, low, high) for low, high in zip(*terms, strict=True)]
