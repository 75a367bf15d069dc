"""Consumer warpgroup of the ``wgmma`` back-to-back GEMM: a hidden chunk is a register-sourced A operand.

Per chunk: ``wgmma`` of the resident rows of x and the first weight; element-wise operations on its accumulators in
registers, rounded to operands; these registers are the A fragments of the ``wgmma``s that add to the results.  The
second GEMM of a chunk is under way while the first one of the next is issued behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jcuts.codegen.cuda.b2b_gemm.mid_epilogue import MidEpilogue
from jcuts.codegen.cuda.b2b_gemm.wgmma_rows import ResidentRows
from jcuts.codegen.cuda.b2b_gemm.wgmma_weights import weight_tiles
from jcuts.codegen.cuda.gemm.epilogue import Totals, epilogue
from jcuts.codegen.cuda.gemm.wgmma_smem_tile import WgmmaSmemTile
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.builder import asm
from jcuts.codegen.cuda.ptx.mbarrier_ring import MbarrierRing
from jcuts.codegen.cuda.ptx.shuffle import WARP, recomputed
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, TYPES, gemm_operands
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import B2bWgmmaTile
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, GROUP, KINDS, can_swap_lanes

EIGHT = 8
PAIR = 2
"""Contiguous accumulators of a lane, and 16-bit elements of a word."""

AHEAD = 64
"""Columns of results whose residual and vectors are in flight at once."""


class B2bConsumer:
    """One thread of a consumer warpgroup."""

    def __init__(
        self,
        frame: M.Frame,
        tile: B2bWgmmaTile,
        buffers: Mapping[str, Buffer],
        ring: MbarrierRing,
        thread: L.Value,
        shared: L.Value,
    ) -> None:
        """Args: shared: address of the block's shared memory."""
        builder, block = frame.builder, tile.block
        assert block.expand is not None
        self.frame, self.tile, self.buffers, self.ring, self.builder = frame, tile, buffers, ring, builder
        self.kind, self.thread = TYPES[block.dtype], thread
        # uniform over the warp, and known to be: descriptors are
        group = asm(
            builder,
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
            L.I32,
            [builder.udiv(thread, L.I32(GROUP))],
            effects=True,
        )
        place = builder.add(shared, builder.mul(group, L.I32(tile.group_bytes)))
        barrier = builder.add(shared, L.I32(tile.barriers + BARRIER * KINDS * tile.stages))
        barrier = builder.add(barrier, builder.mul(group, L.I32(BARRIER)))
        self.rows = ResidentRows(frame, tile, ring, barrier, thread, place)
        self.group_row = builder.mul(group, L.I32(tile.group_rows))
        self.up, self.down = weight_tiles(tile)
        part = tile.group_rows * wgmma.LINE
        steps = [divmod(step * ptx_mma.STEP, wgmma.LINE) for step in range(tile.k_steps)]
        self.steps = [line * part + inside for line, inside in steps]
        self.left = wgmma.descriptor(builder, place, wgmma.ROWS * wgmma.LINE, wgmma.ATOM)
        stages = builder.add(shared, L.I32(tile.ring))
        self.weights = [wgmma.descriptor(builder, stages, side.block, wgmma.ATOM) for side in (self.up, self.down)]
        self.chain = MidEpilogue(frame, block.expand.phases[0], COLUMNS, block.expanded_channels, tile.chunk, buffers)

    def start(self, tile: L.Value) -> None:
        """Starts the copies of a row tile's x."""
        row = self.builder.mul(tile, L.I32(self.tile.rows))
        self.rows.start(self.builder.add(row, self.group_row))

    def run(self, tile: L.Value, following: L.Value, state: list[L.Value]) -> list[L.Value]:
        """One row tile. Args: following: the next one of the block; state: the next stage to read, its parity."""
        builder, shape = self.builder, self.tile
        self.rows.arrive()
        entry = builder.block
        loop, after = builder.append_basic_block("chunks"), builder.append_basic_block("chunks.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        number, stage, parity = (builder.phi(L.I32) for _ in range(3))
        carried = [
            [[builder.phi(L.F32) for _ in range(4)] for _ in range(shape.results // EIGHT)] for _ in range(shape.high)
        ]
        for phi, value in zip((number, stage, parity), (L.I32(0), *state), strict=True):
            phi.add_incoming(value, entry)
        later = builder.add(number, L.I32(1))
        hidden, totals = self._expand(number, stage, parity, carried)
        last = builder.icmp_signed("==", later, L.I32(shape.chunks))
        if shape.rounds > 1:
            more = builder.and_(last, builder.icmp_signed("<", following, L.I32(shape.tiles)))
            with builder.if_then(more):
                self.rows.release()
                self.start(following)
        fragments = self._activate(builder.mul(number, L.I32(shape.chunk)), hidden)
        second, second_parity = self.ring.next(stage, parity)
        totals = self._project(second, second_parity, fragments, totals)
        values = [later, *self.ring.next(second, second_parity)]
        for phi, value in zip((number, stage, parity), values, strict=True):
            phi.add_incoming(value, builder.block)
        for phi, value in zip(_flat(carried), _flat(totals), strict=True):
            phi.add_incoming(L.F32(0.0), entry)
            phi.add_incoming(value, builder.block)
        builder.cbranch(last, after, loop)
        builder.position_at_end(after)
        totals = wgmma.wgmma_wait_all(builder, totals)
        self.ring.arrive(self.ring.empty(second))
        self._store(tile, totals)
        return values[1:]

    def _expand(self, number: L.Value, stage: L.Value, parity: L.Value, totals: Totals) -> tuple[Totals, Totals]:
        """The first GEMM of a chunk, behind the second one of the chunk before: both are done. Returns: both sums."""
        builder, shape = self.builder, self.tile
        self._acquire(stage, parity)
        right = self._stage(self.weights[0], stage)
        seconds = [wgmma.advance_descriptor(builder, right, self.up.step(k)) for k in range(shape.k_steps)]
        pairs = []
        for high in range(shape.high):
            offset = high * wgmma.ROWS * wgmma.LINE
            firsts = [wgmma.advance_descriptor(builder, self.left, offset + step) for step in self.steps]
            pairs.append([((first,), second) for first, second in zip(firsts, seconds, strict=True)])
        zeros = [[[L.F32(0.0)] * 4 for _ in range(shape.chunk // EIGHT)] for _ in range(shape.high)]
        hidden = wgmma.wgmma_async(builder, self.kind, pairs, (False, not self.up.by_terms), zeros)
        found = wgmma.wgmma_wait_all(builder, [*hidden, *totals])
        self.ring.arrive(self.ring.empty(stage))
        before = builder.select(
            builder.icmp_signed("==", stage, L.I32(0)), L.I32(shape.stages - 1), builder.sub(stage, L.I32(1))
        )
        self.ring.arrive(self.ring.empty(before), builder.icmp_signed(">", number, L.I32(0)))
        return found[: shape.high], found[shape.high :]

    def _activate(self, first: L.Value, hidden: Totals) -> list[list[list[L.Value]]]:
        """A fragments [64 rows][k-step][4] of a chunk, whose first hidden column is given: the epilogue, rounded."""
        builder, shape = self.builder, self.tile
        quarter = builder.and_(self.thread, L.I32(3))
        is_wide = shape.item == 4
        step = 1 if is_wide else PAIR
        mine = builder.mul(quarter, L.I32(step)) if step > 1 else quarter
        tiles = range(shape.chunk // EIGHT)

        def column(j: int, k: int) -> tuple[int, list[L.Value]]:
            """Accumulators k (of two) of tile j: the hidden column's offset from the lane's first, its rows."""
            values = [row[j][PAIR * half + k] for row in hidden for half in (0, 1)]
            return EIGHT * j + (4 * k if is_wide else k), values

        runs = (
            [[column(j, k)] for j in tiles for k in (0, 1)]
            if is_wide
            else [[column(j, 0), column(j, 1)] for j in tiles]
        )
        column_ = builder.add(first, mine)
        values = self.chain.apply(column_, step, runs)
        words = []  # [word of a k-step's row][row]
        for run, found in zip(runs, values, strict=True):
            real = None
            if shape.block.expanded_channels % shape.chunk:
                real = builder.icmp_signed("<", column_, L.I32(shape.block.expanded_channels - run[0][0]))
            row_words = []
            for row in range(PAIR * shape.high):
                (word,) = self.chain.words([mine[row] for mine in found])
                word = ptx_mma.to_tf32(builder, word) if is_wide else word
                row_words.append(word if real is None else builder.select(real, word, L.I32(0)))
            words.append(row_words)
        fragments = []
        for high in range(shape.high):
            low, up = PAIR * high, PAIR * high + 1
            fragments.append([[a[low], a[up], b[low], b[up]] for a, b in zip(words[::2], words[1::2], strict=True)])
        return fragments

    def _project(self, stage: L.Value, parity: L.Value, fragments: list[list[list[L.Value]]], totals: Totals) -> Totals:
        """Issues the second GEMM of a chunk."""
        builder = self.builder
        self._acquire(stage, parity)
        right = self._stage(self.weights[1], stage)
        seconds = [wgmma.advance_descriptor(builder, right, self.down.step(k)) for k in range(len(fragments[0]))]
        pairs = [list(zip(row, seconds, strict=True)) for row in fragments]
        return wgmma.wgmma_async(builder, self.kind, pairs, (False, not self.down.by_terms), totals)

    def _acquire(self, stage: L.Value, parity: L.Value) -> None:
        """Waits for a stage."""
        ring = self.ring
        ring.wait((ring.fenced if self.tile.has_fence_warp else ring.full)(stage), parity)

    def _stage(self, descriptor: L.Value, stage: L.Value) -> L.Value:
        """The descriptor of a weight's chunk in a stage."""
        builder = self.builder
        return builder.add(descriptor, builder.mul(builder.zext(stage, L.I64), L.I64(self.tile.stage >> 4)))

    def _store(self, tile: L.Value, totals: Totals) -> None:
        """The epilogue of the results; nothing that depends on the lane is kept over the loop of row tiles."""
        builder, shape, block = self.builder, self.tile, self.tile.block
        thread = recomputed(builder, self.thread)
        lane = builder.and_(thread, L.I32(WARP - 1))
        phase = block.project.phases[0]
        group = builder.mul(builder.lshr(thread, L.I32(7)), L.I32(shape.group_rows))
        warp = builder.and_(builder.lshr(thread, L.I32(5)), L.I32(GROUP // WARP - 1))
        row = builder.add(group, builder.mul(warp, L.I32(wgmma.ROWS // (GROUP // WARP))))
        row = builder.add(builder.mul(tile, L.I32(shape.rows)), row)
        side = gemm_operands(block.project)[0]
        left = WgmmaSmemTile(side, block.rows, shape.rows, shape.chunk, shape.group_rows)
        many = self.down.n_tiles_per_lane_group
        paired = many == 1 and can_swap_lanes(shape.results, block.out_channels)
        width = EIGHT * max(many, PAIR)
        right = replace(self.down, warp=width)
        for start in range(0, shape.results, AHEAD):
            # a branch that is always taken: ptxas issues no loads over it, for which there would be no registers
            with builder.if_then(builder.icmp_unsigned("<", recomputed(builder, self.thread), L.I32(shape.threads))):
                for first in range(start, min(start + AHEAD, shape.results), width):  # of column vectors, one slice
                    tiles = slice(first // EIGHT, (first + width) // EIGHT)
                    frame = M.Frame(builder, {ROWS: row, COLUMNS: L.I32(first)}, self.frame.pointers, {}, {})
                    part = [rows[tiles] for rows in totals]
                    epilogue(frame, phase, (left, right), self.buffers, lane, part, paired=paired)


def _flat(totals: Totals) -> list[L.Value]:
    return [value for rows in totals for tile in rows for value in tile]
