"""Fused inverted residual (MBConv): expand GEMM, depthwise convolution and project GEMM in one kernel (``mma.sync``).

This is the *block* form.  A thread block computes a tile of outputs (`schedule.gpu.inverted_residual.tile`).  It copies
the input pixels that the tile's windows cover into shared memory, rounds float32 to TF32 once, and goes through the
channels between the GEMMs in chunks:

1. expand: fragments of pixels times a chunk of weights; element-wise operations in registers; into the *patch*;
2. depthwise: a thread sums a strip of one channel's (bfloat16: two channels') windows from the patch; element-wise
   operations; rounded, into shared memory;
3. project: fragments of those times a chunk of weights, accumulated in registers.

Weights of the next chunk are copied meanwhile (``cp.async``).  Pixels outside the image are zeros, written once.  Where
there is no expand GEMM, chunks of an operand are copied into two patches alternately (double buffering).
"""

from __future__ import annotations

from collections.abc import Mapping

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.b2b_gemm.expand_gemm import ExpandGemm, left_fragments
from jcuts.codegen.cuda.b2b_gemm.project_gemm import ProjectGemm
from jcuts.codegen.cuda.inverted_residual.depthwise import DepthwiseConv
from jcuts.codegen.cuda.inverted_residual.loads import DirectLoad, clear
from jcuts.codegen.cuda.inverted_residual.tile_coords import TileCoordinates
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.schedule.gpu.b2b_gemm.pair_tile import ROW_TILE, STEP
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile, shape_of


def block_shape(program: Program) -> InvertedResidualTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    shape, params = shape_of(program), dict(program.params)
    if shape is None or not shape.fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no block of tiles {params['tile']} by warps {params['expand']}")
    return shape


class InvertedResidualKernel:
    """Emits one thread of the fused inverted residual."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: InvertedResidualTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.shape, self.thread = builder, tile, integers["thread"]
        self.place = TileCoordinates(builder, tile, integers["block"])
        frame = M.Frame(builder, {}, pointers, {}, {})
        inputs, up, _, patch, _ = tile.sizes
        weights, pixels = (
            builder.add(shared, L.I32(tile.weight_stages * up)),
            builder.add(shared, L.I32(tile.weights)),
        )
        self.patch = pixels if tile.held else builder.add(pixels, L.I32(inputs))
        deep = builder.add(self.patch, L.I32(tile.patches * patch))
        self.project = ProjectGemm(frame, tile, self.thread, weights, buffers)
        self.left = left_fragments(builder, self.project.lane, deep, self.project.row, tile.item * tile.projected_pitch)
        self.first: ExpandGemm | DirectLoad
        if tile.block.expand is None:
            self.first = DirectLoad(frame, tile, self.place, self.thread, self.patch)
        else:
            places = shared, pixels, self.patch
            self.first = ExpandGemm(frame, tile, self.place, self.thread, places, buffers)
        self.windows = DepthwiseConv(frame, tile, self.thread, self.patch, deep, buffers)

    def emit(self) -> None:
        """The tile."""
        builder, shape = self.builder, self.shape
        self.first.start()
        ptx_mma.cp_async_commit(builder)
        if not shape.held:
            self._clear()
        ptx_mma.cp_async_wait(builder, 0)
        self.first.arrived()
        ptx_mma.barrier(builder)
        if shape.held:
            self.first.hold()
            ptx_mma.barrier(builder)
            self._clear()
            ptx_mma.barrier(builder)
        self.project.store(self.place, self.project.over_chunks(self.first.ahead, self._windows, self._rows))

    def _clear(self) -> None:
        """Zeroes patch pixels outside the image, and depthwise results beyond the tile's."""
        _, _, _, patch, deep = self.shape.sizes
        size = self.shape.patches * patch + deep
        clear(self.builder, self.patch, size, self.thread, self.shape.threads)

    def _windows(self, first: L.Value, odd: L.Value) -> None:
        """Expand GEMM and depthwise stage of a chunk."""
        filters = self.windows.filters(first)
        self.first.compute(first, odd)
        ptx_mma.barrier(self.builder)
        self.windows.compute(first, filters, self.first.source(odd))

    def _rows(self, fragment: int, step: int, odd: L.Value) -> list[L.Value]:
        """A fragment of depthwise results."""
        shape = self.shape
        offset = shape.item * fragment * ROW_TILE * shape.projected_pitch + step * STEP
        return ptx_mma.ldmatrix_x4(self.builder, self.left, offset)
