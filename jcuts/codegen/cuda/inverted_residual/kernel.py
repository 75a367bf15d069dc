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
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.smem_tile import FragmentReader, SmemTile, TileLoader
from jcuts.codegen.cuda.inverted_residual.depthwise import DepthwiseConv
from jcuts.codegen.cuda.inverted_residual.expand_gemm import EIGHT, DirectLoad, ExpandGemm, left_fragments
from jcuts.codegen.cuda.inverted_residual.loads import clear
from jcuts.codegen.cuda.inverted_residual.project_epilogue import store_epilogue
from jcuts.codegen.cuda.inverted_residual.tile_coords import TileCoordinates
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.patterns.gemm import TYPES
from jcuts.schedule.gpu.inverted_residual.tile import ROW_TILE, STEP, InvertedResidualTile, shape_of


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
        self.builder, self.shape, self.buffers = builder, tile, buffers
        self.thread = integers["thread"]
        self.lane = builder.and_(self.thread, L.I32(WARP - 1))
        warp = builder.lshr(self.thread, L.I32(5))
        self.place = TileCoordinates(builder, tile, integers["block"])
        self.frame = M.Frame(builder, {}, pointers, {}, {})
        inputs, up, _, patch, _ = tile.sizes
        weights, pixels = (
            builder.add(shared, L.I32(tile.weight_stages * up)),
            builder.add(shared, L.I32(tile.weights)),
        )
        self.patch = pixels if tile.held else builder.add(pixels, L.I32(inputs))
        self.deep = builder.add(self.patch, L.I32(tile.patches * patch))
        self.row = builder.mul(builder.udiv(warp, L.I32(tile.project[1])), L.I32(ROW_TILE * tile.m_fragments_out))
        self.column = builder.mul(builder.urem(warp, L.I32(tile.project[1])), L.I32(tile.n_per_warp))
        side, columns = tile.block.weights[1], tile.n_per_warp * tile.project[1]
        ragged = tile.block.expanded_channels % tile.chunk != 0
        self.down = SmemTile(side, tile.block.out_channels, columns, tile.chunk, tile.n_per_warp, 0, ragged)
        self.copier = TileLoader(self.frame, self.down, tile.threads, self.thread, L.I32(0), weights)
        rounded = buffers[side.buffer].tf32
        self.fragments = FragmentReader(builder, self.down, weights, self.column, self.lane, rounded)
        self.left = left_fragments(builder, self.lane, self.deep, self.row, tile.item * tile.projected_pitch)
        self.first: ExpandGemm | DirectLoad
        if tile.block.expand is None:
            self.first = DirectLoad(self.frame, tile, self.place, self.thread, self.patch)
        else:
            places = shared, pixels, self.patch
            self.first = ExpandGemm(self.frame, tile, self.place, self.thread, places, buffers)
        self.windows = DepthwiseConv(self.frame, tile, self.thread, self.patch, self.deep, buffers)

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
        totals = self._loop()
        store_epilogue(self.frame, shape, self.place, self.down, self.buffers, self.lane, self.row, self.column, totals)

    def _clear(self) -> None:
        """Zeroes patch pixels outside the image, and depthwise results beyond the tile's."""
        _, _, _, patch, deep = self.shape.sizes
        size = self.shape.patches * patch + deep
        clear(self.builder, self.patch, size, self.thread, self.shape.threads)

    def _loop(self) -> Totals:
        """The loop over channel chunks."""
        builder, shape = self.builder, self.shape
        before = builder.block
        loop, after = builder.append_basic_block("pieces"), builder.append_basic_block("pieces.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        number = builder.phi(L.I32)
        number.add_incoming(L.I32(0), before)
        carried = [
            [[builder.phi(L.F32) for _ in range(4)] for _ in range(self.n_fragments)]
            for _ in range(shape.m_fragments_out)
        ]
        following = builder.add(number, L.I32(1))
        more = builder.icmp_signed("<", following, L.I32(shape.channel_chunks))
        odd, first = builder.and_(number, L.I32(1)), builder.mul(number, L.I32(shape.chunk))
        if shape.channel_chunks > 1:
            with builder.if_then(more):
                self.first.ahead(builder.add(first, L.I32(shape.chunk)), builder.xor(odd, L.I32(1)))
        stage = builder.mul(odd, L.I32(shape.sizes[2]))
        self.copier.start(first, stage, builder.sub(L.I32(shape.block.expanded_channels), first))
        ptx_mma.cp_async_commit(builder)
        filters = self.windows.filters(first)
        self.first.compute(first, odd)
        ptx_mma.barrier(builder)
        self.windows.compute(first, filters, self.first.source(odd))
        ptx_mma.cp_async_wait(builder, 0)
        ptx_mma.barrier(builder)
        sums = self._project(stage, [[list(tile) for tile in row] for row in carried])
        number.add_incoming(following, builder.block)
        for row, made in zip(carried, sums, strict=True):
            for tile, values in zip(row, made, strict=True):
                for phi, value in zip(tile, values, strict=True):
                    phi.add_incoming(L.F32(0.0), before)
                    phi.add_incoming(value, builder.block)
        builder.cbranch(more, loop, after)
        builder.position_at_end(after)
        return sums

    @property
    def n_fragments(self) -> int:
        """Number of 8-column fragments of a warp's results."""
        shape = self.shape
        if shape.project[1] > 1 or self.down.scalar_fragments:
            return shape.n_per_warp // EIGHT
        return -(-shape.block.out_channels // EIGHT)

    def _project(self, stage: L.Value, sums: Totals) -> Totals:
        """Project GEMM of one channel chunk: adds to the accumulators."""
        builder, shape = self.builder, self.shape
        kind = TYPES[shape.block.dtype]
        for step in range(shape.chunk // shape.step):
            columns = self.fragments.read(stage, step * shape.step)[: self.n_fragments]
            for i in range(shape.m_fragments_out):
                offset = shape.item * i * ROW_TILE * shape.projected_pitch + step * STEP
                row = ptx_mma.ldmatrix_x4(builder, self.left, offset)
                for j, column in enumerate(columns):
                    sums[i][j] = ptx_mma.mma_sync(builder, kind, row, column, sums[i][j])
        return sums
