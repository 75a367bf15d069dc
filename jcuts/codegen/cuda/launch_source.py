"""numba.cuda source of a launch: grid and thread index decoding in Python around one intrinsic with the
thread's code.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.attention.flash import attention_shape
from jcuts.codegen.cuda.conv.few_channels import patch_shape
from jcuts.codegen.cuda.conv.implicit_gemm_tile import window_shape
from jcuts.codegen.cuda.elementwise.horizontal import CombinedShape, combined_shape
from jcuts.codegen.cuda.elementwise.smem_transpose import TransposedShape, tiles_of, transposed_shape
from jcuts.codegen.cuda.elementwise.thread_tile import TileVariant, tile_indexed_axes
from jcuts.codegen.cuda.gemm.mma_f64 import double_shape
from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernelTile, block_count, product_shape
from jcuts.codegen.cuda.gemm.simt import fma_shape
from jcuts.codegen.cuda.gemm.wgmma_tile import group_shape
from jcuts.codegen.cuda.inverted_residual.kernel import block_shape
from jcuts.codegen.cuda.layout.weight_transpose import TurnShape, turn_shape
from jcuts.codegen.cuda.ptx.global_memory import LIMIT
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.cuda.reduction.column import ColumnShape, lane_blocks, shape_of
from jcuts.codegen.cuda.reduction.column_norm import ColumnRowsShape, column_rows_shape, outer_axes
from jcuts.codegen.cuda.reduction.row import RowReductionTile, row_count, row_length
from jcuts.codegen.cuda.scan.kernel import ScanShape, grid_of, scan_shape, scans_of_grid
from jcuts.codegen.cuda.warp_specialized.tile import fed_shape
from jcuts.codegen.cuda.window.sliding_window import walk_of
from jcuts.kernel_ir.program import Phase, Program
from jcuts.lower.patterns.gemm import WIDE, gemm_operands
from jcuts.schedule.gpu.attention.tile import FlashTile
from jcuts.schedule.gpu.conv.few_channels_tile import FewChannelTile
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile

GRID_LIMIT = 2**31 - 1
MAX_THREADS = 1024
KERNEL_FAMILIES = (
    "point",
    "team",
    "columns",
    "column_rows",
    "moments",
    "transposed",
    "scan_columns",
    "scan_rows",
    "product",
    "patch",
    "block",
    "attention",
    "weights",
    "combined",
)
AnyShape = (
    TileVariant
    | RowReductionTile
    | ColumnShape
    | ColumnRowsShape
    | TransposedShape
    | ScanShape
    | MmaKernelTile
    | FewChannelTile
    | InvertedResidualTile
    | FlashTile
    | TurnShape
    | CombinedShape
)


@dataclass
class CudaSource:
    """Source text of one kernel, the intrinsics that it calls by name, and the launch that it is written for.

    Attributes:
        shared: dynamic shared memory of a block [B], beside what the kernel declares.
        cluster: blocks of a cluster.
        least: resident blocks per multiprocessor that registers must allow (``.minnctapersm``); 0: ptxas chooses, and
            may spill a few registers for one more.
    """

    text: str
    blocks: int
    threads: int
    variants: dict[str, AnyShape] = field(default_factory=dict)
    helpers: dict[str, tuple[str, int]] = field(default_factory=dict)
    shared: int = 0
    cluster: int = 1
    least: int = 0


def emit_source(program: Program) -> CudaSource:
    """The numba.cuda source of one kernel (a part, see `codegen.cuda.split_kernels`)."""
    params = dict(program.params)
    form, threads = params.get("cuda"), int(str(params.get("threads", 0)))
    if form not in KERNEL_FAMILIES or not 1 <= threads <= MAX_THREADS:
        raise CompileRejected(f"{program.name}: no schedule for a GPU ({program.params})")
    for buffer in program.buffers:
        if buffer.size > LIMIT:
            raise CompileRejected(f"{program.name}: {buffer.name} has {buffer.size} elements, indices reach {LIMIT}")
    writer = LaunchSourceWriter(program, threads)
    return getattr(writer, str(form))()


class LaunchSourceWriter:
    """Writes the source of a launch; the method of a form (schedule parameter ``cuda``) decodes that form's grid."""

    def __init__(self, program: Program, threads: int) -> None:
        self.program, self.threads = program, threads
        self.names = [b.name for b in program.buffers if b.role != "local"]
        self.lines = [f"def kernel({', '.join(self.names)}):"]
        self.helpers: dict[str, tuple[str, int]] = {}
        self.variants: dict[str, AnyShape] = {}

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def helper(self, kind: str, value: str, number: int) -> str:
        """``value // number`` or ``value % number`` of a 32-bit number that is not negative."""
        if number == 1:
            return value if kind == "div" else "0"
        name = f"{kind}_{number}"
        self.helpers[name] = (kind, number)
        return f"{name}({value})"

    def done(self, blocks: int) -> CudaSource:
        if blocks > GRID_LIMIT:
            raise CompileRejected(f"{self.program.name}: {blocks} blocks, a grid has at most {GRID_LIMIT}")
        return CudaSource("\n".join(self.lines) + "\n", blocks, self.threads, self.variants, self.helpers)

    def point(self) -> CudaSource:
        phase = self._only_phase()
        counts = self._counts(phase)
        pairs: Any = dict(self.program.params).get("block", ())  # threads of a block along some axes
        shape = dict(pairs)
        if shape:
            return self._blocked(phase, counts, {str(k): int(v) for k, v in shape.items()})
        tiles = math.prod(counts.values())
        self.line(1, f"thread = cuda.blockIdx.x * {self.threads} + cuda.threadIdx.x")
        depth = 1
        if tiles % self.threads:
            self.line(1, f"if thread < {tiles}:")
            depth = 2
        places = self._decoded(depth, "thread", counts)
        steps = self._steps(phase)
        for axis in phase.axes:
            step = steps[axis.name]
            self.line(depth, f"{axis.name} = {places[axis.name]}" + (f" * {step}" if step > 1 else ""))
        self._variants(phase, depth)
        return self.done(-(-tiles // self.threads))

    def _blocked(self, phase: Phase, counts: dict[str, int], shape: dict[str, int]) -> CudaSource:
        """Blocks of threads that are neighbours along several axes."""
        if math.prod(shape.values()) != self.threads or not set(shape) <= set(counts):
            raise CompileRejected(f"{self.program.name}: a block of {self.threads} threads shaped {shape}")
        blocks = {name: -(-count // shape.get(name, 1)) for name, count in counts.items()}
        inner = self._decoded(1, "cuda.threadIdx.x", shape)
        outer = self._decoded(1, "cuda.blockIdx.x", blocks)
        tests = []
        steps = self._steps(phase)
        for axis in phase.axes:
            place, step = outer[axis.name], steps[axis.name]
            if axis.name in shape:
                place = f"{place} * {shape[axis.name]} + {inner[axis.name]}"
                if counts[axis.name] % shape[axis.name]:
                    tests.append(f"{axis.name} < {counts[axis.name] * step}")
            self.line(1, f"{axis.name} = ({place}) * {step}" if step > 1 else f"{axis.name} = {place}")
        if tests:
            self.line(1, f"if {' and '.join(tests)}:")
        self._variants(phase, 1 + bool(tests))
        return self.done(math.prod(blocks.values()))

    def _counts(self, phase: Phase) -> dict[str, int]:
        """Threads along every axis."""
        walk = walk_of(self.program)
        tiles = {a.name: -(-a.extent // a.unroll) for a in phase.axes}
        return {n: -(-c // walk.tiles) if walk is not None and n == walk.axis else c for n, c in tiles.items()}

    def _steps(self, phase: Phase) -> dict[str, int]:
        """What the variable of an axis moves per thread."""
        by_tile, walk = tile_indexed_axes(phase), walk_of(self.program)
        steps = {a.name: 1 if a.name in by_tile else a.unroll for a in phase.axes}
        return steps if walk is None else {**steps, walk.axis: steps[walk.axis] * walk.tiles}

    def _decoded(self, depth: int, number: str, counts: dict[str, int]) -> dict[str, str]:
        """Mixed-radix digits of a number, last axis fastest; intermediate quotients get lines of their own."""
        found: dict[str, str] = {}
        rest = number
        names = list(counts)
        for name in reversed(names):
            if name == names[0]:
                found[name] = rest
                break
            found[name] = self.helper("mod", rest, counts[name])
            made = f"rest{len(self.lines)}"
            self.line(depth, f"{made} = {self.helper('div', rest, counts[name])}")
            rest = made
        return found

    def _places_of_block(self, counts: dict[str, int]) -> None:
        """Names the thread, and the block's place along every axis."""
        self.line(1, "block = cuda.blockIdx.x")
        self.line(1, "thread = cuda.threadIdx.x")
        places = self._decoded(1, "block", counts)
        for name in counts:
            self.line(1, f"{name} = {places[name]}")

    def _variants(self, phase: Phase, depth: int) -> None:
        """One call per combination of full tiles and remainders; one set of them per operand of a switch."""
        switch = dict(self.program.params).get("switch")
        chosen = next((a for a in phase.axes if a.name == switch), None)
        if chosen is not None:
            for place in range(chosen.extent):
                self.line(depth, f"{'el' if place else ''}if {chosen.name} == {place}:")
                self._calls(phase, depth + 1, (chosen.name, place))
        else:
            self._calls(phase, depth, None)

    def _calls(self, phase: Phase, depth: int, fixed: tuple[str, int] | None) -> None:
        options = []
        steps = self._steps(phase)
        axes = [a for a in phase.axes if fixed is None or a.name != fixed[0]]
        for axis in axes:
            whole, rest = divmod(axis.extent, axis.unroll)
            end = whole * steps[axis.name]
            full = [(axis.unroll, f"{axis.name} < {end}" if rest else "")] if whole else []
            options.append([*full, *([(rest, f"{axis.name} >= {end}" if whole else "")] if rest else [])])
        arguments = ", ".join([*self.names, *(a.name for a in phase.axes)])
        for combination in itertools.product(*options):
            counts = tuple((a.name, n) for a, (n, _) in zip(axes, combination, strict=True))
            shape = TileVariant(counts, () if fixed is None else (fixed,))
            name = "_".join(["tile", *(str(n) for n, _ in combination), *([f"at_{fixed[1]}"] if fixed else [])])
            self.variants[name] = shape
            tests = [test for _, test in combination if test]
            if tests:
                self.line(depth, f"if {' and '.join(tests)}:")
            self.line(depth + bool(tests), f"{name}({arguments})")

    def team(self) -> CudaSource:
        params = dict(self.program.params)
        shape = RowReductionTile(
            int(str(params["team"])), self.threads, int(str(params["vector"])), int(str(params["chunks"]))
        )
        team = shape.team
        if team & (team - 1) or self.threads % team or (team > WARP and self.threads != team) or self.threads % WARP:
            raise CompileRejected(f"{self.program.name}: teams of {team} in blocks of {self.threads} threads")
        if row_length(self.program) % shape.vector:
            raise CompileRejected(f"{self.program.name}: rows of {row_length(self.program)} in steps of {shape.vector}")
        per_block = self.threads // team
        if per_block == 1:
            self.line(1, "row = cuda.blockIdx.x")
            self.line(1, "lane = cuda.threadIdx.x")
        else:
            self.line(1, f"row = cuda.blockIdx.x * {per_block} + {self.helper('div', 'cuda.threadIdx.x', team)}")
            self.line(1, f"lane = {self.helper('mod', 'cuda.threadIdx.x', team)}")
        for number in range(len(self.program.phases)):
            self.line(1, f"# phase {number}")
        name = f"row_of_{team}x{shape.vector}x{shape.chunks}"
        self.variants[name] = shape
        self.line(1, f"{name}({', '.join([*self.names, 'row', 'lane'])})")
        return self.done(-(-row_count(self.program) // per_block))

    def columns(self) -> CudaSource:
        phase = self._only_phase()
        shape = shape_of(self.program)
        lane = phase.axes[-1]
        counts = {a.name: -(-a.extent // a.unroll) for a in phase.axes[:-1]}
        counts[lane.name] = lane_blocks(phase, shape)
        if any(a.extent % a.unroll for a in phase.axes):
            raise CompileRejected(f"{self.program.name}: tiles that do not divide the result")
        self.line(1, "block = cuda.blockIdx.x")
        self.line(1, "thread = cuda.threadIdx.x")
        places = self._decoded(1, "block", counts)
        for axis in phase.axes:
            step = shape.across if axis is lane and counts[lane.name] > 1 else axis.unroll if axis is not lane else 1
            self.line(1, f"{axis.name} = {places[axis.name]}" + (f" * {step}" if step > 1 else ""))
        name = f"columns_of_{shape.across}x{shape.deep}"
        self.variants[name] = shape
        self.line(1, f"{name}({', '.join([*self.names, *(a.name for a in phase.axes), 'thread'])})")
        return self.done(math.prod(counts.values()))

    def column_rows(self) -> CudaSource:
        shape = column_rows_shape(self.program)
        axes = outer_axes(self.program)
        counts = {a.name: a.extent for a in axes[:-1]}
        counts[axes[-1].name] = -(-axes[-1].extent // shape.columns)
        self._places_of_block(counts)
        for number in range(len(self.program.phases)):
            self.line(1, f"# phase {number}")
        name = f"{dict(self.program.params)['cuda']}_of_{shape.across}x{shape.deep}x{shape.vector}x{shape.chunks}"
        self.variants[name] = shape
        self.line(1, f"{name}({', '.join([*self.names, *(a.name for a in axes), 'thread'])})")
        return self.done(math.prod(counts.values()))

    moments = column_rows

    def transposed(self) -> CudaSource:
        phase = self._only_phase()
        shape = transposed_shape(self.program)
        counts = {a.name: tiles_of(a, phase, shape) for a in phase.axes}
        self._places_of_block(counts)
        name = f"transposed_{shape.rows}x{shape.columns}"
        self.variants[name] = shape
        self.line(1, f"{name}({', '.join([*self.names, *(a.name for a in phase.axes), 'thread'])})")
        return self.done(math.prod(counts.values()))

    def product(self) -> CudaSource:
        params = dict(self.program.params)
        if "fed" in params:
            fed = fed_shape(self.program)
            return replace(self._by_block(f"fed_{fed.left.size}x{fed.right.size}", fed, fed.blocks), least=1)
        if "pixels" in params:
            window = window_shape(self.program)
            name = f"window_{window.left.size}x{window.right.size}"
            return replace(self._by_block(name, window, window.blocks), cluster=window.cluster)
        wide = "groups" not in params and gemm_operands(self.program)[0].dtype == WIDE
        make = group_shape if "groups" in params else fma_shape if "fma" in params else product_shape
        shape = (double_shape if wide else make)(self.program)
        name = f"product_{shape.left.size}x{shape.right.size}x{shape.left.terms}"
        source = replace(self._by_block(name, shape, block_count(self.program, shape)), cluster=shape.cluster)
        if wide or "fma" in params:
            return replace(source, least=1)  # else ptxas would rather spill a register
        return source

    def patch(self) -> CudaSource:
        shape = patch_shape(self.program)
        name = f"patch_{shape.rows}x{shape.pixels}x{shape.columns}"
        return self._by_block(name, shape, math.prod(shape.blocks))

    def attention(self) -> CudaSource:
        shape = attention_shape(self.program)
        name = f"attention_{shape.rows}x{shape.keys}"
        return replace(self._by_block(name, shape, math.prod(shape.blocks)), least=1)

    def block(self) -> CudaSource:
        shape = block_shape(self.program)
        name = f"block_{shape.images}x{shape.rows}x{shape.columns}x{shape.chunk}"
        return replace(self._by_block(name, shape, shape.tiles), least=shape.beside)

    def weights(self) -> CudaSource:
        return self._parts("weights", turn_shape(self.program))

    def combined(self) -> CudaSource:
        return self._parts("combined", combined_shape(self.program))

    def _parts(self, name: str, shape: TurnShape | CombinedShape) -> CudaSource:
        self.variants[name] = shape
        self.line(1, f"{name}({', '.join([*self.names, 'cuda.blockIdx.x', 'cuda.threadIdx.x'])})")
        return self.done(shape.blocks)

    def _by_block(
        self, name: str, shape: MmaKernelTile | FewChannelTile | InvertedResidualTile | FlashTile, blocks: int
    ) -> CudaSource:
        """A form that is told the numbers of block and thread, and has shared memory of the launch's."""
        self.variants[name] = shape
        self.line(1, f"{name}({', '.join([*self.names, 'cuda.blockIdx.x', 'cuda.threadIdx.x'])})")
        return replace(self.done(blocks), shared=shape.shared)

    def scan_columns(self) -> CudaSource:
        shape = scan_shape(self.program)
        counts = scans_of_grid(self.program, shape)
        total = grid_of(self.program, shape)
        lane = self.program.phases[0].axes[-1].name
        self.line(1, f"thread = cuda.blockIdx.x * {self.threads} + cuda.threadIdx.x")
        depth = 1
        if total % self.threads:
            self.line(1, f"if thread < {total}:")
            depth = 2
        places = self._decoded(depth, "thread", counts)
        for name in counts:
            step = shape.vector if name == lane else 1
            self.line(depth, f"{name} = {places[name]}" + (f" * {step}" if step > 1 else ""))
        name = f"scan_of_{shape.vector}x{shape.unroll}"
        self.variants[name] = shape
        self.line(depth, f"{name}({', '.join([*self.names, *counts])})")
        return self.done(-(-total // self.threads))

    def scan_rows(self) -> CudaSource:
        shape = scan_shape(self.program)
        counts = scans_of_grid(self.program, shape)
        total = grid_of(self.program, shape)
        per_block = self.threads // shape.team
        if per_block == 1:
            self.line(1, "row = cuda.blockIdx.x")
        else:
            self.line(1, f"row = cuda.blockIdx.x * {per_block} + {self.helper('div', 'cuda.threadIdx.x', shape.team)}")
        self.line(1, "thread = cuda.threadIdx.x")
        depth = 1
        if total % per_block:  # a team is a warp then: no other thread waits for it
            self.line(1, f"if row < {total}:")
            depth = 2
        places = self._decoded(depth, "row", counts)
        for name in counts:
            self.line(depth, f"{name} = {places[name]}")
        name = f"scan_of_{shape.team}x{shape.vector}"
        self.variants[name] = shape
        self.line(depth, f"{name}({', '.join([*self.names, *counts, 'thread'])})")
        return self.done(-(-total // per_block))

    def _only_phase(self) -> Phase:
        if len(self.program.phases) != 1:
            raise CompileRejected(
                f"{self.program.name}: {len(self.program.phases)} phases in a kernel of single points"
            )
        return self.program.phases[0]
