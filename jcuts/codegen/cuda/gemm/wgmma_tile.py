"""Block tile of the ``wgmma`` GEMM: warpgroups, pipeline stages, shared-memory budget, and the constraints on
schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernelTile, three
from jcuts.codegen.cuda.gemm.wgmma_smem_tile import SPAN, SQUARE, WgmmaSmemTile
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.column_sums import SUMS
from jcuts.lower.patterns.conv_window import gather_per_copy, linearize_k
from jcuts.lower.patterns.gemm import (
    COLUMNS,
    ROWS,
    K,
    S,
    gemm_operands,
    k_extent,
    k_tiles_per_split,
    k_vectors,
    prologue,
    prologue_is_zero_safe,
)
from jcuts.schedule.gpu.gemm.epilogue_smem import StagedEpilogue, staged_epilogue
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, can_swap_lanes, dsmem_bytes, dsmem_is_separate, smem_with_dsmem

WARPS = 4  # of a group
MOST_TOTALS = 128  # of a thread
AHEAD = 3
"""Steps of products that may be under way while fragments of the next are read."""
ROUNDED_STAGES = (2, 3)  # of shared memory, where tiles wait in registers; of 3 two may be multiplied at once


@dataclass(frozen=True)
class WgmmaKernelTile(MmaKernelTile):
    """Block tile and pipeline of the ``wgmma`` GEMM.

    Attributes:
        left, right: shared-memory tiles of the operands.
        flight: float32 k-tiles in flight in registers; 0 where operands are copied by ``cp.async``.
        rounded: whether A comes from registers (rounded, or computed by a prologue) and B needs no rounding.
        vectors: values per k that the prologue takes.
        spread: whether copies are issued between the k-steps, not behind them.
        steps: k-steps of one ``wgmma`` commit group, where A comes from registers.
        cached: whether A is copied through the L1 cache (taps of convolutions are neighbours).
        push: whether blocks of a cluster store partial sums into each other's shared memory instead of reading them.
        held: the matrices of the epilogue that are staged in shared memory.
    """

    left: WgmmaSmemTile
    right: WgmmaSmemTile
    flight: int
    rounded: bool
    vectors: int
    spread: bool
    steps: int
    cached: bool
    push: bool
    held: StagedEpilogue

    @property
    def prefetch_distance(self) -> int:
        """k-tiles whose copies are issued before the first multiplication."""
        return self.share if self.stages >= self.share else self.stages - 2

    @property
    def whole(self) -> bool:
        """Whether all k-steps of a tile form one ``wgmma`` commit group."""
        return self.rounded and self.steps == self.left.terms * self.left.side.item // ptx_mma.STEP

    @property
    def unrolled_k_tiles(self) -> int:
        """k-tiles per loop iteration: two where the fragments of both are in registers at once."""
        return min(2, self.share) if self.whole else 1

    @property
    def tiles(self) -> int:
        """Bytes of all pipeline stages in shared memory."""
        return self.stage * self.stages

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: stages, prologue vectors, staged epilogue, and a barrier."""
        if self.held.loaded or self.held.stored:
            return self.held.end + BARRIER
        if self.push:
            return smem_with_dsmem(self.kept_until, self.room)
        return max(self.kept_until, self.split_k_smem, self.column_smem)

    @property
    def kept_until(self) -> int:
        """End offset [B] of the stages and the prologue vectors behind them."""
        return self.tiles + 4 * self.vectors * self.share * self.left.terms

    @property
    def room(self) -> int:
        """Bytes of the DSMEM receive buffer (partial sums pushed by the other blocks of the cluster)."""
        return tile_dsmem_bytes(self)

    @property
    def dsmem_is_separate(self) -> bool:
        """Whether the receive buffer lies behind all other shared memory, not over the operands."""
        return dsmem_is_separate(self.kept_until, self.room)

    @property
    def alignment(self) -> int:
        """Alignment [B] of the shared memory."""
        return wgmma.ATOM


