"""Epilogue through shared memory by ``cp.async.bulk``: residual matrices in, results out (capability 9.0).

Copies of the residual rows are issued before the mainloop, and an ``mbarrier`` counts their bytes (PTX ISA,
``cp.async.bulk``, ``mbarrier``); results that lanes have written into shared memory are stored by bulk copies of rows.
Neither needs registers or ``cp.async`` groups, and memory is busy while the tensor cores work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jcuts.codegen.cuda.gemm.smem_tile import SmemTile
from jcuts.codegen.cuda.graph.node_emitter import from_word, to_words
from jcuts.codegen.cuda.ptx import cluster, wgmma
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.mma import VOID
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.node import Node
from jcuts.lower.patterns.gemm import COLUMNS, ROWS
from jcuts.schedule.gpu.gemm.epilogue_smem import PIECE, StagedEpilogue, StagedMatrix


class EpilogueStaging:
    """Staged epilogue tiles of one block (see `schedule.gpu.gemm.epilogue_smem`), from the view of one thread."""

    def __init__(
        self, frame: M.Frame, held: StagedEpilogue, tiles: tuple[SmemTile, SmemTile], shared: L.Value, barrier: L.Value
    ) -> None:
        """Args: frame: at the block's first row and column; shared: its memory; barrier: place of one, see `begin`."""
        self.builder, self.frame, self.held, self.tiles = frame.builder, frame, held, tiles
        self.shared, self.barrier = shared, barrier
        self.warp: tuple[L.Value, L.Value] = (L.I32(0), L.I32(0))
        """First row and column of this thread's warp in the block's tile."""
        self.bases: dict[StagedMatrix, L.Value] = {}

    @property
    def reuses_operand_smem(self) -> bool:
        """Whether results are staged in the operands' shared memory."""
        return bool(self.held.stored) and not self.held.loaded

    # -- what is added ------------------------------------------------------------------------------------------
    def bulk_load(self, thread: L.Value, threads: int) -> None:
        """Initialises the ``mbarrier`` and issues the bulk copies of all matrices; a block barrier between the two."""
        builder, loaded = self.builder, self.held.loaded
        if not loaded:
            return
        rows = [self._within(number) for number in range(2)]
        total: L.Value = L.I32(0)
        for kept in loaded:
            total = builder.add(total, builder.mul(rows[0], builder.mul(rows[1], L.I32(kept.item))))
        with builder.if_then(builder.icmp_signed("==", thread, L.I32(0))):
            asm(builder, "mbarrier.init.shared.b64 [$0], 1;", VOID, [self.barrier], effects=True)
            asm(builder, "fence.mbarrier_init.release.cluster;", VOID, effects=True)
            text = "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;"
            asm(builder, text, VOID, [self.barrier, total], effects=True)
        ptx_mma.barrier(builder)
        for row, inside in self._rows(thread, threads):
            with builder.if_then(inside):
                for kept in loaded:
                    _bulk_copy_g2s(
                        builder, self._place(kept, row), self._source(kept, row), self._size(kept), self.barrier
                    )

    def wait(self) -> None:
        """Waits until all bulk copies have arrived."""
        if self.held.loaded:
            cluster.mbarrier_wait(self.builder, self.barrier)

    # -- lanes --------------------------------------------------------------------------------------------------
    def bind_lane(self, row: L.Value, column: L.Value, step: int) -> None:
        """Sets the address of a lane's first result in its warp's tile. Args: step: divides its columns."""
        builder, self.step = self.builder, step
        row, column = builder.add(self.warp[0], row), builder.add(self.warp[1], column)
        for kept in (*self.held.loaded, *(k for _, k in self.held.stored)):
            line = builder.mul(row, L.I32(kept.pitch))
            place = builder.add(line, builder.mul(column, L.I32(kept.item)))
            self.bases[kept] = builder.add(builder.add(self.shared, L.I32(kept.first)), place)

    def loaded(self, node: Node) -> int | None:
        """Number of the staged matrix that a load reads."""
        for number, kept in enumerate(self.held.loaded):
            if (node.op, node.buffer, node.index, node.guards) == ("load", kept.buffer, kept.index, ()):
                return number
        return None

    def read(self, number: int, down: int, column: int, count: int) -> list[E.Lanes]:
        """Reads neighbouring elements of a staged matrix, at a row and column offset from the lane's first."""
        builder, kept = self.builder, self.held.loaded[number]
        found: list[L.Value] = []
        for first, size in self._pieces(kept, column, count):
            words = _words(builder, *self._where(kept, down, first * kept.item), size * kept.item // 4)
            found += M.elements(builder, words, kept.item, size)
        return [from_word(builder, word, kept.dtype) for word in found]

    def write(self, kept: StagedMatrix, down: int, column: int, values: Sequence[E.Lanes]) -> None:
        """Stores neighbouring results in shared memory."""
        builder = self.builder
        for first, size in self._pieces(kept, column, len(values)):
            words, _ = to_words(builder, values[first - column : first - column + size])
            words = [w if w.type == L.I32 else builder.bitcast(w, L.I32) for w in words]
            ptx_mma.write_words(builder, *self._where(kept, down, first * kept.item), words)

    def _where(self, kept: StagedMatrix, down: int, byte: int) -> tuple[L.Value, int]:
        """Address (register, byte offset) at a row and byte offset from the lane's first result."""
        return self.bases[kept], down * kept.pitch + byte

    def _pieces(self, kept: StagedMatrix, column: int, count: int) -> list[tuple[int, int]]:
        """Accesses (first column, elements) of up to 16 bytes."""
        found, end = [], column + count
        while column < end:
            size = PIECE // kept.item
            while size > end - column or column % size or self.step % size:
                size //= 2
            found.append((column, size))
            column += size
        return found

    # -- results ------------------------------------------------------------------------------------------------
    def bulk_store(self, thread: L.Value, threads: int) -> None:
        """Issues the bulk copies of the results to global memory, after all threads have written theirs."""
        builder, stored = self.builder, self.held.stored
        if not stored:
            return
        wgmma.proxy_fence(builder)
        ptx_mma.barrier(builder)
        for row, inside in self._rows(thread, threads):
            with builder.if_then(inside):
                for _, kept in stored:
                    _bulk_copy_s2g(builder, self._source(kept, row), self._place(kept, row), self._size(kept))
        asm(builder, "cp.async.bulk.commit_group;", VOID, effects=True)
        asm(builder, "cp.async.bulk.wait_group.read 0;", VOID, effects=True)

    # -- rows ---------------------------------------------------------------------------------------------------
    def _within(self, number: int) -> L.Value:
        """Number of existing rows (0) or columns (1) of the block's tile."""
        builder, tile = self.builder, self.tiles[number]
        if tile.extent % tile.size == 0:
            return L.I32(tile.size)
        left = builder.sub(L.I32(tile.extent), self.frame.variables[(ROWS, COLUMNS)[number]])
        return builder.select(builder.icmp_signed("<", left, L.I32(tile.size)), left, L.I32(tile.size))

    def _rows(self, thread: L.Value, threads: int) -> list[tuple[L.Value, L.Value]]:
        """The rows of a thread, with predicates that they exist."""
        builder, last = self.builder, self._within(0)
        rows = [builder.add(thread, L.I32(n)) if n else thread for n in range(0, self.tiles[0].size, threads)]
        return [(row, builder.icmp_signed("<", row, last)) for row in rows]

    def _size(self, kept: StagedMatrix) -> L.Value:
        """Bytes of a row's copy."""
        return self.builder.mul(self._within(1), L.I32(kept.item))

    def _place(self, kept: StagedMatrix, row: L.Value) -> L.Value:
        builder = self.builder
        return builder.add(builder.add(self.shared, L.I32(kept.first)), builder.mul(row, L.I32(kept.pitch)))

    def _source(self, kept: StagedMatrix, row: L.Value) -> L.Value:
        """Global address of a row's first element."""
        variables = {**self.frame.variables, ROWS: self.builder.add(self.frame.variables[ROWS], row)}
        place, constant = M.address(
            replace(self.frame, variables=variables, cache={}), kept.buffer, kept.item, kept.index
        )
        return self.builder.add(place, L.I64(constant)) if constant else place


def _words(builder: GpuBuilder, place: L.Value, offset: int, count: int) -> list[L.Value]:
    if count == 1:
        return [ptx_mma.ld_shared_b32(builder, place, offset)]
    if count == 2:
        return ptx_mma.read_pair(builder, place, offset)
    return [builder.bitcast(value, L.I32) for value in ptx_mma.ld_shared_v4_f32(builder, place, offset)]


def _bulk_copy_g2s(builder: GpuBuilder, place: L.Value, source: L.Value, size: L.Value, barrier: L.Value) -> None:
    """``cp.async.bulk.shared::cluster.global``: starts a bulk copy into shared memory."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    asm(builder, text, VOID, [place, source, size, barrier], effects=True)


def _bulk_copy_s2g(builder: GpuBuilder, target: L.Value, place: L.Value, size: L.Value) -> None:
    """``cp.async.bulk.global.shared::cta``: starts a bulk copy into global memory."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    asm(builder, text, VOID, [target, place, size], effects=True)
