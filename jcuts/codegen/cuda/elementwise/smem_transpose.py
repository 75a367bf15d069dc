"""Element-wise kernel with a shared-memory transpose, for operands that are contiguous along another axis than the
result.

This is the *transposed* form.  A block takes a tile of both axes.  Threads are mapped along the operand's contiguous
axis to load it (up to 16 bytes each) into shared memory, then along the result's contiguous axis to read their elements
there, compute, and store as wide.  The padding of shared-memory rows is the one with the fewest bank conflicts of a
warp's writes and reads together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant
from jcuts.codegen.cuda.graph.node_emitter import from_word
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP, allocate_static
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Axis, Buffer, Phase, Program
from jcuts.kernel_ir.register_tiling import Point
from jcuts.schedule.gpu.elementwise.schedules import smem_staged_loads

STATIC = 48 << 10
ALIGNED = 16  # bytes: where a tile begins
BANKS = 32
"""Banks of shared memory."""
BANK = 4
"""Bytes of a bank."""


@dataclass(frozen=True)
class TransposedShape:
    """Block tile of the transposing kernel.

    Attributes:
        crossed: the axis along which the operand is contiguous.
        rows: points of that axis in the tile.
        columns: points of the last axis in the tile.
        vector: of these, the points of one thread.
        threads: of a block.
    """

    crossed: str
    rows: int
    columns: int
    vector: int
    threads: int


def transposed_shape(program: Program) -> TransposedShape:
    """The block tile of a schedule. Raises CompileRejected where the threads do not fit it."""
    params = dict(program.params)
    lane = program.phases[0].axes[-1]
    rows, columns, threads = (int(str(params[k])) for k in ("rows", "columns", "threads"))
    shape = TransposedShape(str(params["crossed"]), rows, columns, lane.unroll, threads)
    if columns % lane.unroll or threads % (columns // lane.unroll) or lane.extent % lane.unroll:
        raise CompileRejected(f"{program.name}: {threads} threads on tiles of {rows}x{columns} by {lane.unroll}")
    names = {a.name for a in program.phases[0].axes[:-1]}
    if rows % (threads // (columns // lane.unroll)) or shape.crossed not in names:
        raise CompileRejected(f"{program.name}: tiles of {rows}x{columns} along {shape.crossed!r}")
    return shape


def tiles_of(axis: Axis, phase: Phase, shape: TransposedShape) -> int:
    """Blocks along an axis."""
    if axis.name == shape.crossed:
        return -(-axis.extent // shape.rows)
    return -(-axis.extent // shape.columns) if axis is phase.axes[-1] else axis.extent


@functools.cache
def bank_conflict_padding(rows: int, columns: int, read: int, vector: int, size: int, most: int) -> int:
    """Padding of a shared-memory line of ``rows`` elements (at most ``most``) with the fewest bank conflicts of a
    warp's writes and reads.

    Writing, thread t puts the ``read`` elements ``(t % (rows / read)) * read ..`` into line ``t // (rows / read)``;
    reading, it takes one element of each of the ``vector`` lines ``(t % (columns / vector)) * vector ..``.
    """

    def conflicts(pad: int) -> int:
        pitch = rows + pad
        along, lines = rows // read, columns // vector
        total = 0
        for k in range(read):
            total += _conflict_degree([(t // along) * pitch + t % along * read + k for t in range(WARP)], size)
        for k in range(vector):
            total += _conflict_degree([(t % lines * vector + k) * pitch + t // lines for t in range(WARP)], size)
        return total

    return min(range(min(2 * BANKS * BANK // size, most + 1)), key=lambda pad: (conflicts(pad), pad))


def _conflict_degree(elements: list[int], size: int) -> int:
    """Bank-conflict degree of accesses to these elements (reads of one word are broadcast)."""
    banks: dict[int, set[int]] = {}
    for element in elements:
        word = element * size // BANK
        banks.setdefault(word % BANKS, set()).add(word)
    return max(len(words) for words in banks.values())


class _Reader(RegisterTileEmitter):
    """Reads the staged elements of a tile's points from shared memory."""

    places: list[tuple[L.Value, int, Node]]  # address of the thread's first element, bytes between lines, the load

    def _accumulated(self, number: int, point: Point) -> E.Lanes:
        place, line, node = self.places[number]
        offset = dict(point)[self.phase.axes[-1].name] * line
        size = M.item_size(node.dtype)
        kind = ir.IntType(64) if size == 8 else L.I32
        text = f"ld.shared.{'u8' if size == 1 else f'b{8 * size}'} $0, [$1{f'+{offset}' if offset else ''}];"
        if size == 2:
            text = text.replace("b16", "u16")
        word = asm(self.builder, text, kind, [place], effects=True)
        word = self.builder.trunc(word, M.word_type(size)) if size < 4 else word
        return from_word(self.builder, word, node.dtype)


