"""Source of a kernel's entry function in numba.cuda: block and thread index to a task, and the launch configuration.

All kernel families share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jcuts.base.errors import CompileRejected
from jcuts.kernel_ir.program import Phase, Program

GRID_LIMIT = 2**31 - 1
ALIGNMENT = 128
"""Of dynamic shared memory [B], where a tile asks for no other."""


@dataclass
class CudaSource:
    """Source text of one kernel, the intrinsics that it calls by name, and the launch that it is written for.

    Attributes:
        variants: the tile of each intrinsic, as the family's `TileKernel` takes it.
        record: names of the task record, the intrinsics' arguments behind the pointers.
        shared: dynamic shared memory of a block [B], beside what the kernel declares.
        alignment: its alignment [B].
        cluster: blocks of a cluster.
        least: resident blocks per multiprocessor that registers must allow (``.minnctapersm``); 0: ptxas chooses, and
            may spill a few registers for one more.
        cooperative: whether all blocks must be resident at once (`ptx.grid_barrier`).
    """

    text: str
    blocks: int
    threads: int
    variants: dict[str, Any] = field(default_factory=dict)
    helpers: dict[str, tuple[str, int]] = field(default_factory=dict)
    record: tuple[str, ...] = ()
    shared: int = 0
    alignment: int = ALIGNMENT
    cluster: int = 1
    least: int = 0
    cooperative: bool = False


class LaunchSourceWriter:
    """Collects the lines of a launch: decoding of block and thread numbers, then calls of a tile's intrinsics."""

    def __init__(self, program: Program, threads: int) -> None:
        self.program, self.threads = program, threads
        self.names = [b.name for b in program.buffers if b.role != "local"]
        self.lines = [f"def kernel({', '.join(self.names)}):"]
        self.helpers: dict[str, tuple[str, int]] = {}
        self.variants: dict[str, Any] = {}
        self.record: tuple[str, ...] = ()

    def line(self, depth: int, text: str) -> None:
        """A line, indented by ``depth`` levels."""
        self.lines.append("    " * depth + text)

    def helper(self, kind: str, value: str, number: int) -> str:
        """``value // number`` or ``value % number`` of a 32-bit number that is not negative."""
        if number == 1:
            return value if kind == "div" else "0"
        name = f"{kind}_{number}"
        self.helpers[name] = (kind, number)
        return f"{name}({value})"

    def decode(self, depth: int, number: str, counts: dict[str, int]) -> dict[str, str]:
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

    def decode_block(self, counts: dict[str, int]) -> None:
        """Names the thread, and the block's place along every axis."""
        self.line(1, "block = cuda.blockIdx.x")
        self.line(1, "thread = cuda.threadIdx.x")
        places = self.decode(1, "block", counts)
        for name in counts:
            self.line(1, f"{name} = {places[name]}")

    def call(
        self, depth: int, name: str, tile: Any, record: Sequence[str], values: Sequence[str] | None = None
    ) -> None:
        """A call of a tile's intrinsic.

        Args:
            record: names of the task record, the same in all calls of a launch.
            values: what the record holds; None: the variables of these names.
        """
        self.variants[name], self.record = tile, tuple(record)
        self.line(depth, f"{name}({', '.join([*self.names, *(record if values is None else values)])})")

    def only_phase(self) -> Phase:
        """The program's phase. Raises CompileRejected where it has several."""
        if len(self.program.phases) != 1:
            raise CompileRejected(
                f"{self.program.name}: {len(self.program.phases)} phases in a kernel of single points"
            )
        return self.program.phases[0]

    def done(self, blocks: int) -> CudaSource:
        """The source for a grid of so many blocks. Raises CompileRejected where no grid has as many."""
        if blocks > GRID_LIMIT:
            raise CompileRejected(f"{self.program.name}: {blocks} blocks, a grid has at most {GRID_LIMIT}")
        return CudaSource("\n".join(self.lines) + "\n", blocks, self.threads, self.variants, self.helpers, self.record)


Launch = Callable[[LaunchSourceWriter], CudaSource]
"""Writes the launch of a kernel family."""


def launch_per_block(
    tile_of: Callable[[Program], Any],
    name: Callable[[Any], str],
    blocks: Callable[[Program, Any], int] = lambda program, tile: tile.blocks,
    *,
    shared: Callable[[Any], int] = lambda tile: tile.shared,
    alignment: Callable[[Any], int] = lambda tile: ALIGNMENT,
    cluster: Callable[[Any], int] = lambda tile: 1,
    least: Callable[[Any], int] = lambda tile: 0,
) -> Launch:
    """The launch of a family whose tiles are numbered by the grid: block and thread number are the task record.

    Args:
        tile_of: the tile of a scheduled program; raises CompileRejected where its parameters are inconsistent.
        name: the intrinsic's name. blocks: of the grid.
        shared, alignment, cluster, least: as `CudaSource` has them.
    """

    def launch(writer: LaunchSourceWriter) -> CudaSource:
        tile = tile_of(writer.program)
        writer.call(1, name(tile), tile, ("block", "thread"), ("cuda.blockIdx.x", "cuda.threadIdx.x"))
        source = writer.done(blocks(writer.program, tile))
        return replace(source, shared=shared(tile), alignment=alignment(tile), cluster=cluster(tile), least=least(tile))

    return launch
