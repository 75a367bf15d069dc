"""GEMM with ``wgmma`` (capability 9.0 only): warpgroups multiply from swizzled shared memory, one barrier per k-tile.

``groups`` = warpgroups along rows and along columns, each with a multiple of 64 rows.  16-bit operands are copied by
``cp.async``, ``stages - 2`` k-tiles ahead: one tile is being multiplied and the one before may still be.  A block with
no more k-tiles than stages issues all copies at the beginning.  The same holds for float32 with TF32-pre-rounded
weights, whose A operand comes from registers (`wgmma_register_operand`).  Other float32 operands go through registers,
where they are rounded (`wgmma_smem_tile`), ``flight`` k-tiles ahead of the one that is stored while another is
multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.gemm import wgmma_register_operand
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.epilogue_bulk_copy import EpilogueStaging
from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernel
from jcuts.codegen.cuda.gemm.prologue import Prologue
from jcuts.codegen.cuda.gemm.smem_tile import TileLoader
from jcuts.codegen.cuda.gemm.split_k_reduce import reduce_through_dsmem
from jcuts.codegen.cuda.gemm.wgmma_register_operand import RegisterOperandA
from jcuts.codegen.cuda.gemm.wgmma_smem_tile import Tf32RoundingLoader, TransposingLoader, WgmmaSmemTile
from jcuts.codegen.cuda.gemm.wgmma_tile import WARPS, WgmmaKernelTile
from jcuts.codegen.cuda.ptx import cluster, wgmma
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.cuda.toolchain.target import GROUPED
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, S, prologue
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER


class WgmmaKernel(MmaKernel):
    """Emits one thread of the ``wgmma`` GEMM."""

    shape: WgmmaKernelTile
    before: Prologue | None = None
    keeper: EpilogueStaging | None = None

    def _warp_places(self, across: int) -> tuple[L.Value, L.Value]:
        builder, shape = self.builder, self.shape
        if builder.capability != GROUPED:
            raise CompileRejected(f"{self.program.name}: products of warp groups need compute capability 9.0")
        group = builder.lshr(self.flat, L.I32(2))
        self.group_row = builder.mul(builder.udiv(group, L.I32(across)), L.I32(shape.left.warp))
        slice_ = builder.mul(builder.and_(self.flat, L.I32(WARPS - 1)), L.I32(wgmma.ROWS // WARPS))
        column = builder.mul(builder.urem(group, L.I32(across)), L.I32(shape.right.warp))
        return builder.add(self.group_row, slice_), column

    def row_slot(self) -> L.Value:
        builder = self.builder
        group = builder.udiv(builder.lshr(self.flat, L.I32(2)), L.I32(self.shape.warps[1]))
        return builder.add(builder.shl(group, L.I32(2)), builder.and_(self.flat, L.I32(WARPS - 1)))

    def emit(self) -> None:
        """The output tile; see `MmaKernel.emit`."""
        self._expect()
        super().emit()

    def _expect(self) -> None:
        """Makes the barrier at which the block waits for what the others of its cluster push."""
        builder, shape = self.builder, self.shape
        if shape.push:
            barrier = builder.add(self.shared, L.I32(shape.shared - BARRIER))
            cluster.mbarrier_expect_tx(builder, barrier, shape.room, self.thread)
            if shape.dsmem_is_separate:  # nobody writes into a block that has not begun
                cluster.arrive(builder)

    def split_k_reduce(self, totals: Totals) -> None:
        """Sums the partial accumulators of the blocks of a cluster."""
        builder, shape = self.builder, self.shape
        if not shape.push:
            super().split_k_reduce(totals)
            return
        ptx_mma.cp_async_wait(builder, 0)
        if not shape.dsmem_is_separate:
            cluster.arrive(builder)
            cluster.wait(builder)
        end = shape.shared - BARRIER
        places = [builder.add(self.shared, L.I32(n)) for n in (end - shape.room if shape.dsmem_is_separate else 0, end)]
        lane = builder.add(builder.mul(self.flat, L.I32(WARP)), self.lane)
        rank, high = (self.rank, shape.cluster), shape.left.m_fragment_stride
        reduce_through_dsmem(
            builder,
            totals,
            (places[0], places[1]),
            lane,
            shape.threads,
            rank,
            shape.right.n_tiles_per_lane_group,
            high,
            self.epilogue,
        )

    def prefetch_epilogue(self) -> None:
        super().prefetch_epilogue()
        shape = self.shape
        if shape.held.loaded or shape.held.stored:
            barrier = self.builder.add(self.shared, L.I32(shape.shared - BARRIER))
            self.keeper = EpilogueStaging(self.frame, shape.held, (shape.left, shape.right), self.shared, barrier)
            self.keeper.bulk_load(self.thread, shape.threads)

    def epilogue(self, totals: Totals, row: L.Value, column: L.Value) -> None:
        if self.keeper is None:
            super().epilogue(totals, row, column)
            return
        if self.keeper.reuses_operand_smem:
            ptx_mma.cp_async_wait(self.builder, 0)
            ptx_mma.barrier(self.builder)
        self.keeper.wait()
        super().epilogue(totals, row, column)
        self.keeper.bulk_store(self.thread, self.shape.threads)

    # -- sums ---------------------------------------------------------------------------------------------------
    def mainloop(self) -> Totals:
        builder, shape = self.builder, self.shape
        places = ((shape.left, self.variables[ROWS]), (shape.right, self.variables[COLUMNS]))
        left: L.Value = L.I32(shape.terms)
        skipped = builder.mul(self.rank, L.I32(shape.share * shape.left.terms))
        if S in self.variables:
            left = builder.sub(left, builder.mul(self.variables[S], L.I32(shape.share * shape.left.terms)))
        self.bases = [
            self._descriptor(tile, warp)
            for tile, warp in ((shape.left, self.group_row), (shape.right, self.column_warp))
        ]
        if shape.rounded:
            self.rows = RegisterOperandA(builder, shape.left, self.shared, self.row_warp, self.lane)
            if prologue(self.program) is not None:
                behind = builder.add(self.shared, L.I32(shape.tiles))
                self.before = Prologue(self.frame, self.program, shape.share * shape.left.terms, behind, self.lane)
                self.before.start(skipped, shape.threads, self.thread)
        if not shape.flight:
            copiers = [TileLoader(self.frame, t, shape.threads, self.thread, start, self.shared) for t, start in places]
            copiers[0].cached = shape.cached
            return self._mainloop_cp_async(copiers, left, skipped)
        takers = [
            (TransposingLoader if t.is_transposed else Tf32RoundingLoader)(
                self.frame, t, shape.threads, self.thread, start, self.shared
            )
            for t, start in places
        ]
        return self._mainloop_via_registers(takers, left, skipped)

    def _mainloop_cp_async(self, copiers: Sequence[TileLoader], left: L.Value, skipped: L.Value) -> Totals:
        """Operands as they are: a ring of copies that do not wait."""
        builder, shape = self.builder, self.shape
        count, ahead = shape.share, shape.prefetch_distance

        def start(number: L.Value, stage: L.Value) -> None:
            first = builder.add(builder.mul(number, L.I32(shape.left.terms)), skipped)
            for copier in copiers:
                copier.start(first, stage, builder.sub(left, first))

        steady = all(copier.has_constant_stride for copier in copiers)
        ways = [copier.shared_address_loader(skipped, builder.sub(left, skipped)) for copier in copiers if steady]
        for number in range(ahead):
            if number < count and steady:
                for way in ways:
                    way(number, number * shape.stage)
            elif number < count:
                start(L.I32(number), L.I32(number * shape.stage))
            ptx_mma.cp_async_commit(builder)
        if shape.push and shape.dsmem_is_separate:
            cluster.wait(builder)
        self.prefetch_epilogue()
        loop = _WgmmaLoop(self, ahead)

        def tile() -> None:
            ptx_mma.cp_async_wait(builder, ahead - 1)
            wgmma.proxy_fence(builder)
            if shape.spread:
                loop.multiply(
                    self._interleaved_copies(copiers, loop, count - ahead, left, skipped) if count > ahead else []
                )
            else:
                loop.multiply()
                if count > ahead:
                    with builder.if_then(builder.icmp_signed("<", loop.number, L.I32(count - ahead))):
                        start(builder.add(loop.number, L.I32(ahead)), loop.writing)
            ptx_mma.cp_async_commit(builder)
            loop.advance()

        for _ in range(shape.unrolled_k_tiles):
            tile()
        loop.close()
        for _ in range(count % shape.unrolled_k_tiles):
            tile()
        totals = loop.end()
        if shape.spread:
            ptx_mma.cp_async_wait(builder, 0)
        return totals

    def _interleaved_copies(
        self, copiers: Sequence[TileLoader], loop: _WgmmaLoop, rounds: int, left: L.Value, skipped: L.Value
    ) -> list[Iterator[None]]:
        """Copies of a later tile, one after the other, in so many rounds of the loop."""
        builder, shape = self.builder, self.shape
        number = builder.add(loop.number, L.I32(shape.share - rounds))
        first = builder.add(builder.mul(number, L.I32(shape.left.terms)), skipped)
        left, where = builder.sub(left, first), builder.icmp_signed("<", loop.number, L.I32(rounds))
        found: list[Iterator[None]] = []
        for copier in copiers:  # what is not there is zeros in a stage that nobody reads: no branch among the products
            found += [copier.copies(first, loop.writing, left, where)] * len(copier.places)
        return found

    def _mainloop_via_registers(self, takers: Sequence[Tf32RoundingLoader], left: L.Value, skipped: L.Value) -> Totals:
        """float32 operands: tiles wait in registers, are rounded, and stored beside the one that is multiplied."""
        builder, shape = self.builder, self.shape
        count = shape.share

        def load(number: L.Value) -> list[list[L.Value]]:
            first = builder.add(builder.mul(number, L.I32(shape.left.terms)), skipped)
            return [taker.load(first, builder.sub(left, first)) for taker in takers]

        def store(words: list[list[L.Value]], stage: L.Value) -> None:
            for taker, mine in zip(takers, words, strict=True):
                taker.store(mine, stage)
            wgmma.proxy_fence(builder)

        tiles = [load(L.I32(number)) for number in range(min(count, 1 + shape.flight))]
        self.prefetch_epilogue()
        store(tiles[0], L.I32(0))
        waiting = tiles[1:]
        loop = _WgmmaLoop(self, 1, [word for tile in waiting for words in tile for word in words])
        loop.multiply()
        if waiting:
            held, values = [], iter(loop.held)
            for tile in waiting:
                held.append([[next(values) for _ in words] for words in tile])
            # A branch keeps the conversions, which wait for loads, behind the products; loads come behind the fence,
            # which would wait for them.
            with builder.if_then(builder.icmp_signed("<", loop.number, L.I32(count - 1))):
                store(held[0], loop.writing)
            held = held[1:]
            if count > 1 + shape.flight:
                held.append(self._where(loop.number, count - 1 - shape.flight, load))
            else:  # nothing is left to ask for: the places move on
                held.append([[L.I32(0) for _ in words] for words in waiting[0]])
            loop.hold([word for tile in held for words in tile for word in words])
        loop.advance()
        loop.close()
        return loop.end()

    def _where(self, number: L.Value, last: int, load: object) -> list[list[L.Value]]:
        """A tile asked for in the first ``last`` rounds; later anything."""
        builder, ahead = self.builder, 1 + self.shape.flight
        before, inside = builder.block, builder.append_basic_block("load")
        after = builder.append_basic_block("load.done")
        builder.cbranch(builder.icmp_signed("<", number, L.I32(last)), inside, after)
        builder.position_at_end(inside)
        found = load(builder.add(number, L.I32(ahead)))  # type: ignore[operator]
        end = builder.block
        builder.branch(after)
        builder.position_at_end(after)
        made = []
        for words in found:
            made.append([])
            for word in words:
                phi = builder.phi(L.I32)
                phi.add_incoming(word, end)
                phi.add_incoming(L.I32(L.ir.Undefined), before)
                made[-1].append(phi)
        return made

    # -- what the units are told --------------------------------------------------------------------------------
    def _descriptor(self, tile: WgmmaSmemTile, first: L.Value) -> L.Value:
        """Of a group's part of a tile, which begins at this row (or column), in the first stage."""
        builder = self.builder
        into = builder.mul(first, L.I32(tile.block // wgmma.ROWS))
        place = builder.add(builder.add(self.shared, L.I32(tile.first)), into)
        return wgmma.descriptor(builder, place, tile.block, wgmma.ATOM)

    def products(self, number: L.Value, reading: L.Value, totals: Totals, beside: list[Iterator[None]]) -> Totals:
        """Issues the ``wgmma``s of a k-tile in a stage (byte offset from the first)."""
        builder, shape = self.builder, self.shape
        stage = builder.zext(builder.lshr(reading, L.I32(4)), L.I64)
        left, right = (builder.add(base, stage) for base in self.bases)
        if shape.rounded:
            return wgmma_register_operand.wgmma_from_registers(
                builder, self.rows, right, shape.right, reading, number, self.before, totals, beside, shape.steps
            )
        steps = range(shape.left.terms * shape.left.side.item // ptx_mma.STEP)
        pairs = []
        seconds = [wgmma.advance_descriptor(builder, right, shape.right.step(k)) for k in steps]
        for row in range(shape.left.warp // wgmma.ROWS):
            first = [
                wgmma.advance_descriptor(builder, left, row * shape.left.block + shape.left.step(k)) for k in steps
            ]
            pairs.append([((mine,), second) for mine, second in zip(first, seconds, strict=True)])
        turned = (not shape.left.by_terms, not shape.right.by_terms)
        return wgmma.wgmma_async(builder, shape.kind, pairs, turned, totals)


class _WgmmaLoop:
    """The k-loop: one tile is multiplied while the next is made ready."""

    def __init__(self, emitter: WgmmaKernel, ahead: int, held: Sequence[L.Value] = ()) -> None:
        """Begins a loop iteration. Args: ahead: k-tiles between load and store; held: loop-carried values."""
        builder, shape = emitter.builder, emitter.shape
        self.emitter, self.builder = emitter, builder
        before = builder.block
        self.loop, self.after = builder.append_basic_block("terms"), builder.append_basic_block("terms.done")
        builder.branch(self.loop)
        builder.position_at_end(self.loop)

        def carried(kind: L.Type, start: L.Value) -> L.Value:
            found = builder.phi(kind)
            found.add_incoming(start, before)
            return found

        self.number = carried(L.I32, L.I32(0))
        self.reading, self.writing = carried(L.I32, L.I32(0)), carried(L.I32, L.I32(ahead * shape.stage))
        high, wide = shape.left.warp // wgmma.ROWS, shape.right.warp // 8
        self.totals = [[[carried(L.F32, L.F32(0.0)) for _ in range(4)] for _ in range(wide)] for _ in range(high)]
        self.held = [carried(L.I32, value) for value in held]
        self.carried = [self.number, self.reading, self.writing, *self._flat(), *self.held]

    def multiply(self, beside: Sequence[Iterator[None]] = ()) -> None:
        """Waits for the tile and starts its products. Args: beside: copies that are started among them."""
        ptx_mma.barrier(self.builder)
        self.totals = self.emitter.products(self.number, self.reading, self.totals, list(beside))

    def hold(self, values: list[L.Value]) -> None:
        """What goes into the next round."""
        self.held = values

    def advance(self) -> None:
        """Waits for the products of the tile before (of this one, where its stage is written next); on to the next."""
        builder, shape = self.builder, self.emitter.shape
        if not shape.rounded:  # else its steps wait for each other
            wgmma.wgmma_wait_group(builder, 1 if shape.stages > 2 else 0)
        self.number = builder.add(self.number, L.I32(1))
        self.reading, self.writing = (self.emitter.next_stage(stage) for stage in (self.reading, self.writing))

    def close(self) -> None:
        """Goes round as long as there are tiles for a whole round."""
        builder, shape = self.builder, self.emitter.shape
        values = [self.number, self.reading, self.writing, *self._flat(), *self.held]
        for phi, value in zip(self.carried, values, strict=True):
            phi.add_incoming(value, builder.block)
        last = L.I32(shape.share // shape.unrolled_k_tiles * shape.unrolled_k_tiles)
        builder.cbranch(builder.icmp_signed("<", self.number, last), self.loop, self.after)
        builder.position_at_end(self.after)

    def end(self) -> Totals:
        """The sums, after all products."""
        return wgmma.wgmma_wait_all(self.builder, self.totals)

    def _flat(self) -> list[L.Value]:
        return [value for rows in self.totals for tile in rows for value in tile]
