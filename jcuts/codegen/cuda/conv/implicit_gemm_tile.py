"""Block tile of the implicit-GEMM convolution, and the constraints on its schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.conv.halo_tile import HaloTile
from jcuts.codegen.cuda.gemm.mma_mainloop import three
from jcuts.codegen.cuda.gemm.wgmma_smem_tile import WgmmaSmemTile
from jcuts.codegen.cuda.gemm.wgmma_tile import (
    AHEAD,
    WARPS,
    divides_evenly,
    is_loadable,
    may_swap_lanes,
    tile_dsmem_bytes,
)
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.column_sums import SUMS
from jcuts.lower.patterns.conv_window import ConvWindow, linearize_k, match_conv_window, weights_need_no_transform
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, gemm_operands
from jcuts.schedule.gpu.conv.implicit_gemm import RESIDENT
from jcuts.schedule.gpu.gemm.epilogue_smem import StagedEpilogue
from jcuts.schedule.gpu.gemm.wgmma_tile import dsmem_is_separate, smem_with_dsmem


class KLoopSegment(NamedTuple):
    """A segment of the k-loop.

    Attributes:
        taps: taps of its channel chunks.
        steps: k-steps of each tap.
        together: taps per loop iteration.
    """

    taps: int
    steps: int
    together: int


@dataclass(frozen=True)
class ImplicitGemmKernelTile(HaloTile):
    """Block tile of the implicit-GEMM convolution.

    Attributes:
        window: how pixels are read.
        spread: whether copies are issued between the k-steps, not behind them.
        steps: k-steps of one ``wgmma`` commit group.
        unrolled: whether every tap has code of its own.
        fetched: whether the fragments of a tap are read before the products of the tap before start.
        short: whether the last channel chunk is multiplied only as far as it is full.
        push: whether the blocks of a cluster split the channel chunks.
    """

    window: ConvWindow
    spread: bool
    steps: int
    unrolled: bool
    fetched: bool
    short: bool
    push: bool

    @property
    def held(self) -> StagedEpilogue:
        """No epilogue matrices are staged in shared memory."""
        return StagedEpilogue()

    @property
    def lines(self) -> int:
        """Channel chunks (lines) of the block."""
        return self.window.channel_tiles // self.cluster

    @property
    def stage(self) -> int:
        """Bytes of one tap's weight tile."""
        return self.right.bytes

    @property
    def resident(self) -> bool:
        """Whether all weights of the block stay in shared memory."""
        return self.stages == self.share

    @property
    def prefetch_distance(self) -> int:
        """k-tiles whose copies are issued before the first multiplication."""
        return RESIDENT if self.resident else self.stages - 2

    @property
    def whole(self) -> bool:
        """Whether all k-steps of a tile form one ``wgmma`` commit group."""
        return self.steps == self.window.bytes // ptx_mma.STEP

    @property
    def parts(self) -> list[KLoopSegment]:
        """Segments of the k-loop: all channel chunks, or the shorter last chunk after the full ones."""
        found = self.window
        if not self.short:
            return [KLoopSegment(self.share, found.whole, self.together)]
        lines = (found.channel_tiles - 1) * found.taps
        return [
            KLoopSegment(count, steps, found.taps if self.unrolled else self._apart(count, steps))
            for count, steps in ((lines, found.whole), (found.taps, found.short))
            if count
        ]

    def _apart(self, count: int, steps: int) -> int:
        """Unroll factor of the tap loop that keeps fragments out of registers that pending ``wgmma`` groups
        still read.
        """
        groups, under_way = -(-steps // self.steps), 1 if self.whole else AHEAD // self.steps
        return next(t for t in range(1, count + 1) if count % t == 0 and (t * groups > under_way or t == count))

    @property
    def together(self) -> int:
        """Taps per loop iteration (unrolling), where all chunks are equally long."""
        if not self.unrolled:
            return 2 if self.whole else 1
        return self.window.taps * (2 if self.whole and self.window.taps % 2 and self.lines > 1 else 1)

    @property
    def copy_steps(self) -> int:
        """k-tiles of a chunk during which the next run of pixels is copied, so that it arrives in time."""
        return self.window.taps - self.prefetch_distance + (0 if self.fetched else 1)

    @property
    def run(self) -> int:
        """Bytes of a run of pixels (halo)."""
        return self.span * self.window.bytes

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: weights, halos, zeros, the DSMEM receive buffer and its barrier; column
        sums.
        """
        if self.push:
            return smem_with_dsmem(self.kept_until, self.room)
        return self.column_sums_at + self.column_smem

    @property
    def column_sums_at(self) -> int:
        """Offset [B] of what warps combine their column sums in: behind all other where copies are under way."""
        return self.kept_until if self.rounds > 1 else max(0, self.kept_until - self.column_smem)

    @property
    def room(self) -> int:
        """Bytes of the DSMEM receive buffer (partial sums pushed by the other blocks of the cluster)."""
        return tile_dsmem_bytes(self)

    @property
    def dsmem_is_separate(self) -> bool:
        """Whether the receive buffer lies behind all other shared memory, not over the operands."""
        return dsmem_is_separate(self.kept_until, self.room)

    @property
    def high_blocks(self) -> int:
        """Blocks along the rows."""
        return -(-self.rows // self.rounds)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.high_blocks * self.columns * self.cluster


def window_shape(program: Program) -> ImplicitGemmKernelTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    params, extents = dict(program.params), program.phases[0].ranges()
    rows, columns, terms = three(params["tile"])
    along, across = (int(str(v)) for v in params["groups"])  # type: ignore[attr-defined]
    left, right = gemm_operands(program)
    found = match_conv_window(program)
    if found is None or not weights_need_no_transform(program):
        raise CompileRejected(f"{program.name}: no convolution with rounded weights whose pixels can be kept")
    ragged, right = found.channels % found.channels_per_tile != 0, linearize_k(right, found.taps * found.channels)
    first = WgmmaSmemTile(left, extents[ROWS], rows, terms, rows // max(1, along), 0, ragged)
    second = WgmmaSmemTile(right, extents[COLUMNS], columns, terms, columns // max(1, across), 0, ragged)
    stages, kept = int(str(params["stages"])), int(str(params["pixels"]))
    steps, rounds = int(str(params.get("steps", 1))), int(str(params.get("rounds", 1)))
    cluster = int(str(params.get("cluster", 1)))
    shape = ImplicitGemmKernelTile(
        first,
        second,
        (WARPS * along, across, 1),
        stages,
        found.k_tiles // cluster,
        found.taps * found.channels,
        cluster,
        found.halo_rows(rows),
        kept,
        rounds,
        found,
        bool(params.get("spread", 0)),
        steps,
        unrolled=bool(params.get("unrolled", 0)),
        fetched=bool(params.get("fetched", 0)),
        short=bool(params.get("short", 0)),
        push=bool(params.get("push", 0)),
        sums=int(str(params.get(SUMS, 0))),
    )
    fits = divides_evenly(first, second, along, across) and terms == found.channels_per_tile
    grouped = 1 <= steps <= AHEAD and not found.narrow
    grouped = grouped or (shape.whole and (found.narrow or shape.short or shape.share % 2 == 0))
    fits = fits and grouped and terms * left.item // ptx_mma.STEP % steps == 0 and is_loadable(second, across)
    fits = fits and (shape.short or not shape.unrolled or shape.share % shape.together == 0)
    fits = fits and not (shape.short and (found.short == found.whole or (shape.unrolled and found.channel_tiles > 2)))
    fits = fits and 3 <= stages <= shape.share and shape.copy_steps >= 1 and rounds >= 1
    fits = fits and (not shape.fetched or (shape.whole and left.item == 4))
    fits = fits and (kept == 2 or (kept == shape.lines == rounds == 1))
    fits = fits and found.channel_tiles % cluster == 0 and shape.push == (cluster > 1)
    fits = fits and (rounds == 1 or not (shape.push or params.get("early", 0))) and not (shape.push and shape.short)
    fits = fits and shape.sums_fit and {"flight", "split", "cached"}.isdisjoint(params)
    fits = fits and may_swap_lanes(params, second)
    if not fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no convolution of tiles {params['tile']} by groups {params['groups']}")
    return shape