def group_shape(program: Program) -> WgmmaKernelTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    params, phase = dict(program.params), program.phases[0]
    rows, columns, terms = three(params["tile"])
    along, across = (int(str(v)) for v in params["groups"])  # type: ignore[attr-defined]
    extents = phase.ranges()
    total, cluster = k_extent(program), int(str(params.get("cluster", 1)))
    share, ranks = k_tiles_per_split(extents[K], terms, cluster)
    left, right = gemm_operands(program)
    ragged = total % (terms * share * (cluster if S not in extents else 1)) != 0
    stages, flight = int(str(params["stages"])), int(str(params.get("flight", 0)))
    apart = left.run % terms != 0 and left.run != extents[K] and S not in extents and not flight
    apart = apart and gather_per_copy(program, left, right)
    right = linearize_k(right, total) if apart else right
    first = WgmmaSmemTile(left, extents[ROWS], rows, terms, rows // max(1, along), 0, ragged, apart)
    second = WgmmaSmemTile(right, extents[COLUMNS], columns, terms, columns // max(1, across), first.bytes, ragged)
    rounded, steps = bool(params.get("rounded", 0)), int(str(params.get("steps", 1)))
    spread, cached = bool(params.get("spread", 0)), bool(params.get("cached", 0))
    kept = (first.bytes + second.bytes) * stages + 4 * len(k_vectors(program)) * share * terms
    keeps = staged_epilogue(program, rows, columns, int(str(params.get("held", 0))), kept)
    shape = WgmmaKernelTile(
        first,
        second,
        (WARPS * along, across, 1),
        stages,
        share,
        total,
        cluster,
        flight,
        rounded,
        len(k_vectors(program)),
        spread,
        steps,
        cached,
        bool(params.get("push", 0)),
        keeps,
        sums=int(str(params.get(SUMS, 0))),
    )
    fits = divides_evenly(first, second, along, across) and terms * left.item in (wgmma.LINE, 2 * wgmma.LINE)
    through = left.item == 4 and not rounded
    fits = fits and (flight > 0 and stages in ROUNDED_STAGES if through else flight == 0 and stages >= min(3, share))
    if rounded:  # the units would cut bits off whatever else the right operand held
        if ragged and prologue(program) is not None:
            fits = fits and S not in extents and prologue_is_zero_safe(program)
        weights = right.along_terms and program.buffer(right.buffer).tf32
        fits = fits and left.along_terms and (weights if left.item == 4 else prologue(program) is not None)
        fits = (
            fits
            and terms * left.item // ptx_mma.STEP % steps == 0
            and (steps <= AHEAD or steps == terms * left.item // ptx_mma.STEP)
        )
    else:
        fits = fits and prologue(program) is None and (spread, steps, cached) == (False, 1, False)
    fits = fits and not (shape.push and (flight or cluster == 1))  # copies in flight know no block that has not begun
    fits = fits and ranks == cluster and (cluster == 1 or S not in extents)
    fits = fits and shape.sums_fit and not (shape.sums and (S in extents or params.get("held", 0)))
    fits = fits and (cluster == 1 or not params.get("held", 0))  # its blocks finish parts of a tile
    runs = (second,) if apart else (first, second)
    fits = fits and all(t.side.run % terms == 0 or t.side.run in (extents[K], total) for t in runs)
    fits = fits and all(is_loadable(t, number) for t, number in ((first, along), (second, across)))
    fits = fits and may_swap_lanes(params, second)
    if not fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no product of tiles {params['tile']} by groups {params['groups']}")
    return shape


def tile_dsmem_bytes(shape: MmaKernelTile) -> int:
    """Bytes of the DSMEM receive buffer of a block in a cluster."""
    high, wide = shape.left.warp // wgmma.ROWS, shape.right.warp // 8
    return dsmem_bytes(high, wide, shape.right.n_tiles_per_lane_group, shape.cluster, shape.threads)


def divides_evenly(left: WgmmaSmemTile, right: WgmmaSmemTile, along: int, across: int) -> bool:
    """Whether a number of warpgroups divides a block's tile evenly, into shapes that ``wgmma`` and a thread's registers
    allow.
    """
    even = left.size == along * left.warp and right.size == across * right.warp
    units = left.warp % wgmma.ROWS == 0 and right.warp % 8 == 0 and right.warp <= wgmma.WIDEST
    return even and units and left.warp * right.warp <= MOST_TOTALS * WARP * WARPS


def may_swap_lanes(params: Mapping[str, object], tile: WgmmaSmemTile) -> bool:
    """Whether lanes can exchange results of these columns, if they are to (`gemm.epilogue`, ``paired``)."""
    if not params.get("paired", 0):
        return True
    whole = can_swap_lanes(tile.warp, tile.extent) and tile.n_tiles_per_lane_group == 1
    return whole and {"cluster", "held", "fed"}.isdisjoint(params)


def is_loadable(tile: WgmmaSmemTile, groups: int) -> bool:
    """Whether threads can copy a tile, and that many warpgroups side by side read it."""
    side = tile.side
    if tile.is_transposed:
        return side.width == SQUARE and tile.size % SPAN == 0 and not side.guards
    if not tile.by_terms and groups > 1 and tile.warp % wgmma.ROWS:
        return False
    return tile.length % side.width == 0
