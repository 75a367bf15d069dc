"""Shared-memory layout of a staged GEMM epilogue: the block's tile of residual matrices and of results.

A residual comes there by bulk copies of rows (``cp.async.bulk``) that are issued before the mainloop; results leave by
bulk copies, from the place of a residual of the same type where there is one.  Each lane reads and writes its own
elements only.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, S

PIECE = 16
"""Bytes that divide addresses and sizes of bulk copies."""
LINE = 128
"""Bytes of all banks of shared memory."""
ITEMS = {"float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of the types that are kept."""
LOADED = 1
"""Schedules (``held``): residuals are staged in shared memory."""
STORED = 2
"""Results are staged, too."""
SENT = 3
"""Results alone are staged."""


@dataclass(frozen=True)
class StagedMatrix:
    """A matrix whose tile is staged in shared memory.

    Attributes:
        buffer: the array.
        dtype: of its elements.
        index: address of an element of it.
        first: bytes from the beginning of the shared memory to the tile.
        pitch: bytes from a row to the next.
    """

    buffer: str
    dtype: str
    index: Index
    first: int
    pitch: int

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEMS[self.dtype]


@dataclass(frozen=True)
class StagedEpilogue:
    """All staged matrices of an epilogue.

    Attributes:
        loaded: residual matrices that are copied in.
        stored: (number of the store, matrix) of the results that leave by bulk copies.
        end: end of their shared memory [B].
    """

    loaded: tuple[StagedMatrix, ...] = ()
    stored: tuple[tuple[int, StagedMatrix], ...] = ()
    end: int = 0


def staged_epilogue(program: Program, rows: int, columns: int, how: int, start: int) -> StagedEpilogue:
    """What blocks of so many rows and columns keep.

    Args: how: 0, `LOADED`, `STORED` or `SENT`; start: bytes of shared memory that lie before, and are free in the end.
    """
    phase = program.phases[0]
    extents = phase.ranges()
    if not how or S in extents:
        return StagedEpilogue(end=start)
    place, loaded, seen = -(-start // LINE) * LINE, [], set()

    def kept(buffer: str, dtype: str, index: Index, first: int) -> StagedMatrix | None:
        if dtype not in ITEMS or not _plain(index, ITEMS[dtype], columns, extents[COLUMNS]):
            return None
        return StagedMatrix(buffer, dtype, index, first, pitch(columns * ITEMS[dtype]))

    for node in phase.exit.nodes if how != SENT else ():
        if node.op != "load" or node.index is None or node.guards or (node.buffer, node.index) in seen:
            continue
        found = kept(node.buffer, node.dtype, node.index, place)
        if found is not None:
            seen.add((node.buffer, node.index))
            loaded.append(found)
            place += rows * found.pitch
    stored: list[tuple[int, StagedMatrix]] = []
    free = list(loaded)
    for number, store in enumerate(phase.stores if how != LOADED else ()):
        found = kept(store.buffer, program.buffer(store.buffer).dtype, store.address, place)
        if found is None or store.guards:
            continue
        mine = next((k for k in free if k.item == found.item), None)
        if mine is not None:
            free.remove(mine)
            found = StagedMatrix(found.buffer, found.dtype, found.index, mine.first, mine.pitch)
        elif not loaded and not stored:  # the operands' tiles are not needed any more
            found = StagedMatrix(found.buffer, found.dtype, found.index, 0, found.pitch)
            place = max(place, rows * found.pitch)
        else:
            place += rows * found.pitch
        stored.append((number, found))
    return StagedEpilogue(tuple(loaded), tuple(stored), place if loaded or stored else start)


def pitch(row: int) -> int:
    """Bytes from one row to the next: so that neighbours of 64 bytes in two rows meet no bank twice.

    >>> pitch(256), pitch(192), pitch(64)
    (320, 192, 64)
    """
    return row + (LINE // 2 - row) % LINE


def _plain(index: Index, item: int, columns: int, extent: int) -> bool:
    """Whether rows of a tile are neighbours in memory, in whole pieces."""
    if index.values() or index.stride(COLUMNS) != 1 or not index.stride(ROWS):
        return False
    if any(atom.kind != "axis" for atom, _ in index.terms):
        return False
    steps = [index.const, *(coef for atom, coef in index.terms if atom.name != COLUMNS)]
    return all(step * item % PIECE == 0 for step in (*steps, columns, extent))
