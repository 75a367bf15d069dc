"""Block tile of the warp-specialised kernel: stages, roles, registers per role, constraints on schedules."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.arch.sm_limits import SM_90
from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.conv.halo_tile import HaloTile
from jcuts.codegen.cuda.gemm.mma_mainloop import three
from jcuts.codegen.cuda.gemm.wgmma_smem_tile import WgmmaSmemTile
from jcuts.codegen.cuda.gemm.wgmma_tile import WARPS, divides_evenly, is_loadable
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.conv_window import ConvWindow, linearize_k, match_conv_window, weights_need_no_transform
from jcuts.lower.patterns.gemm import (
    COLUMNS,
    ROWS,
    B,
    K,
    S,
    gemm_operands,
    k_extent,
    k_tiles_per_split,
    k_vectors,
    prologue,
)
from jcuts.schedule.gpu.gemm.epilogue_smem import StagedMatrix
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, KINDS
from jcuts.schedule.gpu.warp_specialized.schedules import OTHERS, staged_residual

FILE = SM_90.registers_per_sm
"""Registers of a multiprocessor."""
STEP = 8
"""What the registers of a thread are a multiple of (`setmaxnreg`)."""
MOST_REGISTERS = 240
"""Most registers of a thread."""
CARRYING = {2: (80, 104), 4: (56, 80)}
"""By the number of producer warps: registers of a thread that copies, few or more; the others get what it does not
need (`setmaxnreg`)."""
FEW_TOTALS = 64
"""Accumulators of a consumer thread up to which nobody needs more registers."""


@dataclass(frozen=True)
class WarpSpecializedTile(HaloTile):
    """Block tile of the warp-specialised kernel.

    Attributes:
        window: how the pixels of a halo are read; None where no halo is kept.
        carriers: producer warps.
        early: whether producers prefetch the operands of the epilogue.
        vectors: values per k that a prologue takes.
        beside: the residual matrix that comes through the stages, one stage for each consumer warpgroup.
    """

    window: ConvWindow | None
    carriers: int
    early: bool
    vectors: int
    beside: StagedMatrix | None

    @property
    def consumer_threads(self) -> int:
        """Threads that multiply."""
        return WARP * self.warps[0]

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.consumer_threads + WARP * OTHERS[self.carriers]

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers of a thread that multiplies, and of one that copies, where they are shared out."""
        groups = self.warps[0] // WARPS
        few = groups != 3 and self.left.warp * self.right.size <= FEW_TOTALS * WARP * WARPS
        if OTHERS[self.carriers] != WARPS or groups == 1 or few:
            return None
        more = self.window is not None or self.early or groups > 2
        mine = CARRYING[self.carriers][more]
        return min(MOST_REGISTERS, (self.entry_registers * (groups + 1) - mine) // groups // STEP * STEP), mine

    @property
    def has_fence_warp(self) -> bool:
        """Whether a warp of its own passes proxy fences, not those that multiply."""
        return OTHERS[self.carriers] > self.carriers

    @property
    def entry_registers(self) -> int:
        """Registers that every thread begins with where they are shared out."""
        return FILE // self.threads // STEP * STEP

    @property
    def stage(self) -> int:
        """Bytes of a stage: the weights of a k-tile, and the left operand's tile where no pixels are kept."""
        return self.right.bytes + (self.left.bytes if self.window is None else 0)

    @property
    def residual_stages(self) -> int:
        """Stages of an output tile's residual, behind those of its k-tiles."""
        return 0 if self.beside is None else self.warps[0] // WARPS

    @property
    def barriers(self) -> int:
        """Bytes before the barriers: vectors of a prologue are the last of them."""
        return self.kept_until + 4 * self.vectors * self.share * self.left.terms

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.barriers + KINDS * self.stages * BARRIER

    @property
    def tiles(self) -> int:
        """Tiles of outputs."""
        return self.rows * self.columns

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return -(-self.tiles // self.rounds)


def fed_shape(program: Program) -> WarpSpecializedTile:
    """The block tile that a schedule asks for. Raises CompileRejected where its numbers do not fit each other."""
    params, extents = dict(program.params), program.phases[0].ranges()
    rows, columns, terms = three(params["tile"])
    along, across = (int(str(v)) for v in params["groups"])  # type: ignore[attr-defined]
    left, right = gemm_operands(program)
    kept, total = int(str(params.get("pixels", 0))), k_extent(program)
    fits = {B, S}.isdisjoint(extents) and terms * left.item == wgmma.LINE
    found = match_conv_window(program) if kept and fits else None
    share, _ = k_tiles_per_split(extents[K], terms, 1)
    ragged = total % terms != 0
    if kept:
        if found is None or not weights_need_no_transform(program):
            raise CompileRejected(f"{program.name}: no convolution with rounded weights whose pixels can be kept")
        right, share, ragged = linearize_k(right, total), found.k_tiles, found.channels % found.channels_per_tile != 0
    first = WgmmaSmemTile(left, extents[ROWS], rows, terms, rows // max(1, along), 0, ragged)
    second = WgmmaSmemTile(right, extents[COLUMNS], columns, terms, columns, 0 if kept else first.bytes, ragged)
    stages, rounds = int(str(params["stages"])), int(str(params.get("rounds", 1)))
    if params["fed"] not in OTHERS:
        raise CompileRejected(f"{program.name}: {params['fed']} warps that copy")
    comes = bool(params.get("beside", 0)) and across == 1 and found is None
    added = staged_residual(program, rows, columns, max(1, along), int(str(params["fed"]))) if comes else None
    shape = WarpSpecializedTile(
        first,
        second,
        (WARPS * along, across, 1),
        stages,
        share,
        total,
        1,
        0 if found is None else found.halo_rows(rows),
        kept,
        rounds,
        found,
        int(str(params["fed"])),
        bool(params.get("early", 0)),
        len(k_vectors(program)),
        added,
    )
    fits = fits and bool(params.get("beside", 0)) == (added is not None) and shape.residual_stages <= stages
    fits = fits and across == 1 and divides_evenly(first, second, along, across)
    fits = fits and left.item == 4 and left.along_terms and right.along_terms and program.buffer(right.buffer).tf32
    fits = fits and stages >= 3 and share >= 2 and rounds >= 1
    fits = fits and is_loadable(second, 1) and (found is not None or is_loadable(first, along))
    fits = fits and not (ragged and prologue(program) is not None)  # zeros would not stay zeros
    if found is None:
        fits = fits and all(t.side.run % terms == 0 or t.side.run == extents[K] for t in (first, second))
    else:  # a run is written again when the stages behind it have been read
        fits = fits and kept >= 2 and stages <= (kept - 1) * found.taps + 1
        fits = fits and shape.carriers % 2 == 0  # lines are swizzled by their number
    if shape.registers is not None:  # those that give some give to those that take some
        fits = fits and shape.registers[0] >= shape.entry_registers >= shape.registers[1]
    others = {"flight", "split", "cluster", "push", "held", "cached", "spread", "steps", "unrolled", "fetched"}
    if not fits or not others.isdisjoint(params) or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no product of tiles {params['tile']} by groups {params['groups']}")
    return shape
