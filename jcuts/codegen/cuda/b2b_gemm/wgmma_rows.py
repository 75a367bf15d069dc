"""Rows of x of a consumer warpgroup: copied by ``cp.async`` into 128B-swizzled lines, rounded to TF32 in place.

The lines stay for all chunks of the hidden dimension; ``wgmma`` reads them as its A operand.  One ``mbarrier`` of the
warpgroup ends phase 0 when they may be read, phase 1 when nobody reads them any more.
"""

from __future__ import annotations

from collections.abc import Callable

from jcuts.codegen.cuda.b2b_gemm.loads import ACCESS, copy_width
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.mbarrier_ring import MbarrierRing
from jcuts.codegen.cuda.ptx.shuffle import recomputed
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import gemm_operands
from jcuts.schedule.gpu.b2b_gemm.pair_tile import WORD
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import B2bWgmmaTile
from jcuts.schedule.gpu.gemm.wgmma_tile import GROUP

SWIZZLE = 7
"""Bits of a line's number that its pieces are permuted by."""


class ResidentRows:
    """The rows of x of one warpgroup in shared memory."""

    def __init__(
        self, frame: M.Frame, tile: B2bWgmmaTile, ring: MbarrierRing, barrier: L.Value, thread: L.Value, place: L.Value
    ) -> None:
        """Args: barrier: of the warpgroup (address); thread: of the block; place: address of its first line."""
        self.frame, self.tile, self.ring, self.barrier = frame, tile, ring, barrier
        self.builder, self.thread, self.place = frame.builder, thread, place
        self.width = copy_width(tile.block.in_channels, tile.item)

    def start(self, row: L.Value) -> None:
        """Starts this thread's copies. Args: row: the first one, in x."""
        builder, tile, block = self.builder, self.tile, self.tile.block
        assert block.expand is not None
        base, terms = self.frame.pointers[gemm_operands(block.expand)[0].buffer], block.in_channels

        def copy(target: L.Value, line: L.Value, k: L.Value) -> None:
            mine, live = builder.add(row, line), None
            if block.rows % tile.rows:
                live = builder.icmp_signed("<", mine, L.I32(block.rows))
            if terms < tile.padded_in_channels:
                inside = builder.icmp_unsigned("<", k, L.I32(terms))
                live = inside if live is None else builder.and_(live, inside)
            place = builder.add(builder.mul(mine, L.I32(terms)), k)
            if live is not None:
                place = builder.select(live, place, L.I32(0))
            source = builder.add(base, builder.mul(builder.sext(place, L.I64), L.I64(tile.item)))
            ptx_mma.cp_async(builder, (target, 0), (source, 0), tile.item * self.width, live)

        self._each(copy)

    def arrive(self) -> None:
        """Waits for the copies, rounds float32, and waits until the whole warpgroup has done so (phase 0)."""
        builder = self.builder
        ptx_mma.cp_async_commit(builder)
        ptx_mma.cp_async_wait(builder, 0)
        if self.tile.item == WORD:
            self._round()
        wgmma.proxy_fence(builder)
        self.ring.arrive(self.barrier)
        self.ring.wait(self.barrier, L.I32(0))

    def release(self) -> None:
        """Waits until no warp of the warpgroup reads the rows any more (phase 1)."""
        self.ring.arrive(self.barrier)
        self.ring.wait(self.barrier, L.I32(1))

    def _round(self) -> None:
        builder = self.builder

        def rounded(target: L.Value, line: L.Value, k: L.Value) -> None:
            if WORD * self.width == ACCESS:
                words = ptx_mma.read_words(builder, target, 0, self.width)
            else:
                words = [ptx_mma.ld_shared_b32(builder, target, WORD * k) for k in range(self.width)]
            ptx_mma.write_words(builder, target, 0, [ptx_mma.to_tf32(builder, word) for word in words])

        self._each(rounded)

    def _each(self, body: Callable[[L.Value, L.Value, L.Value], None]) -> None:
        """A loop over this thread's copies, which is not unrolled: it has registers beside all accumulators.

        Args: body: is given the shared address, the row in the warpgroup's lines, k.
        """
        builder, tile = self.builder, self.tile
        along = tile.padded_in_channels // self.width
        thread = recomputed(builder, self.thread)
        none = builder.lshr(thread, L.I32(tile.threads.bit_length()))
        total, mine = builder.add(none, L.I32(tile.group_rows * along)), builder.and_(thread, L.I32(GROUP - 1))
        before, loop = builder.block, builder.append_basic_block("rows")
        after = builder.append_basic_block("rows.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        number = builder.phi(L.I32)
        number.add_incoming(mine, before)
        line = builder.udiv(number, L.I32(along))
        k = builder.mul(builder.urem(number, L.I32(along)), L.I32(self.width))
        byte = builder.mul(k, L.I32(tile.item))
        piece = builder.xor(builder.lshr(byte, L.I32(4)), line)
        place = builder.add(self.place, builder.mul(line, L.I32(wgmma.LINE)))
        place = builder.add(place, builder.shl(builder.and_(piece, L.I32(SWIZZLE)), L.I32(4)))
        place = builder.add(place, builder.and_(byte, L.I32(wgmma.PIECE - 1)))
        far = builder.mul(builder.udiv(byte, L.I32(wgmma.LINE)), L.I32(tile.group_rows * wgmma.LINE))
        body(builder.add(place, far), line, k)
        following = builder.add(number, L.I32(GROUP))
        number.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, total), loop, after)
        builder.position_at_end(after)
