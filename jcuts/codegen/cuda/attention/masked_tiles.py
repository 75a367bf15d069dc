"""Leaving out tiles of attention that a mask of positions makes 0 (``bar.red.and``, ``vote.sync.all``): causal masking.

Which positions those are, and how large operands may be, `lower.patterns.masked_tiles` knows.  Every thread looks at
what it has itself copied of a tile of columns; the barrier that makes the tile visible also tells all threads whether
the whole of it is bounded.  A warp then branches over the tile before its first product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jcuts.codegen.cuda.graph.node_emitter import Emitter
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import WARP, vote_all
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Buffer
from jcuts.lower.patterns.gemm import COLUMNS, ROWS
from jcuts.lower.patterns.masked_tiles import MaskedTiles

HIGH_HALF = 0x7FFF0000
"""Magnitude of a 16-bit number in the upper half of a word, of bfloat16 as a float32."""
MAGNITUDE = 0x7FFFFFFF
"""Of a float32."""
HALF_BITS = 16


def are_bounded(builder: GpuBuilder, kind: str, words: Iterable[L.Value], limit: float) -> L.Value:
    """Whether all numbers of a thread's words are finite and no larger than a limit.

    Args: kind: operand type of the ``mma`` instruction. words: of 32 bits. limit: a power of two.
    """
    largest: L.Value = L.I32(0)
    for word in words:
        for number in _magnitudes(builder, kind, word):
            larger = builder.icmp_unsigned(">", number, largest)
            largest = builder.select(larger, number, largest)
    return builder.icmp_unsigned("<=", largest, L.I32(_bits(kind, limit)))


def _bits(kind: str, limit: float) -> int:
    """A limit as `_magnitudes` has numbers."""
    if kind == "f16":
        return int(np.float16(limit).view(np.uint16)) << HALF_BITS
    return int(np.float32(limit).view(np.uint32))


def _magnitudes(builder: GpuBuilder, kind: str, word: L.Value) -> list[L.Value]:
    if kind == "tf32":
        return [builder.and_(word, L.I32(MAGNITUDE))]
    high, low = word, builder.shl(word, L.I32(HALF_BITS))
    return [builder.and_(half, L.I32(HIGH_HALF)) for half in (high, low)]


def loads_are_bounded(
    frame: M.Frame,
    loads: Sequence[Node],
    buffers: Mapping[str, Buffer],
    place: Mapping[str, L.Value],
    extents: Mapping[str, int],
    limit: float,
) -> L.Value:
    """Whether what a thread loads at a position is bounded; what lies outside is 0.

    Args: place: the thread's row or column. extents: rows and columns that there are.
    """
    builder = frame.builder
    frame = replace(
        frame,
        variables={**frame.variables, ROWS: L.I32(0), COLUMNS: L.I32(0), **place},
        ranges={**frame.ranges, ROWS: MAGNITUDE, COLUMNS: MAGNITUDE},
        multiples={},
        cache={},
        values={},
    )
    graph = Graph()
    numbers = []
    for load in loads:
        assert load.index is not None
        inside = tuple(Guard(Index.axis(a), None, e - 1) for a, e in extents.items() if a in load.index.axes())
        numbers.append(graph.add(replace(load, guards=(*load.guards, *inside), value=load.value or 0)))
    holds: L.Value = L.I1(1)
    emitter = Emitter(frame, graph, buffers)
    for value in emitter.emit(numbers):
        number = builder.and_(builder.bitcast(value.value, L.I32), L.I32(MAGNITUDE))
        holds = builder.and_(holds, builder.icmp_unsigned("<=", number, L.I32(_bits("tf32", limit))))
    return holds


def rows_are_bounded(
    frame: M.Frame,
    masked: MaskedTiles,
    kind: str,
    words: Iterable[L.Value],
    buffers: Mapping[str, Buffer],
    rows: tuple[L.Value, int, int],
    lane: L.Value,
) -> L.Value:
    """Whether the operands of a warp's rows, and what these load, are bounded (``vote.sync.all``).

    Args: kind, words: as of `are_bounded`, of the lane's fragments. rows: the warp's first, how many it has, and how
        many there are.
    """
    builder = frame.builder
    first, count, extent = rows
    holds = are_bounded(builder, kind, words, masked.operands)
    for down in range(0, count, WARP):
        row = builder.add(first, builder.add(lane, L.I32(down)))
        loads = loads_are_bounded(frame, masked.row_loads, buffers, {ROWS: row}, {ROWS: extent}, masked.loads)
        holds = builder.and_(holds, loads)
    return vote_all(builder, holds)


def is_masked(
    builder: GpuBuilder, positions: Sequence[Index], first: Mapping[str, L.Value], sizes: Mapping[str, int]
) -> L.Value:
    """Whether one of some positions is >= 0 all over a tile.

    Args: first: the tile's first row and column; sizes: its rows and columns.
    """
    holds: L.Value = L.I1(0)
    for position in positions:
        least: L.Value = L.I32(position.const)
        for atom, factor in position.terms:
            axis = str(atom.name)
            place = first[axis] if factor > 0 else builder.add(first[axis], L.I32(sizes[axis] - 1))
            least = builder.add(least, builder.mul(place, L.I32(factor)))
        holds = builder.or_(holds, builder.icmp_signed(">=", least, L.I32(0)))
    return holds


def unless(
    builder: GpuBuilder, holds: L.Value, values: list[L.Value], make: Callable[[], list[L.Value]]
) -> list[L.Value]:
    """Values that ``make`` gives, or the present ones where a predicate holds (of a whole warp: a uniform branch)."""
    before = builder.block
    work, after = builder.append_basic_block("work"), builder.append_basic_block("work.done")
    builder.cbranch(holds, after, work)
    builder.position_at_end(work)
    made = make()
    end = builder.block
    builder.branch(after)
    builder.position_at_end(after)
    found = []
    for old, new in zip(values, made, strict=True):
        value = builder.phi(old.type)
        value.add_incoming(old, before)
        value.add_incoming(new, end)
        found.append(value)
    return found