class SmemTransposeKernel:
    """Emits one thread of the transposing element-wise kernel."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: TransposedShape,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.program, self.shape = builder, program, tile
        self.buffers, self.pointers, self.symbol = buffers, pointers, symbol
        self.phase = program.phases[0]
        self.lane = self.phase.axes[-1]
        self.crossed = next(a for a in self.phase.axes if a.name == tile.crossed)
        self.thread = integers["thread"]
        self.others = {a.name: integers[a.name] for a in self.phase.axes if a not in (self.lane, self.crossed)}
        self.row = builder.mul(integers[self.crossed.name], L.I32(tile.rows))
        self.column = builder.mul(integers[self.lane.name], L.I32(tile.columns))
        self.loads = smem_staged_loads(self.phase, tile.crossed)
        if not self.loads:
            raise CompileRejected(f"{program.name}: no operand lies along {tile.crossed}", resource="staged operand")

    def emit(self) -> None:
        """Reads the operands' tiles, synchronises the block, computes and writes."""
        builder = self.builder
        places: list[tuple[L.Value, int, Node]] = []
        spare = self._spare()
        mine_column = builder.urem(self.thread, L.I32(self.shape.columns // self.shape.vector))
        mine_row = builder.udiv(self.thread, L.I32(self.shape.columns // self.shape.vector))
        for number, node in enumerate(self.loads):
            size = M.item_size(node.dtype)
            width = self._width(node, size)
            pad = bank_conflict_padding(self.shape.rows, self.shape.columns, width, self.shape.vector, size, spare)
            pitch = self.shape.rows + pad
            base = allocate_static(builder, f"{self.symbol}_tile{number}", pitch * self.shape.columns * size)
            self._stage(node, base, size, width, pitch)
            line = builder.mul(mine_column, L.I32(self.shape.vector * pitch))
            first = builder.mul(builder.add(line, mine_row), L.I32(size))
            places.append((builder.add(base, first), pitch * size, node))
        asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
        step = self.shape.threads // (self.shape.columns // self.shape.vector)
        column = builder.add(self.column, builder.mul(mine_column, L.I32(self.shape.vector)))
        phase = self._reading()
        shape = TileVariant(tuple((a.name, self.shape.vector if a is self.lane else 1) for a in self.phase.axes))
        for first_row in range(0, self.shape.rows, step):
            row = builder.add(builder.add(self.row, mine_row), L.I32(first_row))
            variables = {**self.others, self.crossed.name: row, self.lane.name: column}
            reader = _Reader(
                builder, phase, shape, self.buffers, self.pointers, variables, {self.lane.name: self.shape.vector}
            )
            reader.places = [
                (builder.add(p, L.I32(first_row * M.item_size(n.dtype))) if first_row else p, line, n)
                for p, line, n in places
            ]
            tests = [
                builder.icmp_signed("<", value, L.I32(axis.extent))
                for value, axis, side in ((row, self.crossed, self.shape.rows), (column, self.lane, self.shape.columns))
                if axis.extent % side
            ]
            if not tests:
                reader._finish()
                continue
            with builder.if_then(tests[0] if len(tests) == 1 else builder.and_(*tests)):
                reader._finish()

    def _spare(self) -> int:
        """Padding that all tiles' lines can have in shared memory. Raises CompileRejected where the tiles do
        not fit.
        """
        each = self.shape.columns * sum(M.item_size(n.dtype) for n in self.loads)
        spare = (STATIC - ALIGNED * len(self.loads)) // each - self.shape.rows
        if spare < 0:
            message = f"{self.program.name}: tiles of {each * self.shape.rows} bytes, there are {STATIC}"
            raise CompileRejected(message, resource="shared memory")
        return spare

    def _width(self, node: Node, size: int) -> int:
        """Vector width of accesses along the operand's contiguous axis."""
        assert node.index is not None
        width = max(1, 16 // size)
        while width > 1:
            frame = self._frame(self.row, self.column, width)
            fits = self.crossed.extent % width == 0 and self.shape.rows % width == 0
            if fits and self._shared_out(width) and M.max_vector_width(frame, size, node.index, width) == width:
                return width
            width //= 2
        return 1

    def _shared_out(self, width: int) -> bool:
        """Whether accesses of this width divide evenly over the threads."""
        along = self.shape.rows // width
        return self.shape.threads % along == 0 and self.shape.columns % (self.shape.threads // along) == 0

    def _frame(self, row: L.Value, column: L.Value, width: int) -> M.Frame:
        ranges = {a.name: a.extent for a in self.phase.axes}
        ranges[self.crossed.name] = -(-self.crossed.extent // self.shape.rows) * self.shape.rows
        ranges[self.lane.name] = -(-self.lane.extent // self.shape.columns) * self.shape.columns
        variables = {**self.others, self.crossed.name: row, self.lane.name: column}
        return M.Frame(self.builder, variables, self.pointers, ranges, {self.crossed.name: width})

    def _stage(self, node: Node, base: L.Value, size: int, width: int, pitch: int) -> None:
        """Stages this thread's part of an operand's tile in shared memory."""
        builder, shape = self.builder, self.shape
        assert node.index is not None
        along = shape.rows // width
        if not self._shared_out(width):
            raise CompileRejected(f"{self.program.name}: {shape.threads} threads read lines of {along} accesses")
        here = builder.mul(builder.urem(self.thread, L.I32(along)), L.I32(width))
        line = builder.udiv(self.thread, L.I32(along))
        step = shape.threads // along
        found = []
        for first in range(0, shape.columns, step):
            column = builder.add(builder.add(self.column, line), L.I32(first))
            frame = self._frame(builder.add(self.row, here), column, width)
            guards = [Guard(Index.axis(a.name), None, a.extent - 1) for a in (self.crossed, self.lane)]
            found.append(M.load(frame, node.buffer, size, node.index, width, guards, 0))
        place = builder.add(builder.mul(line, L.I32(pitch)), here)
        place = builder.add(base, builder.mul(place, L.I32(size)))
        for first, words in zip(range(0, shape.columns, step), found, strict=True):
            for k, word in enumerate(words):
                wide = builder.zext(word, L.I32) if size < 4 else word
                at = (first * pitch + k) * size
                text = f"st.shared.{'u' if size < 4 else 'b'}{8 * size} [$0{f'+{at}' if at else ''}], $1;"
                asm(builder, text, ir.VoidType(), [place, wide], effects=True)

    def _reading(self) -> Phase:
        """The phase with staged loads replaced by given values."""
        exit_, numbers = Graph(), {}
        for number, node in enumerate(self.phase.exit.nodes):
            if node in self.loads:
                given = Node("acc", node.dtype, attrs=(("number", self.loads.index(node)),))
                numbers[number] = exit_.add(given)
                continue
            args = tuple(numbers[a] for a in node.args)
            index = None if node.index is None else node.index.renumber(numbers)
            guards = tuple(Guard(g.index.renumber(numbers), g.low, g.high) for g in node.guards)
            numbers[number] = exit_.add(replace(node, args=args, index=index, guards=guards))
        stores = tuple(replace(s, value=numbers[s.value]) for s in self.phase.stores)
        return replace(self.phase, exit=exit_, stores=stores)
