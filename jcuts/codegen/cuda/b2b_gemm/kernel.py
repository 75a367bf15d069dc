"""Back-to-back GEMM (B2B GEMM, fused MLP): two GEMMs with their epilogues in one kernel, by ``mma.sync``.

This is the *b2b* form.  A thread block computes a tile of rows and all their columns
(`schedule.gpu.b2b_gemm.tile`).  It copies its input rows into shared memory, rounds float32 to TF32 once, and goes
through the hidden dimension in chunks:

1. expand: fragments of input rows times a chunk of weights; element-wise operations in registers; rounded, into the
   hidden tile in shared memory; one barrier;
2. project: fragments of the hidden tile times a chunk of the second weights, accumulated in registers.

Both weights come by ``cp.async`` into two stages.  Two hidden tiles take turns, so that the barrier behind the expand
GEMM is the only one of a chunk: whoever writes a tile again has passed the barrier of the chunk between, behind which
nobody reads it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.b2b_gemm.expand_gemm import ExpandGemm, Run
from jcuts.codegen.cuda.b2b_gemm.hidden_tile import HiddenTile
from jcuts.codegen.cuda.b2b_gemm.project_gemm import ProjectGemm
from jcuts.codegen.cuda.b2b_gemm.tile_coords import RowCoordinates
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.schedule.gpu.b2b_gemm.tile import B2bGemmTile, shape_of


def b2b_shape(program: Program) -> B2bGemmTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    shape, params = shape_of(program), dict(program.params)
    if shape is None or not shape.fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no block of {params['tile']} rows by warps {params['expand']}")
    return shape


class HiddenGemm(ExpandGemm):
    """The first GEMM: its results are rounded to operands of the second, and stored into the hidden tile."""

    hidden: HiddenTile

    def store(self, first: L.Value, odd: L.Value, mine: L.Value, runs: Sequence[Run]) -> None:
        """Stores a chunk's values; columns beyond the hidden dimension are zeros, whatever its epilogue makes."""
        builder, shape = self.builder, self.shape
        place, channels = self.hidden.write_to(self.rows[0], mine), shape.block.expanded_channels
        column = builder.add(first, mine)
        for offset, found in runs:
            real = [None] * len(found)
            if channels % shape.chunk:
                lanes = range(0, len(found), shape.lanes)
                real = [builder.icmp_signed("<", column, L.I32(channels - offset - lane)) for lane in lanes]
            for number in range(2 * shape.m_fragments_in):
                words = self.chain.words([values[number] for values in found])
                if self.kind == "tf32":
                    words = [ptx_mma.to_tf32(builder, word) for word in words]
                words = [w if r is None else builder.select(r, w, L.I32(0)) for w, r in zip(words, real, strict=False)]
                self.hidden.write(place, number, offset, words, odd)


class B2bGemmKernel:
    """Emits one thread of the back-to-back GEMM."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: B2bGemmTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.shape, thread = builder, tile, integers["thread"]
        self.place = RowCoordinates(builder, tile, integers["block"])
        frame = M.Frame(builder, {}, pointers, {}, {})
        inputs, up, _ = tile.operand_bytes
        weights, rows = (builder.add(shared, L.I32(size)) for size in (tile.weight_stages * up, tile.weights))
        start = rows if tile.held else builder.add(rows, L.I32(inputs))
        self.project = ProjectGemm(frame, tile, thread, weights, buffers)
        self.first = HiddenGemm(frame, tile, self.place, thread, (shared, rows, start), buffers)
        self.hidden = self.first.hidden = HiddenTile(builder, tile, self.project.lane, start)
        self.left = self.hidden.read_from(self.project.row)

    def emit(self) -> None:
        """The tile."""
        builder, shape = self.builder, self.shape
        self.first.start()
        ptx_mma.cp_async_commit(builder)
        ptx_mma.cp_async_wait(builder, 0)
        self.first.arrived()
        ptx_mma.barrier(builder)
        if shape.held:
            self.first.hold()
            ptx_mma.barrier(builder)
        self.project.store(self.place, self.project.over_chunks(self.first.ahead, self.first.compute, self._rows))

    def _rows(self, fragment: int, step: int, odd: L.Value) -> list[L.Value]:
        """A fragment of the hidden tile."""
        return self.hidden.read(self.left, fragment, step, odd)
